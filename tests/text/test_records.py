"""Records of every format: the same values, each with its position in the source."""

import json
from collections import Counter
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_pretrain.errors import InputError
from bert_pretrain.text.records import read_records
from bert_pretrain.text.sources import Source
from bert_pretrain.text.text_files import ByteRange

ROWS = [{"text": "one", "kind": "a"}, {"text": 'two "quoted"', "kind": ""}, {"text": "三", "kind": "c"}]
LINES = [json.dumps(row) + "\n" for row in ROWS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text(LINES[0] + "\n" + "".join(LINES[1:]))
    (tmp_path / "a.csv").write_text('text,kind\none,a\n\n"two ""quoted""",\n三,c\n', encoding="utf-8-sig")
    (tmp_path / "a.tsv").write_text('text\tkind\none\ta\n\ntwo "quoted"\t\n三\tc', encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "a.dataset")
    return tmp_path


@pytest.mark.parametrize(
    ("format_", "positions"),
    [
        ("jsonl", ["line 1", "line 3", "line 4"]),
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
    assert counts == ({} if format_ in ("parquet", "dataset") else {"blank_lines": 1})
    some = [record["kind"] for record, _ in read_records(part, counts, columns=["kind"])]
    assert some == [row["kind"] for row in ROWS]
    if format_ != "jsonl":  # whose records may differ from one to the next
        with pytest.raises(InputError, match=r"no column 'body' \(it has: text, kind\)"):
            list(read_records(part, counts, columns=["body"]))


def test_a_record_of_a_later_part_has_its_line_of_the_whole_file(folder: Path) -> None:
    location = f"{folder}/a.jsonl"
    start = len(LINES[0]) + 1
    part = ByteRange(Source(location, "jsonl", None, ""), start, start + len(LINES[1]))
    ((record, position),) = read_records(part, Counter())
    assert record == ROWS[1]
    assert (position.number, str(position)) == (3, f"{location}: line 3")


def test_a_short_row_has_nothing_for_the_fields_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,kind,n\none\n,b\n")
    found = [record for record, _ in read_records(ByteRange(Source(f"{tmp_path}/a.csv", "csv", None, "")), Counter())]
    assert found == [{"text": "one", "kind": None, "n": None}, {"text": "", "kind": "b", "n": None}]
