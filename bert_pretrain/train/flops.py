"""Floating-point operations of a step and of a device, for the utilisation (MFU).

Only real tokens count, forward and backward: 6 a weight and token for the layers, 12 · length · hidden a layer and
token for attention, 6 a weight for the masked-language-model head at predicted tokens and for pooler and next-sentence
head at sequence pairs. Padding, look-ups in embeddings and anything recomputed count as nothing.
"""

import re

import torch

from bert_pretrain.config import ModelConfig
from bert_pretrain.train.batches import GlobalBatch

PEAK_BF16_FLOPS = {
    # Dense tensor-core peaks without sparsity, from NVIDIA's data sheets of each card; the longest name that fits wins.
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
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
    "V100": 125e12,
    "T4": 65e12,
}


def batch_flops(batch: GlobalBatch, model: ModelConfig, vocab_size: int) -> float:
    """Return the floating-point operations of one step over real tokens, forward and backward."""
    hidden, layers = model.hidden_size, model.num_hidden_layers
    layer_weights = 4 * hidden * hidden + 2 * hidden * model.intermediate_size
    return float(
        6 * layers * layer_weights * batch.num_tokens
        + 12 * layers * hidden * batch.sum_squared_lengths
        + 6 * (hidden * hidden + hidden * vocab_size) * batch.num_predictions
        + 6 * (hidden * hidden + 2 * hidden) * batch.num_pairs
    )


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak of a known card in bf16 or fp16, else None."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    known = [card for card in PEAK_BF16_FLOPS if re.search(rf"\b{card}\b", name)]
    return PEAK_BF16_FLOPS[max(known, key=len)] if known else None
