"""Attention within packed sequences of at most 128 tokens, with the Triton kernels of `short_kernels.py`.

For such short sequences, flash attention's backward pass moves three times as much memory as necessary.
"""

from typing import Any

import torch
from torch import Tensor

HEAD_SIZES, MAX_SEQLEN = (16, 32, 64), 128
# Queries per block and launch options: the fastest of several dozen for BERT-Base on an H200.
FORWARD = {"rows": 64, "num_warps": 4, "num_stages": 1, "maxnreg": 128}
BACKWARD = {"rows": 32, "num_warps": 4, "num_stages": 3}


def attend_short(query_key_value: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Attend within each sequence: (tokens, 3, heads, head size) to (tokens, heads, head size).

    `cu_seqlens`, (sequences + 1,) int32, has the start of each sequence and the end of the last. Sequences have at most
    `longest` tokens, which is at most `MAX_SEQLEN`. The head size must be in `HEAD_SIZES`.
    """
    return short_attention(query_key_value, cu_seqlens, longest)[0]


@torch.library.custom_op("bert_pretrain::short_attention", mutates_args=())
def short_attention(query_key_value: Tensor, cu_seqlens: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return the context, (tokens, heads, width), and the logsumexp of the scores in base 2, (tokens, heads)."""
    from bert_pretrain.model import short_kernels  # needs Triton, which only torch for CUDA installs

    context, logsumexp = _outputs(query_key_value, cu_seqlens, longest)
    tensors = query_key_value.contiguous(), context, logsumexp
    _launch(
        short_kernels.attention_forward,
        *tensors,
        cu_seqlens=cu_seqlens,
        longest=longest,
        **FORWARD,
    )
    return context, logsumexp


@torch.library.custom_op("bert_pretrain::short_attention_backward", mutates_args=())
def short_gradients(
    gradient: Tensor,
    query_key_value: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    longest: int,
) -> Tensor:
    """Return the gradient of query, key and value, (tokens, 3, heads, width), from the gradient of the context."""
    from bert_pretrain.model import short_kernels

    gradients = _gradients(
        gradient,
        query_key_value,
        logsumexp,
        cu_seqlens,
        longest,
    )
    tensors = query_key_value.contiguous(), gradient.contiguous(), logsumexp, gradients
    _launch(
        short_kernels.attention_backward,
        *tensors,
        cu_seqlens=cu_seqlens,
        longest=longest,
        **BACKWARD,
    )
    return gradients


def _launch(
    kernel: Any,
    *tensors: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    rows: int,
    **options: int,
) -> None:
    _, _, heads, width = tensors[0].shape
    keys = max(16, 1 << (longest - 1).bit_length())
    shape = {"HEADS": heads, "WIDTH": width, "KEYS": keys, "ROWS": min(rows, keys)}
    # One block holds all keys. Blocks of keys instead of queries would read illegal addresses.
    assert width in HEAD_SIZES, shape
    assert shape["ROWS"] <= keys <= MAX_SEQLEN, shape
    with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]  # Triton uses the current device
        kernel[(heads * (len(cu_seqlens) - 1),)](
            *tensors,
            cu_seqlens,
            width**-0.5,
            **shape,
            **options,
        )


@short_attention.register_fake
def _outputs(query_key_value: Tensor, cu_seqlens: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    context = torch.empty_like(query_key_value[:, 0], memory_format=torch.contiguous_format)
    return context, torch.empty(context.shape[:2], dtype=torch.float32, device=context.device)


@short_gradients.register_fake
def _gradients(
    gradient: Tensor,
    query_key_value: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    longest: int,
) -> Tensor:
    return torch.empty_like(query_key_value, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    query_key_value, cu_seqlens, ctx.longest = inputs
    ctx.save_for_backward(query_key_value, output[1], cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, None, None]:
    return short_gradients(gradient, *ctx.saved_tensors, ctx.longest), None, None


short_attention.register_autograd(_backward, setup_context=_save)
