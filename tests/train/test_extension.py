"""`--init-from` with an extended vocabulary: old rows as they were, new ones the mean of their pieces; and sizes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.io.files import read_json, write_checked_json
from bert_pretrain.io.manifest import read_manifest
from bert_pretrain.model.huggingface import load_model
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.fill_mask import fill_mask
from bert_pretrain.train.evaluation import evaluate
from bert_pretrain.train.run import train

Tiny = Callable[..., Config]
EMBEDDINGS, BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
POSITIONS = "bert.embeddings.position_embeddings.weight"


def replace_tokenizer(data: Path, tokenizer: Tokenizer) -> Path:
    """Let a data folder be one that was made with another vocabulary, whose ids it holds all the same."""
    shutil.rmtree(data / "tokenizer")
    tokenizer.save(data / "tokenizer")
    record = read_json(data / "manifest.json")
    record["tokenizer"] = {"vocab_size": tokenizer.vocab_size, "hash": tokenizer.hash}
    write_checked_json(data / "manifest.json", record)
    return data


@pytest.fixture
def extended_data(tokenizer: Tokenizer, new_data_folder: Callable[..., Path]) -> Path:
    """Data whose vocabulary has two words in slots and one at the end."""
    tokens = [*tokenizer.tokens, "wawb"]
    tokens[1], tokens[7] = "wlwa", "xé"
    return replace_tokenizer(new_data_folder("extended"), tokenizer.with_tokens(tokens))


def copy_with_pieces(finished: Path, folder: Path, tokenizer: Tokenizer) -> Path:
    """A model whose vocabulary has `##wa` and `##wb` in its last two places, and a bias that tells rows apart."""
    shutil.copytree(finished / "model", folder)
    (folder / "checksums.json").unlink()
    tokens = [*tokenizer.tokens[:-2], "##wa", "##wb"]
    tokenizer.with_tokens(tokens).save(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[BIAS] = torch.linspace(-1, 1, len(tokens))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_rows_of_new_tokens_are_the_mean_of_their_pieces_and_all_others_stay(
    finished: Path,
    tiny: Tiny,
    new_data_folder: Callable[..., Path],
    tokenizer: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = copy_with_pieces(finished, tmp_path / "model", tokenizer)
    old = Tokenizer.load(model)
    tokens = [*old.tokens, "wawb"]
    tokens[1], tokens[7] = "wlwa", "xé"
    data = replace_tokenizer(new_data_folder("data"), old.with_tokens(tokens))
    # No step changes anything: what is written is what the run began with.
    train(tiny(max_steps=1, peak_lr=1e-30, weight_decay=0.0), data, tmp_path / "run", init_from=model)
    assert "extends that model's by 3 tokens, 2 in unused slots and 1 at the end" in capsys.readouterr().out
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "run" / "model"))
    ids = {token: index for index, token in enumerate(old.tokens)}
    pieces = {1: ["wl", "##wa"], 7: ["[UNK]"], len(old.tokens): ["wa", "##wb"]}
    for name in (EMBEDDINGS, BIAS):
        assert len(after[name]) == len(old.tokens) + 1
        for index, row in enumerate(after[name]):
            if index in pieces:
                expected = before[name][[ids[piece] for piece in pieces[index]]].mean(dim=0)
                torch.testing.assert_close(row, expected, atol=1e-7, rtol=1e-6)
            else:
                assert torch.equal(row, before[name][index])
    others = before.keys() - {EMBEDDINGS, BIAS}
    assert all(torch.equal(before[name], after[name]) for name in others)
    check_in_transformers(tmp_path / "run" / "model", len(tokens))


def check_in_transformers(folder: Path, vocab_size: int) -> None:
    from transformers import AutoModelForPreTraining, AutoTokenizer

    model, info = AutoModelForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(folder)) == vocab_size
    assert AutoTokenizer.from_pretrained(folder).tokenize("Wawb wlwa") == ["wawb", "wlwa"]


def test_a_run_on_an_extended_vocabulary_continues_and_is_up_to_date(
    finished: Path, tiny: Tiny, extended_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(tiny(max_steps=4), extended_data, run, init_from=finished / "model")
    train(tiny(max_steps=4), extended_data, run, init_from=finished / "model")
    assert "up to date" in capsys.readouterr().out
    train(tiny(max_steps=6), extended_data, run, init_from=finished / "model")
    assert read_manifest(run, "run", "")["progress"]["step"] == 6
    assert evaluate(run / "model", extended_data, config=tiny().train)["mlm_loss"] > 0


def test_what_an_extended_vocabulary_does_not_allow_is_refused(
    finished: Path, tiny: Tiny, extended_data: Path, tmp_path: Path
) -> None:
    checkpoint = finished / "checkpoints" / "step-00000008"
    with pytest.raises(ConfigError, match="3 new tokens"):
        train(tiny(), extended_data, tmp_path / "a", init_from=checkpoint, carry_optimizer=True)
    with pytest.raises(DataError, match="which extends it by 3 tokens"):
        evaluate(finished / "model", extended_data, config=tiny().train)
    cased = tmp_path / "cased"
    shutil.copytree(finished / "model", cased)
    (cased / "checksums.json").unlink()
    record = json.loads((cased / "tokenizer_config.json").read_text())
    (cased / "tokenizer_config.json").write_text(json.dumps({**record, "do_lower_case": False}))
    with pytest.raises(DataError, match="treats text differently from that of the data: do_lower_case False and True"):
        train(tiny(), extended_data, tmp_path / "b", init_from=cased)


def pad_rows(folder: Path, number: int) -> None:
    """Fill the embedding up with rows that belong to no token, as some do up to a round number."""
    tensors = load_file(folder / "model.safetensors")
    for name in (EMBEDDINGS, BIAS):
        rows = tensors[name]
        tensors[name] = torch.cat([rows, torch.full((number, *rows.shape[1:]), 0.01)])
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + number}))


def test_rows_that_only_fill_up_stay_for_inference_and_go_in_training(
    finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path
) -> None:
    from transformers import pipeline

    padded = shutil.copytree(finished / "model", tmp_path / "padded")
    (padded / "checksums.json").unlink()
    pad_rows(padded, 6)
    theirs = pipeline("fill-mask", model=str(padded), top_k=3)("wa wb [MASK]")
    (ours,) = fill_mask(padded, "wa wb [MASK]", top_k=3, config=tiny().train)
    assert [token for token, _ in ours] == [answer["token_str"] for answer in theirs]
    assert [share for _, share in ours] == pytest.approx([answer["score"] for answer in theirs], abs=1e-5)
    assert len(fill_mask(padded, "wa [MASK]", top_k=1000, config=tiny().train)[0]) == 152
    more = evaluate(padded, data_folder, config=tiny().train)["mlm_loss"]
    assert more > evaluate(finished / "model", data_folder, config=tiny().train)["mlm_loss"]  # in the softmax too
    train(tiny(max_steps=1, peak_lr=1e-30), data_folder, tmp_path / "run", init_from=padded)
    assert load_model(tmp_path / "run" / "model").model.vocab_size == 152
    for name in ("vocab.txt", "tokenizer.json"):
        (padded / name).unlink()
    with pytest.raises(DataError, match="has the shape"):  # nothing says that the rows have no tokens
        train(tiny(), data_folder, tmp_path / "other", init_from=padded)
    with pytest.raises(DataError, match="158 tokens, the vocabulary 152"):
        evaluate(padded, data_folder, config=tiny().train)


def test_an_embedding_too_small_for_its_vocabulary_is_refused(
    finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path
) -> None:
    short = shutil.copytree(finished / "model", tmp_path / "short")
    (short / "checksums.json").unlink()
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "vocab_size": 150}))
    tensors = load_file(short / "model.safetensors")
    tensors = {name: tensor[:150] if name in (EMBEDDINGS, BIAS) else tensor for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, short / "model.safetensors")
    with pytest.raises(DataError, match=r"the vocabulary has 152 tokens, the tensor .* only 150 rows"):
        train(tiny(), data_folder, tmp_path / "run", init_from=short)


def test_sizes_come_from_the_folder_and_a_contradiction_is_named(
    finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = tiny(max_steps=1).train.model_dump()
    free = Config.model_validate({"model": {"hidden_dropout_prob": 0.0}, "train": settings})
    train(free, data_folder, tmp_path / "run", init_from=finished / "model")
    assert "2 layers of 32, 2 heads, dropout 0 and 0.1 (attention)" in capsys.readouterr().out
    config = load_model(tmp_path / "run" / "model").model.config
    assert config == tiny().model.model_copy(update={"hidden_dropout_prob": 0.0})
    with pytest.raises(ConfigError, match="num_attention_heads is 4, that of the weights") as caught:
        train(tiny(model={"num_attention_heads": 4}), data_folder, tmp_path / "a", init_from=finished / "model")
    assert caught.value.where == "model.num_attention_heads"


def test_a_model_with_more_positions_begins_with_those_there_are_repeated(
    finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = tiny(max_steps=1, peak_lr=1e-30, weight_decay=0.0, model={"max_position_embeddings": 80})
    train(longer, data_folder, tmp_path / "run", init_from=finished / "model")
    assert "80 positions: the 32 of that model, repeated" in capsys.readouterr().out
    before, after = (load_file(run / "model" / "model.safetensors")[POSITIONS] for run in (finished, tmp_path / "run"))
    assert torch.equal(after, torch.cat([before, before, before[:16]]))
    shorter = tiny(model={"max_position_embeddings": 31})
    with pytest.raises(ConfigError, match="max_position_embeddings is 31"):
        train(shorter, data_folder, tmp_path / "short", init_from=finished / "model")
    newest = finished / "checkpoints" / "step-00000012"
    longer = tiny(max_steps=20, model={"max_position_embeddings": 80})
    with pytest.raises(ConfigError, match="max_position_embeddings is 80"):
        train(longer, data_folder, tmp_path / "carried", init_from=newest, carry_optimizer=True)


@pytest.mark.parametrize("tokenizer_file", ["vocab.txt", "tokenizer.json"])
def test_a_masked_language_model_of_transformers_trains_on(
    finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path, tokenizer_file: str
) -> None:
    from transformers import AutoModelForMaskedLM

    outside = tmp_path / "outside"
    AutoModelForMaskedLM.from_pretrained(finished / "model").save_pretrained(outside, max_shard_size="20KB")
    shutil.copy(finished / "model" / tokenizer_file, outside)
    shutil.copy(finished / "model" / "tokenizer_config.json", outside)
    train(tiny(max_steps=1, peak_lr=1e-30), data_folder, tmp_path / "run", init_from=outside)
    after, before = (load_file(run / "model" / "model.safetensors") for run in (tmp_path / "run", finished))
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert set(before) - set(same) == {"bert.pooler.dense.weight", "cls.seq_relationship.weight"} | {
        name for name in ("bert.pooler.dense.bias", "cls.seq_relationship.bias") if before[name].any()
    }
    alone = evaluate(outside, data_folder, config=tiny().train)  # without a head for the pairs of the data
    whole = evaluate(finished / "model", data_folder, config=tiny().train)
    assert alone == {name: value for name, value in whole.items() if not name.startswith("nsp")}
