"""The order of the examples of a split: each epoch shuffles the shards, and the rows within each shard.

The order depends only on the shards, seed and position. Reading can start anywhere, and opens only the shards it needs.
Dynamic masks are drawn for a whole shard when an epoch opens it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bert_pretrain import ragged, rng
from bert_pretrain.examples.examples import Examples
from bert_pretrain.examples.shards import ShardRecord, read_shard

CACHE_SIZE = 4  # shards in memory: a batch may need two, and another reader may be a batch ahead

Rows = tuple[Examples, np.ndarray]  # a shard, and the indices of selected rows in it


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
        self._opened: dict[tuple[int, int], Rows] = {}  # by epoch and shard; the least recently used first
        self.num_rows = int(self._shard_rows.sum())  # examples per epoch

    def take(self, first: int, count: int) -> list[Rows]:
        """Return the examples [first, first + count), numbered across all epochs, as rows of shards."""
        parts: list[Rows] = []
        while count:
            epoch, position = divmod(first, self.num_rows)
            shard_order = self._permutation(len(self._shard_rows), "shard order", epoch=epoch)
            starts = ragged.offsets_of(self._shard_rows[shard_order])
            index = int(np.searchsorted(starts, position, side="right")) - 1
            examples, order = self._shard(epoch, int(shard_order[index]))
            start = position - int(starts[index])
            rows = order[start : start + count]
            parts.append((examples, rows))
            first += len(rows)
            count -= len(rows)
        return parts

    def _permutation(
        self,
        size: int,
        purpose: str,
        **coordinates: int,
    ) -> np.ndarray:
        if self._seed is None:
            return np.arange(size)
        return rng.stream(self._seed, purpose, **coordinates).permutation(size)

    def _shard(self, epoch: int, shard: int) -> Rows:
        """Return the examples of a shard, with the masks of the epoch, and their order in the epoch."""
        key = (epoch, shard)
        opened = self._opened.pop(key, None)
        if opened is None:
            if len(self._opened) >= CACHE_SIZE:
                del self._opened[next(iter(self._opened))]  # frees its memory before the next shard is read
            examples = read_shard(self._folder, self._records[shard])
            if self._mask is not None and self._seed is not None:
                examples = self._mask(examples, rng=rng.stream(self._seed, "mask", epoch=epoch, shard=shard))
            opened = (examples, self._permutation(len(examples), "row order", epoch=epoch, shard=shard))
        self._opened[key] = opened
        return opened
