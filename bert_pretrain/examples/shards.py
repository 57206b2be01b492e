"""Data folders: Parquet shards of examples, written atomically, read as columns and checked against the manifest."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, ValidationError, with_config

from bert_pretrain.config import SINGLE_CHARACTERS, DataConfig
from bert_pretrain.errors import ConfigError, DataError, first_problem
from bert_pretrain.examples.examples import Examples, Masks
from bert_pretrain.io.files import atomic_path, sha256_file
from bert_pretrain.io.manifest import MANIFEST, read_manifest
from bert_pretrain.text import ragged
from bert_pretrain.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bert_pretrain.examples.padded import PaddedBatches

# Raised by pyarrow for files that are not Parquet. ValueError: a column name is not UTF-8.
PARQUET_ERRORS = (pa.ArrowException, OSError, ValueError)

_Number = Annotated[int, Field(ge=0, strict=True)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]*$")]
_IDS = (pa.list_(pa.uint16()), pa.list_(pa.uint32()))
_TYPES: dict[str, tuple[pa.DataType, ...]] = {  # the accepted Parquet types of each column
    "input_ids": _IDS,
    "segment_b_start": (pa.uint16(),),
    "masked_lm_positions": (pa.list_(pa.uint16()),),
    "masked_lm_ids": _IDS,
    "next_sentence_label": (pa.uint8(),),
    "word_starts": (pa.list_(pa.uint16()),),
}


@with_config(extra="forbid")
@dataclass(frozen=True)
class ShardRecord:
    """The entry of one shard in the manifest."""

    path: Annotated[str, Field(pattern=r"^([\w-]+/)?[\w-]+\.parquet$")]  # in the data folder: `train/00003.parquet`
    rows: _Number
    tokens: _Number
    bytes: _Number
    sha256: _Digest  # of the file; may change with the version of pyarrow
    content_hash: _Digest  # of the columns' values; independent of the machine and of the version of pyarrow


class _Split(BaseModel):
    rows: _Number
    tokens: _Number
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
        try:
            _Contents.model_validate(self.manifest)
        except ValidationError as error:
            remedy = "restore the file from a copy, or make the data again"
            raise DataError(first_problem(error), where=str(self.path / MANIFEST), remedy=remedy) from error

    def __repr__(self) -> str:
        rows = " and ".join(f"{self.rows(split):,} {split}" for split in self.manifest["splits"])
        return f"<data folder {self.path}: {rows} examples of at most {self.max_seq_length:,} tokens>"

    @staticmethod
    def open(path: Path, flag: str = "--data", *, verify: bool = False) -> "DataFolder":
        """Open a data folder, and check its manifest and its shards.

        Shards are checked by size and Parquet footer or, with `verify`, by the SHA-256 of all bytes. `flag` is the
        option that named the folder, for messages. Raises DataError if the folder is missing, unfinished or damaged.
        """
        folder = DataFolder(path, read_manifest(path, "data", flag))
        records = (*folder.shards("train"), *folder.shards("validation"))
        with ThreadPoolExecutor(16) as readers:  # hides the latency of a slow disk with thousands of shards
            damages = readers.map(partial(damage_of, path, check_hash=verify), records)
            for record, damage in zip(records, damages, strict=True):
                if damage is not None:
                    raise _damaged(path, record, damage)
        return folder

    def shards(self, split: str) -> list[ShardRecord]:
        """Return the shard records of a split, `train` or `validation`, in order. Empty if there is no such split."""
        return [ShardRecord(**record) for record in self.manifest["splits"].get(split, {}).get("shards", [])]

    def rows(self, split: str) -> int:
        """Return the number of examples of a split."""
        return sum(record.rows for record in self.shards(split))

    def num_documents(self, split: str) -> int | None:
        """Return the number of documents of a split, or None if it is unknown, as in folders of older versions."""
        return self.manifest["splits"].get(split, {}).get("statistics", {}).get("documents")

    def mean_tokens(self, split: str) -> float:
        """Return the mean number of tokens per example of a split, 0 if it is empty."""
        return sum(record.tokens for record in self.shards(split)) / max(self.rows(split), 1)

    def dataset(self) -> Any:
        """Load all splits as a `datasets.DatasetDict`."""
        import datasets

        return datasets.load_dataset(str(self.path))

    def loader(
        self, split: str = "train", *, batch_size: int = 32, epoch: int = 0, seed: int = 12345, padding: str = "longest"
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

        return PaddedBatches(self, split, batch_size=batch_size, epoch=epoch, seed=seed, padding=padding)

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer of these examples from the data folder."""
        tokenizer = Tokenizer.load(self.path / "tokenizer", "--data")
        if tokenizer.hash != self.manifest["tokenizer"].get("hash"):
            what = "the tokenizer in the data folder is not the one that made the data"
            remedy = "run the make-data command of this data again: it restores the tokenizer"
            raise DataError(what, where=str(self.path / "tokenizer"), remedy=remedy)
        return tokenizer

    @cached_property
    def config(self) -> DataConfig:
        """The `data` section of the configuration that made this folder."""
        try:
            return DataConfig.model_validate(self.manifest["config"].get("data"))
        except ValidationError as error:
            what = f"this version cannot read the configuration of the data: {first_problem(error)}"
            remedy = "use the version of bert-pretrain that made the data, or make it again with this version"
            raise DataError(what, where=str(self.path / MANIFEST), remedy=remedy) from error

    @property
    def repeatable_config(self) -> DataConfig:
        """The section `data` with which the same inputs give the same data."""
        # In `config`, a word segmenter of None means single characters, see `with_language`.
        is_single = self.config.whole_word_mask and self.config.word_segmenter is None
        return self.config.model_copy(update={"word_segmenter": SINGLE_CHARACTERS}) if is_single else self.config

    @property
    def max_seq_length(self) -> int:
        """The maximum length of an example in tokens, [CLS] and [SEP] included."""
        return self.config.max_seq_length

    @cached_property
    def content_hash(self) -> str:
        """A hash of all examples in order, and of the masking settings if masks are drawn during training."""
        hashes = [record.content_hash for split in ("train", "validation") for record in self.shards(split)]
        if self.config.masking == "dynamic":
            rule = {"max_seq_length", "masked_lm_prob", "max_predictions_per_seq", "whole_word_mask"}
            hashes.append(self.config.model_dump_json(include=rule))
        return hashlib.sha256("".join(hashes).encode()).hexdigest()


def write_shard(folder: Path, name: str, examples: Examples) -> ShardRecord:
    """Write a shard to `folder / name` atomically, and return its record."""
    with atomic_path(folder / name) as temporary:
        table = _to_table(examples)
        # Without a dictionary, Parquet stores 16-bit ids in four bytes each.
        with (
            temporary.open("wb") as file,  # Arrow opens no path whose absolute form is not UTF-8
            pq.ParquetWriter(file, table.schema, compression="zstd", use_dictionary=True) as writer,
        ):
            if table.num_rows:  # `datasets` cannot read a row group without rows
                writer.write_table(table, row_group_size=4096)
        digest, size = sha256_file(temporary), temporary.stat().st_size
    return ShardRecord(name, len(examples), len(examples.input_ids), size, digest, content_hash(examples))


def read_shard(folder: Path, record: ShardRecord) -> Examples:
    """Read the examples of a shard, and check its SHA-256 and its numbers of rows and tokens."""
    damage = damage_of(folder, record, check_hash=True)
    if damage is None:
        try:
            with (folder / record.path).open("rb") as file:
                examples = _from_table(pq.read_table(file, use_threads=False))
            if (len(examples), len(examples.input_ids)) == (record.rows, record.tokens):
                return examples
            damage = f"does not have the {record.rows:,} rows and {record.tokens:,} tokens of the manifest"
        except PARQUET_ERRORS as error:
            damage = f"has no readable examples: {str(error) or type(error).__name__}"
    raise _damaged(folder, record, damage)


def damage_of(folder: Path, record: ShardRecord, *, check_hash: bool) -> str | None:
    """Describe how a shard's file differs from its record, or return None if it does not.

    Compares the size, and either the SHA-256 of all bytes (`check_hash`) or the number of rows.
    """
    path = folder / record.path
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"has {size:,} bytes, not {record.bytes:,} as in the manifest"
        if check_hash:
            is_equal = sha256_file(path) == record.sha256
            return None if is_equal else "is damaged: its SHA-256 is not the one in the manifest"
        with path.open("rb") as file:
            rows = pq.read_metadata(file).num_rows
    except FileNotFoundError:
        return "is missing"
    except PARQUET_ERRORS as error:
        return f"is not Parquet: {error}"
    return None if rows == record.rows else f"has {rows:,} rows, not {record.rows:,} as in the manifest"


def _damaged(folder: Path, record: ShardRecord, damage: str) -> DataError:
    remedy = "run the same make-data command again with --verify: it rebuilds the data"
    return DataError(f"the shard {record.path} {damage}", where=str(folder / record.path), remedy=remedy)


def content_hash(examples: Examples) -> str:
    """Return the SHA-256 of the columns' values. It does not depend on the file format."""
    digest = hashlib.sha256()
    for name, column in examples.columns().items():
        # Offsets are hashed as lengths. All values are little-endian, so the hash is the same on every machine.
        values = np.diff(column) if name.endswith("offsets") else column
        is_wide = values.dtype.itemsize > 2
        digest.update(f"{name}:{len(values)};".encode())
        digest.update(np.ascontiguousarray(values, dtype="<u4" if is_wide else "<u2").data)
    return digest.hexdigest()


def _to_table(examples: Examples) -> pa.Table:
    """Return the examples as an Arrow table, without the columns that are None."""
    columns = {
        "input_ids": _list_array(examples.input_ids, examples.offsets),
        "segment_b_start": _array(examples.segment_b_start.astype(np.uint16)),
    }
    if examples.masks is not None:
        columns["masked_lm_positions"] = _list_array(examples.masks.positions, examples.masks.offsets)
        columns["masked_lm_ids"] = _list_array(examples.masks.original_ids, examples.masks.offsets)
    if examples.next_sentence_label is not None:
        columns["next_sentence_label"] = _array(examples.next_sentence_label.astype(np.uint8))
    if examples.starts_word is not None:
        positions = ragged.positions_within(examples.offsets)[examples.starts_word]
        words_before = ragged.offsets_of(examples.starts_word)  # the number of words before each token
        columns["word_starts"] = _list_array(positions.astype(np.uint16), words_before[examples.offsets])
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))


def _from_table(table: pa.Table) -> Examples:
    """Return the examples of a table. Raise ValueError if columns are missing, mistyped or of inconsistent lengths."""
    names = set(table.column_names)
    if missing := {"input_ids", "segment_b_start"} - names:
        raise ValueError(f"there is no column {min(missing)}")
    if ("masked_lm_positions" in names) != ("masked_lm_ids" in names):
        raise ValueError("masked_lm_positions and masked_lm_ids belong together")
    columns = {name: table.column(name).combine_chunks() for name in names & set(_TYPES)}
    for name, column in columns.items():
        values = column.flatten() if pa.types.is_list(column.type) else column
        if column.type not in _TYPES[name] or column.null_count or values.null_count:
            raise ValueError(f"the column {name} is {column.type}, or has nulls")
    input_ids, offsets = _flat(columns["input_ids"])
    masks = starts_word = None
    if "masked_lm_positions" in columns:
        positions, masked_offsets = _flat(columns["masked_lm_positions"])
        original_ids, original_offsets = _flat(columns["masked_lm_ids"])
        if not np.array_equal(masked_offsets, original_offsets):
            raise ValueError("masked_lm_positions and masked_lm_ids have different lengths")
        _check_within(positions, masked_offsets, offsets)
        masks = Masks(positions, original_ids, masked_offsets)
    if "word_starts" in columns:
        word_starts, word_offsets = _flat(columns["word_starts"])
        _check_within(word_starts, word_offsets, offsets)
        starts_word = np.zeros(len(input_ids), dtype=bool)
        starts_word[np.repeat(offsets[:-1], np.diff(word_offsets)) + word_starts] = True
    labels = columns.get("next_sentence_label")
    return Examples(
        input_ids=input_ids,
        offsets=offsets,
        segment_b_start=columns["segment_b_start"].to_numpy(),
        masks=masks,
        next_sentence_label=None if labels is None else labels.to_numpy(),
        starts_word=starts_word,
    )


def _check_within(positions: np.ndarray, position_offsets: np.ndarray, example_offsets: np.ndarray) -> None:
    if (positions >= np.repeat(np.diff(example_offsets), np.diff(position_offsets))).any():
        raise ValueError("a position is beyond its example")


def _list_array(values: np.ndarray, offsets: np.ndarray) -> pa.Array:
    flat = _array(values)
    if offsets[-1] >= 2**31:
        what, remedy = f"a shard would have {offsets[-1]:,} tokens", "lower it: at most 2,147,483,647 fit in a shard"
        raise ConfigError(what, where="data.examples_per_shard", remedy=remedy)
    buffers = [None, pa.py_buffer(offsets.astype(np.int32))]
    return pa.Array.from_buffers(pa.list_(flat.type), len(offsets) - 1, buffers, children=[flat])


def _array(values: np.ndarray) -> pa.Array:
    """Return an Arrow array. `pa.array` would import pandas, which takes longer than writing a small shard."""
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])


def _flat(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of a list column, and int64 offsets that start at 0, unlike those of a sliced column."""
    values = column.flatten().to_numpy()
    return values, ragged.offsets_of(np.diff(column.offsets.to_numpy()))
