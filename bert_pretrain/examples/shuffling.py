"""The order of the training examples: each epoch shuffles the shards, and the rows within each shard.

The order depends only on the data folder, seed and position. Reading can start anywhere, and opens only the shards it
needs. Dynamic masks are drawn for a whole shard when an epoch opens it.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from bert_pretrain import rng
from bert_pretrain.examples.examples import Examples
from bert_pretrain.examples.masking import mask_examples
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.text import ragged

CACHE_SIZE = 4  # shards in memory: a batch may need two, and another reader may be a batch ahead

Rows = tuple[Examples, np.ndarray]  # a shard, and the indices of selected rows in it
Value = TypeVar("Value")


class ShuffledExamples:
    """The endless sequence of training examples of a data folder for one seed."""

    def __init__(self, data: DataFolder, seed: int) -> None:
        """Prepare the order. `take` reads and checks the shards."""
        self.num_rows = data.rows("train")  # examples per epoch
        self._folder, self._config, self._seed = data.path, data.config, seed
        self._records = data.shards("train")
        self._shard_rows = np.array([record.rows for record in self._records], dtype=np.int64)
        self._tokenizer = data.tokenizer() if data.config.masking == "dynamic" else None
        self._shards: dict[tuple[int, int], Examples] = {}
        self._shard_orders: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._row_orders: dict[tuple[int, int], np.ndarray] = {}

    def take(self, first: int, count: int) -> list[Rows]:
        """Return the examples [first, first + count), numbered across all epochs, as rows of shards."""
        parts: list[Rows] = []
        while count:
            epoch, position = divmod(first, self.num_rows)
            in_epoch = min(count, self.num_rows - position)
            parts += [(self._shard(epoch, shard), rows) for shard, rows in self._rows(epoch, position, in_epoch)]
            first, count = first + in_epoch, count - in_epoch
        return parts

    def _rows(self, epoch: int, position: int, count: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the examples [position, position + count) of an epoch, as pairs of shard index and rows."""

        def draw() -> tuple[np.ndarray, np.ndarray]:
            order = rng.stream(self._seed, "shard order", epoch=epoch).permutation(len(self._shard_rows))
            return order, ragged.offsets_of(self._shard_rows[order])

        shard_order, starts = _cached(self._shard_orders, (epoch, 0), draw)
        index = int(np.searchsorted(starts, position, side="right")) - 1
        while count:
            shard = int(shard_order[index])
            start = position - int(starts[index])
            rows = self._row_order(epoch, shard)[start : start + count]
            if len(rows):
                yield shard, rows
            position, count, index = position + len(rows), count - len(rows), index + 1

    def _row_order(self, epoch: int, shard: int) -> np.ndarray:
        def draw() -> np.ndarray:
            stream = rng.stream(self._seed, "row order", epoch=epoch, shard=shard)
            return stream.permutation(self._shard_rows[shard])

        return _cached(self._row_orders, (epoch, shard), draw)

    def _shard(self, epoch: int, shard: int) -> Examples:
        """Return the examples of a shard, with new masks for every epoch if masking is dynamic."""

        def read() -> Examples:
            examples = read_shard(self._folder, self._records[shard])
            if self._tokenizer is None:
                return examples
            stream = rng.stream(self._seed, "mask", epoch=epoch, shard=shard)
            return mask_examples(examples, self._tokenizer, self._config, stream)

        return _cached(self._shards, (0 if self._tokenizer is None else epoch, shard), read)


def _cached(cache: dict[tuple[int, int], Value], key: tuple[int, int], make: Callable[[], Value]) -> Value:
    """Return a value from a least-recently-used cache. Make and store it if it is missing."""
    if key not in cache and len(cache) >= CACHE_SIZE:
        del cache[next(iter(cache))]  # the least recently used; frees its memory before `make`
    cache[key] = cache.pop(key) if key in cache else make()  # moves the key to the end
    return cache[key]
