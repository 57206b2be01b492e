"""Parquet shards of examples, written atomically, read as columns and compared with their records."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, with_config

from bert_pretrain import ragged
from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.examples.examples import Examples, Masks
from bert_pretrain.io.files import atomic_path, sha256_file

# Raised by pyarrow for files that are not Parquet or lack columns. ValueError: a column name is not UTF-8.
PARQUET_ERRORS = (pa.ArrowException, OSError, ValueError, KeyError)

Number = Annotated[int, Field(ge=0, strict=True)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]*$")]
_IDS = (pa.list_(pa.uint16()), pa.list_(pa.uint32()))
_TYPES = {
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
    rows: Number
    tokens: Number
    bytes: Number
    sha256: Digest  # of the file; may change with the version of pyarrow
    content_hash: Digest  # of the columns' values; independent of the machine and of the version of pyarrow


def write_shard(folder: Path, name: str, examples: Examples) -> ShardRecord:
    """Write a shard to `folder / name` atomically, and return its record."""
    table = _to_table(examples)
    with atomic_path(folder / name) as temporary:
        # Without a dictionary, Parquet stores 16-bit ids in four bytes each.
        with (
            temporary.open("wb") as file,  # Arrow opens no path whose absolute form is not UTF-8
            pq.ParquetWriter(file, table.schema, compression="zstd", use_dictionary=True) as writer,
        ):
            if table.num_rows:  # `datasets` cannot read a row group without rows
                writer.write_table(table, row_group_size=4096)
        return ShardRecord(
            path=name,
            rows=len(examples),
            tokens=len(examples.input_ids),
            bytes=temporary.stat().st_size,
            sha256=sha256_file(temporary),
            content_hash=content_hash(examples),
        )


def read_shard(folder: Path, record: ShardRecord) -> Examples:
    """Read the examples of a shard, and check its SHA-256 and its numbers of rows and tokens."""
    damage = damage_of(folder, record, check_hash=True)
    if damage is not None:
        raise damaged(folder, record, damage)
    try:
        with (folder / record.path).open("rb") as file:
            examples = _from_table(pq.read_table(file, use_threads=False))
    except PARQUET_ERRORS as error:
        raise damaged(folder, record, f"has no readable examples: {error}") from error
    if len(examples) != record.rows or len(examples.input_ids) != record.tokens:
        damage = f"does not have the {record.rows:,} rows and {record.tokens:,} tokens of the manifest"
        raise damaged(folder, record, damage)
    return examples


def damage_of(folder: Path, record: ShardRecord, *, check_hash: bool) -> str | None:
    """Describe how a shard's file differs from its record, or return None if it does not.

    Compares the size and, with `check_hash`, the SHA-256 of all bytes.
    """
    path = folder / record.path
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"has {size:,} bytes, not {record.bytes:,} as in the manifest"
        if check_hash and sha256_file(path) != record.sha256:
            return "is damaged: its SHA-256 is not the one in the manifest"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"is not readable: {error}"
    return None


def damaged(folder: Path, record: ShardRecord, damage: str) -> DataError:
    """Return the error for a shard, given the result of `damage_of`."""
    return DataError(
        f"the shard {record.path} {damage}",
        where=str(folder / record.path),
        remedy="run the same make-data command again with --verify: it rebuilds the data",
    )


def content_hash(examples: Examples) -> str:
    """Return the SHA-256 of the columns' values. It does not depend on the file format."""
    digest = hashlib.sha256()
    for name, column in examples.columns().items():
        # Offsets are hashed as lengths. All values are little-endian, so the hash is the same on every machine.
        values = np.diff(column) if name.endswith("offsets") else column
        dtype = "<u4" if values.dtype.itemsize > 2 else "<u2"
        digest.update(f"{name}:{len(values)};".encode())
        digest.update(np.ascontiguousarray(values, dtype=dtype).data)
    return digest.hexdigest()


def _to_table(examples: Examples) -> pa.Table:
    """Return the examples as an Arrow table, without the columns that are None."""
    columns = {
        "input_ids": _list_array(examples.input_ids, examples.offsets),
        "segment_b_start": _array(examples.segment_b_start),
    }
    if examples.masks is not None:
        columns["masked_lm_positions"] = _list_array(examples.masks.positions, examples.masks.offsets)
        columns["masked_lm_ids"] = _list_array(examples.masks.original_ids, examples.masks.offsets)
    if examples.next_sentence_label is not None:
        columns["next_sentence_label"] = _array(examples.next_sentence_label)
    if examples.starts_word is not None:
        positions = ragged.positions_within(examples.offsets)[examples.starts_word]
        words_before = ragged.offsets_of(examples.starts_word)  # the number of words before each token
        columns["word_starts"] = _list_array(positions.astype(np.uint16), words_before[examples.offsets])
    return pa.table(columns)


def _array(values: np.ndarray) -> pa.Array:
    """Return an Arrow array. `pa.array` would import pandas, which takes longer than writing a small shard."""
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])


def _list_array(values: np.ndarray, offsets: np.ndarray) -> pa.Array:
    if offsets[-1] >= 2**31:  # Parquet lists have 32-bit offsets
        raise ConfigError("too many tokens in a shard", where="data.examples_per_shard", remedy="lower it")
    return pa.ListArray.from_arrays(_array(offsets.astype(np.int32)), _array(values))


def _from_table(table: pa.Table) -> Examples:
    """Return the examples of a table. Raise one of PARQUET_ERRORS if columns are missing or have other types."""
    values: dict[str, np.ndarray] = {}
    offsets: dict[str, np.ndarray] = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if column.type not in _TYPES[name]:
            raise ValueError(f"the column {name} is {column.type}")
        if pa.types.is_list(column.type):
            offsets[name] = ragged.offsets_of(np.diff(column.offsets.to_numpy()))
            column = column.flatten()
        values[name] = column.to_numpy()
    masks = starts_word = None
    if "masked_lm_positions" in values:
        masks = Masks(values["masked_lm_positions"], values["masked_lm_ids"], offsets["masked_lm_positions"])
    if "word_starts" in values:
        rows = ragged.lists_of(offsets["word_starts"])
        starts_word = np.zeros(len(values["input_ids"]), dtype=bool)
        starts_word[offsets["input_ids"][rows] + values["word_starts"]] = True
    return Examples(
        values["input_ids"],
        offsets["input_ids"],
        values["segment_b_start"],
        masks,
        values.get("next_sentence_label"),
        starts_word,
    )
