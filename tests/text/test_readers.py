"""Records of every format: the same values, each with its position in the source."""

import csv
import gzip
import json
import re
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_pretrain.config import MIN_RECORD_BYTES, DataConfig
from bert_pretrain.errors import InputError
from bert_pretrain.text import text_files
from bert_pretrain.text.parquet import rows_at_once
from bert_pretrain.text.readers import Record, array_elements, read_records, read_texts
from bert_pretrain.text.sources import Source, resolve
from bert_pretrain.text.text_files import ByteRange

ROWS = [{"text": "one", "kind": "a"}, {"text": 'two "quoted"', "kind": ""}, {"text": "三", "kind": "c"}]
LINES = [json.dumps(row) + "\n" for row in ROWS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text(LINES[0] + "\n" + "".join(LINES[1:]))
    (tmp_path / "a.csv").write_text('text,kind\none,a\n\n"two ""quoted""",\n三,c\n', encoding="utf-8-sig")
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "a.tsv").write_text('text\tkind\none\ta\n\ntwo "quoted"\t\n三\tc', encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "a.dataset")
    return tmp_path


@pytest.mark.parametrize(
    ("format_", "positions"),
    [
        ("jsonl", ["line 1", "line 3", "line 4"]),
        ("json", ["record 1", "record 2", "record 3"]),
        ("csv", ["line 2", "line 4", "line 5"]),
        ("tsv", ["line 2", "line 4", "line 5"]),
        ("parquet", ["row 1", "row 2", "row 3"]),
        ("dataset", ["row 1", "row 2", "row 3"]),
    ],
)
def test_every_format_gives_the_same_records_with_their_positions(
    folder: Path, format_: str, positions: list[str]
) -> None:
    location = f"{folder}/a.{format_}"
    part, counts = ByteRange(Source(location, format_, None, "")), Counter[str]()
    found = list(read_records(part, counts))
    assert [record for record, _ in found] == ROWS
    assert [str(position) for _, position in found] == [f"{location}: {position}" for position in positions]
    assert counts == ({} if format_ in ("json", "parquet", "dataset") else {"blank_lines": 1})
    some = [record["kind"] for record, _ in read_records(part, counts, columns=["kind"])]
    assert some == [row["kind"] for row in ROWS]
    if format_ not in ("json", "jsonl"):  # whose records may differ from one to the next
        with pytest.raises(InputError, match=r"no column 'body' \(it has: text, kind\)"):
            list(read_records(part, counts, columns=["body"]))


def read(path: Path, **options: int) -> list[Record]:
    return list(read_records(ByteRange(Source(str(path), path.name.split(".")[1], None, "")), Counter(), **options))


def test_csv_has_blank_lines_before_its_header_and_short_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\n\ntext,kind,n\none\n,b\n")
    (first, position), (second, _) = read(tmp_path / "a.csv")
    assert (first, position.number) == ({"text": "one", "kind": None, "n": None}, 4)
    assert second == {"text": "", "kind": "b", "n": None}


CONFIG = DataConfig(max_record_bytes=MIN_RECORD_BYTES)
LONG = "a" * MIN_RECORD_BYTES


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.jsonl", f'{{"text": "b"}}\n{{"text": "{LONG}"}}\n', "line 2"),
        ("a.jsonl.gz", f'{{"text": "b"}}\n\n{{"text": "{LONG}', "line 3"),
        ("a.json", f'[{{"text": "b"}}, {{"text": "{LONG}"}}]', "record 2"),
        ("a.json.gz", f'[{{"text": "b"}}, {{"text": "{LONG}{LONG}', "record 2"),
        ("a.csv", f"text\nb\n{LONG}a\n", "line 3"),
        ("a.csv", 'text\nb\n"' + "unclosed\n" * (MIN_RECORD_BYTES // 8), "line 3"),
        ("a.csv.gz", 'text\nb\n"' + "开\n" * (MIN_RECORD_BYTES // 4 + 1), "line 3"),
        ("a.tsv", f"text\tn\nb\t1\n{LONG}\t2\n", "line 3"),
    ],
)
def test_a_record_over_the_limit_is_one_message(tmp_path: Path, name: str, content: str, where: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode(), 1) if name.endswith(".gz") else content.encode())
    with pytest.raises(InputError, match=rf"more than {MIN_RECORD_BYTES:,} bytes") as caught:
        read(path, max_bytes=MIN_RECORD_BYTES)
    assert caught.value.where == f"{path}: {where}"
    assert "data.max_record_bytes" in caught.value.remedy


def test_parquet_that_unfolds_to_far_more_than_its_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = pa.DictionaryArray.from_arrays(np.zeros(2300, np.int32), ["a" * 900_000])
    pq.write_table(pa.table({"text": texts}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1000
    with pytest.raises(InputError, match="unfolds to more than") as caught:
        read(path, max_bytes=64 << 20)
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    ("format_", "content"),
    [
        ("jsonl", b"0" * (80 << 20)),
        ("csv", b'text\n"' + (b"0" * 65535 + b"\n") * 1280),
        ("json", b'["' + b"0" * (80 << 20)),
    ],
    ids=["line", "unclosed quote", "unclosed string"],
)
def test_a_small_archive_of_a_huge_record_takes_bounded_memory(tmp_path: Path, format_: str, content: bytes) -> None:
    path = tmp_path / f"a.{format_}.gz"
    path.write_bytes(gzip.compress(content, 1))
    tracemalloc.start()
    with pytest.raises(InputError, match="the record has more than"):
        list(read_texts(ByteRange(Source(str(path), format_, None, "")), CONFIG, Counter()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20


def test_records_up_to_the_limit_are_read(tmp_path: Path) -> None:
    text = LONG[: -len('{"text": ""}')]
    (tmp_path / "a.jsonl").write_text(f'{{"text": "{text}"}}\n' * 3)
    (tmp_path / "a.json").write_text("[" + ", ".join([f'{{"text": "{text}"}}'] * 3) + "]")
    (tmp_path / "a.csv").write_text(f'text\n"{text}\n"\n' * 2)
    for name in ("a.jsonl", "a.json", "a.csv"):
        assert len(read(tmp_path / name, max_bytes=MIN_RECORD_BYTES)) == 3


@pytest.mark.parametrize("rows", [[LONG + "a"], ["b"] * 70 + [LONG + "a"] + ["b"] * 70])
def test_a_row_of_parquet_over_the_limit_is_one_message(tmp_path: Path, rows: list[str]) -> None:
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(InputError, match="the record has more than") as caught:
        read(tmp_path / "a.parquet", max_bytes=MIN_RECORD_BYTES)
    assert caught.value.where == f"{tmp_path}/a.parquet: row {1 + rows.index(LONG + 'a')}"
    assert len(read(tmp_path / "a.parquet")) == len(rows)


def test_metadata_of_columns_are_looked_at_only_where_a_row_group_is_over_the_limit() -> None:
    """Pyarrow ends the process where they are damaged, by one bit."""
    small = SimpleNamespace(total_byte_size=300 * 50, num_rows=50)  # without `column`
    assert rows_at_once(small, ["text"], 15_000, "row 1") == 50
    chunks = [
        SimpleNamespace(path_in_schema=name, total_uncompressed_size=size) for name, size in (("text", 30), ("n", 9))
    ]
    large = SimpleNamespace(total_byte_size=39, num_rows=3, num_columns=2, column=chunks.__getitem__)
    assert rows_at_once(large, ["text"], 20, "row 1") == 2


@pytest.mark.parametrize("depth", [101, 100_000])
def test_a_record_nested_deeply_is_one_message(tmp_path: Path, depth: int) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "one", "n": {"7" * 5000}, "x": {"[" * depth}{"]" * depth}}}\n')
    with pytest.raises(InputError, match="nested") as caught:
        read(tmp_path / "a.jsonl")
    assert caught.value.where == f"{tmp_path}/a.jsonl: line 1"
    (tmp_path / "b.jsonl").write_text(f'{{"n": -{"7" * 5000}, "label": 3}}\n')  # of thousands of digits
    assert read(tmp_path / "b.jsonl")[0][0] == {"n": float("-inf"), "label": 3}


def elements(text: str, size: int) -> list[str]:
    """Return the elements of an array that comes in blocks of so many characters."""
    blocks = [text[begin : begin + size] for begin in range(0, len(text), size)]
    part = ByteRange(Source("a.json", "json", None, ""))
    return [element for element, _ in array_elements(blocks, part, MIN_RECORD_BYTES)]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\[]{}, \n字🙂\x07'),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text('k"\\]', max_size=3), values, max_size=3),
    max_leaves=10,
)


@settings(max_examples=50)
@given(
    values=st.lists(JSON_VALUES, max_size=5),
    size=st.integers(1, 40),
    indent=st.sampled_from([None, 0, 2]),
    data=st.data(),
)
def test_a_json_array_is_cut_into_its_elements_wherever_a_block_ends(
    values: list[object], size: int, indent: int | None, data: st.DataObject
) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=data.draw(st.booleans()))
    assert [json.loads(element) for element in elements(text + "\n", size)] == values


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ('[{}, {"text": "b"', "not JSON"),
        ("[{}, ", "no end"),
        ("[{}, {}] and more", "unexpected 'and more'"),
        ("[{}, {}], [{}]", "unexpected ','"),
        ('[{}, {"text": "a"}}', "unexpected '}'"),
        ("[{}, ]", "not JSON"),
        ('[{}, {"text" "b"}]', "not JSON"),
        ("[{}, 5]", "not an object but int"),
        ("[{}, " + "[" * 100_000, "not JSON"),
    ],
)
@pytest.mark.parametrize("size", [3, 1 << 20])
def test_a_json_array_that_is_none_is_refused_by_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, what: str, size: int
) -> None:
    monkeypatch.setattr(text_files, "BLOCK_BYTES", max(size, len(content) // 9))
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(InputError, match=re.escape(what[:12])) as caught:
        read(tmp_path / "a.json")
    assert caught.value.where == f"{tmp_path}/a.json: record 2"


def test_a_mistake_in_a_long_json_array_is_found_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the limit of a record, up to which it might continue; and memory is bounded."""
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 1 << 16)
    record = json.dumps({"text": "\\ 字" * 2000})
    (tmp_path / "a.json").write_text(f'[{", ".join([record] * 300)}, {{"text" 5}}, {", ".join([record] * 600)}]')
    tracemalloc.start()
    with pytest.raises(InputError, match="not JSON") as caught:
        for _ in read_records(ByteRange(Source(f"{tmp_path}/a.json", "json", None, "")), Counter()):
            pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.where == f"{tmp_path}/a.json: record 301"
    assert peak < 1 << 20 < (tmp_path / "a.json").stat().st_size / 4


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_is_read_by_the_delimiter_of_its_header(tmp_path: Path, delimiter: str) -> None:
    rows = [
        ["id", "te,xt;", "kind"],
        ["1", '<p class="a">One, two; three.</p>\nFour\t"five".', "a"],
        ["2", "Six.", "b"],
    ]
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    assert read_documents(tmp_path / "a.csv", ("te,xt;",)) == [rows[1][1], rows[2][1]]
    (tmp_path / "b.csv").write_text('text\n"One; two."\nThree\n')  # one column has no delimiter
    assert read_documents(tmp_path / "b.csv", "text") == ["One; two.", "Three"]
    (tmp_path / "c.tsv").write_text('n\ttext\n1\tOne, "two"; three.\n')
    assert read_documents(tmp_path / "c.tsv", "text") == ['One, "two"; three.']


def read_documents(path: Path, field: str | tuple[str, ...]) -> list[str | None]:
    (source,) = resolve([str(path)], DataConfig())
    return list(read_texts(ByteRange(source), DataConfig(text_field=field), Counter()))
