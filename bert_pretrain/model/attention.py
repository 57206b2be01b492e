"""Bidirectional self-attention over packed sequences; `attention_backend.py` chooses one of its equivalent backends.

`varlen`: flash attention on `cu_seqlens`; CUDA, bf16 or fp16, no dropout on the probabilities.
`triton`: the same for sequences of at most 128 tokens, by the kernels of `short_attention.py`.
`padded`: pad, scaled dot product, unpad; any device and precision, with dropout. What depends only on the lengths is
computed once per batch (`Layout`), not once per layer.

Of a layer's two wide products the compiled backward pass moves less on CUDA: a bias has the sum over all rows as its
gradient, for which the compiler reads the rows again; sums of blocks of rows it takes where the rows are made, when the
gradients of query, key and value are put together, and in GELU's backward.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_pretrain.model.dropout import dropout

BLOCK_ROWS = 64  # of a sum of the gradient's rows


@dataclass(frozen=True)
class Layout:
    """The memory layout of a batch of packed sequences, for any backend."""

    cu_seqlens: Tensor  # (sequences + 1,) int32: the begin of each sequence, and the end of the last one
    max_seqlen: int
    slots: Tensor | None
    """(tokens,) int64: each token's slot in the padded (sequences * max_seqlen); None without padding."""
    mask: Tensor | None
    """(sequences, 1, 1, max_seqlen) bool: which slots hold a token; None without padding."""

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1


def layout_of(cu_seqlens: Tensor, max_seqlen: int, num_tokens: int, backend: str) -> Layout:
    """Return the layout of sequences with the given bounds, (sequences + 1,) int32, the longest of `max_seqlen`."""
    num_sequences = cu_seqlens.shape[0] - 1
    if backend != "padded" or num_sequences * max_seqlen == num_tokens:
        return Layout(cu_seqlens, max_seqlen, None, None)
    bounds = cu_seqlens.long()
    lengths = bounds.diff()
    # A token's slot is its index in the packed batch plus all the padding before its sequence.
    padding_before = torch.arange(num_sequences, device=bounds.device) * max_seqlen - bounds[:-1]
    slots = torch.arange(num_tokens, device=bounds.device)
    slots = slots + padding_before.repeat_interleave(lengths, output_size=num_tokens)
    mask = torch.arange(max_seqlen, device=bounds.device) < lengths[:, None]  # (sequences, max_seqlen)
    return Layout(cu_seqlens, max_seqlen, slots, mask[:, None, None, :])


def pad(rows: Tensor, layout: Layout) -> Tensor:
    """Return packed rows, (tokens, width), in their slots, (sequences * max_seqlen, width), with zeros between."""
    if layout.slots is None:
        return rows
    padded = rows.new_zeros(layout.num_sequences * layout.max_seqlen, rows.shape[1])
    return padded.index_copy_(0, layout.slots, rows)


def attend_varlen(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
    """Attend within each sequence by flash attention; 3 × (tokens, heads, head size) to (tokens, heads * head size)."""
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = layout.cu_seqlens, layout.max_seqlen
    # Only the first seven arguments have the same meaning in all releases of torch.
    context: Any = varlen_attn(query, key, value, bounds, bounds, longest, longest)
    return context.flatten(1)  # (tokens, hidden)


def attend_padded(query_key_value: Tensor, layout: Layout, dropout_rate: float) -> Tensor:
    """Attend within each sequence by padding; (tokens, 3, heads, head size) to (tokens, heads * head size).

    The dropout is of the attention probabilities; 0 for evaluation.
    """
    num_tokens, _, heads, head_size = query_key_value.shape
    padded = pad(query_key_value.flatten(1), layout)  # (sequences * max_seqlen, 3 * hidden)
    padded = padded.view(layout.num_sequences, layout.max_seqlen, 3, heads, head_size)
    query, key, value = padded.permute(2, 0, 3, 1, 4)  # 3 × (sequences, heads, max_seqlen, head size)
    context = _weigh(query, key, value, layout.mask, dropout_rate)
    context = context.transpose(1, 2).reshape(-1, heads * head_size)  # (sequences * max_seqlen, hidden)
    if layout.slots is not None:
        context = _gather(context, layout.slots)
    return context.view(num_tokens, -1)


def _weigh(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_rate: float) -> Tensor:
    """Return softmax(query key^T / sqrt(head size)) value of (sequences, heads, max_seqlen, head size)."""
    if query.device.type != "cpu" or (dropout_rate == 0.0 and query.dtype == torch.float32):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_rate)
    # On CPU the fused kernel has no dropout, and its backward pass in 16 bits takes three times as long as this.
    with torch.autocast("cpu", enabled=False):
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)  # (sequences, heads, max_seqlen, max_seqlen)
        if mask is not None:
            scores += torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, -torch.inf)
        return dropout(scores.softmax(dim=-1), dropout_rate) @ value


class _Gather(torch.autograd.Function):
    """Copy the rows of distinct slots. Autograd's own adjoint of that adds, which is far slower than copying."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.num_slots = padded.shape[0]
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        padded = gradient.new_zeros(ctx.num_slots, gradient.shape[1])
        return padded.index_copy_(0, ctx.saved_tensors[0], gradient), None


_gather: Callable[[Tensor, Tensor], Tensor] = _Gather.apply


def three_outputs(hidden: Tensor, linear: nn.Linear) -> tuple[Tensor, ...]:
    """Return the three equal parts of a layer's output: (tokens, hidden) to 3 × (tokens, width)."""
    if _is_fusible(hidden, linear):
        return _apply(hidden, linear, False)
    query_key_value: Tensor = linear(hidden)
    return query_key_value.chunk(3, dim=1)


def gelu_of(hidden: Tensor, linear: nn.Linear) -> Tensor:
    """Return the GELU of a layer's output: (tokens, hidden) to (tokens, width); by erf, or compiled by `_normal`."""
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
        return ((wide * _normal(wide)[0]).to(wide.dtype),) if with_gelu else wide.chunk(3, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, *wide = ctx.saved_tensors
        # Blocks of rows, (blocks, BLOCK_ROWS, width), back and forth: a view by the number of tokens would be a copy,
        # where the compiler knows no number.
        blocks = [each.reshape(each.shape[0] // BLOCK_ROWS, BLOCK_ROWS, each.shape[1]) for each in (*gradients, *wide)]
        if wide:
            distribution, density = _normal(blocks[1])
            found = (blocks[0] * (distribution + blocks[1] * density)).to(hidden.dtype)
        else:
            found = torch.cat(blocks, dim=2)
        rows = found.flatten(0, 1)
        sums = found.sum(dim=1, dtype=torch.float32).sum(dim=0)
        return rows @ weight, rows.t() @ hidden, sums.to(weight.dtype), None


def _normal(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return distribution function and density of the standard normal distribution, in fp32, within 7.5e-8.

    By equation 26.2.17 of Abramowitz and Stegun (1964), from the one exponential that both need: with erf, a card
    computes GELU and its gradient for longer than it moves their values.
    """
    values = values.float()
    density = torch.exp(values * values * -0.5) * (2.0 * math.pi) ** -0.5
    inverse = 1.0 / (1.0 + 0.2316419 * values.abs())
    tail = 1.330274429 * inverse
    for factor in (-1.821255978, 1.781477937, -0.356563782, 0.319381530):
        tail = (tail + factor) * inverse
    tail = tail * density
    return torch.where(values > 0.0, 1.0 - tail, tail), density
