"""Bidirectional self-attention over packed sequences, with two equivalent backends.

`varlen`: flash attention on `cu_seqlens`; CUDA, bf16 or fp16, no dropout on the probabilities.
`padded`: pad, scaled dot product, unpad; any device and precision, with dropout. What depends only on the lengths is
computed once per batch (`Layout`), not once per layer.

Of a layer's two wide products the compiled backward pass moves less on CUDA: a bias has the sum over all rows as its
gradient, for which the compiler reads the rows again; sums of blocks of rows it takes where the rows are made, when the
gradients of query, key and value are put together, and in GELU's backward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_pretrain.errors import ConfigError
from bert_pretrain.model.dropout import dropout

BLOCK_ROWS = 64  # of a sum of the gradient's rows


@dataclass(frozen=True)
class Layout:
    """The memory layout of a batch of packed sequences, for either backend."""

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
    if backend == "varlen" or num_sequences * max_seqlen == num_tokens:
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


def choose_attention(
    setting: str, device: torch.device, dtype: torch.dtype, *, head_size: int, dropout_rate: float
) -> tuple[str, str]:
    """Return the backend for `auto`, `varlen` or `padded`, and the reason for it."""
    if setting == "padded":
        return "padded", "as configured"
    obstacle = _varlen_obstacle(device, dtype, head_size, dropout_rate)
    if obstacle is None:
        return "varlen", "as configured" if setting == "varlen" else "flash attention without padding fits here"
    if setting == "varlen":
        raise ConfigError(
            f"attention is 'varlen', but {obstacle}", where="train.attention", remedy="set it to auto or padded"
        )
    return "padded", obstacle


def _varlen_obstacle(device: torch.device, dtype: torch.dtype, head_size: int, dropout_rate: float) -> str | None:
    if device.type != "cuda":
        return f"flash attention over packed sequences needs CUDA, the device is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention needs bf16 or fp16, the precision is {str(dtype).removeprefix('torch.')}"
    if dropout_rate > 0:
        return f"it has no dropout, attention_probs_dropout_prob is {dropout_rate:g}"
    if head_size % 8 or head_size > 256:
        return f"flash attention takes heads of a multiple of 8, up to 256 wide; here they are {head_size} wide"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"flash attention needs compute capability 8.0, this card has {major}.{minor}"
    return None
