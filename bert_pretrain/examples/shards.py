"""A data folder: Parquet shards of examples, written atomically, read as columns, checked against the manifest.

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
from bert_pretrain.errors import ConfigError, DataError, first_problem
from bert_pretrain.examples.examples import Examples, Masks
from bert_pretrain.io.files import atomic_path, sha256_file
from bert_pretrain.io.manifest import MANIFEST, read_manifest
from bert_pretrain.text import ragged
from bert_pretrain.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bert_pretrain.examples.padded import PaddedBatches

ROW_GROUP_ROWS = 4096
FOOTER_READERS = 16
"""Footers that are read at once: on a slow disk or a network, thousands of small shards are a matter of waiting."""
MASKING_KEYS = {"max_seq_length", "masked_lm_prob", "max_predictions_per_seq", "whole_word_mask"}
"""Keys that decide, together with the tokenizer, which masks are drawn for given examples."""
UNREADABLE = (pa.ArrowException, OSError, ValueError)
"""Exceptions of pyarrow for files that are not Parquet; a name in a footer may not be UTF-8."""
REBUILD = "run the make-data command that wrote it again, with --verify: it builds the data again"


_Number = Annotated[int, Field(ge=0, strict=True)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]*$")]
_IDS = (pa.list_(pa.uint16()), pa.list_(pa.uint32()))
_TYPES: dict[str, tuple[pa.DataType, ...]] = {
    "input_ids": _IDS,
    "segment_b_start": (pa.uint16(),),
    "masked_lm_positions": (pa.list_(pa.uint16()),),
    "masked_lm_ids": _IDS,
    "next_sentence_label": (pa.uint8(),),
    "word_starts": (pa.list_(pa.uint16()),),
}
"""The accepted types of each column in Parquet."""


@with_config(extra="forbid")
@dataclass(frozen=True)
class ShardRecord:
    """The entry of one shard in the manifest."""

    path: Annotated[str, Field(pattern=r"^([\w-]+/)?[\w-]+\.parquet$")]
    """Relative to the data folder, for example `train/00003.parquet`."""
    rows: _Number
    tokens: _Number
    bytes: _Number
    sha256: _Digest
    """Hash of the file; equal for equal versions of pyarrow."""
    content_hash: _Digest
    """Hash of the columns' values; equal across versions and machines."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class _Split(BaseModel):
    rows: _Number
    tokens: _Number
    shards: list[ShardRecord]
    statistics: dict[str, Any]


class _Contents(BaseModel):
    """The entries that a manifest of a data folder must have to be opened."""

    inputs: list[dict[str, Any]]
    corpus: dict[str, Any]
    splits: dict[str, _Split]
    tokenizer: dict[str, Any]
    config: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class DataFolder:
    """A finished data folder: its manifest, checked, and access to its shards."""

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
        """Read and check the manifest, and every shard's size and footer, or with `verify` its SHA-256, against it."""
        folder = DataFolder(path, read_manifest(path, "data", flag))
        records = (*folder.shards("train"), *folder.shards("validation"))
        with ThreadPoolExecutor(FOOTER_READERS) as readers:
            for record, damage in zip(
                records, readers.map(partial(damage_of, path, whole=verify), records), strict=True
            ):
                if damage is not None:
                    raise _damaged(path, record, damage)
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
        if tokenizer.hash != self.manifest["tokenizer"].get("hash"):
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
            return DataConfig.model_validate(self.manifest["config"].get("data"))
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

    @cached_property
    def content_hash(self) -> str:
        """A hash of all examples in order, and of the masking rule if masks are drawn in training."""
        hashes = [record.content_hash for split in ("train", "validation") for record in self.shards(split)]
        if self.config.masking == "dynamic":
            hashes.append(self.config.model_dump_json(include=MASKING_KEYS))
        return hashlib.sha256("".join(hashes).encode()).hexdigest()


def write_shard(folder: Path, name: str, examples: Examples) -> ShardRecord:
    """Write one shard to `folder / name`, whole or not at all, and return its record."""
    with atomic_path(folder / name) as temporary:
        table = _to_table(examples)
        pq.write_table(table, temporary, compression="zstd", use_dictionary=True, row_group_size=ROW_GROUP_ROWS)
        digest, size = sha256_file(temporary), temporary.stat().st_size
    return ShardRecord(name, len(examples), len(examples.input_ids), size, digest, content_hash(examples))


def read_shard(folder: Path, record: ShardRecord) -> Examples:
    """Check a shard's SHA-256 and counts, and return its examples."""
    damage = damage_of(folder, record, whole=True)
    if damage is None:
        try:
            with (folder / record.path).open("rb") as file:
                examples = _from_table(pq.read_table(file, use_threads=False))
            if (len(examples), len(examples.input_ids)) == (record.rows, record.tokens):
                return examples
            damage = f"has other numbers of rows and tokens than the manifest: {record.rows:,} and {record.tokens:,}"
        except UNREADABLE as error:
            damage = f"holds no examples: {str(error) or type(error).__name__}"
    raise _damaged(folder, record, damage)


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


def _damaged(folder: Path, record: ShardRecord, damage: str) -> DataError:
    return DataError(f"the shard {record.path} {damage}", where=str(folder / record.path), remedy=REBUILD)


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


def _to_table(examples: Examples) -> pa.Table:
    """Return the columns as in Parquet; those that an objective does not need are absent."""
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
        before = np.concatenate([[0], np.cumsum(examples.starts_word, dtype=np.int64)])  # words before each token
        columns["word_starts"] = _list_array(positions.astype(np.uint16), before[examples.offsets])
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))


def _from_table(table: pa.Table) -> Examples:
    """Return the examples of a table; ValueError where columns are missing, of other types, or disagree in lengths."""
    found = set(table.column_names)
    if missing := {"input_ids", "segment_b_start"} - found:
        raise ValueError(f"there is no column {min(missing)}")
    if ("masked_lm_positions" in found) != ("masked_lm_ids" in found):
        raise ValueError("masked_lm_positions and masked_lm_ids belong together")
    columns = {name: table.column(name).combine_chunks() for name in found & set(_TYPES)}
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


def _check_within(positions: np.ndarray, offsets: np.ndarray, of_examples: np.ndarray) -> None:
    if (positions >= np.repeat(np.diff(of_examples), np.diff(offsets))).any():
        raise ValueError("a position is beyond its example")


def _list_array(values: np.ndarray, offsets: np.ndarray) -> pa.Array:
    flat = _array(values)
    if offsets[-1] >= 2**31:
        what, remedy = f"a shard has {offsets[-1]:,} tokens", "lower it: fewer than 2,147,483,648 fit"
        raise ConfigError(what, where="data.examples_per_shard", remedy=remedy)
    begins = pa.py_buffer(offsets.astype(np.int32))
    return pa.Array.from_buffers(pa.list_(flat.type), len(offsets) - 1, [None, begins], children=[flat])


def _array(values: np.ndarray) -> pa.Array:
    """Return an array as Arrow's; `pa.array` would import pandas, which takes longer than many a shard."""
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])


def _flat(column: Any) -> tuple[np.ndarray, np.ndarray]:
    values = column.flatten().to_numpy()
    return values, ragged.offsets_of(np.diff(column.offsets.to_numpy()))
