"""Scale embeddings for export by a power of two, and derive a fine-tuning learning rate from the scale of weights.

AdamW changes a weight by about the learning rate per step, independent of the size of the weight.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

INITIAL_RMS = 0.02  # standard deviation of BERT's initial weights (released code of Devlin et al., 2018)
EXPORTED_RMS = 0.05  # largest root mean square of exported word embeddings, similar to other BERTs
BASE_RATE, BASE_WIDTH = 3e-4, 256  # rate for matrices with `INITIAL_RMS`, measured at a width of 128 (RESULTS.md)
WIDTH_POWER = 2.26  # above `BASE_WIDTH`; width 768 and an RMS of 0.04 give the paper's rate of 5e-5 (appendix A.3)


def rms(weight: Tensor) -> float:
    return float(weight.detach().float().square().mean().sqrt())


def fine_tuning_rate(encoder: nn.Module, hidden_size: int) -> float:
    """Return AdamW's learning rate for an encoder, from its width and the RMS of its matrices, to one digit."""
    scale = rms(torch.cat([weight.detach().flatten() for weight in encoder.parameters() if weight.dim() == 2]))
    width_factor = min(1.0, BASE_WIDTH / hidden_size) ** WIDTH_POWER
    return float(f"{BASE_RATE * width_factor * scale / INITIAL_RMS:.0e}")


def export_exponent(word_embeddings: Tensor) -> int:
    """Return the smallest k >= 0 for which word embeddings times 2^-k have an RMS of at most `EXPORTED_RMS`."""
    size = rms(word_embeddings)
    return max(0, math.ceil(math.log2(size / EXPORTED_RMS))) if math.isfinite(size) and size > 0 else 0


def scale_embeddings(tensors: Mapping[str, Tensor], exponent: int) -> dict[str, Tensor]:
    """Multiply all embeddings by 2^-exponent without changing the outputs. Names are those of our parameters.

    Layer normalization after the embeddings removes the factor. The decoder shares the word embeddings, so its input is
    multiplied by 2^exponent. Powers of two are exact, so the negative exponent restores the same weights.
    """
    factors = {f"embeddings.{kind}_embeddings.weight": 2.0**-exponent for kind in ("word", "position", "token_type")}
    factors |= {f"mlm_head.layer_norm.{leaf}": 2.0**exponent for leaf in ("weight", "bias")}
    return {name: tensor * factors[name] if name in factors else tensor for name, tensor in tensors.items()}
