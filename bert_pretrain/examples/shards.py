"""Parquet shards of examples: written atomically, read as columns, checked against the manifest.

Zstd with dictionary encoding, because 16-bit ids would otherwise cost four bytes each in Parquet.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, ValidationError, with_config

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import DataError, first_problem
from bert_pretrain.examples.examples import Examples
from bert_pretrain.examples.tables import from_table, to_table
from bert_pretrain.io.files import atomic_path, sha256_file
from bert_pretrain.io.manifest import MANIFEST, read_manifest
from bert_pretrain.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bert_pretrain.examples.padded import PaddedBatches

ROW_GROUP_ROWS = 4096
FOOTER_READERS = 16
"""Footers that are read at once: on a slow disk or a network, thousands of small shards are a matter of waiting."""
MASKING_KEYS = {"max_seq_length", "masked_lm_prob", "max_predictions_per_seq", "whole_word_mask"}
"""What decides, together with the tokenizer, which masks are drawn for given examples."""
UNREADABLE = (pa.ArrowException, OSError, ValueError)
"""What pyarrow raises on files that are not Parquet; a name in a footer may not be UTF-8."""
REBUILD = "run the make-data command that wrote it again, with --verify: it builds the data again"


_Number = Annotated[int, Field(ge=0, strict=True)]
_Figure = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]*$")]


@with_config(extra="forbid")
@dataclass(frozen=True)
class ShardRecord:
    """What the manifest says of one shard."""

    path: Annotated[str, Field(pattern=r"^([\w-]+/)?[\w-]+\.parquet$")]
    """Relative to the data folder, for example `train/00003.parquet`."""
    rows: _Number
    tokens: _Number
    bytes: _Number
    sha256: _Digest
    """Of the file; equal for equal versions of pyarrow."""
    content_hash: _Digest
    """Of the columns' values; equal across versions and machines."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class _Statistics(BaseModel, extra="allow"):
    __pydantic_extra__: dict[str, _Figure | None]
    drops: dict[str, _Number]
    mean_length_tokens: _Figure


class _Split(BaseModel):
    rows: _Number
    tokens: _Number
    shards: list[ShardRecord]
    statistics: _Statistics


class _Vocabulary(BaseModel):
    hash: str
    vocab_size: _Number


class _Sections(BaseModel):
    data: dict[str, Any]


class _Input(BaseModel):
    location: str


class _Corpus(BaseModel):
    documents: _Number
    sentences: _Number
    tokens: _Number
    unk_share: _Figure
    repairs_and_drops: dict[str, _Number]


class _Contents(BaseModel):
    """What the manifest of a data folder must say, so that it can be opened."""

    inputs: list[_Input]
    corpus: _Corpus
    splits: dict[str, _Split]
    tokenizer: _Vocabulary
    config: _Sections


@dataclass(frozen=True)
class DataFolder:
    """A finished data folder: its manifest, checked, and access to its shards."""

    path: Path
    manifest: dict[str, Any]

    def __post_init__(self) -> None:
        try:
            _Contents.model_validate(self.manifest)
        except ValidationError as error:
            raise self._broken(first_problem(error)) from error
        for split, entry in self.manifest["splits"].items():
            for name in ("rows", "tokens"):
                if entry[name] != sum(shard[name] for shard in entry["shards"]):
                    raise self._broken(f"splits.{split}.{name} is {entry[name]}, not the sum over the shards")

    def _broken(self, what: str) -> DataError:
        remedy = "restore the file from a copy, or make the data again"
        return DataError(what, where=str(self.path / MANIFEST), remedy=remedy)

    def __repr__(self) -> str:
        rows = " and ".join(f"{self.rows(split):,} {split}" for split in self.manifest["splits"])
        return f"<data folder {self.path}: {rows} examples of at most {self.max_seq_length:,} tokens>"

    @staticmethod
    def open(path: Path, flag: str = "--data", *, verify: bool = False) -> "DataFolder":
        """Read and check the manifest, and every shard's size and footer, or with `verify` its SHA-256, against it."""
        folder = DataFolder(path, read_manifest(path, "data", flag))
        records = (*folder.shards("train"), *folder.shards("validation"))
        with ThreadPoolExecutor(FOOTER_READERS) as readers:
            for _ in readers.map(partial(_check_shard, path, whole=verify), records):  # raises for the first damaged
                pass
        return folder

    def shards(self, split: str) -> list[ShardRecord]:
        """Return the records of the shards of `train` or `validation`, in order; empty if there is no such split."""
        return [ShardRecord(**record) for record in self.manifest["splits"].get(split, {}).get("shards", [])]

    def rows(self, split: str) -> int:
        """Return the number of examples of a split."""
        return sum(record.rows for record in self.shards(split))

    def mean_tokens(self, split: str) -> float:
        """Return the average number of tokens of an example of a split; 0 where it is empty."""
        return sum(record.tokens for record in self.shards(split)) / max(self.rows(split), 1)

    def dataset(self) -> Any:
        """Return all examples as a `datasets.DatasetDict` of the splits."""
        import datasets

        return datasets.load_dataset(str(self.path))

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
        (batch, length), and, where examples are pairs, `next_sentence_label`, (batch,).

        Args:
            split: `train`, in the order and with the masks that `train` gives it, or `validation`, as it is stored.
            batch_size: examples of a batch; the last one may have fewer.
            epoch: decides the order of the training examples, and their masks where these are dynamic.
            seed: like `train.seed`.
            padding: `longest`, to the longest example of the batch, or `max_length`, to that of the data.
        """
        from bert_pretrain.examples.padded import PaddedBatches

        return PaddedBatches(self, split, batch_size=batch_size, epoch=epoch, seed=seed, padding=padding)

    def tokenizer(self) -> Tokenizer:
        """Open the tokenizer that made these examples, from its copy here."""
        tokenizer = Tokenizer.load(self.path / "tokenizer", "--data")
        if tokenizer.hash != self.manifest["tokenizer"]["hash"]:
            raise DataError(
                "the tokenizer in the data folder is not the one that made the data",
                where=str(self.path / "tokenizer"),
                remedy="run the make-data command that wrote it again: it restores that folder",
            )
        return tokenizer

    @cached_property
    def config(self) -> DataConfig:
        """The section `data` of the configuration that made this folder."""
        try:
            return DataConfig.model_validate(self.manifest["config"]["data"])
        except ValidationError as error:
            raise DataError(
                f"the data was made with a configuration unknown here: {first_problem(error)}",
                where=str(self.path / MANIFEST),
                remedy="use the version of bert-pretrain that made it, or make it again with this one",
            ) from error

    @property
    def max_seq_length(self) -> int:
        """The longest an example can be, [CLS] and [SEP] included."""
        return self.config.max_seq_length

    @property
    def content_hash(self) -> str:
        """A hash of all examples in order, and of the masking rule if masks are drawn in training."""
        hashes = [record.content_hash for split in ("train", "validation") for record in self.shards(split)]
        if self.config.masking == "dynamic":
            hashes.append(self.config.model_dump_json(include=MASKING_KEYS))
        return hashlib.sha256("".join(hashes).encode()).hexdigest()


def write_shard(folder: Path, name: str, examples: Examples) -> ShardRecord:
    """Write one shard to `folder / name`, whole or not at all, and return its record."""
    path = folder / name
    with atomic_path(path) as temporary:
        pq.write_table(
            to_table(examples),
            temporary,
            compression="zstd",
            use_dictionary=True,
            row_group_size=ROW_GROUP_ROWS,
            store_schema=True,
        )
        digest, size = sha256_file(temporary), temporary.stat().st_size
    return ShardRecord(name, len(examples), len(examples.input_ids), size, digest, content_hash(examples))


def read_shard(folder: Path, record: ShardRecord) -> Examples:
    """Check a shard's SHA-256 and counts, and return its examples."""
    _check_shard(folder, record, whole=True)
    where = str(folder / record.path)
    try:
        with (folder / record.path).open("rb") as file:
            examples = from_table(pq.read_table(file, use_threads=False))
    except UNREADABLE as error:
        damage = f"holds no examples: {str(error) or type(error).__name__}"
        raise DataError(f"the shard {record.path} {damage}", where=where, remedy=REBUILD) from error
    for name, count, named in (
        ("rows", len(examples), record.rows),
        ("tokens", len(examples.input_ids), record.tokens),
    ):
        if count != named:
            damage = f"has {count:,} {name}, the manifest says {named:,}"
            raise DataError(f"the shard {record.path} {damage}", where=where, remedy=REBUILD)
    return examples


def damage_of(folder: Path, record: ShardRecord, *, whole: bool) -> str | None:
    """Return how a shard's file differs from its record, None if it does not.

    Compares size and number of rows, and with `whole` the SHA-256 of all bytes.
    """
    path = folder / record.path
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"has {size:,} bytes, the manifest says {record.bytes:,}"
        if whole:
            same = sha256_file(path) == record.sha256
            return None if same else "is damaged: its SHA-256 is not the one in the manifest"
        with path.open("rb") as file:
            rows = pq.read_metadata(file).num_rows
    except FileNotFoundError:
        return "is missing"
    except UNREADABLE as error:
        return f"is not Parquet: {error}"
    return None if rows == record.rows else f"has {rows:,} rows, the manifest says {record.rows:,}"


def _check_shard(folder: Path, record: ShardRecord, *, whole: bool) -> None:
    if damage := damage_of(folder, record, whole=whole):
        raise DataError(f"the shard {record.path} {damage}", where=str(folder / record.path), remedy=REBUILD)


def content_hash(examples: Examples) -> str:
    """Return a SHA-256 over the columns' values, independent of how a file encodes them."""
    digest = hashlib.sha256()
    for name, column in examples.columns().items():
        # Offsets are hashed as lengths, which are as short as ids on most machines; all little-endian.
        values = np.diff(column) if name.endswith("offsets") else column
        is_wide = values.dtype.itemsize > 2
        digest.update(f"{name}:{len(values)};".encode())
        digest.update(np.ascontiguousarray(values, dtype="<u4" if is_wide else "<u2").data)
    return digest.hexdigest()
