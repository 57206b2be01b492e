"""Floating-point operations of a training step and peak FLOP/s of a device, for the model FLOPs utilization (MFU).

Forward and backward pass on real tokens: 6 per weight and token in the layers, 12 · length · hidden per token and layer
in attention (at most the window's length in ModernBERT's local layers), 6 per weight and masked token in the MLM head,
6 per weight and pair in the pooler and next-sentence head.
Shared layers count as often as they run. Padding, embedding look-ups and recomputation do not count.
"""

import re

import torch

from bert_pretrain.config import ModelConfig
from bert_pretrain.train.packing import GlobalBatch

# Peaks of dense bf16 products (fp16 before Ampere) with fp32 sums, from NVIDIA's data sheets and architecture papers.
# Numbers with sparsity are halved. The longest matching name applies.
PEAK_BF16_FLOPS = {
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
    "A6000": 154.8e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 6000 Ada": 364e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "V100S": 130e12,
    "V100-PCIE": 112e12,
    "V100": 125e12,
    "T4": 65e12,
}
# Cards with these words in their names have other peaks than the card of the table whose name they contain.
UNKNOWN_CARDS = ("Laptop", "Max-Q", "MIG", "RTX 5090 D", "RTX 4090 D", "RTX 3090 Ti", "V100-FHHL")


def batch_flops(batch: GlobalBatch, model: ModelConfig, num_outputs: int) -> float:
    """Return the floating-point operations of one training step, with logits of `num_outputs` tokens."""
    tokens = batch.num_tokens
    squared_lengths = batch.sum_squared_lengths
    if model.is_electra:
        # The logits are computed a third time, without a backward pass, to draw tokens.
        drawing = 2 * model.embedding_width * num_outputs * batch.num_predictions
        head = 6 * (model.hidden_size**2 + model.hidden_size) * tokens
        generator = training_flops(model.generator, num_outputs, tokens, squared_lengths, batch.num_predictions)
        return generator + drawing + head + training_flops(model, 0, tokens, squared_lengths, 0.0)
    return training_flops(
        model,
        num_outputs,
        tokens,
        squared_lengths,
        batch.num_predictions,
        batch.num_pairs,
    )


def training_flops(
    model: ModelConfig,
    num_outputs: int,
    tokens: float,
    squared_lengths: float,
    predictions: float,
    pairs: float = 0.0,
) -> float:
    """Return the floating-point operations of training on `tokens` tokens without padding.

    `squared_lengths` is the sum of the squared lengths of the sequences; `pairs` counts next-sentence labels. The MLM
    head has `num_outputs` logits: one for each token of the vocabulary, or for each candidate of a sampled softmax.
    """
    hidden = model.hidden_size
    width = model.embedding_width
    layers = model.num_hidden_layers
    num_matrices = 3 if model.is_modern else 2  # of the feed-forward layer
    layer_weights = 4 * hidden * hidden + num_matrices * hidden * model.intermediate_size
    num_global = len(range(0, layers, model.global_attn_every_n_layers)) if model.is_modern else layers
    attended = num_global * squared_lengths  # pairs of tokens, over the layers
    attended += (layers - num_global) * min(squared_lengths, tokens * (model.local_attention + 1))
    return float(
        6 * (layers * layer_weights + (hidden * width if model.projects_embeddings else 0)) * tokens
        + 12 * hidden * attended
        + 6 * (hidden * width + width * num_outputs) * predictions
        + 6 * (hidden * hidden + 2 * hidden) * pairs
    )


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a device in bf16 or fp16, or None if unknown."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    card = known_card(torch.cuda.get_device_name(device))
    return None if card is None else PEAK_BF16_FLOPS[card]


def known_card(name: str) -> str | None:
    """Return the key of `PEAK_BF16_FLOPS` for PyTorch's name of a device, or None."""

    def occurs(card: str) -> bool:
        return re.search(rf"\b{re.escape(card)}\b", name) is not None

    if any(map(occurs, UNKNOWN_CARDS)):
        return None
    return max(filter(occurs, PEAK_BF16_FLOPS), key=len, default=None)
