"""Model folders open in `transformers`, and any BERT folder opens here."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bert_pretrain.errors import DataError
from bert_pretrain.model.huggingface import exported, load_model, save_model, save_tensors
from bert_pretrain.text.tokenizer import Tokenizer
from tests.train.conftest import VOCAB_SIZE


@pytest.fixture
def model_folder(make_model: Any, tokenizer: Tokenizer, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_model(make_model(dropout=0.1), folder, tokenizer)
    (folder / "checksums.json").unlink()  # as others write it
    return folder


def assert_same(left: torch.nn.Module, right: torch.nn.Module) -> None:
    torch.testing.assert_close(dict(left.state_dict()), dict(right.state_dict()), atol=0.0, rtol=0.0)


def rewrite(folder: Path, change: Any) -> None:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def test_the_configuration_survives_transformers(model_folder: Path, make_model: Any) -> None:
    config = transformers.AutoConfig.from_pretrained(model_folder)
    for key, value in make_model(dropout=0.1).config.model_dump().items():
        assert getattr(config, key) == value
    assert config.pad_token_id == 0


@torch.no_grad()
def test_large_embeddings_are_exported_smaller_with_equal_outputs(
    make_model: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = make_model().eval()
    for name in ("word", "position", "token_type"):
        getattr(model.embeddings, f"{name}_embeddings").weight.mul_(20)
    weights, exponent = exported(dict(model.named_parameters()))
    assert exponent > 1
    save_tensors(weights, model, tmp_path, tokenizer)
    theirs = transformers.BertForPreTraining.from_pretrained(tmp_path).eval()
    assert 0.025 < theirs.bert.embeddings.word_embeddings.weight.square().mean().sqrt() <= 0.05
    ids, places = torch.randint(5, VOCAB_SIZE, (1, 16)), torch.arange(16)
    output = model(ids[0], torch.zeros_like(places), places, torch.tensor([0, 16], dtype=torch.int32), 16, places)
    found = theirs(input_ids=ids)
    logits = model.decode(output.mlm_features)  # (tokens, vocabulary), of the order of 100
    torch.testing.assert_close(logits, found.prediction_logits[0], atol=1e-6 * float(logits.abs().max()), rtol=1e-5)
    torch.testing.assert_close(output.nsp_logits, found.seq_relationship_logits, atol=1e-5, rtol=1e-5)


def test_our_own_folder_and_what_transformers_saves_of_it_come_back_bit_for_bit(
    model_folder: Path, make_model: Any, tmp_path: Path
) -> None:
    assert len({path.stat().st_mode for path in model_folder.iterdir()}) == 1  # whoever reads one file reads all
    transformers.AutoModelForPreTraining.from_pretrained(model_folder).save_pretrained(tmp_path / "theirs")
    for folder in (model_folder, tmp_path / "theirs"):
        loaded = load_model(folder)
        assert (loaded.fresh, loaded.unused) == ([], {})
        assert_same(loaded.model, make_model(dropout=0.1))


def test_old_names_buffers_and_untied_copies_are_understood(model_folder: Path, make_model: Any) -> None:
    def age(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        aged = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in tensors.items()
        }
        aged["bert.embeddings.position_ids"] = torch.arange(24)[None]
        aged["cls.predictions.decoder.weight"] = aged["bert.embeddings.word_embeddings.weight"].clone()
        aged["cls.predictions.decoder.bias"] = aged.pop("cls.predictions.bias")
        aged["classifier.weight"] = torch.zeros(2, 32)
        return aged

    rewrite(model_folder, age)
    loaded = load_model(model_folder)
    assert loaded.fresh == []
    assert list(loaded.unused) == ["classifier.weight"]
    assert_same(loaded.model, make_model(dropout=0.1))


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("dump", [torch.save, lambda value, file: pickle.dump(value, file, protocol=2)])
def test_a_pickle_that_could_run_code_is_refused_unread(model_folder: Path, tmp_path: Path, dump: Any) -> None:
    (model_folder / "model.safetensors").unlink()
    with (model_folder / "pytorch_model.bin").open("wb") as file:
        dump({"weights": Trap(tmp_path / "sprung")}, file)
    with pytest.raises(DataError, match="unpickled"):
        load_model(model_folder)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("index", "word"),
    [
        ({"weight_map": {"a": "model-1.safetensors"}}, "model-1"),
        ({"weight_map": {"a": "../model.safetensors"}}, "names no files"),
        ({"weight_map": {"a": "config.json"}}, "unpickled"),
    ],
)
def test_an_index_without_its_files_is_refused(model_folder: Path, index: Any, word: str) -> None:
    (model_folder / "model.safetensors").rename(model_folder.parent / "model.safetensors")
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=word):
        load_model(model_folder)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_act": "gelu_new"}, "gelu_new"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"hidden_size": 64}, "shape"),
        ({"vocab_size": VOCAB_SIZE + 1}, "shape"),
        ({"num_attention_heads": 5}, "not a multiple"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 3}, r"encoder\.layer\.2\."),
    ],
)
def test_what_is_no_fitting_bert_is_refused(model_folder: Path, change: dict[str, Any], word: str) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(DataError, match=word):
        load_model(model_folder)


def test_weights_of_another_model_or_type_are_refused(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folder"):
        load_model(tmp_path / "nowhere")
    rewrite(model_folder, lambda tensors: {name: tensor.long() for name, tensor in tensors.items()})
    with pytest.raises(DataError, match="not supported"):
        load_model(model_folder)
    rewrite(model_folder, lambda tensors: {"something.weight": torch.zeros(2)})
    with pytest.raises(DataError, match="word_embeddings"):
        load_model(model_folder)


def test_a_model_without_its_heads_or_with_untied_ones_is_refused(model_folder: Path, tmp_path: Path) -> None:
    transformers.BertModel.from_pretrained(model_folder).save_pretrained(tmp_path / "bare")
    assert load_model(tmp_path / "bare").fresh
    with pytest.raises(DataError, match=r"cls\."):
        load_model(tmp_path / "bare", required=("cls.",))
    config = transformers.AutoConfig.from_pretrained(model_folder, tie_word_embeddings=False)
    transformers.BertForPreTraining(config).save_pretrained(tmp_path / "untied")
    with pytest.raises(DataError, match="word embeddings"):
        load_model(tmp_path / "untied")
