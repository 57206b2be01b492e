"""Padded batches for other training loops, named like the arguments of `transformers`.

With the same seed, an epoch of the training split has the same order and masks as in the command `train`.
"""

import itertools
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.examples import IGNORE_INDEX, Examples, concatenate
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.examples.shuffling import Rows, ShuffledExamples
from bert_pretrain.text import ragged


class PaddedBatch(dict[str, Tensor]):
    """A batch of examples as arguments of `transformers` models. A `DataLoader` must not batch it again."""


def _refuse_to_batch(*_: object, **__: object) -> NoReturn:
    what = "data.loader yields batches already, and this DataLoader would batch them again"
    remedy = "pass batch_size=None to DataLoader, and the batch size to data.loader"
    raise ConfigError(what, where="DataLoader(data.loader(…), batch_size=…)", remedy=remedy)


default_collate_fn_map[PaddedBatch] = _refuse_to_batch


class PaddedBatches(IterableDataset[PaddedBatch]):
    """One epoch of a split in padded batches, see `DataFolder.loader`.

    In a `torch.utils.data.DataLoader` with `batch_size=None`, each worker yields a part of the batches.
    """

    def __init__(self, data: DataFolder, split: str, *, batch_size: int, epoch: int, seed: int, padding: str) -> None:
        """Check the arguments of `DataFolder.loader`."""
        _check("split", split, split in ("train", "validation"), "'train' or 'validation'")
        _check("padding", padding, padding in ("longest", "max_length"), "'longest' or 'max_length'")
        _check("batch_size", batch_size, isinstance(batch_size, int) and batch_size >= 1, "an integer of at least 1")
        self.split, self.batch_size = split, batch_size
        self.set_epoch(epoch)
        self._data, self._num_rows = data, data.rows(split)
        self._pad_id = data.tokenizer().pad_id
        self._length = data.max_seq_length if padding == "max_length" else None
        self._shuffled = ShuffledExamples(data, seed) if split == "train" else None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. `transformers.Trainer` calls this."""
        _check("epoch", epoch, isinstance(epoch, int) and epoch >= 0, "an integer of at least 0")
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-self._num_rows // self.batch_size)

    def __repr__(self) -> str:
        return f"<{len(self):,} batches of {self.batch_size:,} {self.split} examples, epoch {self.epoch}>"

    def __iter__(self) -> Iterator[PaddedBatch]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for parts in itertools.islice(self._batches(), first, None, step):
            examples = concatenate([shard.take(rows) for shard, rows in parts])
            yield pad(examples, self._pad_id, self._length or int(examples.lengths.max()))

    def _batches(self) -> Iterator[list[Rows]]:
        """Yield each batch as rows of shards."""
        if self._shuffled is not None:
            for first in range(0, self._num_rows, self.batch_size):
                num_rows = min(self.batch_size, self._num_rows - first)
                yield self._shuffled.take(self.epoch * self._num_rows + first, num_rows)
            return
        parts: list[Rows] = []
        num_missing = self.batch_size
        for record in self._data.shards(self.split):
            shard, start = read_shard(self._data.path, record), 0
            while start < len(shard):
                rows = np.arange(start, min(start + num_missing, len(shard)))
                parts.append((shard, rows))
                start, num_missing = start + len(rows), num_missing - len(rows)
                if not num_missing:
                    yield parts
                    parts, num_missing = [], self.batch_size
        if parts:
            yield parts


def pad(examples: Examples, pad_id: int, length: int) -> PaddedBatch:
    """Return masked examples as arguments of `transformers.BertForPreTraining`, see `DataFolder.loader`."""
    assert examples.masks is not None
    indices = np.arange(len(examples))
    rows, columns = np.repeat(indices, examples.lengths), ragged.positions_within(examples.offsets)
    masked_rows = np.repeat(indices, np.diff(examples.masks.offsets))
    fills = {"input_ids": pad_id, "attention_mask": 0, "token_type_ids": 0, "labels": IGNORE_INDEX}
    batch = {name: np.full((len(examples), length), fill, dtype=np.int64) for name, fill in fills.items()}
    batch["input_ids"][rows, columns] = examples.input_ids
    batch["attention_mask"][rows, columns] = 1
    batch["token_type_ids"][rows, columns] = examples.is_segment_b
    batch["labels"][masked_rows, examples.masks.positions] = examples.masks.original_ids
    if examples.next_sentence_label is not None:
        batch["next_sentence_label"] = examples.next_sentence_label.astype(np.int64)
    return PaddedBatch({name: torch.from_numpy(values) for name, values in batch.items()})


def _check(name: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise ConfigError(f"{name} is {value!r}", where=name, remedy=f"give {expected}")
