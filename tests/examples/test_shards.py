"""Shards round-trip, and shards or manifests that are damaged or inconsistent are errors."""

import itertools
import shutil
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_pretrain import ragged
from bert_pretrain.errors import DataError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.examples import Examples, Masks, concatenate, with_error
from bert_pretrain.examples.shards import ShardRecord, content_hash, read_shard, write_shard
from bert_pretrain.inspect.inspect import inspect
from bert_pretrain.io.files import read_json, sha256_file, write_checked_json


def table(
    rows: int, seed: int = 0, dtype: type = np.uint16, *, is_masked=True, has_labels=True, has_words=False
) -> Examples:
    rng, most = np.random.default_rng(seed), np.iinfo(dtype).max
    offsets = ragged.offsets_of(rng.integers(5, 40, rows))
    masked_offsets = ragged.offsets_of(rng.integers(1, 5, rows))
    num_masks = masked_offsets[-1]
    positions = rng.integers(0, 5, num_masks).astype(np.uint16)
    masks = Masks(positions, rng.integers(0, most, num_masks).astype(dtype), masked_offsets)
    return Examples(
        input_ids=rng.integers(0, most, offsets[-1]).astype(dtype),
        offsets=offsets,
        segment_b_start=rng.integers(2, 5, rows).astype(np.uint16),
        masks=masks if is_masked else None,
        next_sentence_label=rng.integers(0, 2, rows).astype(np.uint8) if has_labels else None,
        starts_word=rng.random(offsets[-1]) < 0.7 if has_words else None,
    )


KINDS = {  # the columns of each objective
    "pairs": {},
    "full sentences": {"has_labels": False},
    "dynamic masks": {"is_masked": False},
    "dynamic masks of segmented words": {"is_masked": False, "has_words": True, "has_labels": False},
}


def assert_equal(first: Examples, second: Examples) -> None:
    ours, theirs = first.columns(), second.columns()
    assert list(ours) == list(theirs)
    for name, column in ours.items():
        assert np.array_equal(column, theirs[name]), name
        assert column.dtype == theirs[name].dtype, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "dtype"), [(0, np.uint16), (1, np.uint32), (5000, np.uint16), (5000, np.uint32)])
def test_a_shard_round_trips(tmp_path: Path, rows: int, dtype: type, kind: str) -> None:
    examples = table(rows, dtype=dtype, **KINDS[kind])
    record = write_shard(tmp_path, "00000.parquet", examples)
    assert (record.rows, record.tokens) == (rows, len(examples.input_ids))
    assert record.bytes == (tmp_path / record.path).stat().st_size
    found = read_shard(tmp_path, record)
    assert_equal(found, examples)
    assert content_hash(found) == record.content_hash
    assert write_shard(tmp_path, "00001.parquet", examples).sha256 == record.sha256


def test_a_shard_without_rows_does_not_stop_datasets(tmp_path: Path) -> None:
    for number, rows in enumerate((3, 0)):
        write_shard(tmp_path, f"{number}.parquet", table(rows))
    files = {"train": [f"{tmp_path}/{number}.parquet" for number in range(2)]}
    found = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))
    assert found["train"].num_rows == 3


def test_the_parquet_schema(tmp_path: Path) -> None:
    write_shard(tmp_path, "a.parquet", table(3))
    schema = pq.read_schema(tmp_path / "a.parquet")
    assert {field.name: str(field.type) for field in schema} == {
        "input_ids": "list<element: uint16>",
        "segment_b_start": "uint16",
        "masked_lm_positions": "list<element: uint16>",
        "masked_lm_ids": "list<element: uint16>",
        "next_sentence_label": "uint8",
    }
    column = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0).column(0)
    assert column.compression == "ZSTD"
    assert column.has_dictionary_page
    write_shard(tmp_path, "b.parquet", table(3, **KINDS["dynamic masks of segmented words"]))
    schema = pq.read_schema(tmp_path / "b.parquet")
    assert schema.names == ["input_ids", "segment_b_start", "word_starts"]
    assert str(schema.field("word_starts").type) == "list<element: uint16>"


@pytest.mark.parametrize("kind", KINDS)
def test_the_content_hash_depends_on_every_column(kind: str) -> None:
    columns, hashes = table(9, **KINDS[kind]).columns(), {content_hash(table(9, **KINDS[kind]))}
    for name in columns:
        examples = table(9, **KINDS[kind])
        examples.columns()[name][-1] ^= True
        hashes.add(content_hash(examples))
    assert len(hashes) == 1 + len(columns)


@given(st.lists(st.integers(0, 19), max_size=30), st.integers(0, 9), st.sampled_from(list(KINDS.values())))
def test_take_and_concatenate(rows, seed: int, kind) -> None:
    tables = [table(number, seed + number, **kind) for number in (12, 0, 8)]
    examples = concatenate(tables)
    assert_equal(examples.take(np.arange(12)), tables[0])
    assert_equal(examples.take(np.arange(12, 20)), tables[2])
    taken = examples.take(np.array(rows, dtype=np.int64))
    assert len(taken) == len(rows)
    for place, row in enumerate(rows):
        assert_equal(taken.take(np.array([place])), examples.take(np.array([row])))


@given(st.lists(st.integers(0, 9), max_size=20))
def test_ragged_arrays(lengths: list[int]) -> None:
    offsets = ragged.offsets_of(np.array(lengths, dtype=np.int64))
    values = np.arange(offsets[-1])
    lists = [values[begin:end].tolist() for begin, end in itertools.pairwise(offsets)]
    assert list(map(len, lists)) == lengths
    assert ragged.positions_within(offsets).tolist() == [place for length in lengths for place in range(length)]
    order = np.arange(len(lengths))[::-1]
    taken, taken_offsets = ragged.take(values, offsets, order)
    assert taken.tolist() == [value for row in order for value in lists[row]]
    assert np.diff(taken_offsets).tolist() == lengths[::-1]


LISTS = pa.list_(pa.uint16())
# Changes of columns that make a valid Parquet file an invalid shard, and a part of the error.
INVALID: dict[str, tuple[dict[str, pa.Array | None], str]] = {
    "a column less": ({"segment_b_start": None}, "segment_b_start"),
    "masks without ids": ({"masked_lm_ids": None}, "masked_lm_ids"),
    "texts": ({"input_ids": pa.array([["a"]] * 3)}, "list<"),
    "numbers for lists": ({"input_ids": pa.array([1, 2, 3], pa.uint16())}, "uint16"),
    "nulls": ({"segment_b_start": pa.array([1, None, 2], pa.uint16())}, "nulls"),
    "nulls in lists": ({"input_ids": pa.array([[1], [None], [2]], LISTS)}, "nulls"),
}


@pytest.mark.parametrize("kind", INVALID)
def test_parquet_files_without_examples_are_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.parquet"
    write_shard(tmp_path, path.name, table(3))
    content = pq.read_table(path)
    changes, what = INVALID[kind]
    columns = {**dict(zip(content.column_names, content.columns, strict=True)), **changes}
    pq.write_table(pa.table({name: column for name, column in columns.items() if column is not None}), path)
    record = ShardRecord(path.name, 3, 1, path.stat().st_size, sha256_file(path), "")
    with pytest.raises(DataError, match=what) as error:
        read_shard(tmp_path, record)
    assert error.value.where == str(path)


FIRST = ("splits", "train", "shards", 0)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("splits",), []),
        (("splits", "train", "shards"), 7),
        *(((*FIRST, "path"), path) for path in ("../../elsewhere.parquet", "/etc/passwd")),
        *(
            ((*FIRST, name), value)
            for name, value in (("rows", "31"), ("bytes", -1), ("more", 1), ("content_hash", "x7"))
        ),
        *(((name,), value) for name, value in (("tokenizer", None), ("inputs", {}), ("corpus", 1.5))),
        (("config", "data"), "short"),
    ],
)
def test_an_invalid_manifest_is_an_error(data_folder: Path, tmp_path: Path, keys, value) -> None:
    folder = tmp_path / "data"
    shutil.copytree(data_folder, folder)
    content = inner = read_json(folder / "manifest.json")
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    write_checked_json(folder / "manifest.json", content)
    for read in (inspect, DataFolder.open):
        with pytest.raises(DataError) as error:
            read(folder)
        assert error.value.where == str(folder / "manifest.json")
        assert ".".join(map(str, keys)) in error.value.what


@pytest.mark.parametrize(
    ("examples", "documents", "expected"),
    [
        (400, None, "64.0% ± 2.4%"),
        (400, 400, "64.0% ± 2.4%"),
        (400, 20, "64.0% ± 3.0%"),  # 20 pairs of each document count as 400 / 1.57 pairs
        (1302, 20, "63.2% ± 2.3%"),
        (1302, 600, "63.2%"),
        (None, None, "64.0%"),
    ],
)
def test_standard_errors_count_documents(examples: int | None, documents: int | None, expected: str) -> None:
    accuracy = 0.632 if examples == 1302 else 0.64
    assert with_error(accuracy, examples, documents) == expected
