"""`transformers` loads our model folders, and we load any BERT folder."""

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bert_pretrain.errors import DataError
from bert_pretrain.model.architectures import huggingface_settings
from bert_pretrain.model.bert import Packed
from bert_pretrain.model.huggingface import export_weights, load_model, save_model_folder
from bert_pretrain.text.tokenizer import Tokenizer
from tests.conftest import save_model
from tests.model.conftest import make_model
from tests.train.conftest import VOCAB_SIZE


@pytest.fixture
def model_folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_model(make_model(dropout=0.1), folder, tokenizer)
    (folder / "checksums.json").unlink()  # which other tools do not write
    return folder


def assert_same(left: torch.nn.Module, right: torch.nn.Module) -> None:
    torch.testing.assert_close(dict(left.state_dict()), dict(right.state_dict()), atol=0.0, rtol=0.0)


def rewrite(folder: Path, change: Any) -> None:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@torch.no_grad()
def test_export_scales_large_embeddings_and_keeps_outputs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_model().eval()
    for name in ("word", "position", "token_type"):
        getattr(model.embeddings, f"{name}_embeddings").weight.mul_(20)
    weights, _, exponent = export_weights(dict(model.named_parameters()), "bert")
    assert exponent > 1
    save_model_folder(weights, model, tmp_path, tokenizer)
    theirs = transformers.BertForPreTraining.from_pretrained(tmp_path).eval()
    assert 0.025 < theirs.bert.embeddings.word_embeddings.weight.square().mean().sqrt() <= 0.05
    ids, places = torch.randint(5, VOCAB_SIZE, (1, 16)), torch.arange(16)
    packed = Packed(ids[0], torch.zeros_like(places), places, torch.tensor([0, 16], dtype=torch.int32), 16)
    output = model(packed, places)
    expected = theirs(input_ids=ids)
    logits = model.decode(output.mlm_features)  # (tokens, vocabulary), of the order of 100
    torch.testing.assert_close(logits, expected.prediction_logits[0], atol=1e-6 * float(logits.abs().max()), rtol=1e-5)
    torch.testing.assert_close(output.nsp_logits, expected.seq_relationship_logits, atol=1e-5, rtol=1e-5)


def test_our_folder_and_its_copy_by_transformers_load_bit_equal(model_folder: Path, tmp_path: Path) -> None:
    assert len({path.stat().st_mode for path in model_folder.iterdir()}) == 1  # equal permissions
    theirs, ours = transformers.AutoModelForPreTraining.from_pretrained(model_folder), make_model(dropout=0.1)
    settings = huggingface_settings(ours.config)
    assert settings.keys() >= {"hidden_size", "layer_norm_eps", "type_vocab_size"}
    assert settings.items() <= {**theirs.config.to_dict(), "position_embedding_type": "absolute"}.items()
    theirs.save_pretrained(tmp_path / "theirs")
    for folder in (model_folder, tmp_path / "theirs"):
        loaded = load_model(folder)
        assert (loaded.missing, loaded.unused) == ([], {})
        assert_same(loaded.model, ours)


def test_old_names_buffers_and_decoder_copies_are_read(model_folder: Path) -> None:
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
    assert loaded.missing == []
    assert list(loaded.unused) == ["classifier.weight"]
    assert_same(loaded.model, make_model(dropout=0.1))


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("dump", [torch.save, lambda value, file: pickle.dump(value, file, protocol=2)])
def test_pickle_that_could_run_code_is_refused(model_folder: Path, tmp_path: Path, dump: Any) -> None:
    (model_folder / "model.safetensors").unlink()
    with (model_folder / "pytorch_model.bin").open("wb") as file:
        dump({"weights": Trap(tmp_path / "sprung")}, file)
    with pytest.raises(DataError, match="unpickled"):
        load_model(model_folder)
    assert not (tmp_path / "sprung").exists()


def write(name: str, content: dict[str, Any]) -> Any:
    """Return a function that changes values of a JSON file in a folder, or writes the file."""

    def change(folder: Path) -> None:
        before = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps({**before, **content}))

    return change


def index(name: str) -> Any:
    """Return a function that replaces the weights by an index."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
        write("model.safetensors.index.json", {"weight_map": {"a": name}})(folder)

    return change


def renamed(pattern: str, replacement: str) -> Any:
    """Return a function that renames the tensors of a folder."""
    return lambda folder: rewrite(
        folder, lambda tensors: {re.sub(pattern, replacement, name): value for name, value in tensors.items()}
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (shutil.rmtree, r"no folder(.|\n)*google-bert/bert-base-uncased"),
        (index("model-1.safetensors"), "model-1"),
        (index("../model.safetensors"), "names no files"),
        (index("config.json"), "unpickled"),
        (write("config.json", {"hidden_act": "gelu_new"}), "gelu_new"),
        (write("config.json", {"position_embedding_type": "relative_key"}), "relative_key"),
        (write("config.json", {"hidden_size": 64}), "shape"),
        (write("config.json", {"vocab_size": VOCAB_SIZE + 1}), "shape"),
        (write("config.json", {"num_attention_heads": 5}), "not a multiple"),
        (write("config.json", {"vocab_size": None}), "vocab_size"),
        (write("config.json", {"num_hidden_layers": 3}), r"encoder\.layer\.2\."),
        (lambda folder: rewrite(folder, lambda tensors: {k: v.long() for k, v in tensors.items()}), "not supported"),
        (lambda folder: rewrite(folder, lambda tensors: {"a.weight": torch.zeros(2)}), "word_embeddings"),
        (renamed(r"^", "module."), r"module\.bert\.embeddings"),
        (renamed(r"^bert\.", "module."), r"module\.embeddings"),
        (lambda folder: (folder / "config.json").rename(folder / "bert_config.json"), "TensorFlow"),
    ],
)
def test_unsupported_or_inconsistent_folders_are_refused(model_folder: Path, change: Any, word: str) -> None:
    change(model_folder)
    with pytest.raises(DataError, match=word):
        load_model(model_folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["bert.pooler.dense.bias", "classifier.weight"])
def test_weights_that_are_not_finite_are_refused(model_folder: Path, name: str, value: float, dtype: Any) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[name] = torch.ones(32)
        tensors[name][3] = value
        return {other: tensor.to(dtype) for other, tensor in tensors.items()}

    rewrite(model_folder, spoil)
    with pytest.raises(DataError, match=f"{name} has NaN or infinity"):
        load_model(model_folder)


def test_missing_heads_and_untied_embeddings_are_refused(model_folder: Path, tmp_path: Path) -> None:
    transformers.BertModel.from_pretrained(model_folder).save_pretrained(tmp_path / "bare")
    assert load_model(tmp_path / "bare").missing
    with pytest.raises(DataError, match=r"cls\."):
        load_model(tmp_path / "bare", required=("mlm_head",))
    config = transformers.AutoConfig.from_pretrained(model_folder, tie_word_embeddings=False)
    transformers.BertForPreTraining(config).save_pretrained(tmp_path / "untied")
    with pytest.raises(DataError, match="word embeddings"):
        load_model(tmp_path / "untied")
