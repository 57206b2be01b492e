"""Attention may begin at neighbouring tokens."""

import pytest
import torch

from bert_pretrain.config import ModelConfig
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.positional_heads import start_positional_heads


def started(hidden: int, heads: int, positions: int, *, seed: int = 3) -> BertForPreTraining:
    config = ModelConfig(
        hidden_size=hidden, num_hidden_layers=2, num_attention_heads=heads, intermediate_size=2 * hidden,
        max_position_embeddings=positions,
    )  # fmt: skip
    model = BertForPreTraining(config, 1000)
    model.initialize(seed)
    start_positional_heads(model, seed)
    return model


@torch.no_grad()
def attention(model: BertForPreTraining) -> torch.Tensor:
    """Return the attention of the first layer on random tokens, (heads, queries, keys)."""
    embeddings, first = model.embeddings, model.encoder.layers[0].attention
    num_positions, hidden = embeddings.position_embeddings.weight.shape
    ids = torch.randint(0, 1000, (num_positions,), generator=torch.Generator().manual_seed(1))
    inputs = embeddings(ids, torch.zeros_like(ids), torch.arange(num_positions))
    query, key, _ = first.query_key_value(inputs).view(num_positions, 3, first.num_heads, -1).unbind(1)
    logits = torch.einsum("qhd,khd->hqk", query, key) / (hidden / first.num_heads) ** 0.5
    return logits.softmax(-1)


@pytest.mark.parametrize(("hidden", "heads", "positions"), [(128, 2, 64), (100, 5, 40), (99, 3, 40), (768, 12, 512)])
def test_heads_of_the_first_layer_attend_to_their_neighbours(hidden: int, heads: int, positions: int) -> None:
    model = started(hidden, heads, positions).eval()
    found = attention(model)
    for head, offset in zip(range(heads), (-1, 1, -2, 2, -3, 3, -4, 4, -5, 5, -6, 6), strict=False):
        assert torch.diagonal(found[head], offset).mean() > 0.5, offset


def test_the_seed_decides_the_weights() -> None:
    first, same, other = (started(64, 1, 16, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], same[name]) for name in first)
    changed = {name for name in first if not torch.equal(first[name], other[name])}
    assert {"embeddings.position_embeddings.weight", "nsp_head.dense.weight"} <= changed


def test_projections_keep_lengths_at_any_width() -> None:
    for hidden in (64, 512):
        weight = started(hidden, hidden // 64, 16).encoder.layers[1].attention.output.weight
        inputs = torch.randn(100, hidden, generator=torch.Generator().manual_seed(2))
        ratio = (inputs @ weight.detach().T).norm() / inputs.norm()
        assert ratio.item() == pytest.approx(0.7, rel=0.05)
