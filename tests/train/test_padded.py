"""`DataFolder.loader`: padded batches that `transformers` takes, of the examples and masks that `train` sees."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.examples import IGNORE_INDEX
from bert_pretrain.train.loader import TrainingData
from tests.train.conftest import NewData, rows_of

Row = tuple[tuple[int, ...], ...]


def rows_of_padded(batch: dict[str, Tensor]) -> list[Row]:
    """Ids, token types and labels of the real tokens of each example."""
    columns = ("input_ids", "token_type_ids", "labels")
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    return [tuple(tuple(batch[name][row, :length].tolist()) for name in columns) for row, length in enumerate(lengths)]


@pytest.mark.parametrize("masking", ["static", "dynamic"])
def test_an_epoch_has_the_examples_and_masks_of_train(new_data_folder: NewData, masking: str) -> None:
    """360 examples: an epoch is six batches of 60."""
    data = DataFolder.open(new_data_folder(masking=masking))
    loader = data.loader("train", batch_size=60)
    ours = TrainingData(data, seed=12345, global_batch_size=60, micro_batch_tokens=512)
    for epoch in (1, 0):
        loader.set_epoch(epoch)
        batches = [rows_of_padded(batch) for batch in loader]
        assert len(batches) == len(loader) == 6
        assert batches == [rows_of_padded(batch) for batch in data.loader("train", batch_size=60, epoch=epoch)]
        for step, batch in enumerate(batches):
            assert sorted(batch) == sorted(rows_of(ours.global_batch(6 * epoch + step).micro_batches))
    assert rows_of_padded(next(iter(data.loader(batch_size=60, seed=1)))) != batches[0]


def test_padding_has_pad_id_and_only_masked_tokens_have_labels(data_folder: Path, new_data_folder: NewData) -> None:
    data = DataFolder.open(data_folder)
    for padding, width in (("longest", None), ("max_length", 32)):
        batch = next(iter(data.loader(batch_size=5, padding=padding)))
        lengths = batch["attention_mask"].sum(dim=1)
        assert {values.dtype for values in batch.values()} == {torch.int64}
        assert batch["input_ids"].shape == batch["labels"].shape == (5, width or int(lengths.max()))
        is_pad = torch.arange(batch["input_ids"].shape[1]) >= lengths[:, None]
        assert (batch["input_ids"][is_pad] == data.tokenizer().pad_id).all()
        assert (batch["labels"][is_pad] == IGNORE_INDEX).all()
        assert not batch["token_type_ids"][is_pad].any()
        assert torch.equal(is_pad, batch["attention_mask"] == 0)
        assert batch["next_sentence_label"].shape == (5,)
    alone = next(iter(DataFolder.open(new_data_folder(next_sentence="none")).loader(batch_size=4)))
    assert "next_sentence_label" not in alone
    assert not alone["token_type_ids"].any()


def test_held_out_examples_keep_their_order_across_shards_and_the_last_batch_is_smaller(
    new_data_folder: NewData,
) -> None:
    data = DataFolder.open(new_data_folder(shard_rows=(5, 3, 4), validation_rows=11))
    whole = rows_of_padded(next(iter(data.loader("validation", batch_size=100))))
    batches = [rows_of_padded(batch) for batch in data.loader("validation", batch_size=4, epoch=3)]
    assert [len(batch) for batch in batches] == [4, 4, 3]
    assert [row for batch in batches for row in batch] == whole
    assert sorted(len(batch["labels"]) for batch in data.loader("train", batch_size=5)) == [2, 5, 5]


def test_dataloader_workers_share_the_batches(data_folder: Path) -> None:
    batches = DataFolder.open(data_folder).loader("train", batch_size=7, padding="max_length")
    sent = pickle.loads(pickle.dumps(batches))  # as to a worker that is spawned
    loader = DataLoader(sent, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert sorted(map(rows_of_padded, loader)) == sorted(map(rows_of_padded, batches))


@pytest.mark.parametrize(
    "argument", [{"split": "test"}, {"batch_size": 0}, {"batch_size": 2.5}, {"epoch": -1}, {"padding": "shortest"}]
)
def test_invalid_argument_is_named_in_the_error(data_folder: Path, argument: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        DataFolder.open(data_folder).loader(**argument)
    assert caught.value.where in argument
