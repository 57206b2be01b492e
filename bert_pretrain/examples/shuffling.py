"""The order in which the training examples are visited: every epoch the shards, and the rows of each, in a new order.

A pure function of (data folder, seed, position), so that reading may begin anywhere: only the shards that hold what is
asked for are read. Masks that no shard holds are drawn for a whole shard when an epoch opens it.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from bert_pretrain import rng
from bert_pretrain.examples.examples import Examples
from bert_pretrain.examples.masking import mask_examples
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.text import ragged

OPEN_SHARDS = 4
"""Shards kept in memory: a batch may straddle two, and a reader may run ahead."""

Rows = tuple[Examples, np.ndarray]
"""A shard, and the chosen rows of it."""
Value = TypeVar("Value")


class ShuffledExamples:
    """The endless sequence of examples that a seed makes of a data folder's training split."""

    def __init__(self, data: DataFolder, seed: int) -> None:
        """Read nothing yet; what is read later is checked then."""
        self.num_rows = data.rows("train")
        """Examples in an epoch."""
        self._folder, self._config, self._seed = data.path, data.config, seed
        self._records = data.shards("train")
        self._shard_rows = np.array([record.rows for record in self._records], dtype=np.int64)
        self._tokenizer = data.tokenizer() if data.config.masking == "dynamic" else None
        self._shards: dict[tuple[int, int], Examples] = {}
        self._shard_orders: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._row_orders: dict[tuple[int, int], np.ndarray] = {}

    def take(self, first: int, count: int) -> list[Rows]:
        """Return the examples [first, first + count), counted over all epochs, as rows of shards."""
        parts: list[Rows] = []
        while count:
            epoch, position = divmod(first, self.num_rows)
            now = min(count, self.num_rows - position)
            parts += [(self._shard(epoch, shard), rows) for shard, rows in self._rows(epoch, position, now)]
            first, count = first + now, count - now
        return parts

    def _rows(self, epoch: int, position: int, count: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (shard, its rows) for the examples [position, position + count) of an epoch."""

        def draw() -> tuple[np.ndarray, np.ndarray]:
            order = rng.stream(self._seed, "shard order", epoch=epoch).permutation(len(self._shard_rows))
            return order, ragged.offsets_of(self._shard_rows[order])

        shard_order, starts = _remembered(self._shard_orders, (epoch, 0), draw)
        place = int(np.searchsorted(starts, position, side="right")) - 1
        while count:
            shard = int(shard_order[place])
            begin = position - int(starts[place])
            rows = self._order_of_rows(epoch, shard)[begin : begin + count]
            if len(rows):
                yield shard, rows
            position, count, place = position + len(rows), count - len(rows), place + 1

    def _order_of_rows(self, epoch: int, shard: int) -> np.ndarray:
        """Return a new order of a shard's rows."""

        def draw() -> np.ndarray:
            stream = rng.stream(self._seed, "row order", epoch=epoch, shard=shard)
            return stream.permutation(self._shard_rows[shard])

        return _remembered(self._row_orders, (epoch, shard), draw)

    def _shard(self, epoch: int, shard: int) -> Examples:
        """Return a shard's examples, with the masks of an epoch where none are stored."""

        def read() -> Examples:
            examples = read_shard(self._folder, self._records[shard])
            if self._tokenizer is None:
                return examples
            stream = rng.stream(self._seed, "mask", epoch=epoch, shard=shard)
            return mask_examples(examples, self._tokenizer, self._config, stream)

        return _remembered(self._shards, (0 if self._tokenizer is None else epoch, shard), read)


def _remembered(last: dict[tuple[int, int], Value], key: tuple[int, int], make: Callable[[], Value]) -> Value:
    """Return the value of a key; those of the last few keys are kept, others are made."""
    while key not in last and len(last) >= OPEN_SHARDS:
        del last[next(iter(last))]
    last[key] = last.pop(key) if key in last else make()  # the last one used goes to the end
    return last[key]
