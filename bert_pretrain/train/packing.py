"""From examples to packed batches: which examples share a micro-batch, and how they are laid out.

A micro-batch is packed: sequences end to end, without padding, perhaps with a dummy tail that gives it a common shape.
How a global batch is cut into micro-batches changes speed and memory, never the gradient.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bert_pretrain.examples.examples import Examples, concatenate
from bert_pretrain.text import ragged

MAX_DUMMY_SHARE = 0.02  # of a micro-batch's tokens: how many a dummy tail may add so that few distinct shapes occur
IGNORED = -100  # the label of what is not predicted, as in `torch.nn.functional.cross_entropy`


@dataclass(frozen=True)
class Batch:
    """One packed micro-batch, perhaps with a tail of dummy sequences that gives it a common shape.

    What the model returns for a tail is dropped, and labels have none; or theirs is `IGNORED`, which lets all shapes be
    known without the data.
    """

    input_ids: Tensor  # (tokens,) int64
    token_type_ids: Tensor  # (tokens,) int64: 1 from the second segment's first token on
    position_ids: Tensor  # (tokens,) int64: from 0 in every sequence
    cu_seqlens: Tensor  # (sequences + 1,) int32
    masked_positions: Tensor  # (masked,) int64: indices into the packed tokens
    masked_labels: Tensor  # (masked,) int64
    next_sentence_labels: Tensor | None  # (sequences,) int64: 0 where B follows A, 1 where not; None without pairs
    max_seqlen: int
    num_tokens: int  # real ones
    num_sequences: int  # real ones
    num_predictions: int  # real ones

    @property
    def sequences(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """Inputs of an encoder: ids, segments, positions, bounds, and the longest length."""
        return self.input_ids, self.token_type_ids, self.position_ids, self.cu_seqlens, self.max_seqlen

    def to(self, device: torch.device) -> "Batch":
        """Return this batch on a device; from pinned memory the copy to CUDA does not block."""
        return self.with_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """Return this batch in page-locked memory, from which CUDA copies in the background."""
        return self.with_tensors(Tensor.pin_memory)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their fields' names."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changes: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changes)


@dataclass(frozen=True)
class GlobalBatch:
    """One optimizer step: this rank's micro-batches, and the true numbers of all ranks that the losses divide by."""

    micro_batches: list[Batch]
    num_sequences: int
    num_pairs: int  # sequences with a next-sentence label: all of them, or none
    num_predictions: int
    num_tokens: int
    sum_squared_lengths: int

    def to(self, device: torch.device) -> "GlobalBatch":
        return replace(self, micro_batches=[batch.to(device) for batch in self.micro_batches])

    def pin_memory(self) -> "GlobalBatch":
        return replace(self, micro_batches=[batch.pin_memory() for batch in self.micro_batches])


@dataclass(frozen=True)
class ShapeMultiples:
    """What the sizes of a micro-batch are rounded up to, so that few distinct shapes occur in a run.

    A compiler makes code for a shape, and so does oneDNN on CPU for every product in 16 bits, half a megabyte each.
    """

    tokens: int
    masked: int
    sequences: int
    max_seqlen: int
    with_labels: bool = False
    """Whether labels have a tail too."""

    @staticmethod
    def for_padded_attention(micro_batch_tokens: int) -> "ShapeMultiples":
        """Return the multiples for micro-batches of sequences of about equal length; the longest varies."""
        return ShapeMultiples(_power_of_two(MAX_DUMMY_SHARE * micro_batch_tokens), 32, 2, 8)


def cut(examples: Examples, micro_batch_tokens: int, rank: int = 0, num_ranks: int = 1) -> GlobalBatch:
    """Return one rank's micro-batches of a global batch, as `assign_by_length` assigns them, without tails."""
    assigned = assign_by_length(examples.lengths, micro_batch_tokens, rank, num_ranks)
    return global_batch_of([(examples, np.arange(len(examples)))], assigned)


def assign_by_length(lengths: np.ndarray, micro_batch_tokens: int, rank: int, num_ranks: int) -> list[np.ndarray]:
    """Return the rows of each micro-batch of a rank, each of at most `micro_batch_tokens` and at least one example.

    Sorted by length, examples are assigned to ranks in snake order, so that all ranks hold about equally many tokens,
    and attention that pads then pads little.
    """
    share = _snake_order(lengths, num_ranks)[rank]
    return [share[begin:end] for begin, end in itertools.pairwise(_cut_points(lengths[share], micro_batch_tokens))]


def assign_evenly(lengths: np.ndarray, micro_batch_tokens: int, rank: int, num_ranks: int) -> list[np.ndarray]:
    """Return the rows of each micro-batch of a rank, such that all hold about equally many tokens and examples.

    Examples of all lengths are assigned to every micro-batch alike, so that a compiler sees nearly one shape.
    """
    number = max(1, -(-int(lengths.sum()) // (num_ranks * micro_batch_tokens)))
    while number * num_ranks < len(lengths):
        largest = max(int(lengths[share].sum()) for share in _snake_order(lengths, num_ranks * number))
        if largest <= micro_batch_tokens:
            break
        number += 1
    number = min(number, len(lengths) // num_ranks)
    return _snake_order(lengths, num_ranks * number)[rank::num_ranks]


def multiples_of_equal_shares(
    num_examples: int, num_shares: int, max_seq_length: int, mean_tokens: float
) -> ShapeMultiples:
    """Return the multiples for micro-batches of `assign_evenly`: one number of sequences, one longest sequence.

    The usual number of tokens comes from `mean_tokens`, of all the data, so that steps agree.
    """
    usual = mean_tokens * num_examples / num_shares
    unit = _power_of_two(MAX_DUMMY_SHARE * usual)
    num_sequences = -(-num_examples // num_shares) + _tail_sequences(unit, max_seq_length)
    # About a tenth of the predicted tokens, which vary by a few percent: mostly one number.
    return ShapeMultiples(unit, _power_of_two(0.015 * usual), num_sequences, max_seq_length, with_labels=True)


def with_tail(batch: Batch, multiples: ShapeMultiples) -> Batch:
    """Return a micro-batch with a tail of dummy sequences that rounds its sizes up to the multiples."""
    max_seqlen = _round_up(batch.max_seqlen, multiples.max_seqlen)
    at_least = batch.num_sequences + _tail_sequences(multiples.tokens, max_seqlen)
    missing = _round_up(at_least, multiples.sequences) - batch.num_sequences
    tail_tokens = _round_up(batch.num_tokens + missing, multiples.tokens) - batch.num_tokens
    tail_masks = -batch.num_predictions % multiples.masked
    lengths = np.full(missing, tail_tokens // missing) + (np.arange(missing) < tail_tokens % missing)
    bounds = torch.from_numpy((batch.num_tokens + np.cumsum(lengths)).astype(np.int32))
    masked_labels, pair_labels = batch.masked_labels, batch.next_sentence_labels
    if multiples.with_labels:
        masked_labels = F.pad(masked_labels, (0, tail_masks), value=IGNORED)
        pair_labels = None if pair_labels is None else F.pad(pair_labels, (0, missing), value=IGNORED)
    return replace(
        batch,
        input_ids=F.pad(batch.input_ids, (0, tail_tokens)),
        token_type_ids=F.pad(batch.token_type_ids, (0, tail_tokens)),
        position_ids=F.pad(batch.position_ids, (0, tail_tokens)),
        cu_seqlens=torch.cat([batch.cu_seqlens, bounds]),
        masked_positions=F.pad(batch.masked_positions, (0, tail_masks)),
        masked_labels=masked_labels,
        next_sentence_labels=pair_labels,
        max_seqlen=max_seqlen,
    )


def _tail_sequences(unit_tokens: int, max_seqlen: int) -> int:
    """Return how many sequences a tail needs at least: of one token each, and of less than a unit more in all."""
    return 1 + (unit_tokens - 1) // max(max_seqlen - 1, 1)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _power_of_two(number: float) -> int:
    """Return the largest power of two up to a number, at least 1."""
    return 1 << max(0, int(number).bit_length() - 1)


def _snake_order(lengths: np.ndarray, number: int) -> list[np.ndarray]:
    """Return the rows of each share: examples sorted by length, assigned first to last, then last to first."""
    order = np.argsort(lengths, kind="stable")
    turns = np.arange(len(order)) % (2 * number)
    owner = np.minimum(turns, 2 * number - 1 - turns)
    return [order[owner == one] for one in range(number)]


def lengths_of(parts: Sequence[tuple[Examples, np.ndarray]]) -> np.ndarray:
    """Return the length of each example of a global batch, given by its rows shard by shard."""
    return np.concatenate([shard.lengths[rows] for shard, rows in parts])


def global_batch_of(
    parts: Sequence[tuple[Examples, np.ndarray]], assigned: list[np.ndarray], multiples: ShapeMultiples | None = None
) -> GlobalBatch:
    """Pack one rank's micro-batches, with the numbers of the whole global batch.

    `parts` are the rows of the global batch, shard by shard; of the rows `assigned` to each micro-batch only the tokens
    are taken. `multiples` are for tails; None for none.
    """
    own = np.sort(np.concatenate(assigned))
    examples = _take(parts, own)
    packed = [pack(examples.take(np.searchsorted(own, rows))) for rows in assigned]
    lengths = lengths_of(parts).astype(np.int64)
    has_pairs = parts[0][0].next_sentence_label is not None
    predictions = [int(np.diff(shard.masks.offsets)[rows].sum()) for shard, rows in parts if shard.masks is not None]
    return GlobalBatch(
        packed if multiples is None else [with_tail(micro_batch, multiples) for micro_batch in packed],
        num_sequences=len(lengths),
        num_pairs=len(lengths) if has_pairs else 0,
        num_predictions=sum(predictions),
        num_tokens=int(lengths.sum()),
        sum_squared_lengths=int((lengths**2).sum()),
    )


def _take(parts: Sequence[tuple[Examples, np.ndarray]], wanted: np.ndarray) -> Examples:
    """Return some rows of a global batch, `wanted` in ascending order, from its rows shard by shard."""
    bounds = np.searchsorted(wanted, ragged.offsets_of(np.array([len(rows) for _, rows in parts])))
    first, taken = 0, []
    for (shard, rows), (begin, end) in zip(parts, itertools.pairwise(bounds), strict=True):
        if begin < end:
            taken.append(shard.take(rows[wanted[begin:end] - first]))
        first += len(rows)
    return concatenate(taken)


def _cut_points(lengths: np.ndarray, micro_batch_tokens: int) -> list[int]:
    """Return where micro-batches begin, and where the last one ends, if each is filled before the next."""
    offsets, points = ragged.offsets_of(lengths), [0]
    while points[-1] < len(lengths):
        limit = offsets[points[-1]] + micro_batch_tokens
        points.append(max(points[-1] + 1, int(np.searchsorted(offsets, limit, side="right")) - 1))
    return points


def pack(examples: Examples) -> Batch:
    """Lay examples end to end as one packed batch; at least one, and with masks."""
    assert examples.masks is not None
    lengths, masks, labels = examples.lengths, examples.masks, examples.next_sentence_label
    position_ids = ragged.positions_within(examples.offsets)
    segment_b_start = np.repeat(examples.segment_b_start, lengths)
    return Batch(
        input_ids=_int64(examples.input_ids),
        token_type_ids=_int64(position_ids >= segment_b_start),
        position_ids=_int64(position_ids),
        cu_seqlens=torch.from_numpy(examples.offsets.astype(np.int32)),
        masked_positions=_int64(examples.masked_indices),
        masked_labels=_int64(masks.original_ids),
        next_sentence_labels=None if labels is None else _int64(labels),
        max_seqlen=int(lengths.max()),
        num_tokens=len(examples.input_ids),
        num_sequences=len(examples),
        num_predictions=len(masks.original_ids),
    )


def _int64(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))
