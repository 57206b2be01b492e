"""Floating-point operations of a step and of a device, for the utilisation (MFU).

Only real tokens count, forward and backward: 6 a weight and token for the layers, 12 · length · hidden a layer and
token for attention, 6 a weight for the masked-language-model head at predicted tokens and for pooler and next-sentence
head at sequence pairs. Padding, look-ups in embeddings and anything recomputed count as nothing.
"""

import re
from collections.abc import Iterable

import torch

from bert_pretrain.config import ModelConfig
from bert_pretrain.train.packing import GlobalBatch

PEAK_BF16_FLOPS = {
    # Dense tensor-core peaks in bf16 with sums in fp32, from NVIDIA's data sheets and architecture papers: half of a
    # figure with sparsity, and those of fp16 before Ampere. The longest name that fits wins.
    "GB300": 2500e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A6000": 154.8e12,
    "RTX 6000 Ada": 364e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "V100S": 130e12,
    "V100-PCIE": 112e12,
    "V100": 125e12,
    "T4": 65e12,
}
OTHER_CARDS = ("Laptop", "Max-Q", "MIG", "RTX 5090 D", "RTX 4090 D", "RTX 3090 Ti", "V100-FHHL")
"""Words in the names of cards that contain a name of the table but have other peaks."""


def batch_flops(batch: GlobalBatch, model: ModelConfig, vocab_size: int) -> float:
    """Return the floating-point operations of one step over real tokens, forward and backward."""
    return training_flops(
        model, vocab_size, batch.num_tokens, batch.sum_squared_lengths, batch.num_predictions, batch.num_pairs
    )


def training_flops(
    model: ModelConfig,
    vocab_size: int,
    tokens: float,
    squared_lengths: float,
    predictions: float,
    pairs: float = 0.0,
) -> float:
    """Return the floating-point operations of training on these tokens, forward and backward.

    `tokens` are real ones, `squared_lengths` is the sum of the squares of the sequences' lengths, and `pairs` counts
    the sequences with a next-sentence label.
    """
    hidden, layers = model.hidden_size, model.num_hidden_layers
    layer_weights = 4 * hidden * hidden + 2 * hidden * model.intermediate_size
    return float(
        6 * layers * layer_weights * tokens
        + 12 * layers * hidden * squared_lengths
        + 6 * (hidden * hidden + hidden * vocab_size) * predictions
        + 6 * (hidden * hidden + 2 * hidden) * pairs
    )


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak of a known card in bf16 or fp16, else None."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    card = known_card(torch.cuda.get_device_name(device))
    return None if card is None else PEAK_BF16_FLOPS[card]


def known_card(name: str) -> str | None:
    """Return the card of the table that PyTorch's name of a device says."""
    known = [] if _named(OTHER_CARDS, name) else _named(PEAK_BF16_FLOPS, name)
    return max(known, key=len, default=None)


def _named(cards: Iterable[str], name: str) -> list[str]:
    """Return the cards whose names occur in another as whole words."""
    return [card for card in cards if re.search(rf"\b{re.escape(card)}\b", name)]
