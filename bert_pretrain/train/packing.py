"""Divide a global batch into packed micro-batches.

A packed micro-batch is a concatenation of sequences without padding. A tail of dummy sequences may round up its shape.
The division into micro-batches affects speed, memory and dropout masks, but otherwise not the gradient.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bert_pretrain import ragged
from bert_pretrain.examples.examples import IGNORE_INDEX, Examples
from bert_pretrain.model.bert import Packed
from bert_pretrain.model.sequences import batches_by_length
from bert_pretrain.train.sampled_softmax import Candidates

MAX_DUMMY_SHARE = 0.02  # share of a micro-batch's tokens by which its number of tokens may be rounded up


@dataclass(frozen=True)
class Batch:
    """A packed micro-batch, which may end with a tail of dummy sequences.

    With `ShapeMultiples.with_labels`, the labels of the tail are `IGNORE_INDEX`. Otherwise the tail has no labels, and
    the loss cuts off its outputs.
    """

    input_ids: Tensor  # (tokens,) int64
    token_type_ids: Tensor  # (tokens,) int64: 0 in the first segment, 1 in the second
    position_ids: Tensor  # (tokens,) int64: from 0 in every sequence
    cu_seqlens: Tensor  # (sequences + 1,) int32: cumulative lengths
    masked_positions: Tensor  # (masked,) int64: indices into the packed tokens
    masked_labels: Tensor  # (masked,) int64
    next_sentence_labels: Tensor | None  # (sequences,) int64: 0 where B follows A, 1 where not; None without pairs
    max_seqlen: int
    num_tokens: int  # without the tail, as the next two
    num_sequences: int
    num_predictions: int
    # The two fields of `Candidates` of a sampled softmax; None: a softmax over the whole vocabulary.
    candidate_ids: Tensor | None = None  # (candidates,) int64
    candidate_log_probabilities: Tensor | None = None  # (candidates,) float32
    draws: Tensor | None = None  # (masked,) float32 in [0, 1): where ELECTRA's generator draws in its distribution

    @property
    def sequences(self) -> Packed:
        """The encoder's inputs."""
        return Packed(
            self.input_ids,
            self.token_type_ids,
            self.position_ids,
            self.cu_seqlens,
            self.max_seqlen,
        )

    @property
    def candidates(self) -> Candidates | None:
        if self.candidate_ids is None or self.candidate_log_probabilities is None:
            return None
        return Candidates(self.candidate_ids, self.candidate_log_probabilities)

    @property
    def is_real(self) -> Tensor:
        """Which tokens are not of the tail, (tokens,) bool. A CUDA graph may compute it for any tail.

        All positions of a tail are 0. The first token of an example is followed by one with position 1.
        """
        is_later = self.position_ids > 0
        return is_later | is_later.roll(-1)

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are tensors, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changes: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changes)


@dataclass(frozen=True)
class GlobalBatch:
    """The data of one optimizer step: this rank's micro-batches, and counts over all ranks, which exclude tails."""

    micro_batches: list[Batch]
    num_sequences: int
    num_pairs: int  # sequences with a next-sentence label: all or none
    num_predictions: int
    num_tokens: int
    sum_squared_lengths: int

    @property
    def counts(self) -> tuple[int, int, int]:
        """The counts by which sums of losses are divided: predictions, pairs and tokens."""
        return self.num_predictions, self.num_pairs, self.num_tokens

    def to(self, device: torch.device) -> "GlobalBatch":
        return self.with_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> "GlobalBatch":
        """Return the batch with a change of each tensor."""
        return replace(self, micro_batches=[batch.with_tensors(change) for batch in self.micro_batches])

    def with_candidates(self, candidates: Candidates) -> "GlobalBatch":
        """Return the batch with a sampled softmax."""
        changes: dict[str, Any] = {
            "candidate_ids": candidates.token_ids,
            "candidate_log_probabilities": candidates.log_probabilities,
        }
        return replace(self, micro_batches=[replace(batch, **changes) for batch in self.micro_batches])

    def num_outputs(self, vocab_size: int) -> int:
        """Return the number of logits per masked token: those of the vocabulary, or of the candidates."""
        candidate_ids = self.micro_batches[0].candidate_ids
        return vocab_size if candidate_ids is None else len(candidate_ids)


@dataclass(frozen=True)
class ShapeMultiples:
    """Multiples to which the sizes of a micro-batch are rounded up, so that few distinct shapes occur in a run.

    `torch.compile` generates code for each shape. So does oneDNN for 16-bit products on CPU, 0.5 MB per shape.
    """

    tokens: int
    masked: int
    sequences: int
    max_seqlen: int
    with_labels: bool = False  # whether the tail has labels

    @staticmethod
    def for_padded_attention(micro_batch_tokens: int) -> "ShapeMultiples":
        """Return the multiples for micro-batches of sequences of similar length, with a varying `max_seqlen`."""
        tokens = _power_of_two(MAX_DUMMY_SHARE * micro_batch_tokens)
        return ShapeMultiples(tokens, masked=32, sequences=2, max_seqlen=8)

    @staticmethod
    def for_equal_shares(
        num_examples: int,
        num_shares: int,
        max_seqlen: int,
        mean_tokens: float,
    ) -> "ShapeMultiples":
        """Return the multiples for a global batch of `num_examples` examples in `num_shares` micro-batches.

        All micro-batches get the same number of sequences and `max_seqlen`. `mean_tokens` is the mean length of all
        examples of the data, so that steps with equal `num_shares` have the same multiples.
        """
        expected_tokens = mean_tokens * num_examples / num_shares
        unit = _power_of_two(MAX_DUMMY_SHARE * expected_tokens)
        num_sequences = -(-num_examples // num_shares) + _min_tail_sequences(unit, max_seqlen)
        # At most a tenth of the masked tokens at 15 %. Their number varies by a few percent: most steps round up alike.
        masked = _power_of_two(0.015 * expected_tokens)
        return ShapeMultiples(
            unit,
            masked,
            num_sequences,
            max_seqlen,
            with_labels=True,
        )


def assign_by_length(
    lengths: np.ndarray,
    micro_batch_tokens: int,
    rank: int,
    num_ranks: int,
) -> list[np.ndarray]:
    """Return the examples of each micro-batch of a rank, as indices into `lengths`.

    Micro-batches are those of `batches_by_length`. Ranks get similar numbers of tokens.
    """
    share = _snake_shares(lengths, num_ranks)[rank]
    return [share[rows] for rows in batches_by_length(lengths[share], micro_batch_tokens)]


def assign_evenly(
    lengths: np.ndarray,
    micro_batch_tokens: int,
    rank: int,
    num_ranks: int,
) -> list[np.ndarray]:
    """Return the examples of each micro-batch of a rank, with about equal numbers of tokens and examples in each.

    Each micro-batch gets examples of all lengths, so that `torch.compile` sees few shapes. Ranks get equal numbers of
    micro-batches, as few as possible with at most `micro_batch_tokens` each, and none is empty.
    """
    num_micro_batches = max(1, -(-int(lengths.sum()) // (num_ranks * micro_batch_tokens)))
    while num_micro_batches * num_ranks < len(lengths):
        shares = _snake_shares(lengths, num_ranks * num_micro_batches)
        if max(int(lengths[share].sum()) for share in shares) <= micro_batch_tokens:
            break
        num_micro_batches += 1
    num_micro_batches = min(num_micro_batches, len(lengths) // num_ranks)
    return _snake_shares(lengths, num_ranks * num_micro_batches)[rank::num_ranks]


def _min_tail_sequences(unit_tokens: int, max_seqlen: int) -> int:
    """Return enough sequences for any tail: each has one token, and they share up to `unit_tokens` - 1 more tokens."""
    return 1 + (unit_tokens - 1) // max(max_seqlen - 1, 1)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _power_of_two(number: float) -> int:
    """Return the largest power of two up to a number, at least 1."""
    return 1 << max(0, int(number).bit_length() - 1)


def _snake_shares(lengths: np.ndarray, num_shares: int) -> list[np.ndarray]:
    """Sort the indices of `lengths` by length and assign them to shares in snake order: 0, 1, 2, 2, 1, 0, 0, 1, …"""
    order = np.argsort(lengths, kind="stable")
    turns = np.arange(len(order)) % (2 * num_shares)
    owner = np.minimum(turns, 2 * num_shares - 1 - turns)
    return [order[owner == share] for share in range(num_shares)]


def global_batch_of(
    examples: Examples,
    assigned: list[np.ndarray],
    multiples: ShapeMultiples | None = None,
    draws: np.random.Generator | None = None,
) -> GlobalBatch:
    """Pack one rank's micro-batches, with counts of the whole global batch.

    `examples` are those of all ranks, at least one and with masks. `assigned` has the indices of each micro-batch's
    examples. `draws` draws a number for each mask of all ranks.
    """
    return GlobalBatch(
        list(packed(examples, assigned, multiples, draws)),
        num_sequences=len(examples),
        num_pairs=0 if examples.next_sentence_label is None else len(examples),
        num_predictions=len(examples.masked_indices),
        num_tokens=len(examples.input_ids),
        sum_squared_lengths=int((examples.lengths**2).sum()),
    )


def packed(
    examples: Examples,
    assigned: list[np.ndarray],
    multiples: ShapeMultiples | None,
    draws: np.random.Generator | None,
) -> Iterator[Batch]:
    """Yield the micro-batches of `assigned` examples, with the numbers of their masks if there are `draws`."""
    masks = examples.masks
    assert masks is not None
    numbers = None if draws is None else draws.random(len(masks.original_ids), dtype=np.float32)
    for rows in assigned:
        of_rows = None if numbers is None else ragged.take(numbers, masks.offsets, rows)[0]
        yield pack(examples.take(rows), multiples, of_rows)


def pack(examples: Examples, multiples: ShapeMultiples | None = None, draws: np.ndarray | None = None) -> Batch:
    """Concatenate examples, at least one and with masks, into a packed batch.

    A tail of dummy sequences, at least one, rounds its sizes up to the multiples, if they are given. `draws` are the
    numbers of the masks, (masked,).
    """
    masks = examples.masks
    assert masks is not None
    labels = examples.next_sentence_label
    bounds = examples.offsets
    max_seqlen = int(examples.lengths.max())
    num_masked = len(masks.original_ids)
    if multiples is not None:
        max_seqlen = _round_up(max_seqlen, multiples.max_seqlen)
        bounds = _with_tail(bounds, max_seqlen, multiples)
        num_masked = _round_up(num_masked, multiples.masked)
    has_tail_labels = multiples is not None and multiples.with_labels
    num_masked_labels = num_masked if has_tail_labels else len(masks.original_ids)
    num_pair_labels = len(bounds) - 1 if has_tail_labels else len(examples)
    num_tokens = int(bounds[-1])
    return Batch(
        input_ids=_column(examples.input_ids, num_tokens),
        token_type_ids=_column(examples.is_segment_b, num_tokens),
        position_ids=_column(ragged.positions_within(examples.offsets), num_tokens),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        masked_positions=_column(examples.masked_indices, num_masked),
        masked_labels=_column(masks.original_ids, num_masked_labels, IGNORE_INDEX),
        next_sentence_labels=None if labels is None else _column(labels, num_pair_labels, IGNORE_INDEX),
        max_seqlen=max_seqlen,
        num_tokens=len(examples.input_ids),
        num_sequences=len(examples),
        num_predictions=len(masks.original_ids),
        draws=None if draws is None else _column(draws, num_masked_labels, dtype=np.float32),
    )


def _with_tail(offsets: np.ndarray, max_seqlen: int, multiples: ShapeMultiples) -> np.ndarray:
    """Append the ends of dummy sequences of similar lengths, which round up the numbers of sequences and tokens."""
    num_sequences = len(offsets) - 1
    min_sequences = num_sequences + _min_tail_sequences(multiples.tokens, max_seqlen)
    tail_sequences = _round_up(min_sequences, multiples.sequences) - num_sequences
    tail_tokens = _round_up(offsets[-1] + tail_sequences, multiples.tokens) - offsets[-1]
    ends = np.arange(1, tail_sequences + 1) * tail_tokens // tail_sequences
    return np.concatenate([offsets, offsets[-1] + ends])


def _column(
    values: np.ndarray,
    size: int,
    fill: int = 0,
    dtype: type = np.int64,
) -> Tensor:
    """Return the values as `dtype`, filled up to a size."""
    column: np.ndarray = np.full(size, fill, dtype=dtype)
    column[: len(values)] = values
    return torch.from_numpy(column)
