"""Records of every format with their positions."""

import csv
import gzip
import json
import tracemalloc
from collections import Counter
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_pretrain.config import MIN_RECORD_BYTES, DataConfig
from bert_pretrain.errors import InputError
from bert_pretrain.text import readers, text_files
from bert_pretrain.text.readers import Record, json_values, read_records, read_texts
from bert_pretrain.text.sources import Source, examined, resolve
from bert_pretrain.text.text_files import ByteRange

from .test_documents import write

ROWS = [{"text": "one", "kind": "a"}, {"text": 'two "quoted"', "kind": ""}, {"text": "三", "kind": "c"}]
LINES = [json.dumps(row) + "\n" for row in ROWS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text(LINES[0] + "\n" + "".join(LINES[1:]))
    (tmp_path / "a.csv").write_text('\ntext,kind\none,a\n\n"two ""quoted""",\n三,c\n', encoding="utf-8-sig")
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "a.tsv").write_text('text\tkind\none\ta\n\ntwo "quoted"\t\n三\tc', encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "a.dataset")
    return tmp_path


@pytest.mark.parametrize(
    ("format_", "positions"),
    [
        ("jsonl", "line 1 3 4"), ("json", "record 1 2 3"), ("csv", "line 3 5 6"), ("tsv", "line 2 4 5"),
        ("parquet", "row 1 2 3"), ("dataset", "row 1 2 3"),
    ],
)  # fmt: skip
def test_every_format_gives_the_same_records_with_their_positions(folder: Path, format_: str, positions: str) -> None:
    location, (unit, *numbers) = f"{folder}/a.{format_}", positions.split()
    part, counts = ByteRange(Source(location, format_, None, "")), Counter[str]()
    found = list(read_records(part, counts))
    assert [record for record, _ in found] == ROWS
    assert [str(position) for _, position in found] == [f"{location}: {unit} {number}" for number in numbers]
    assert counts == ({"blank_lines": 1} if unit == "line" else {})
    some = [record["kind"] for record, _ in read_records(part, counts, columns=["kind"])]
    assert some == [row["kind"] for row in ROWS]
    if format_ not in ("json", "jsonl"):  # whose records may differ from one to the next
        with pytest.raises(InputError, match=r"'body' \(it has: text, kind\)"):
            list(read_records(part, counts, columns=["body"]))


def read(path: Path, **options: int) -> list[Record]:
    return list(read_records(ByteRange(Source(str(path), path.name.split(".")[1], None, "")), Counter(), **options))


def test_a_carriage_return_inside_a_line_of_tsv_is_a_blank(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(b"text\tkind\r\ngood\rfilm\ta\r\nbad\t\r")
    assert [record for record, _ in read(tmp_path / "a.tsv")] == [
        {"text": "good film", "kind": "a"}, {"text": "bad", "kind": ""},
    ]  # fmt: skip


LONG = "a" * MIN_RECORD_BYTES


LONG_ARRAY = ", ".join([json.dumps({"text": "\\ 字" * 2000})] * 300)


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.jsonl", f'{{"text": "b"}}\n{{"text": "{LONG}"}}\n'.encode(), "line 2"),
        ("a.json", f'[{{"text": "b"}}, {{"text": "{LONG}"}}]'.encode(), "record 2"),
        ("a.csv", b'text\nb\n"' + b"unclosed\n" * (MIN_RECORD_BYTES // 8), "line 3"),
        ("a.tsv", f"text\tn\nb\t1\n{LONG}\t2\n".encode(), "line 3"),
        ("a.jsonl.gz", b"0" * (80 << 20), "line 1"),
        ("a.csv.gz", b'text\n"' + (b"0" * 65535 + b"\n") * 1280, "line 2"),
        ("a.json.gz", b'["' + b"0" * (80 << 20), "record 1"),
        # Found where it is, not at the limit of a record, up to which it might continue.
        ("a.json.gz", f'[{LONG_ARRAY}, {{"text" 5}}, {LONG_ARRAY}, {LONG_ARRAY}]'.encode(), "record 301"),
    ],
    ids=["line", "element", "quote", "row", "huge line", "unclosed quote", "unclosed string", "long array"],
)
def test_record_over_the_limit_is_refused_in_bounded_memory(
    tmp_path: Path, name: str, content: bytes, where: str
) -> None:
    path = write(tmp_path / name, gzip.compress(content, 1) if name.endswith(".gz") else content)
    config = DataConfig(max_record_bytes=MIN_RECORD_BYTES)
    tracemalloc.start()
    with pytest.raises(InputError, match=f"{MIN_RECORD_BYTES:,} bytes") as caught:
        list(read_texts(ByteRange(Source(str(path), name.split(".")[1], None, "")), config, Counter()))
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
    (tmp_path / "a.jsonl").write_text(f'{{"text": "one", "x": {"[" * depth}{"]" * depth}}}\n')
    with pytest.raises(InputError, match="nested") as caught:
        read(tmp_path / "a.jsonl")
    assert caught.value.where == f"{tmp_path}/a.jsonl: line 1"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\[]{}, \n字🙂\x07'),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text('k"\\]', max_size=3), values, max_size=3),
    max_leaves=10,
)


@given(st.lists(JSON_VALUES, max_size=5), st.integers(1, 40), st.sampled_from([None, 0, 2]), st.booleans())
def test_elements_of_a_json_array_are_independent_of_blocks(values, size, indent, is_ascii) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=is_ascii) + "\n"
    blocks = [text[begin : begin + size] for begin in range(0, len(text), size)]
    found = json_values(blocks, ByteRange(Source("a.json", "json", None, "")), MIN_RECORD_BYTES)
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
    rows = [["id", "te,xt;", "kind"], ["1", text, "a"], ["2", "Six.", "b"]]
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    write(tmp_path / "b.csv", 'text\n"One; two."\nThree\n')  # one column has no delimiter
    write(tmp_path / "c.tsv", 'n\ttext\n1\tOne, "two"; three.\n')
    expected = {"a.csv": [text, "Six."], "b.csv": ["One; two.", "Three"], "c.tsv": ['One, "two"; three.']}
    for name, texts in expected.items():
        (source,) = resolve([str(tmp_path / name)], DataConfig())
        config = DataConfig(text_field=("te,xt;",) if name == "a.csv" else "text")
        assert list(read_texts(ByteRange(source), config, Counter())) == texts


def test_csv_with_two_columns_of_one_name_is_refused_if_they_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,id,id,,\nOne.,1,2,3,4\n")
    (source,) = resolve([str(path)], DataConfig())
    assert list(read_texts(ByteRange(source), DataConfig(), Counter())) == ["One."]
    for columns in ((), ("id",)):  # () reads all columns
        with pytest.raises(InputError, match="two columns 'id'"):
            list(read_records(ByteRange(source), Counter(), columns=columns))


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
def test_objects_over_several_lines_are_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    rows = [{"text": "a {\n", "n": [1, {}]}, {"text": "b"}]
    monkeypatch.setattr(text_files, "BLOCK_BYTES", size)
    for number in (1, 2):
        path = write(tmp_path / f"{number}.json", "\n".join(json.dumps(row, indent=2) for row in rows[:number]))
        found = read(path)
        assert [record for record, _ in found] == rows[:number]
        assert str(found[-1][1]) == f"{path}: record {number}"
    with pytest.raises(InputError, match="record 2"):
        read(write(tmp_path / "3.json", json.dumps(rows[0], indent=2) + "\n{"))


def test_rows_that_an_unclosed_quote_swallows_are_reported(tmp_path: Path, capsys) -> None:
    lines = [f"some text {number},pos" for number in range(40)]
    lines[19], lines[29] = f'"{lines[19]}', f'{lines[29]}"'
    article = '"One line, and more.\nTwo lines\n\nThree, four, five.\nSix.",neg'
    path = write(tmp_path / "a.csv", "\n".join(["text,label", *lines, article]) + "\n")
    counts: Counter[str] = Counter()
    (source,) = examined([Source(str(path), "csv")], DataConfig())
    assert len(list(read_records(ByteRange(source), counts))) == 31
    readers.check_texts(counts, 31)
    assert f"warning: 1 CSV fields with lines that look like rows (first: {path}: line 21)" in capsys.readouterr().out
