"""Triton kernels of attention within packed sequences that are short enough for one block of keys.

A program computes one head of one sequence, with all keys and values on the chip. The forward pass reads query, key and
value once and writes the context. The backward pass reads them and the gradient of the context, recomputes the
probabilities and writes three gradients. There are no atomic additions, so results are bitwise reproducible. Each token
has one row: (3, heads, width) in `query_key_value`, (heads, width) in `context`. The mathematics is equation 1 of
Vaswani et al. (2017).
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _at(
    base, row, head, part: tl.constexpr, parts: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr
):
    """Return pointers (N, WIDTH) to one head of N rows from `row` on; `part` selects query, key or value."""
    base += (row.to(tl.int64) * parts + part) * (HEADS * WIDTH) + head * WIDTH
    return base + tl.arange(0, N)[:, None] * (parts * HEADS * WIDTH) + tl.arange(0, WIDTH)[None, :]


@triton.jit
def attention_forward(
    query_key_value, context, logsumexp, cu_seqlens, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the context of one head of one sequence with at most KEYS tokens, in blocks of ROWS queries.

    Also write the base-2 log-sum-exp of each query's scores, (tokens, heads) fp32, for the backward pass.
    """
    head, sequence = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    begin, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    is_key = tl.arange(0, KEYS) < end - begin
    key = tl.load(_at(query_key_value, begin, head, 1, 3, HEADS, WIDTH, KEYS), mask=is_key[:, None], other=0.0)
    value = tl.load(_at(query_key_value, begin, head, 2, 3, HEADS, WIDTH, KEYS), mask=is_key[:, None], other=0.0)
    for first in range(0, end - begin, ROWS):
        row = begin + first
        rows = row + tl.arange(0, ROWS)
        is_row = rows < end
        query = tl.load(_at(query_key_value, row, head, 0, 3, HEADS, WIDTH, ROWS), mask=is_row[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key)) * (scale * LOG2_E)  # (ROWS, KEYS)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        largest = tl.max(scores, 1)
        exponentials = tl.exp2(scores - largest[:, None])
        total = tl.sum(exponentials, 1)
        result = tl.dot(exponentials.to(value.dtype), value) / total[:, None]
        tl.store(_at(context, row, head, 0, 1, HEADS, WIDTH, ROWS), result.to(value.dtype), mask=is_row[:, None])
        tl.store(logsumexp + rows.to(tl.int64) * HEADS + head, largest + tl.log2(total), mask=is_row)


@triton.jit
def attention_backward(
    query_key_value, d_context, logsumexp, d_inputs, cu_seqlens, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of query, key and value."""
    head, sequence = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    begin, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    is_key = tl.arange(0, KEYS) < end - begin
    key = tl.load(_at(query_key_value, begin, head, 1, 3, HEADS, WIDTH, KEYS), mask=is_key[:, None], other=0.0)
    value = tl.load(_at(query_key_value, begin, head, 2, 3, HEADS, WIDTH, KEYS), mask=is_key[:, None], other=0.0)
    d_key = tl.zeros([KEYS, WIDTH], dtype=tl.float32)
    d_value = tl.zeros([KEYS, WIDTH], dtype=tl.float32)
    for first in range(0, end - begin, ROWS):
        row = begin + first
        rows = row + tl.arange(0, ROWS)
        is_row = rows < end
        query = tl.load(_at(query_key_value, row, head, 0, 3, HEADS, WIDTH, ROWS), mask=is_row[:, None], other=0.0)
        d_result = tl.load(_at(d_context, row, head, 0, 1, HEADS, WIDTH, ROWS), mask=is_row[:, None], other=0.0)
        row_logsumexp = tl.load(logsumexp + rows.to(tl.int64) * HEADS + head, mask=is_row, other=0.0)
        scores = tl.dot(query, tl.trans(key)) * (scale * LOG2_E)  # (ROWS, KEYS)
        probabilities = tl.where(is_key[None, :], tl.exp2(scores - row_logsumexp[:, None]), 0.0)
        d_value += tl.dot(tl.trans(probabilities.to(d_result.dtype)), d_result)
        d_probabilities = tl.dot(d_result, tl.trans(value))
        weighted_mean = tl.sum(probabilities * d_probabilities, 1, keep_dims=True)
        d_scores = (probabilities * (d_probabilities - weighted_mean) * scale).to(key.dtype)
        d_key += tl.dot(tl.trans(d_scores), query)
        d_query = tl.dot(d_scores, key)
        tl.store(_at(d_inputs, row, head, 0, 3, HEADS, WIDTH, ROWS), d_query.to(key.dtype), mask=is_row[:, None])
    tl.store(_at(d_inputs, begin, head, 1, 3, HEADS, WIDTH, KEYS), d_key.to(key.dtype), mask=is_key[:, None])
    tl.store(_at(d_inputs, begin, head, 2, 3, HEADS, WIDTH, KEYS), d_value.to(key.dtype), mask=is_key[:, None])
