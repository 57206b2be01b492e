"""`--init-from` with other sizes: an extended vocabulary, more positions, padding rows of the vocabulary."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer, pipeline

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.io.files import read_json, write_checked_json
from bert_pretrain.model.huggingface import load_model
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.fill_mask import fill_mask
from bert_pretrain.train.evaluation import evaluate
from bert_pretrain.train.run import train
from tests.train.conftest import VOCAB_SIZE, Fit, NewData, tiny

EMBEDDINGS, BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
POSITIONS = "bert.embeddings.position_embeddings.weight"


def extend(tokenizer: Tokenizer, data: Path) -> Path:
    """Add three tokens to the tokenizer of a data folder: two in unused slots, one at the end."""
    tokens = [*tokenizer.tokens, "wawb"]
    tokens[1], tokens[7] = "wlwa", "xé"
    tokenizer = tokenizer.with_tokens(tokens)
    shutil.rmtree(data / "tokenizer")
    tokenizer.save(data / "tokenizer")
    record = read_json(data / "manifest.json")
    record["tokenizer"] = {"vocab_size": tokenizer.vocab_size, "hash": tokenizer.hash}
    write_checked_json(data / "manifest.json", record)
    return data


def change_rows(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the rows of the vocabulary."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: change(tensors[name]).contiguous() for name in (EMBEDDINGS, BIAS)}
    save_file(tensors, folder / "model.safetensors")
    change_json(folder / "config.json", vocab_size=len(tensors[BIAS]))


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**read_json(path), **values}))


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def test_rows_of_new_tokens_are_the_mean_of_their_pieces_and_others_are_unchanged(
    fit: Fit, model: Path, new_data_folder: NewData, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    old = tokenizer.with_tokens([*tokenizer.tokens[:-2], "##wa", "##wb"])
    old.save(model)
    change_rows(model, lambda rows: rows if rows.dim() == 2 else torch.linspace(-1, 1, len(rows)))
    data = extend(old, new_data_folder("data"))
    # No step changes anything: what is written is what the run began with.
    run = fit(data=data, init_from=model, max_steps=1, peak_lr=1e-30, weight_decay=0.0)
    before, after = weights(tmp_path), weights(run)
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
    assert not [name for name in before.keys() - {EMBEDDINGS, BIAS} if not torch.equal(before[name], after[name])]
    theirs, info = AutoModelForPreTraining.from_pretrained(run / "model", output_loading_info=True)
    assert not any(info.values())
    opened = AutoTokenizer.from_pretrained(run / "model")
    assert theirs.config.vocab_size == len(opened) == len(old.tokens) + 1
    assert opened.tokenize("Wawb wlwa") == ["wawb", "wlwa"]


def test_mismatched_vocabularies_are_errors(
    fit: Fit, finished: Path, model: Path, tokenizer: Tokenizer, new_data_folder: NewData
) -> None:
    extended_data = extend(tokenizer, new_data_folder("extended"))
    checkpoint = finished / "checkpoints" / "step-00000008"
    with pytest.raises(ConfigError, match="3 new tokens"):
        fit("a", data=extended_data, init_from=checkpoint, carry_optimizer=True)
    with pytest.raises(DataError, match="3 tokens"):
        evaluate(finished / "model", extended_data, config=tiny().train)
    change_rows(model, lambda rows: rows[:150])
    with pytest.raises(DataError, match="only 150 rows"):
        fit("b", init_from=model)
    change_json(model / "tokenizer_config.json", do_lower_case=False)
    with pytest.raises(DataError, match="do_lower_case"):
        fit("c", data=extended_data, init_from=model)


def test_padding_rows_are_kept_in_inference_and_removed_in_training(
    fit: Fit, finished: Path, model: Path, data_folder: Path, tmp_path: Path
) -> None:
    config = tiny().train
    change_rows(model, lambda rows: torch.cat([rows, torch.full((6, *rows.shape[1:]), 0.01)]))
    theirs = pipeline("fill-mask", model=str(model), top_k=3)("wa wb [MASK]")
    (ours,) = fill_mask(model, "wa wb [MASK]", top_k=3, config=config)
    assert [token for token, _ in ours] == [answer["token_str"] for answer in theirs]
    assert [share for _, share in ours] == pytest.approx([answer["score"] for answer in theirs], abs=1e-5)
    assert len(fill_mask(model, "wa [MASK]", top_k=1000, config=config)[0]) == VOCAB_SIZE
    more, before = (evaluate(folder, data_folder, config=config)["mlm_loss"] for folder in (model, finished / "model"))
    assert more > before  # in the softmax too
    assert len(weights(fit(init_from=model, max_steps=1, peak_lr=1e-30))[BIAS]) == VOCAB_SIZE
    for name in ("vocab.txt", "tokenizer.json"):
        (model / name).unlink()
    with pytest.raises(DataError, match="has the shape"):  # nothing says that the rows have no tokens
        fit("other", init_from=model)
    with pytest.raises(DataError, match="158 tokens"):
        evaluate(model, data_folder, config=config)


def test_the_trained_length_is_that_of_the_longest_examples_of_all_runs(fit: Fit, new_data_folder: NewData) -> None:
    origin = None
    for name, longest, trained in (("first", 32, 32), ("longer", 48, 48), ("shorter", 32, 48)):
        data = new_data_folder(f"data-{name}", max_seq_length=longest)
        run = fit(name, data, init_from=origin, max_steps=1, model={"max_position_embeddings": 64})
        for folder in (run / "model", run / "checkpoints" / "step-00000001"):
            assert read_json(folder / "config.json")["pretraining"]["max_seq_length"] == trained
            assert AutoTokenizer.from_pretrained(folder).model_max_length == trained  # `transformers` truncates too
        origin = run / "model"


def test_sizes_come_from_the_folder_and_new_positions_are_copies_of_old_ones(
    fit: Fit, finished: Path, data_folder: Path, tmp_path: Path
) -> None:
    settings = tiny(max_steps=1, peak_lr=1e-30, weight_decay=0.0).train.model_dump()
    changed = {"hidden_dropout_prob": 0.0, "max_position_embeddings": 80}
    config = Config.model_validate({"model": changed, "train": settings})
    train(config, data_folder, tmp_path / "run", init_from=finished / "model")
    assert load_model(tmp_path / "run" / "model").model.config == tiny().model.model_copy(update=changed)
    before, after = weights(finished)[POSITIONS], weights(tmp_path / "run")[POSITIONS]
    assert torch.equal(after, torch.cat([before, before, before[:16]]))
    for positions, carry in ((31, False), (80, True)):
        with pytest.raises(ConfigError, match=f"max_position_embeddings is {positions}"):
            fit(
                "other",
                init_from=finished / "checkpoints" / "step-00000012",
                carry_optimizer=carry,
                max_steps=20,
                model={"max_position_embeddings": positions},
            )


def test_masked_language_model_of_transformers_gets_new_pooler_and_nsp_head(
    fit: Fit, finished: Path, data_folder: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    AutoModelForMaskedLM.from_pretrained(finished / "model").save_pretrained(outside, max_shard_size="20KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(finished / "model" / name, outside)
    before, after = weights(finished), weights(fit(init_from=outside, max_steps=1, peak_lr=1e-30))
    changed = {name.rpartition(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"bert.pooler.dense", "cls.seq_relationship"}
    alone = evaluate(outside, data_folder, config=tiny().train)  # without a head for the pairs of the data
    whole = evaluate(finished / "model", data_folder, config=tiny().train)
    assert alone == {name: value for name, value in whole.items() if not name.startswith("nsp")}
