"""Padded batches for training loops other than ours, under the names of the arguments of `transformers`.

An epoch of the training split has the order, and the masks, that `train` gives it for the same seed.
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
from bert_pretrain.examples.examples import Examples, concatenate
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.examples.shuffling import Rows, ShuffledExamples
from bert_pretrain.text import ragged

NOT_PREDICTED = -100
"""The label that PyTorch's cross-entropy ignores."""


class PaddedBatch(dict[str, Tensor]):
    """A batch of examples by the names of the arguments of `transformers`; it is complete, and not to be batched."""


def _refuse_to_batch(*_: object, **__: object) -> NoReturn:
    raise ConfigError(
        "the loader gives batches, and this DataLoader would put several into one",
        where="DataLoader(data.loader(…), batch_size=…)",
        remedy="give batch_size=None to DataLoader, and the size to data.loader",
    )


default_collate_fn_map[PaddedBatch] = _refuse_to_batch


class PaddedBatches(IterableDataset[PaddedBatch]):
    """One epoch of a split in padded batches; see `DataFolder.loader`.

    In a `torch.utils.data.DataLoader` with `batch_size=None` and several workers, each makes its share of the batches.
    """

    def __init__(self, data: DataFolder, split: str, *, batch_size: int, epoch: int, seed: int, padding: str) -> None:
        """Check the arguments, which are those of `DataFolder.loader`."""
        _check_choice("split", split, ("train", "validation"))
        _check_choice("padding", padding, ("longest", "max_length"))
        _check_count("batch_size", batch_size, at_least=1)
        self.split, self.batch_size = split, batch_size
        self.set_epoch(epoch)
        self._data, self._num_rows = data, data.rows(split)
        self._pad_id = data.tokenizer().pad_id
        self._length = data.max_seq_length if padding == "max_length" else None
        self._shuffled = ShuffledExamples(data, seed) if split == "train" else None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration goes over; `Trainer` calls it."""
        _check_count("epoch", epoch, at_least=0)
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches; the last one may be smaller."""
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
        """Yield the examples of each batch as rows of shards."""
        if self._shuffled is not None:
            for first in range(0, self._num_rows, self.batch_size):
                count = min(self.batch_size, self._num_rows - first)
                yield self._shuffled.take(self.epoch * self._num_rows + first, count)
            return
        parts: list[Rows] = []
        missing = self.batch_size
        for record in self._data.shards(self.split):
            shard, begin = read_shard(self._data.path, record), 0
            while begin < len(shard):
                rows = np.arange(begin, min(begin + missing, len(shard)))
                parts.append((shard, rows))
                begin, missing = begin + len(rows), missing - len(rows)
                if not missing:
                    yield parts
                    parts, missing = [], self.batch_size
        if parts:
            yield parts


def pad(examples: Examples, pad_id: int, length: int) -> PaddedBatch:
    """Return masked examples as the arguments of `transformers.BertForPreTraining`; see `DataFolder.loader`."""
    assert examples.masks is not None
    numbers = np.arange(len(examples))
    rows, columns = np.repeat(numbers, examples.lengths), ragged.positions_within(examples.offsets)
    masked_rows = np.repeat(numbers, np.diff(examples.masks.offsets))
    shape = (len(examples), length)
    input_ids, labels = np.full(shape, pad_id, dtype=np.int64), np.full(shape, NOT_PREDICTED, dtype=np.int64)
    attention_mask, token_type_ids = (np.zeros(shape, dtype=np.int64) for _ in range(2))
    input_ids[rows, columns] = examples.input_ids
    attention_mask[rows, columns] = 1
    token_type_ids[rows, columns] = columns >= examples.segment_b_start[rows]
    labels[masked_rows, examples.masks.positions] = examples.masks.original_ids
    batch = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "token_type_ids": token_type_ids,
        "labels": labels,
    }
    if examples.next_sentence_label is not None:
        batch["next_sentence_label"] = examples.next_sentence_label.astype(np.int64)
    return PaddedBatch({name: torch.from_numpy(values) for name, values in batch.items()})


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}", where=name, remedy=f"give {' or '.join(map(repr, choices))}")


def _check_count(name: str, value: object, *, at_least: int) -> None:
    if not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{name} is {value!r}", where=name, remedy=f"give a whole number from {at_least} on")
