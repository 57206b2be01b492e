"""Dropout with fewer random bits than PyTorch's 32 per element.

On CPU the mask comes from numpy's SFC64, which is faster than PyTorch's generator, with 16 bits per element. Compiled
layers on CUDA use 8 bits per element, drawn by one kernel, because Inductor's own generator takes twice as long as the
memory access of its kernels. The rate is rounded to a multiple of 2^-16 or 2^-8.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LEVELS, _CUDA_LEVELS = 1 << 16, 1 << 8
_INTEGER_TYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class Dropout(nn.Module):
    """Zeroes elements at a rate during training and scales the rest to keep the mean (Srivastava et al., 2014)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, values: Tensor) -> Tensor:
        return dropout(values, self.rate) if self.training else values


def dropout(values: Tensor, rate: float) -> Tensor:
    """Zero each element with probability `rate` and divide the rest by `1 - rate`.

    The state of the device's default generator determines the mask.
    """
    if rate == 0.0:
        return values
    if values.device.type == "cuda" and torch.compiler.is_compiling():
        return dropout_by_bytes(values, rate)
    if values.device.type != "cpu" or rate == 1.0 or torch.compiler.is_compiling():
        return F.dropout(values, rate)
    apply: Callable[[Tensor, float], Tensor] = _DropoutOnCpu.apply
    return apply(values, rate)


def dropout_by_bytes(values: Tensor, rate: float) -> Tensor:
    """Apply dropout to (rows, columns) values with one random byte for each."""
    dropped_levels = min(round(rate * _CUDA_LEVELS), _CUDA_LEVELS - 1)
    keep = random_bytes(values.detach()) >= dropped_levels
    return values * keep * (_CUDA_LEVELS / (_CUDA_LEVELS - dropped_levels))


@torch.library.custom_op("bert_pretrain::random_bytes", mutates_args=())
def random_bytes(like: Tensor) -> Tensor:
    """Return random bytes from the device's default generator, uint8 in the shape of a tensor.

    The compiler merges calls with equal arguments, so each call must have another tensor.
    """
    words = torch.empty(-(-like.numel() // 8), dtype=torch.int64, device=like.device)
    words.random_(-(2**63), None)  # all 64 bits
    return words.view(torch.uint8)[: like.numel()].view(like.shape)


@random_bytes.register_fake
def _empty_bytes(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=torch.uint8, device=like.device)


class _DropoutOnCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rate: float) -> Tensor:
        dropped_levels = round(rate * _LEVELS)
        keep = _random_uint16(values.numel()) >= dropped_levels
        mask = torch.from_numpy(keep.view(np.int8)).view(values.shape)
        ctx.save_for_backward(mask)
        ctx.scale = _LEVELS / (_LEVELS - dropped_levels)
        return _mask_and_scale(values, mask, ctx.scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _mask_and_scale(gradients[0], ctx.saved_tensors[0], ctx.scale), None


def _random_uint16(size: int) -> np.ndarray:
    """Return `size` random uint16, seeded from torch's generator."""
    seed = int(torch.randint(1 << 62, ()))
    generator = np.random.Generator(np.random.SFC64(seed))
    return generator.integers(0, 1 << 64, -(-size // 4), dtype=np.uint64).view(np.uint16)[:size]


def _mask_and_scale(values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return `scale * values` where the int8 mask is 1, and 0 where it is 0."""
    scaled = values * scale
    # Clearing bits is far faster on CPU than a product with a boolean or float mask.
    bits = scaled.view(_INTEGER_TYPES[scaled.element_size()])
    bits &= mask.to(bits.dtype).neg_()
    return scaled
