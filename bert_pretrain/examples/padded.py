"""Padded batches for other training loops, named like the arguments of `transformers`.

With the same seed, an epoch of the training split has the same order and masks as in the command `train`.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from bert_pretrain import ragged
from bert_pretrain.examples.examples import IGNORE_INDEX, Examples, concatenate
from bert_pretrain.examples.shuffling import ExampleSequence


class PaddedBatches(IterableDataset[dict[str, Tensor]]):
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
        self.batch_size = batch_size
        self._examples = examples
        self._pad_id = pad_id
        self._length = length
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. `transformers.Trainer` calls this."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-self._examples.num_rows // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        first_batch, step = (worker.id, worker.num_workers) if worker else (0, 1)
        num_rows = self._examples.num_rows
        for first in range(first_batch * self.batch_size, num_rows, step * self.batch_size):
            parts = self._examples.take(self.epoch * num_rows + first, min(self.batch_size, num_rows - first))
            examples = concatenate([shard.take(rows) for shard, rows in parts])
            yield pad(examples, self._pad_id, self._length or int(examples.lengths.max()))


def pad(examples: Examples, pad_id: int, length: int) -> dict[str, Tensor]:
    """Return masked examples as arguments of `transformers.BertForPreTraining`, see `DataFolder.loader`."""
    assert examples.masks is not None

    def padded(
        fill: int,
        offsets: np.ndarray,
        positions: np.ndarray,
        values: Any,
    ) -> Tensor:
        matrix = np.full((len(examples), length), fill, dtype=np.int64)
        matrix[ragged.lists_of(offsets), positions] = values
        return torch.from_numpy(matrix)

    positions = ragged.positions_within(examples.offsets)
    masks = examples.masks
    batch = {
        "input_ids": padded(pad_id, examples.offsets, positions, examples.input_ids),
        "attention_mask": padded(0, examples.offsets, positions, 1),
        "token_type_ids": padded(0, examples.offsets, positions, examples.is_segment_b),
        "labels": padded(IGNORE_INDEX, masks.offsets, masks.positions, masks.original_ids),
    }
    if examples.next_sentence_label is not None:
        batch["next_sentence_label"] = torch.from_numpy(examples.next_sentence_label.astype(np.int64))
    return batch
