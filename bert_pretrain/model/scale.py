"""The scale of weights: how large they are exported, and the learning rate of fine-tuning that fits it.

Fine-tuning by AdamW moves a weight by about the learning rate per step, independent of the size of the weight.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

INITIAL_RMS = 0.02
"""Standard deviation of BERT's initial weights (Devlin et al., 2018: the released code)."""
EXPORTED_RMS = 0.05
"""Largest root mean square of exported word embeddings, as of other BERTs."""
BASE_RATE, BASE_WIDTH = 3e-4, 256
"""Rate of fine-tuning for matrices of BERT's initial scale, measured for a width of 128 (RESULTS.md)."""
WIDTH_POWER = 2.26
"""Beyond, the rate falls so that it is 2.5e-5 at a width of 768, where matrices of an rms of 0.04 then get the paper's
5e-5 (appendix A.3)."""
_EMBEDDINGS = (
    "embeddings.word_embeddings.weight",
    "embeddings.position_embeddings.weight",
    "embeddings.token_type_embeddings.weight",
)
_BEFORE_DECODER = ("mlm_head.layer_norm.weight", "mlm_head.layer_norm.bias")


def rms(weight: Tensor) -> float:
    return float(weight.detach().float().square().mean().sqrt())


def fine_tuning_rate(encoder: nn.Module, hidden_size: int) -> float:
    """Return AdamW's learning rate for a network, by its width and the rms of the encoder's matrices, to one digit."""
    scale = rms(torch.cat([weight.detach().flatten() for weight in encoder.parameters() if weight.dim() == 2]))
    width = min(1.0, BASE_WIDTH / hidden_size) ** WIDTH_POWER
    return float(f"{BASE_RATE * width * scale / INITIAL_RMS:.0e}")


def export_exponent(word_embeddings: Tensor) -> int:
    """Return the smallest k, 0 or more, with which word embeddings times 2^-k have an rms of at most `EXPORTED_RMS`."""
    size = rms(word_embeddings)
    return max(0, math.ceil(math.log2(size / EXPORTED_RMS))) if math.isfinite(size) and size > 0 else 0


def scale_embeddings(tensors: Mapping[str, Tensor], exponent: int) -> dict[str, Tensor]:
    """Return weights, by our own names, with all embeddings times 2^-exponent and equal outputs.

    Layer normalisation follows the embeddings. The decoder, whose matrix are the word embeddings, gets an input that
    is as much larger. A power of two changes no digit, so the opposite exponent gives the same weights back.
    """
    factors = dict.fromkeys(_EMBEDDINGS, 2.0**-exponent) | dict.fromkeys(_BEFORE_DECODER, 2.0**exponent)
    return {name: tensor * factors[name] if name in factors else tensor for name, tensor in tensors.items()}
