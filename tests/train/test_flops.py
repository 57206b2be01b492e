"""Floating-point operations: of a step by the formula, of a card by its name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bert_pretrain.config import ModelConfig
from bert_pretrain.train.batches import cut
from bert_pretrain.train.flops import OTHER_CARDS, PEAK_BF16_FLOPS, batch_flops, peak_flops


def test_flops_are_those_of_real_tokens(examples: Callable[..., Any]) -> None:
    table = examples(9)
    config = ModelConfig(hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=20)
    weights = 3 * (4 * 8 * 8 + 2 * 8 * 20)
    expected = (
        6 * weights * len(table.input_ids)
        + 12 * 3 * 8 * (table.lengths**2).sum()
        + 6 * (8 * 8 + 8 * 150) * len(table.masks.positions)
        + 6 * (8 * 8 + 16) * 9
    )
    for budget in (10_000, 60):
        assert batch_flops(cut(table, budget), config, 150) == expected


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        # As torch.cuda.get_device_name prints them.
        ("NVIDIA GB200", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        # Unknown, though some are called nearly like a known one.
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Quadro RTX 6000", None),
        ("NVIDIA H2000", None),
        ("A card of the future", None),
    ],
)
def test_the_peak_of_a_card_is_known_by_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, teraflops: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peak = None if teraflops is None else pytest.approx(teraflops * 1e12)
    assert peak_flops(torch.device("cuda"), torch.bfloat16) == peak
    assert peak_flops(torch.device("cuda"), torch.float16) == peak
    assert peak_flops(torch.device("cuda"), torch.float32) is None
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_every_card_of_the_table_is_found_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for card, peak in PEAK_BF16_FLOPS.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, card=card: f"NVIDIA {card}")
        assert peak_flops(torch.device("cuda"), torch.bfloat16) == peak
    for part in OTHER_CARDS:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, part=part: f"NVIDIA H100 {part}")
        assert peak_flops(torch.device("cuda"), torch.bfloat16) is None
