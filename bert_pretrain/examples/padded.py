"""Padded batches for other training loops, named like the arguments of `transformers`.

With the same seed, an epoch of the training split has the same order and masks as in the command `train`.
"""

from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from bert_pretrain import ragged
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.examples import IGNORE_INDEX, Examples, concatenate
from bert_pretrain.examples.shuffling import ExampleSequence


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

    def __init__(
        self,
        examples: ExampleSequence,
        *,
        batch_size: int,
        epoch: int,
        pad_id: int,
        length: int | None,
    ) -> None:
        """Pad all batches to `length` or, if it is None, each batch to its longest example."""
        self._examples = examples
        self.batch_size = _checked("batch_size", batch_size, 1)
        self._pad_id = pad_id
        self._length = length
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. `transformers.Trainer` calls this."""
        self.epoch = _checked("epoch", epoch, 0)

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-self._examples.num_rows // self.batch_size)

    def __iter__(self) -> Iterator[PaddedBatch]:
        worker = get_worker_info()
        numbers = range(len(self)) if worker is None else range(worker.id, len(self), worker.num_workers)
        return map(self._batch, numbers)

    def _batch(self, number: int) -> PaddedBatch:
        num_rows = self._examples.num_rows
        first = number * self.batch_size
        size = min(self.batch_size, num_rows - first)
        parts = self._examples.take(self.epoch * num_rows + first, size)
        examples = concatenate([shard.take(rows) for shard, rows in parts])
        return pad(examples, self._pad_id, self._length or int(examples.lengths.max()))


def _checked(name: str, value: int, minimum: int) -> int:
    """Return an argument, or raise ConfigError if it is not an integer of at least `minimum`."""
    if isinstance(value, int) and value >= minimum:
        return value
    raise ConfigError(f"{name} is {value!r}", where=name, remedy=f"give an integer of at least {minimum}")


def pad(examples: Examples, pad_id: int, length: int) -> PaddedBatch:
    """Return masked examples as arguments of `transformers.BertForPreTraining`, see `DataFolder.loader`."""
    assert examples.masks is not None
    rows = ragged.lists_of(examples.offsets)
    columns = ragged.positions_within(examples.offsets)
    fills = {"input_ids": pad_id, "attention_mask": 0, "token_type_ids": 0, "labels": IGNORE_INDEX}
    batch = {name: np.full((len(examples), length), fill, dtype=np.int64) for name, fill in fills.items()}
    batch["input_ids"][rows, columns] = examples.input_ids
    batch["attention_mask"][rows, columns] = 1
    batch["token_type_ids"][rows, columns] = examples.is_segment_b
    batch["labels"][ragged.lists_of(examples.masks.offsets), examples.masks.positions] = examples.masks.original_ids
    if examples.next_sentence_label is not None:
        batch["next_sentence_label"] = examples.next_sentence_label.astype(np.int64)
    return PaddedBatch({name: torch.from_numpy(values) for name, values in batch.items()})
