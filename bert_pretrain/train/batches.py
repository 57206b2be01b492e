"""From shards to packed batches: which examples make which step, how they are cut, and reading them ahead.

A global batch is a pure function of (data folder, seed, step), so a run resumes by naming a step: only the shards that
hold its examples are read. Each epoch visits the shards in a new order and the rows of each shard in a new order.
Masks that no shard holds are drawn for a whole shard when an epoch opens it, so no step has a say in them.
"""

import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bert_pretrain import ragged, rng
from bert_pretrain.examples import Examples, concatenate
from bert_pretrain.masking import mask_examples, masking_rule
from bert_pretrain.shards import DataFolder, read_shard

MAX_DUMMY_SHARE = 0.02
"""Of a micro-batch's tokens, where all are given a common shape."""
OPEN_SHARDS = 4
"""Shards kept in memory: a batch may straddle two, and the reader runs ahead."""
READ_AHEAD = 2
"""Global batches prepared before they are asked for."""


@dataclass(frozen=True)
class Batch:
    """One packed micro-batch, perhaps with a tail of dummy sequences that give it a common shape.

    Labels have no tail; what the model returns for one is dropped.
    """

    input_ids: Tensor  # (tokens,) int64
    token_type_ids: Tensor  # (tokens,) int64: 1 from the second segment's first token on
    position_ids: Tensor  # (tokens,) int64: from 0 in every sequence
    cu_seqlens: Tensor  # (sequences + 1,) int32
    masked_positions: Tensor  # (masked,) int64: indices into the packed tokens
    masked_labels: Tensor  # (masked,) int64
    next_sentence_labels: Tensor | None  # (sequences,) int64: 0 where B follows A, 1 where not; None without pairs
    max_seqlen: int
    num_tokens: int
    """Real ones."""
    num_sequences: int
    """Real ones."""

    @property
    def num_predictions(self) -> int:
        return self.masked_labels.shape[0]

    def to(self, device: torch.device) -> "Batch":
        """Return this batch on a device; from pinned memory the copy does not block."""
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """Return this batch in page-locked memory, from which CUDA copies in the background."""
        return self._with_tensors(Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changes: dict[str, Any] = {
            field.name: change(getattr(self, field.name))
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return replace(self, **changes)


@dataclass(frozen=True)
class GlobalBatch:
    """One optimizer step: this rank's micro-batches, and the true numbers of all ranks that the losses divide by."""

    micro_batches: list[Batch]
    num_sequences: int
    num_pairs: int
    """Sequences with a next-sentence label: all of them, or none."""
    num_predictions: int
    num_tokens: int
    sum_squared_lengths: int

    def to(self, device: torch.device) -> "GlobalBatch":
        """Return this batch with its micro-batches on a device, as `Batch.to` brings them there."""
        return replace(self, micro_batches=[batch.to(device) for batch in self.micro_batches])


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

        Every rank reads the whole global batch, which is the same for any number of them, and keeps its own share.
        """
        self._rank, self._num_ranks = rank, num_ranks
        self._static_length = data.max_seq_length if static_shapes else None
        self._mean_tokens = sum(record.tokens for record in data.shards("train")) / max(data.rows("train"), 1)
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
            parts += [self._shards.get(epoch, shard).take(rows) for shard, rows in self._rows(epoch, position, count)]
            first, remaining = first + count, remaining - count
        examples = concatenate(parts)
        if self._static_length is None:
            return cut(examples, self.micro_batch_tokens, self._rank, self._num_ranks)
        return cut_alike(
            examples, self.micro_batch_tokens, self._static_length, self._mean_tokens, self._rank, self._num_ranks
        )

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
    for record in data.shards(split):
        yield from cut(read_shard(data.path, record), micro_batch_tokens).micro_batches


def cut(examples: Examples, micro_batch_tokens: int, rank: int = 0, num_ranks: int = 1) -> GlobalBatch:
    """Return one rank's micro-batches of a global batch, each of at most so many tokens and at least one example.

    Sorted by length, examples are dealt to and fro, so that all ranks hold about equally many tokens. They all get the
    same number of micro-batches, for under FSDP they gather weights together; where that leaves a rank with fewer
    examples than micro-batches, all have one micro-batch less, and some hold an example above the budget.
    """
    # The losses are sums, so order means nothing, and attention that pads then pads little.
    shares = _dealt(examples.lengths, num_ranks)
    bounds = [_cut_points(examples.lengths[share], micro_batch_tokens) for share in shares]
    wanted = min(max(len(found) - 1 for found in bounds), min(len(share) for share in shares))
    own = examples.take(shares[rank])
    cuts = _with_number(bounds[rank], wanted)
    return _global_batch(examples, [pack(own.take(np.arange(begin, end))) for begin, end in itertools.pairwise(cuts)])


def cut_alike(
    examples: Examples,
    micro_batch_tokens: int,
    max_seq_length: int,
    mean_tokens: float,
    rank: int = 0,
    num_ranks: int = 1,
) -> GlobalBatch:
    """Return one rank's micro-batches of a global batch, all of nearly the same shape, for a compiler.

    Examples of all lengths are dealt to every micro-batch alike, so that they hold about equally many tokens, and the
    rest is filled up by a tail of dummy sequences: at most 2 % of the tokens that a micro-batch has on average, besides
    one for each missing sequence. That average comes from `mean_tokens`, of all the data, so that steps agree.
    """
    total, number = len(examples.input_ids), 0
    while True:
        number = number + 1 if number else max(1, -(-total // (num_ranks * micro_batch_tokens)))
        shares = _dealt(examples.lengths, num_ranks * number)
        largest = max(int(examples.lengths[share].sum()) for share in shares)
        if largest <= micro_batch_tokens or number * num_ranks >= len(examples):
            break
    number = min(number, len(examples) // num_ranks)
    shares = _dealt(examples.lengths, num_ranks * number)
    usual = mean_tokens * len(examples) / len(shares)
    unit, masks_unit = _power_of_two(MAX_DUMMY_SHARE * usual), _power_of_two(0.1 * usual)
    num_sequences = -(-len(examples) // len(shares)) + -(-unit // max_seq_length) + 1
    micro_batches = [pack(examples.take(shares[place])) for place in range(rank, len(shares), num_ranks)]
    return _global_batch(
        examples, [_with_tail(micro, unit, masks_unit, num_sequences, max_seq_length) for micro in micro_batches]
    )


def _with_tail(batch: Batch, unit: int, masks_unit: int, num_sequences: int, max_seq_length: int) -> Batch:
    """Add dummy sequences up to a number of them, and to a multiple of `unit` tokens."""
    missing = num_sequences - batch.num_sequences
    padded_tokens = -(-(batch.num_tokens + missing) // unit) * unit
    tail_tokens, tail_masks = padded_tokens - batch.num_tokens, -batch.num_predictions % masks_unit
    lengths = np.full(missing, tail_tokens // missing) + (np.arange(missing) < tail_tokens % missing)
    bounds = torch.from_numpy((batch.num_tokens + np.cumsum(lengths)).astype(np.int32))
    dummy = torch.zeros(tail_tokens, dtype=torch.int64)
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, dummy]),
        token_type_ids=torch.cat([batch.token_type_ids, dummy]),
        position_ids=torch.cat([batch.position_ids, dummy]),
        cu_seqlens=torch.cat([batch.cu_seqlens, bounds]),
        masked_positions=torch.cat([batch.masked_positions, torch.zeros(tail_masks, dtype=torch.int64)]),
        max_seqlen=max(max_seq_length, int(lengths.max())),
    )


def _power_of_two(number: float) -> int:
    """Return the largest power of two up to a number, at least 1."""
    return 1 << max(0, int(number).bit_length() - 1)


def _dealt(lengths: np.ndarray, number: int) -> list[np.ndarray]:
    """Deal examples, sorted by length, to and fro to so many hands; returns the rows of each."""
    order = np.argsort(lengths, kind="stable")
    turns = np.arange(len(order)) % (2 * number)
    owner = np.minimum(turns, 2 * number - 1 - turns)
    return [order[owner == one] for one in range(number)]


def _global_batch(examples: Examples, micro_batches: list[Batch]) -> GlobalBatch:
    return GlobalBatch(
        micro_batches,
        len(examples),
        0 if examples.next_sentence_label is None else len(examples),
        0 if examples.masks is None else len(examples.masks.original_ids),
        len(examples.input_ids),
        int((examples.lengths.astype(np.int64) ** 2).sum()),
    )


def _cut_points(lengths: np.ndarray, micro_batch_tokens: int) -> list[int]:
    """Return where micro-batches begin, and where the last one ends, if each is filled before the next."""
    offsets, points = ragged.offsets_of(lengths), [0]
    while points[-1] < len(lengths):
        limit = offsets[points[-1]] + micro_batch_tokens
        points.append(max(points[-1] + 1, int(np.searchsorted(offsets, limit, side="right")) - 1))
    return points


def _with_number(points: list[int], number: int) -> list[int]:
    """Split the micro-batches of the most examples, or join those of the fewest, until there are so many."""
    points = list(points)
    while len(points) - 1 < number:
        sizes = np.diff(points)
        largest = int(sizes.argmax())
        points.insert(largest + 1, points[largest] + int(sizes[largest]) // 2)
    while len(points) - 1 > number:
        del points[1 + int((np.diff(points)[:-1] + np.diff(points)[1:]).argmin())]
    return points


def pack(examples: Examples) -> Batch:
    """Lay examples end to end as one packed batch; at least one, and with masks."""
    assert examples.masks is not None
    lengths, masks, labels = examples.lengths, examples.masks, examples.next_sentence_label
    position_ids = ragged.positions_within(examples.offsets)
    segment_b_start = np.repeat(examples.segment_b_start, lengths)
    masked_starts = np.repeat(examples.offsets[:-1], np.diff(masks.offsets))
    return Batch(
        input_ids=_int64(examples.input_ids),
        token_type_ids=_int64(position_ids >= segment_b_start),
        position_ids=_int64(position_ids),
        cu_seqlens=torch.from_numpy(examples.offsets.astype(np.int32)),
        masked_positions=_int64(masked_starts + masks.positions),
        masked_labels=_int64(masks.original_ids),
        next_sentence_labels=None if labels is None else _int64(labels),
        max_seqlen=int(lengths.max()),
        num_tokens=len(examples.input_ids),
        num_sequences=len(examples),
    )


def _int64(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


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
