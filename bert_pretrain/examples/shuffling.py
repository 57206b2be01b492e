"""The order in which the training examples are visited: every epoch the shards, and the rows of each, in a new order.

A pure function of (data folder, seed, position), so that reading may begin anywhere: only the shards that hold what is
asked for are read. Masks that no shard holds are drawn for a whole shard when an epoch opens it.
"""

from collections.abc import Iterator

import numpy as np

from bert_pretrain import rng
from bert_pretrain.examples.examples import Examples
from bert_pretrain.examples.masking import mask_examples, masking_rule
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.text import ragged

OPEN_SHARDS = 4
"""Shards kept in memory: a batch may straddle two, and a reader may run ahead."""

Rows = tuple[Examples, np.ndarray]
"""A shard, and the chosen rows of it."""


class ShuffledExamples:
    """The endless sequence of examples that a seed makes of a data folder's training split."""

    def __init__(self, data: DataFolder, seed: int) -> None:
        """Read nothing yet; what is read later is checked then."""
        self.num_rows = data.rows("train")
        """Of an epoch."""
        self._folder, self._seed = data.path, seed
        self._records = data.shards("train")
        self._shard_rows = np.array([record.rows for record in self._records], dtype=np.int64)
        self._rule = masking_rule(data.tokenizer(), data.config) if data.config.masking == "dynamic" else None
        self._open: dict[tuple[int, int], Examples] = {}
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
        shard_order = rng.stream(self._seed, "shard order", epoch=epoch).permutation(len(self._shard_rows))
        starts = ragged.offsets_of(self._shard_rows[shard_order])
        place = int(np.searchsorted(starts, position, side="right")) - 1
        while count:
            shard = int(shard_order[place])
            begin = position - int(starts[place])
            rows = self._order_of_rows(epoch, shard)[begin : begin + count]
            if len(rows):
                yield shard, rows
            position, count, place = position + len(rows), count - len(rows), place + 1

    def _order_of_rows(self, epoch: int, shard: int) -> np.ndarray:
        """Return a new order of a shard's rows; the last few are kept."""
        key = (epoch, shard)
        if key not in self._row_orders:
            while len(self._row_orders) >= OPEN_SHARDS:
                del self._row_orders[next(iter(self._row_orders))]
            stream = rng.stream(self._seed, "row order", epoch=epoch, shard=shard)
            self._row_orders[key] = stream.permutation(self._shard_rows[shard])
        return self._row_orders[key]

    def _shard(self, epoch: int, index: int) -> Examples:
        """Return a shard's examples, with the masks of an epoch where none are stored; the last few are kept."""
        key = (0 if self._rule is None else epoch, index)
        if key in self._open:
            self._open[key] = self._open.pop(key)  # the last one used goes to the end
        else:
            examples = read_shard(self._folder, self._records[index])
            if self._rule is not None:
                generator = rng.stream(self._seed, "mask", epoch=epoch, shard=index)
                examples = mask_examples(examples, self._rule, generator)
            while len(self._open) >= OPEN_SHARDS:
                del self._open[next(iter(self._open))]
            self._open[key] = examples
        return self._open[key]
