"""New networks of ModernBERT start with positional heads, and its folders continue; others are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.model.attention import make_layout, rotate, with_rotation
from bert_pretrain.model.folder import read_config
from bert_pretrain.train.rotary_weights import start_rotary
from bert_pretrain.train.run import train
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
    query, key, _ = rotate(attention.query_key_value(hidden).view(24, 3, 4, -1), layout.global_angles).unbind(1)
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
