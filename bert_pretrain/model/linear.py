"""Linear layers whose compiled backward pass moves less on CUDA, with the products and sums that autograd has.

A bias has the sum over all rows as its gradient, for which the compiler reads the rows again. Sums of blocks of rows it
takes where the rows are made: for query, key and value when their gradients are put together, and in GELU's backward.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK_ROWS = 64


def three_outputs(hidden: Tensor, linear: nn.Linear) -> tuple[Tensor, ...]:
    """Return the three equal parts of a layer's output: (tokens, hidden) to 3 × (tokens, width)."""
    if _is_fusible(hidden, linear):
        parts: tuple[Tensor, ...] = _ThreeOutputs.apply(hidden, linear.weight, linear.bias)  # type: ignore[no-untyped-call]
        return parts
    return linear(hidden).chunk(3, dim=1)


def gelu_of(hidden: Tensor, linear: nn.Linear) -> Tensor:
    """Return the exact GELU, by erf, of a layer's output: (tokens, hidden) to (tokens, width)."""
    if _is_fusible(hidden, linear):
        wide: Tensor = _Gelu.apply(hidden, linear.weight, linear.bias)  # type: ignore[no-untyped-call]
        return wide
    return F.gelu(linear(hidden))


def _is_fusible(hidden: Tensor, linear: nn.Linear) -> bool:
    """Whether the compiler makes kernels for a card, of weights in 16 bits and whole blocks of rows."""
    is_compiled = hidden.device.type == "cuda" and torch.compiler.is_compiling()
    return is_compiled and hidden.dtype == linear.weight.dtype and hidden.shape[0] % BLOCK_ROWS == 0


class _ThreeOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, weight)
        return F.linear(hidden, weight, bias).chunk(3, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return _gradients(hidden, weight, torch.cat([_in_blocks(gradient) for gradient in gradients], dim=2))


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        wide = F.linear(hidden, weight, bias)
        ctx.save_for_backward(hidden, weight, wide)
        return F.gelu(wide)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight, wide = ctx.saved_tensors
        blocks = torch.ops.aten.gelu_backward(_in_blocks(gradients[0]), _in_blocks(wide))
        return _gradients(hidden, weight, blocks)


def _in_blocks(rows: Tensor) -> Tensor:
    """Return (tokens, width) as (blocks, BLOCK_ROWS, width)."""
    return rows.reshape(rows.shape[0] // BLOCK_ROWS, BLOCK_ROWS, rows.shape[1])


def _gradients(hidden: Tensor, weight: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias from the output's, (blocks, BLOCK_ROWS, width)."""
    sums = blocks.sum(dim=1, dtype=torch.float32).sum(dim=0)
    rows = blocks.flatten(0, 1)  # a view by the number of tokens would be a copy, where the compiler knows no number
    return rows @ weight, rows.t() @ hidden, sums.to(weight.dtype)
