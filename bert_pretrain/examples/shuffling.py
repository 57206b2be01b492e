"""The order of the examples of a split: each epoch shuffles the shards, and the rows within each shard.

The order depends only on the shards, seed and position. Reading can start anywhere, and opens only the shards it needs.
Dynamic masks are drawn for a whole shard when an epoch opens it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from bert_pretrain import ragged, rng
from bert_pretrain.examples.examples import Examples
from bert_pretrain.examples.shards import ShardRecord, read_shard

CACHE_SIZE = 4  # shards in memory: a batch may need two, and another reader may be a batch ahead

Rows = tuple[Examples, np.ndarray]  # a shard, and the indices of selected rows in it
Key = tuple[int, int]  # epoch and shard
Value = TypeVar("Value")


class ExampleSequence:
    """The endless sequence of the examples of a split, epoch after epoch."""

    def __init__(
        self,
        folder: Path,
        records: Sequence[ShardRecord],
        seed: int | None = None,
        mask: Callable[..., Examples] | None = None,
    ) -> None:
        """Prepare the order: shuffled by a seed, or the stored order without one. `take` reads and checks the shards.

        `mask(examples, rng=generator)` draws new masks for every epoch.
        """
        self._folder = folder
        self._records = records
        self._shard_rows = np.array([record.rows for record in records], dtype=np.int64)
        self._seed = seed
        self._mask = mask
        self._shards: dict[Key, Examples] = {}
        self._row_orders: dict[Key, np.ndarray] = {}
        self.num_rows = int(self._shard_rows.sum())  # examples per epoch

    def take(self, first: int, count: int) -> list[Rows]:
        """Return the examples [first, first + count), numbered across all epochs, as rows of shards."""
        parts: list[Rows] = []
        while count:
            epoch, position = divmod(first, self.num_rows)
            shard, start = self._locate(epoch, position)
            rows = self._row_order(epoch, shard)[start : start + count]
            parts.append((self._shard(epoch, shard), rows))
            first += len(rows)
            count -= len(rows)
        return parts

    def _locate(self, epoch: int, position: int) -> tuple[int, int]:
        """Return the shard of a position in an epoch, and the position in that shard."""
        shard_order = self._permutation(len(self._shard_rows), "shard order", epoch=epoch)
        starts = ragged.offsets_of(self._shard_rows[shard_order])
        index = int(np.searchsorted(starts, position, side="right")) - 1
        return int(shard_order[index]), position - int(starts[index])

    def _row_order(self, epoch: int, shard: int) -> np.ndarray:
        num_rows = int(self._shard_rows[shard])
        draw = partial(self._permutation, num_rows, "row order", epoch=epoch, shard=shard)
        return _cached(self._row_orders, (epoch, shard), draw)

    def _permutation(self, size: int, purpose: str, **coordinates: int) -> np.ndarray:
        if self._seed is None:
            return np.arange(size)
        return rng.stream(self._seed, purpose, **coordinates).permutation(size)

    def _shard(self, epoch: int, shard: int) -> Examples:
        """Return the examples of a shard, with the masks of the epoch."""
        if self._mask is None:
            epoch = 0  # all epochs share the stored masks
        return _cached(self._shards, (epoch, shard), partial(self._read, epoch, shard))

    def _read(self, epoch: int, shard: int) -> Examples:
        examples = read_shard(self._folder, self._records[shard])
        if self._mask is None or self._seed is None:
            return examples
        return self._mask(examples, rng=rng.stream(self._seed, "mask", epoch=epoch, shard=shard))


def _cached(cache: dict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    """Return a value from a least-recently-used cache. Make and store it if it is missing."""
    if key in cache:
        cache[key] = cache.pop(key)  # moves the key to the end
        return cache[key]
    if len(cache) >= CACHE_SIZE:
        del cache[next(iter(cache))]  # the least recently used; frees its memory before `make`
    return cache.setdefault(key, make())
