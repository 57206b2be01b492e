"""Records of every format with their positions."""

import csv
import gzip
import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_pretrain.config import MIN_RECORD_BYTES, DataConfig
from bert_pretrain.errors import InputError
from bert_pretrain.text import text_files
from bert_pretrain.text.readers import Record, json_values, read_records, read_texts
from bert_pretrain.text.sources import Source
from bert_pretrain.text.text_files import ByteRange

from .test_documents import sources_of, write

ROWS = [{"text": "NA", "kind": "007"}, {"text": 'two "quoted"', "kind": ""}, {"text": "三", "kind": "None"}]
LINES = [json.dumps(row) + "\n" for row in ROWS]


def write_tables(folder: Path) -> Path:
    """Write ROWS in every format, some with blank lines."""
    (folder / "a.jsonl").write_text(LINES[0] + "\n" + "".join(LINES[1:]))
    (folder / "a.csv").write_text('\ntext,kind\nNA,007\n\n"two ""quoted""",\n三,None\n', encoding="utf-8-sig")
    (folder / "a.json").write_text(json.dumps(ROWS, indent=1))
    (folder / "a.tsv").write_text('text\tkind\nNA\t007\n\ntwo "quoted"\t\n三\tNone', encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "a.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "a.dataset")
    return folder


def part_of(path: Path) -> ByteRange:
    return ByteRange(Source(str(path), path.name.split(".")[1]))


def read(path: Path, **options: Any) -> list[Record]:
    return list(read_records(part_of(path), Counter(), **options))


def texts_of(path: Path, **settings: Any) -> list[str | None]:
    """Return the texts of a file by the layout that is found in it."""
    (source,) = sources_of(path)
    return list(read_texts(ByteRange(source), DataConfig(**settings), Counter()))


@pytest.mark.parametrize(
    ("format_", "positions"),
    [
        ("jsonl", "line 1 3 4"),
        ("json", "record 1 2 3"),
        ("csv", "line 3 5 6"),
        ("tsv", "line 2 4 5"),
        ("parquet", "row 1 2 3"),
        ("dataset", "row 1 2 3"),
    ],
)
def test_every_format_gives_the_same_records_with_their_positions(tmp_path, format_: str, positions: str) -> None:
    path, (unit, *numbers) = write_tables(tmp_path) / f"a.{format_}", positions.split()
    counts: Counter[str] = Counter()
    found = list(read_records(part_of(path), counts))
    assert [record for record, _ in found] == ROWS
    assert [str(position) for _, position in found] == [f"{path}: {unit} {number}" for number in numbers]
    assert counts == ({"blank_lines": 1} if unit == "line" else {})
    assert [record["kind"] for record, _ in read(path, columns=["kind"])] == [row["kind"] for row in ROWS]
    if format_ not in ("json", "jsonl"):  # whose records may differ from one to the next
        with pytest.raises(InputError, match=r"'body' \(it has: text, kind\)"):
            read(path, columns=["body"])


def test_a_carriage_return_inside_a_line_of_tsv_is_a_blank(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", b"text\tkind\r\ngood\rfilm\ta\r\nbad\t\r")
    records = [{"text": "good film", "kind": "a"}, {"text": "bad", "kind": ""}]
    assert [record for record, _ in read(path)] == records


LONG = "a" * MIN_RECORD_BYTES


LONG_ARRAY = ", ".join([json.dumps({"text": "\\ 字" * 2000})] * 300)


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.jsonl", f'{{"text": "b"}}\n{{"text": "{LONG}"}}\n'.encode(), "line 2"),
        ("a.json", f'[{{"text": "b"}}, {{"text": "{LONG}"}}]'.encode(), "record 2"),
        ("a.tsv", f"text\tn\nb\t1\n{LONG}\t2\n".encode(), "line 3"),
        ("a.jsonl.gz", b"0" * (80 << 20), "line 1"),
        ("a.csv.gz", b'text\nb\n"' + (b"0" * 65535 + b"\n") * 1280, "line 3"),
        ("a.json.gz", b'["' + b"0" * (80 << 20), "record 1"),
        # Found where it is, not at the limit of a record, up to which it might continue.
        ("a.json.gz", f'[{LONG_ARRAY}, {{"text" 5}}, {LONG_ARRAY}, {LONG_ARRAY}]'.encode(), "record 301"),
    ],
    ids=["line", "element", "row", "huge line", "unclosed quote", "unclosed string", "long array"],
)
def test_record_over_the_limit_is_refused_in_bounded_memory(tmp_path, name: str, content: bytes, where: str) -> None:
    path = write(tmp_path / name, gzip.compress(content, 1) if name.endswith(".gz") else content)
    config = DataConfig(max_record_bytes=MIN_RECORD_BYTES)
    tracemalloc.start()
    with pytest.raises(InputError, match=f"{MIN_RECORD_BYTES:,} bytes") as caught:
        list(read_texts(part_of(path), config, Counter()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.where == f"{path}: {where}"
    assert peak < 64 << 20


@pytest.mark.parametrize("rows", [[LONG + "a"], ["b"] * 70 + [LONG + "a"] + ["b"] * 70])
def test_parquet_row_over_the_limit_is_refused(tmp_path: Path, rows: list[str]) -> None:
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(InputError, match="more than") as caught:
        read(tmp_path / "a.parquet", max_bytes=MIN_RECORD_BYTES)
    assert caught.value.where == f"{tmp_path}/a.parquet: row {1 + rows.index(LONG + 'a')}"
    assert len(read(tmp_path / "a.parquet")) == len(rows)


@pytest.mark.parametrize("depth", [101, 100_000])
def test_deeply_nested_record_is_refused(tmp_path: Path, depth: int) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"text": "one", "x": {"[" * depth}{"]" * depth}}}\n')
    with pytest.raises(InputError, match="nested") as caught:
        read(path)
    assert caught.value.where == f"{path}: line 1"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\[]{}, \n字🙂\x07'),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text('k"\\]', max_size=3), values, max_size=3),
    max_leaves=10,
)


@given(st.lists(JSON_VALUES, max_size=5), st.integers(1, 40), st.sampled_from([None, 0, 2]), st.booleans())
def test_elements_of_a_json_array_are_independent_of_blocks(values, size, indent, is_ascii) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=is_ascii) + "\n"
    blocks = [text[begin : begin + size] for begin in range(0, len(text), size)]
    found = json_values(blocks, part_of(Path("a.json")), MIN_RECORD_BYTES)
    assert [json.loads(element) for element, _ in found] == values


@pytest.mark.parametrize(
    "content",
    [
        '[{}, {"text": "b"', "[{}, ", "[{}, {}] and more", "[{}, {}], [{}]", '[{}, {"text": "a"}}', "[{}, ]",
        '[{}, {"text" "b"}]', "[{}, 5]", "[{}, " + "[" * 100_000,
    ],
    ids=range(9),
)  # fmt: skip
@pytest.mark.parametrize("size", [3, 1 << 20])
def test_invalid_json_array_is_refused_with_the_record(tmp_path, monkeypatch, content, size) -> None:
    monkeypatch.setattr(text_files, "BLOCK_BYTES", max(size, len(content) // 9))
    with pytest.raises(InputError) as caught:
        read(write(tmp_path / "a.json", content))
    assert caught.value.where == f"{tmp_path}/a.json: record 2"


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_is_read_by_the_delimiter_of_its_header(tmp_path: Path, delimiter: str) -> None:
    text = '<p class="a">One, two; three.</p>\nFour\t"five".'
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=delimiter).writerows(
            [["id", "te,xt;", "kind"], ["1", text, "a"], ["2", "Six.", "b"]]
        )
    assert texts_of(tmp_path / "a.csv", text_field=("te,xt;",)) == [text, "Six."]


def test_other_delimiters_are_text(tmp_path: Path) -> None:
    assert texts_of(write(tmp_path / "a.csv", 'text\n"One; two."\nThree\n')) == ["One; two.", "Three"]
    assert texts_of(write(tmp_path / "a.tsv", 'n\ttext\n1\tOne, "two"; three.\n')) == ['One, "two"; three.']


def test_csv_with_two_columns_of_one_name_is_refused_if_they_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,id,id,,\nOne.,1,2,3,4\n")
    assert texts_of(path) == ["One."]
    for columns in ((), ("id",)):  # () reads all columns
        with pytest.raises(InputError, match="two columns 'id'"):
            read(path, columns=columns)


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
def test_objects_over_several_lines_are_records(tmp_path: Path, monkeypatch, size: int) -> None:
    rows = [{"text": "a {\n", "n": [1, {}]}, {"text": "b"}]
    monkeypatch.setattr(text_files, "BLOCK_BYTES", size)
    for number in (1, 2):
        path = write(tmp_path / f"{number}.json", "\n".join(json.dumps(row, indent=2) for row in rows[:number]))
        found = read(path)
        assert [record for record, _ in found] == rows[:number]
        assert str(found[-1][1]) == f"{path}: record {number}"
    with pytest.raises(InputError, match="record 2"):
        read(write(tmp_path / "3.json", json.dumps(rows[0], indent=2) + "\n{"))
