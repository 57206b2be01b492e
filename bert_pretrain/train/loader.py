"""Reading ahead: which examples make which step, the shards that hold them, and their batches in the background.

A global batch is a pure function of (data folder, seed, step), so a run resumes by naming a step: only the shards that
hold its examples are read. Each epoch visits the shards in a new order and the rows of each shard in a new order.
Masks that no shard holds are drawn for a whole shard when an epoch opens it, so no step has a say in them.
"""

import functools
import itertools
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from bert_pretrain import rng
from bert_pretrain.examples import ragged
from bert_pretrain.examples.examples import Examples
from bert_pretrain.examples.masking import mask_examples, masking_rule
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.train.batches import (
    Batch,
    GlobalBatch,
    ShapeMultiples,
    assign_by_length,
    assign_evenly,
    cut,
    global_batch_of,
    lengths_of,
    multiples_of_equal_shares,
    with_tail,
)

OPEN_SHARDS = 4
"""Shards kept in memory: a batch may straddle two, and the reader runs ahead."""
READ_AHEAD = 2
"""Global batches prepared before they are asked for."""


class ShardCache:
    """The shards of the training split with their masks, read and checked when first needed, a few of them kept."""

    def __init__(self, data: DataFolder, seed: int) -> None:
        self.records = data.shards("train")
        self._folder = data.path
        self._seed = seed
        self._rule = masking_rule(data.tokenizer(), data.config) if data.config.masking == "dynamic" else None
        self._open: dict[tuple[int, int], Examples] = {}

    def get(self, epoch: int, index: int) -> Examples:
        """Return a shard's examples, with the masks of an epoch where none are stored.

        Raises:
            DataError: when its bytes are not those the manifest names.
        """
        key = (0 if self._rule is None else epoch, index)
        if key in self._open:
            self._open[key] = self._open.pop(key)  # the last one used goes to the end
        else:
            examples = read_shard(self._folder, self.records[index])
            if self._rule is not None:
                generator = rng.stream(self._seed, "mask", epoch=epoch, shard=index)
                examples = mask_examples(examples, self._rule, generator)
            while len(self._open) >= OPEN_SHARDS:
                del self._open[next(iter(self._open))]
            self._open[key] = examples
        return self._open[key]


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
        share, and takes only the tokens of that. `static_shapes` gives all micro-batches nearly the same shape.
        """
        self._rank, self._num_ranks = rank, num_ranks
        self._static_shapes, self._max_seq_length = static_shapes, data.max_seq_length
        self._mean_tokens = data.mean_tokens("train")
        self._first_step, self._first_example = first_step, first_example
        self.num_rows = data.rows("train")
        self.global_batch_size = global_batch_size
        self.micro_batch_tokens = micro_batch_tokens
        self._seed = seed
        self._shards = ShardCache(data, seed)
        self._row_order = functools.lru_cache(OPEN_SHARDS)(self._order_of_rows)
        self._shard_rows = np.array([record.rows for record in self._shards.records], dtype=np.int64)

    def global_batch(self, step: int) -> GlobalBatch:
        """Return the batch of the optimizer step that follows `step` finished ones.

        Raises:
            DataError: when a shard that it needs is damaged.
        """
        first, remaining = self._examples_before(step), self.global_batch_size
        parts = []
        while remaining:
            epoch, position = divmod(first, self.num_rows)
            count = min(remaining, self.num_rows - position)
            parts += [(self._shards.get(epoch, shard), rows) for shard, rows in self._rows(epoch, position, count)]
            first, remaining = first + count, remaining - count
        lengths = lengths_of(parts)
        assign = assign_evenly if self._static_shapes else assign_by_length
        assigned = assign(lengths, self.micro_batch_tokens, self._rank, self._num_ranks)
        return global_batch_of(parts, assigned, self._multiples(len(lengths), len(assigned) * self._num_ranks))

    def _multiples(self, num_examples: int, num_micro_batches: int) -> ShapeMultiples:
        if not self._static_shapes:
            return ShapeMultiples.for_padded_attention(self.micro_batch_tokens)
        return multiples_of_equal_shares(num_examples, num_micro_batches, self._max_seq_length, self._mean_tokens)

    def epoch(self, step: int) -> float:
        """Return how often the training split has been seen after so many steps."""
        return self._examples_before(step) / self.num_rows

    def _examples_before(self, step: int) -> int:
        return self._first_example + (step - self._first_step) * self.global_batch_size

    def _order_of_rows(self, epoch: int, shard: int) -> np.ndarray:
        return rng.stream(self._seed, "row order", epoch=epoch, shard=shard).permutation(self._shard_rows[shard])

    def _rows(self, epoch: int, position: int, count: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (shard, its rows) for the examples [position, position + count) of an epoch."""
        shard_order = rng.stream(self._seed, "shard order", epoch=epoch).permutation(len(self._shard_rows))
        starts = ragged.offsets_of(self._shard_rows[shard_order])
        place = int(np.searchsorted(starts, position, side="right")) - 1
        while count:
            shard = int(shard_order[place])
            begin = position - int(starts[place])
            rows = self._row_order(epoch, shard)[begin : begin + count]
            if len(rows):
                yield shard, rows
            position, count, place = position + len(rows), count - len(rows), place + 1


def evaluation_batches(data: DataFolder, split: str, micro_batch_tokens: int) -> Iterator[Batch]:
    """Yield a whole split in micro-batches, with its stored masks."""
    multiples = ShapeMultiples.for_padded_attention(micro_batch_tokens)
    for record in data.shards(split):
        for micro_batch in cut(read_shard(data.path, record), micro_batch_tokens).micro_batches:
            yield with_tail(micro_batch, multiples)


class Prefetcher:
    """Global batches from `first_step` on, read ahead by a thread."""

    def __init__(self, data: TrainingData, first_step: int, last_step: int | None, device: torch.device) -> None:
        """Read until `last_step`, or until closed where that is None."""
        self.last_wait_seconds = 0.0
        """How long the last batch asked for was not there yet."""
        self._data = data
        self._device = device
        self._steps = itertools.count(first_step) if last_step is None else range(first_step, last_step)
        self._ready: queue.Queue[GlobalBatch | Exception] = queue.Queue(maxsize=READ_AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, name="batches", daemon=True)
        self._thread.start()

    def next(self) -> GlobalBatch:
        """Return the next global batch on the device; raises what reading it raised."""
        begin = time.perf_counter()
        ready = self._ready.get()
        self.last_wait_seconds = time.perf_counter() - begin
        if isinstance(ready, Exception):
            raise ready
        return ready.to(self._device)

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                self._thread.join(timeout=0.05)

    def _read(self) -> None:
        try:
            for step in self._steps:
                batch = self._data.global_batch(step)
                if self._device.type == "cuda":
                    batch = replace(batch, micro_batches=[micro.pin_memory() for micro in batch.micro_batches])
                self._ready.put(batch)
                if self._stopped.is_set():
                    return
        except Exception as error:  # handed to the training thread, which raises it
            self._ready.put(error)
