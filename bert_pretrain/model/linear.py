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
    return _apply(hidden, linear, False) if _is_fusible(hidden, linear) else linear(hidden).chunk(3, dim=1)


def gelu_of(hidden: Tensor, linear: nn.Linear) -> Tensor:
    """Return the exact GELU, by erf, of a layer's output: (tokens, hidden) to (tokens, width)."""
    return _apply(hidden, linear, True)[0] if _is_fusible(hidden, linear) else F.gelu(linear(hidden))


def _is_fusible(hidden: Tensor, linear: nn.Linear) -> bool:
    """Whether the compiler makes kernels for a card, of weights in 16 bits and whole blocks of rows."""
    is_compiled = hidden.device.type == "cuda" and torch.compiler.is_compiling()
    in_16_bits = hidden.dtype == linear.weight.dtype != torch.float32
    return is_compiled and in_16_bits and hidden.shape[0] % BLOCK_ROWS == 0


def _apply(hidden: Tensor, linear: nn.Linear, with_gelu: bool) -> tuple[Tensor, ...]:
    function: Any = _Linear.apply
    outputs: tuple[Tensor, ...] = function(hidden, linear.weight, linear.bias, with_gelu)
    return outputs


class _Linear(torch.autograd.Function):
    """A linear layer with its GELU, or in three parts."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, with_gelu: bool) -> tuple[Tensor, ...]:
        wide = F.linear(hidden, weight, bias)
        ctx.save_for_backward(hidden, weight, *([wide] if with_gelu else []))
        return (F.gelu(wide),) if with_gelu else wide.chunk(3, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, *wide = ctx.saved_tensors
        # Blocks of rows, (blocks, BLOCK_ROWS, width), back and forth: a view by the number of tokens would be a copy,
        # where the compiler knows no number.
        blocks = [each.reshape(each.shape[0] // BLOCK_ROWS, BLOCK_ROWS, each.shape[1]) for each in (*gradients, *wide)]
        found = torch.ops.aten.gelu_backward(*blocks) if wide else torch.cat(blocks, dim=2)
        rows = found.flatten(0, 1)
        sums = found.sum(dim=1, dtype=torch.float32).sum(dim=0)
        return rows @ weight, rows.t() @ hidden, sums.to(weight.dtype), None
