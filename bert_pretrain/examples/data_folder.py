"""Data folders: a checked manifest, the shards of each split, and the tokenizer that made them."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import ConfigError, DataError, first_problem
from bert_pretrain.examples.masking import mask_examples
from bert_pretrain.examples.shards import Number, ShardRecord, damage_of, damaged
from bert_pretrain.examples.shuffling import ExampleSequence
from bert_pretrain.io.manifest import MANIFEST, read_manifest
from bert_pretrain.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bert_pretrain.examples.padded import PaddedBatches


class _Split(BaseModel):
    rows: Number
    tokens: Number
    shards: list[ShardRecord]
    statistics: dict[str, Any]


class _Contents(BaseModel):
    """The required entries of the manifest of a data folder."""

    inputs: list[dict[str, Any]]
    corpus: dict[str, Any]
    splits: dict[str, _Split]
    tokenizer: dict[str, Any]
    config: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class DataFolder:
    """A finished data folder: its checked manifest, and access to its shards."""

    path: Path
    manifest: dict[str, Any]

    def __post_init__(self) -> None:
        self.shards("train")  # checks the manifest

    @cached_property
    def _splits(self) -> dict[str, _Split]:
        """The checked entries of the splits."""
        try:
            return _Contents.model_validate(self.manifest).splits
        except ValidationError as error:
            raise DataError(
                first_problem(error),
                where=str(self.path / MANIFEST),
                remedy="restore the file from a copy, or make the data again",
            ) from error

    def __repr__(self) -> str:
        rows = " and ".join(f"{self.rows(split):,} {split}" for split in self._splits)
        return f"<data folder {self.path}: {rows} examples of at most {self.max_seq_length:,} tokens>"

    @staticmethod
    def open(path: Path, flag: str = "--data", *, verify: bool = False) -> "DataFolder":
        """Open a data folder, and check its manifest and its shards.

        Shards are checked by size or, with `verify`, by the SHA-256 of all bytes. `flag` is the option that named the
        folder, for messages. Raises DataError if the folder is missing, unfinished or damaged.
        """
        folder = DataFolder(path, read_manifest(path, "data", flag))
        records = [*folder.shards("train"), *folder.shards("validation")]
        with ThreadPoolExecutor(16) as readers:  # hides the latency of a slow disk with thousands of shards
            damages = readers.map(partial(damage_of, path, check_hash=verify), records)
            for record, damage in zip(records, damages, strict=True):
                if damage is not None:
                    raise damaged(path, record, damage)
        return folder

    def shards(self, split: str) -> list[ShardRecord]:
        """Return the shard records of a split, `train` or `validation`, in order. Empty if there is no such split."""
        return self._splits[split].shards if split in self._splits else []

    def rows(self, split: str) -> int:
        """Return the number of examples of a split."""
        return sum(record.rows for record in self.shards(split))

    def num_documents(self, split: str) -> int | None:
        """Return the number of documents of a split, or None if it is unknown, as in folders of older versions."""
        return self._splits[split].statistics.get("documents") if split in self._splits else None

    def mean_tokens(self, split: str) -> float:
        """Return the mean number of tokens per example of a split, 0 if it is empty."""
        return sum(record.tokens for record in self.shards(split)) / max(self.rows(split), 1)

    def dataset(self) -> Any:
        """Load all splits as a `datasets.DatasetDict`."""
        import datasets

        return datasets.load_dataset(str(self.path))

    def shuffled(self, seed: int) -> ExampleSequence:
        """Return the endless sequence of training examples for a seed, as in the command `train`."""
        mask = None
        if self.config.masking == "dynamic":
            mask = partial(mask_examples, tokenizer=self.tokenizer(), config=self.config)
        return ExampleSequence(self.path, self.shards("train"), seed, mask)

    def loader(
        self,
        split: str = "train",
        *,
        batch_size: int = 32,
        epoch: int = 0,
        seed: int = 12345,
        padding: str = "longest",
    ) -> "PaddedBatches":
        """Return one epoch of a split as padded batches for `transformers.BertForPreTraining`.

        Batches are dictionaries of int64 tensors: `input_ids`, `attention_mask`, `token_type_ids` and `labels`, each
        (batch, length). Examples that are pairs also have `next_sentence_label`, (batch,).

        Args:
            split: `train`, in the order and with the masks of the command `train`, or `validation`, in stored order.
            batch_size: examples per batch; the last batch may be smaller.
            epoch: the epoch of the training examples, which decides their order and their dynamic masks.
            seed: the key `train.seed` of a run; it decides the order and the dynamic masks of the training examples.
            padding: `longest` pads to the longest example of the batch, `max_length` to `max_seq_length`.

        Raises:
            ConfigError: an argument has an invalid value.
        """
        from bert_pretrain.examples.padded import PaddedBatches

        arguments = {
            "split": split in ("train", "validation"),
            "batch_size": isinstance(batch_size, int) and batch_size >= 1,
            "epoch": isinstance(epoch, int) and epoch >= 0,
            "padding": padding in ("longest", "max_length"),
        }
        for name, is_valid in arguments.items():
            if not is_valid:
                raise ConfigError(f"{name} has an invalid value", where=name, remedy="see help(DataFolder.loader)")
        return PaddedBatches(
            self.shuffled(seed) if split == "train" else ExampleSequence(self.path, self.shards(split)),
            batch_size=batch_size,
            epoch=epoch,
            pad_id=self.tokenizer().pad_id,
            length=self.max_seq_length if padding == "max_length" else None,
        )

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer of these examples from the data folder."""
        folder = self.path / "tokenizer"
        tokenizer = Tokenizer.load(folder, "--data")
        if tokenizer.hash != self.manifest["tokenizer"].get("hash"):
            raise DataError(
                "the tokenizer in the data folder is not the one that made the data",
                where=str(folder),
                remedy="run the make-data command of this data again: it restores the tokenizer",
            )
        return tokenizer

    @cached_property
    def config(self) -> DataConfig:
        """The `data` section of the configuration that made this folder."""
        try:
            return DataConfig.model_validate(self.manifest["config"].get("data"))
        except ValidationError as error:
            raise DataError(
                f"this version cannot read the configuration of the data: {first_problem(error)}",
                where=str(self.path / MANIFEST),
                remedy="use the version of bert-pretrain that made the data, or make it again with this version",
            ) from error

    @property
    def max_seq_length(self) -> int:
        """The maximum length of an example in tokens, [CLS] and [SEP] included."""
        return self.config.max_seq_length

    @cached_property
    def content_hash(self) -> str:
        """A hash of all examples in order, and of the masking settings if masks are drawn during training."""
        records = [*self.shards("train"), *self.shards("validation")]
        content = "".join(record.content_hash for record in records)
        if self.config.masking == "dynamic":
            rule = {"max_seq_length", "masked_lm_prob", "max_predictions_per_seq", "whole_word_mask"}
            content += self.config.model_dump_json(include=rule)
        return hashlib.sha256(content.encode()).hexdigest()
