"""New networks of ModernBERT start with positional heads, and its folders continue; others are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from bert_pretrain.config import Config, TrainConfig
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.shards import read_shard
from bert_pretrain.make_data.run import make_data
from bert_pretrain.model.attention import make_layout, rotated_heads, with_rotation
from bert_pretrain.model.folder import read_config
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.embed import embed
from bert_pretrain.train.evaluation import evaluate
from bert_pretrain.train.rotary_weights import start_rotary
from bert_pretrain.train.run import train
from tests.conftest import run_stages
from tests.text.test_json_tokenizer import byte_level, write_folder
from tests.train.conftest import (
    NO_DROPOUT,
    VOCAB_SIZE,
    NewData,
    make_model,
    make_tokenizer,
    tiny,
)

# A window of 4 tokens on each side is shorter than the examples; the second layer is local.
MODERN = {**NO_DROPOUT, "architecture": "modernbert", "local_attention": 8, "intermediate_size": 40}

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def modern(model: dict[str, Any] | None = None, **settings: Any) -> Config:
    return tiny(model={**MODERN, **(model or {})}, **settings)


@pytest.fixture
def unpaired(new_data_folder: NewData) -> Path:
    return new_data_folder("unpaired", next_sentence="none")


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("with_cooccurrences", [True, False])
@torch.no_grad()
def test_heads_of_new_networks_attend_to_their_offsets(biases: bool, with_cooccurrences: bool, unpaired: Path) -> None:
    config = modern({"biases": biases, "hidden_size": 64, "num_attention_heads": 4, "local_attention": 32})
    model = make_model(config)
    data, tokenizer = DataFolder.open(unpaired), make_tokenizer()
    start_rotary(model, data, tokenizer, 0, with_cooccurrences=with_cooccurrences)
    positions = torch.arange(24)
    ids = torch.randint(5, VOCAB_SIZE, (24,), generator=torch.Generator().manual_seed(0))
    layout = make_layout(torch.tensor([0, 24], dtype=torch.int32), 24, 24, "padded")
    layout = with_rotation(layout, positions, config.model, is_padded=True)
    attention = model.encoder.layers[0].attention
    hidden = model.embeddings(ids, torch.zeros_like(ids), positions)
    query, key, _ = rotated_heads(hidden, attention.query_key_value, 4, layout.global_turns).unbind(1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / 4.0  # the root of the head size
    for head, offset in enumerate((-1, 1, -2, 2)):
        most = scores[head].argmax(dim=1)[4:20]
        assert (most == positions[4:20] + offset).float().mean() >= 0.9, (head, offset)


def test_a_folder_continues_on_longer_examples_with_another_base(unpaired: Path, tmp_path: Path) -> None:
    train(modern(max_steps=2), unpaired, tmp_path / "first")
    longer = modern({"max_position_embeddings": 64, "global_rope_theta": 1e6}, max_steps=2)
    train(longer, unpaired, tmp_path / "second", init_from=tmp_path / "first" / "model")
    config, _ = read_config(tmp_path / "second" / "model", "MODEL")
    assert (config.max_position_embeddings, config.global_rope_theta) == (64, 1e6)
    wider = modern({"local_attention": 16}, max_steps=2)
    with pytest.raises(ConfigError, match="local_attention is 16, but the weights"):
        train(wider, unpaired, tmp_path / "third", init_from=tmp_path / "first" / "model")


def test_phases_of_32_and_8192_tokens_and_what_reads_them(english_text: Path, tmp_path: Path, capsys) -> None:
    long = {"name": "long", "data": {"max_seq_length": 8192}, "model": {"global_rope_theta": 160_000}}
    body = {
        "inputs": [str(english_text)],
        "vocab": {"size": 1500},
        "data": {"next_sentence": "none", "max_seq_length": 32, "dupe_factor": 1, "validation_fraction": 0.05},
        "model": {**MODERN, **SIZES, "max_position_embeddings": 8192, "global_rope_theta": 10_000},
        "train": {"max_steps": 1, "global_batch_size": 2, "device": "cpu"},
        "phases": [{"name": "short"}, long],
    }
    model = run_stages(Config.model_validate(body), tmp_path / "out")
    short = tmp_path / "out" / "train" / "short" / "model"
    assert [read_config(folder, "MODEL")[0].global_rope_theta for folder in (short, model)] == [10_000, 160_000]
    longest = DataFolder.open(tmp_path / "out" / "data" / "long")
    assert max(read_shard(longest.path, record).lengths.max() for record in longest.shards("train")) > 8000
    assert evaluate(model, longest.path, config=TrainConfig())["examples"] == longest.rows("validation")
    text = tmp_path / "one_line.txt"
    text.write_text(" ".join(english_text.read_text().split()[:9000]) + "\n")
    for folder, max_length, number in ((model, None, 8192), (short, None, 32), (short, 48, 48)):
        embed(folder, [str(text)], tmp_path / "v.parquet", config=Config(), level="token", max_length=max_length)
        assert len(pq.read_table(tmp_path / "v.parquet")["tokens"][0]) == number
    assert "--max-length is 48, but the model is trained for 32 tokens" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="8192 positions"):
        embed(model, [str(text)], tmp_path / "v.parquet", config=Config(), max_length=8193)


def test_sentence_pairs_are_refused_with_the_key_to_set(data_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no head for them") as caught:
        train(modern(), data_folder, tmp_path / "run")
    assert "data.next_sentence=none" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation silu"),
        ({"mlp_bias": False}, "attention_bias True, mlp_bias False"),
        ({"decoder_bias": False}, "only True"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "only 'default'"),
        ({"local_attention": 1}, "local_attention"),
        ({"intermediate_size": 80}, "shape"),
    ],
)
def test_folders_of_other_networks_are_refused(
    change: dict[str, Any], reason: str, unpaired: Path, tmp_path: Path
) -> None:
    train(modern(max_steps=1), unpaired, tmp_path / "run")
    model = tmp_path / "run" / "model"
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, **change}))
    with pytest.raises((DataError, ConfigError), match=reason):
        read_config(model, "MODEL")


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory, english_text: Path) -> Path:
    """Return a ModernBERT as it is distributed: with byte-level BPE, without biases, and with old names of settings."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    folder = write_folder(byte_level, english_text.read_text(), tmp_path_factory.mktemp("distributed"))
    tokenizer = Tokenizer.load(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    ids = {"pad_token_id": tokenizer.pad_id, "cls_token_id": tokenizer.cls_id, "sep_token_id": tokenizer.sep_id}
    ids |= {"bos_token_id": tokenizer.cls_id, "eos_token_id": tokenizer.sep_id}
    torch.manual_seed(0)
    config = ModernBertConfig(vocab_size=tokenizer.vocab_size, local_attention=8, initializer_range=0.3, **sizes, **ids)
    ModernBertForMaskedLM(config).save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    del settings["rope_parameters"], settings["layer_types"]
    settings |= {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    settings |= {"layer_norm_eps": 1e-5, "position_embedding_type": "absolute", "reference_compile": True}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_a_distributed_folder_continues_on_own_text(distributed: Path, english_text: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    keys = {"next_sentence": "none", "max_seq_length": 64, "dupe_factor": 1, "validation_fraction": 0.2}
    config = load_config(settings=[f"data.{key}={value}" for key, value in keys.items()])
    data = make_data(config, [str(english_text)], distributed, tmp_path / "data", workers=1)
    examples = read_shard(data, DataFolder.open(data).shards("validation")[0])
    before = evaluate(distributed, data, config=TrainConfig())
    theirs = AutoModelForMaskedLM.from_pretrained(distributed)
    losses = []
    for row in range(len(examples)):
        one = examples.take(np.array([row]))
        labels = torch.full((1, len(one.input_ids)), -100)
        labels[0, one.masked_indices] = torch.tensor(one.masks.original_ids.astype(np.int64))
        logits = theirs(torch.tensor(one.input_ids.astype(np.int64))[None]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, labels[0], reduction="sum").item())
    assert before["mlm_loss"] == pytest.approx(sum(losses) / before["predictions"], rel=1e-5)
    config = load_config(settings=["train.global_batch_size=16", "train.max_steps=12", "train.peak_lr=0.003"])
    train(config, data, tmp_path / "run", init_from=distributed)
    model = tmp_path / "run" / "model"
    assert evaluate(model, data, config=TrainConfig())["mlm_loss"] < before["mlm_loss"]
    text = "  The café isn't\n[MASK] 中文"
    assert AutoTokenizer.from_pretrained(model)(text) == AutoTokenizer.from_pretrained(distributed)(text)
    assert AutoModelForMaskedLM.from_pretrained(model).config.norm_bias is False


def test_ids_beyond_the_embedding_are_refused(distributed: Path, english_text: Path, tmp_path: Path) -> None:
    settings = ["data.next_sentence=none", "data.dupe_factor=1"]
    data = make_data(load_config(settings=settings), [str(english_text)], distributed, tmp_path / "data", workers=1)
    shutil.copytree(distributed, tmp_path / "smaller")
    weights = load_file(distributed / "model.safetensors")
    rows = len(weights["model.embeddings.tok_embeddings.weight"]) - 8
    weights = {name: weight[:rows].clone() if len(weight) > rows else weight for name, weight in weights.items()}
    save_file(weights, tmp_path / "smaller" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((distributed / "config.json").read_text())
    (tmp_path / "smaller" / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
    with pytest.raises(DataError, match=f"only {rows} rows"):
        train(load_config(settings=["train.max_steps=2"]), data, tmp_path / "run", init_from=tmp_path / "smaller")
