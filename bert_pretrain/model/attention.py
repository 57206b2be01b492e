"""Bidirectional self-attention over packed sequences. `attention_backend.py` chooses one of three equivalent backends.

`varlen`: flash attention with `cu_seqlens`. Needs CUDA, bf16 or fp16, and no dropout on the attention probabilities.
`triton`: the kernels of `short_attention.py`, for sequences of at most 128 tokens. Has the same requirements.
`padded`: pad, scaled dot product attention, unpad. Supports every device and precision, and dropout.

A compiled backward pass on CUDA reads the output gradient again to sum its rows, which is the gradient of the bias.
`_Linear` sums blocks of rows instead, which the compiler fuses into the kernel that computes the rows.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_pretrain.config import ModelConfig
from bert_pretrain.model.dropout import dropout

BLOCK_ROWS = 64  # number of rows that `_Linear` sums in one block
BLOCK_QUERIES = 64  # number of queries that attend together to the keys in their windows, without flash attention


@dataclass(frozen=True)
class Layout:
    """Memory layout of a batch of packed sequences, computed once per batch, for any backend.

    The last five fields are those of ModernBERT: see `with_rotation`.
    """

    cu_seqlens: Tensor  # (sequences + 1,) int32: start of each sequence, then the end of the last one
    max_seqlen: int
    slots: Tensor | None  # (tokens,) int64: index of each token in the padded batch; None if nothing is padded
    mask: Tensor | None  # (sequences, 1, 1, max_seqlen) bool: True where a slot has a token; None if nothing is padded
    window: int | None = None  # distance to which layers with a window attend; None if it has the whole sequence
    window_mask: Tensor | None = None  # (sequences or 1, 1, max_seqlen, max_seqlen) bool: `mask` within the window
    # In place of `window_mask`, for sequences far longer than the window: for each block of queries, which of the
    # `window` keys before it, in it, and `window` keys behind it are visible, (blocks, 1, queries, keys) bool.
    block_mask: Tensor | None = None
    # Cosines and sines of the angles by which rotary positions turn queries and keys (Su et al., 2021), and of 0 for
    # values, in layers of both kinds, (tokens, 3, 1, head size / 2, 2).
    global_turns: Tensor | None = None
    local_turns: Tensor | None = None


def make_layout(
    cu_seqlens: Tensor,
    max_seqlen: int,
    num_tokens: int,
    backend: str,
) -> Layout:
    """Return the layout of packed sequences from their `cu_seqlens`, (sequences + 1,) int32."""
    num_sequences = cu_seqlens.shape[0] - 1
    if backend != "padded" or num_sequences * max_seqlen == num_tokens:
        return Layout(cu_seqlens, max_seqlen, None, None)
    bounds = cu_seqlens.long()
    lengths = bounds.diff()
    # The slot of a token is its index in the packed batch plus the padding before its sequence.
    padding_before = torch.arange(num_sequences, device=bounds.device) * max_seqlen - bounds[:-1]
    slots = torch.arange(num_tokens, device=bounds.device)
    slots = slots + padding_before.repeat_interleave(lengths, output_size=num_tokens)
    mask = torch.arange(max_seqlen, device=bounds.device) < lengths[:, None]  # (sequences, max_seqlen)
    return Layout(cu_seqlens, max_seqlen, slots, mask[:, None, None, :])


def with_rotation(
    layout: Layout,
    position_ids: Tensor,
    config: ModelConfig,
    *,
    is_padded: bool,
) -> Layout:
    """Add what ModernBERT's layers need: the rotations of both kinds of layers, and the window of the local ones.

    `position_ids`, (tokens,) int, are the positions in each sequence. The backend `padded` (`is_padded`) needs a mask.
    """
    window = config.local_attention // 2
    has_window = window < layout.max_seqlen - 1
    window_mask, block_mask = layout.mask, None
    if is_padded and layout.max_seqlen > 4 * window:
        block_mask = _block_mask(layout.cu_seqlens, len(position_ids), window)
    elif is_padded and has_window:
        slots = torch.arange(layout.max_seqlen, device=position_ids.device)
        distances = (slots[:, None] - slots).abs()  # (max_seqlen, max_seqlen)
        window_mask = (distances <= window)[None, None]
        if layout.mask is not None:
            # A slot without a token attends to itself: a softmax over nothing would be NaN, also in the gradients.
            window_mask = window_mask & (layout.mask | (distances == 0))
    return replace(
        layout,
        window=window if has_window else None,
        window_mask=window_mask,
        block_mask=block_mask,
        global_turns=_turns(position_ids, layout.max_seqlen, config, config.global_rope_theta),
        local_turns=_turns(position_ids, layout.max_seqlen, config, config.local_rope_theta),
    )


def _block_mask(cu_seqlens: Tensor, num_tokens: int, window: int) -> Tensor:
    num_blocks = -(-num_tokens // BLOCK_QUERIES)
    tokens = torch.arange(
        -window,
        num_blocks * BLOCK_QUERIES + window,
        dtype=torch.int32,
        device=cu_seqlens.device,
    )
    num_keys = BLOCK_QUERIES + 2 * window
    distances = tokens[:num_keys] - tokens[window : window + BLOCK_QUERIES, None]  # (queries, keys)
    sequences = torch.searchsorted(cu_seqlens, tokens, right=True)
    sequences = sequences.unfold(0, num_keys, BLOCK_QUERIES)[:, None]  # (blocks, 1, keys)
    queries = sequences[:, :, window:-window].mT  # (blocks, queries, 1)
    return ((queries == sequences) & (distances.abs() <= window))[:, None]


def _turns(
    position_ids: Tensor,
    max_seqlen: int,
    config: ModelConfig,
    theta: float,
) -> Tensor:
    head_size = config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, head_size, 2, device=position_ids.device) / head_size
    positions = torch.arange(max_seqlen, device=position_ids.device)
    angles = positions[:, None] * (1.0 / theta**exponents)  # (max_seqlen, head size / 2)
    angles = torch.stack([angles, angles, torch.zeros_like(angles)], dim=1)[:, :, None]
    return torch.view_as_real(torch.complex(angles.cos(), angles.sin())).index_select(0, position_ids)


def rotate(heads: Tensor, turns: Tensor) -> Tensor:
    """Turn queries or keys in fp32: (tokens, heads, head size) to the same shape."""
    first, second = heads.float().chunk(2, dim=-1)  # (tokens, heads, head size / 2)
    cosines, sines = turns[:, 0].unbind(-1)  # (tokens, 1, head size / 2)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1).to(heads.dtype)


def rotated_heads(
    hidden: Tensor,
    linear: nn.Linear,
    num_heads: int,
    turns: Tensor,
) -> Tensor:
    """Return values, and turned queries and keys: (tokens, hidden) to (tokens, 3, heads, head size).

    On a CPU, a product of complex numbers is the fastest rotation. It needs the two dimensions that an angle turns next
    to each other, in queries and in keys. Reordered rows of the matrix do this, and do not change any score.
    """
    rows = torch.arange(linear.out_features, device=hidden.device).view(3, num_heads, 2, -1)
    rows = torch.cat([rows[:2].mT.flatten(), rows[2].flatten()])
    bias = None if linear.bias is None else linear.bias.index_select(0, rows)
    heads = F.linear(hidden, linear.weight.index_select(0, rows), bias)
    pairs = heads.float().view(len(hidden), 3, num_heads, -1, 2)
    turned = torch.view_as_complex(pairs) * torch.view_as_complex(turns)
    return torch.view_as_real(turned).flatten(-2).to(heads.dtype)


def gated_gelu(hidden: Tensor, linear: nn.Linear) -> Tensor:
    """Return GELU of half of a linear layer's outputs, times the other half: (tokens, hidden) to (tokens, width)."""
    if hidden.device.type != "cpu":
        wide, gate = linear(hidden).chunk(2, dim=1)
        return F.gelu(wide) * gate
    # On a CPU, GELU of half of each row takes three times as long as that of a matrix.
    biases = (None, None) if linear.bias is None else linear.bias.chunk(2)
    wide, gate = map(F.linear, (hidden, hidden), linear.weight.chunk(2), biases)
    return F.gelu(wide) * gate


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    is_global: bool = True,
) -> Tensor:
    """Apply flash attention within each sequence: 3 × (tokens, heads, head size) to (tokens, heads * head size)."""
    from torch.nn.attention.varlen import varlen_attn

    bounds, max_seqlen = layout.cu_seqlens, layout.max_seqlen
    # Only the first seven arguments have the same meaning in every release of torch.
    window: dict[str, Any] = {}
    if not is_global and layout.window is not None:
        window["window_size"] = (layout.window, layout.window)
    context: Any = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        max_seqlen,
        max_seqlen,
        **window,
    )
    return context.flatten(1)  # (tokens, hidden)


def has_windows() -> bool:
    """Return whether `attend_varlen` can attend within a window. This depends on the release of torch."""
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in inspect.signature(varlen_attn).parameters


def attend_padded(
    query_key_value: Tensor,
    layout: Layout,
    dropout_rate: float,
    *,
    is_global: bool = True,
) -> Tensor:
    """Pad and attend within each sequence: (tokens, 3, heads, head size) to (tokens, heads * head size).

    `dropout_rate` applies to the attention probabilities; 0 for evaluation. Without `is_global`, tokens attend only to
    the layout's window.
    """
    if layout.block_mask is not None and not is_global:
        return _attend_in_blocks(query_key_value, layout.block_mask, dropout_rate)
    num_tokens, _, heads, head_size = query_key_value.shape
    num_sequences, max_seqlen = layout.cu_seqlens.shape[0] - 1, layout.max_seqlen
    padded = query_key_value.flatten(1)  # (tokens, 3 * hidden)
    if layout.slots is not None:
        zeros = padded.new_zeros(num_sequences * max_seqlen, padded.shape[1])
        padded = zeros.index_copy_(0, layout.slots, padded)
    padded = padded.view(
        num_sequences,
        max_seqlen,
        3,
        heads,
        head_size,
    )
    query, key, value = padded.permute(2, 0, 3, 1, 4)  # 3 × (sequences, heads, max_seqlen, head size)
    mask = layout.mask if is_global else layout.window_mask
    context = _scaled_dot_product(
        query,
        key,
        value,
        mask,
        dropout_rate,
    )
    context = context.transpose(1, 2).reshape(-1, heads * head_size)  # (sequences * max_seqlen, hidden)
    if layout.slots is not None:
        context = _Gather.apply(context, layout.slots)  # type: ignore[no-untyped-call]
    return context.view(num_tokens, -1)


def _attend_in_blocks(query_key_value: Tensor, mask: Tensor, dropout_rate: float) -> Tensor:
    """Attend within the window, without a matrix of length × length. Shapes are those of `attend_padded`."""
    num_tokens, _, heads, head_size = query_key_value.shape
    num_blocks, _, num_queries, num_keys = mask.shape
    hidden, window = heads * head_size, (num_keys - num_queries) // 2
    after = num_blocks * num_queries - num_tokens
    queries, others = torch.split(query_key_value.flatten(1), [hidden, 2 * hidden], dim=1)
    query = F.pad(queries, (0, 0, 0, after)).view(num_blocks, num_queries, heads, head_size).transpose(1, 2)
    starts = torch.arange(num_blocks, device=mask.device) * num_queries
    rows = starts[:, None] + torch.arange(num_keys, device=mask.device)
    others = F.pad(others, (0, 0, window, window + after)).index_select(0, rows.flatten())
    others = others.view(
        num_blocks,
        num_keys,
        2,
        heads,
        head_size,
    )
    key, value = others.permute(2, 0, 3, 1, 4)  # 2 × (blocks, heads, keys, head size)
    context = _scaled_dot_product(
        query,
        key,
        value,
        mask,
        dropout_rate,
    )
    return context.transpose(1, 2).reshape(-1, hidden)[:num_tokens]


def _scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_rate: float,
) -> Tensor:
    """Return softmax(query key^T / sqrt(head size)) value, (sequences, heads, max_seqlen, head size)."""
    if query.device.type != "cpu" or (dropout_rate == 0.0 and query.dtype == torch.float32):
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout_rate,
        )
    # The fused CPU kernel has no dropout, and its 16-bit backward pass is 3 × slower than the code below.
    with torch.autocast("cpu", enabled=False):
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)  # (sequences, heads, max_seqlen, max_seqlen)
        if mask is not None:
            scores += torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, -torch.inf)
        return dropout(scores.softmax(dim=-1), dropout_rate) @ value


class _Gather(torch.autograd.Function):
    """Selects rows by distinct slots. The backward pass copies rows; that of `index_select` adds them and is slower."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.num_slots = padded.shape[0]
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        zeros = gradient.new_zeros(ctx.num_slots, gradient.shape[1])
        return zeros.index_copy_(0, ctx.saved_tensors[0], gradient), None


def linear_chunks(hidden: Tensor, linear: nn.Linear) -> tuple[Tensor, ...]:
    """Return the output of a linear layer in three equal parts: (tokens, hidden) to 3 × (tokens, width)."""
    if _is_fusible(hidden, linear):
        return _fused_linear(hidden, linear.weight, linear.bias, False)
    outputs: Tensor = linear(hidden)
    return outputs.chunk(3, dim=1)


def linear_gelu(hidden: Tensor, linear: nn.Linear) -> Tensor:
    """Apply a linear layer and GELU: (tokens, hidden) to (tokens, width). Uses erf in eager mode."""
    if _is_fusible(hidden, linear):
        return _fused_linear(hidden, linear.weight, linear.bias, True)[0]
    return F.gelu(linear(hidden))


def _is_fusible(hidden: Tensor, linear: nn.Linear) -> bool:
    """Return whether `_Linear` applies: compiled for CUDA, 16-bit weights, and a multiple of `BLOCK_ROWS` tokens."""
    is_compiled = hidden.device.type == "cuda" and torch.compiler.is_compiling()
    in_16_bits = hidden.dtype == linear.weight.dtype != torch.float32
    return is_compiled and in_16_bits and hidden.shape[0] % BLOCK_ROWS == 0


class _Linear(torch.autograd.Function):
    """Linear layer followed by GELU, or by a split into three parts."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        with_gelu: bool,
    ) -> tuple[Tensor, ...]:
        wide = F.linear(hidden, weight, bias)
        ctx.save_for_backward(hidden, weight, *([wide] if with_gelu else []))
        return ((wide * _normal_cdf_and_density(wide)[0]).to(wide.dtype),) if with_gelu else wide.chunk(3, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, *wide = ctx.saved_tensors
        # Reshape the inputs to (blocks, BLOCK_ROWS, width) and flatten the result. The reverse order would make the
        # compiler copy the result if the number of tokens is symbolic.
        blocks = [each.reshape(each.shape[0] // BLOCK_ROWS, BLOCK_ROWS, each.shape[1]) for each in (*gradients, *wide)]
        if wide:
            cdf, density = _normal_cdf_and_density(blocks[1])
            gradient = (blocks[0] * (cdf + blocks[1] * density)).to(hidden.dtype)
        else:
            gradient = torch.cat(blocks, dim=2)
        rows = gradient.flatten(0, 1)
        bias_gradient = gradient.sum(dim=1, dtype=torch.float32).sum(dim=0)
        return rows @ weight, rows.t() @ hidden, bias_gradient.to(weight.dtype), None


_fused_linear: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, ...]] = _Linear.apply


def _normal_cdf_and_density(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the CDF and the density of the standard normal distribution in fp32, with an error below 7.5e-8.

    Equation 26.2.17 of Abramowitz and Stegun (1964) needs one exponential for both. With erf, GELU and its gradient
    would be limited by computation instead of memory bandwidth.
    """
    values = values.float()
    density = torch.exp(values * values * -0.5) * (2.0 * math.pi) ** -0.5
    inverse = 1.0 / (1.0 + 0.2316419 * values.abs())
    tail = 1.330274429 * inverse
    for factor in (-1.821255978, 1.781477937, -0.356563782, 0.319381530):
        tail = (tail + factor) * inverse
    tail = tail * density
    return torch.where(values > 0.0, 1.0 - tail, tail), density
