"""Reading ahead: which examples make which step, and their batches in the background.

A global batch is a pure function of (data folder, seed, step), so a run resumes by naming a step.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np
import torch

from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.examples.shuffling import ShuffledExamples
from bert_pretrain.train.packing import (
    Batch,
    GlobalBatch,
    ShapeMultiples,
    assign_by_length,
    assign_evenly,
    global_batch_of,
    lengths_of,
    multiples_of_equal_shares,
)

AnyBatch = TypeVar("AnyBatch", Batch, GlobalBatch)
READ_AHEAD = 3  # batches prepared before they are asked for
SHARDS_OF_SOME = 32
"""Shards that an evaluation of a part of a split reads, or as many as hold it; each is a random sample of documents."""


class TrainingData:
    """The endless sequence of global batches that a seed makes of a data folder's training split."""

    def __init__(
        self,
        data: DataFolder,
        *,
        seed: int,
        global_batch_size: int,
        micro_batch_tokens: int,
        first_step: int = 0,
        first_example: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        static_shapes: bool = False,
    ) -> None:
        """Begin with `first_example`, counted over all epochs, at `first_step`.

        The global batch is the same for any number of ranks; from the lengths of its examples each rank finds its own
        share, and takes only the tokens of that. All ranks read and mask whole shards, so that an example has the masks
        that one rank gives it: 2.5 µs of a core per example of 64 tokens, and 2.9 to gather and pack one of its own.
        `static_shapes` gives all micro-batches nearly the same shape.
        """
        self._rank, self._num_ranks = rank, num_ranks
        self._static_shapes, self._max_seq_length = static_shapes, data.max_seq_length
        self._mean_tokens = data.mean_tokens("train")
        self._first_step, self._first_example = first_step, first_example
        self.global_batch_size = global_batch_size
        self.micro_batch_tokens = micro_batch_tokens
        self._examples = ShuffledExamples(data, seed)

    def halve_micro_batches(self) -> None:
        """Let micro-batches have half as many tokens from the next one on."""
        if self.micro_batch_tokens <= self._max_seq_length:
            raise ConfigError(
                f"one example of {self._max_seq_length} tokens does not fit into the memory of the device",
                where="train.micro_batch_tokens",
                remedy="set train.activation_checkpointing=true, take shorter examples or a smaller network",
            )
        self.micro_batch_tokens = max(self.micro_batch_tokens // 2, self._max_seq_length)

    def global_batch(self, step: int) -> GlobalBatch:
        """Return the batch of the optimizer step that follows `step` finished ones."""
        parts = self._examples.take(self._examples_before(step), self.global_batch_size)
        lengths = lengths_of(parts)
        assign = assign_evenly if self._static_shapes else assign_by_length
        assigned = assign(lengths, self.micro_batch_tokens, self._rank, self._num_ranks)
        if self._static_shapes:
            num_shares = len(assigned) * self._num_ranks
            multiples = multiples_of_equal_shares(len(lengths), num_shares, self._max_seq_length, self._mean_tokens)
        else:
            multiples = ShapeMultiples.for_padded_attention(self.micro_batch_tokens)
        return global_batch_of(parts, assigned, multiples)

    def batches(self, first_step: int, last_step: int | None) -> Iterator[GlobalBatch]:
        """Yield the global batches from one step to before another, or for ever."""
        steps = itertools.count(first_step) if last_step is None else range(first_step, last_step)
        return map(self.global_batch, steps)

    def epoch(self, step: int) -> float:
        """Return how often the training split has been seen after `step` steps."""
        return self._examples_before(step) / self._examples.num_rows

    def _examples_before(self, step: int) -> int:
        return self._first_example + (step - self._first_step) * self.global_batch_size


def evaluation_batches(
    data: DataFolder,
    split: str,
    micro_batch_tokens: int,
    at_most: int | None = None,
    *,
    static_shapes: bool = False,
    rank: int = 0,
    num_ranks: int = 1,
) -> Iterator[Batch]:
    """Yield a rank's share of a split in micro-batches, with its stored masks.

    Of more rows than `at_most` it is as many, evenly spaced over `SHARDS_OF_SOME` shards or more. With `static_shapes`
    all have one longest sequence, as in training: for a compiler it is a constant.
    """
    multiples = ShapeMultiples.for_padded_attention(micro_batch_tokens)
    if static_shapes:
        multiples = replace(multiples, max_seqlen=data.max_seq_length)
    records, number = data.shards(split), data.rows(split)
    if at_most is not None and at_most < number:
        enough = max(SHARDS_OF_SOME, 1 + at_most * len(records) // number)
        kept = np.unique(np.linspace(0, len(records) - 1, enough).round().astype(int))
        records = [records[index] for index in kept]
        number = min(at_most, sum(record.rows for record in records))
    chosen = np.linspace(0, sum(record.rows for record in records), number, endpoint=False).astype(np.int64)
    begin, turn = 0, rank
    for record in records:
        first, last = np.searchsorted(chosen, [begin, begin + record.rows])
        if first < last:
            parts = [(read_shard(data.path, record), chosen[first:last] - begin)]
            assigned = assign_by_length(lengths_of(parts), micro_batch_tokens, 0, 1)
            if turn < len(assigned):
                yield from global_batch_of(parts, assigned[turn::num_ranks], multiples).micro_batches
            turn = (turn - len(assigned)) % num_ranks
        begin += record.rows


class Prefetcher(Generic[AnyBatch]):
    """Batches on the device, read ahead by a thread."""

    last_wait_seconds = 0.0  # how long the last batch asked for was not there yet

    def __init__(self, batches: Iterator[AnyBatch], device: torch.device) -> None:
        self._device = device
        self.start(batches)

    def start(self, batches: Iterator[AnyBatch]) -> None:
        """Read these batches from now on; others must be closed."""
        self._batches: Iterator[AnyBatch] = batches
        self._thread = ThreadPoolExecutor(1, "batches")
        self._ready: deque[Future[AnyBatch | None]] = deque(self._thread.submit(self._read) for _ in range(READ_AHEAD))

    def _read(self) -> AnyBatch | None:
        batch = next(self._batches, None)
        return batch.pin_memory() if batch is not None and self._device.type == "cuda" else batch

    def __iter__(self) -> "Prefetcher[AnyBatch]":
        return self

    def __next__(self) -> AnyBatch:
        """Return the next batch; raises what reading it raised."""
        begin = time.perf_counter()
        batch = self._ready.popleft().result()
        self.last_wait_seconds = time.perf_counter() - begin
        self._ready.append(self._thread.submit(self._read))
        if batch is None:
            raise StopIteration
        return batch.to(self._device)

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._thread.shutdown(cancel_futures=True)
