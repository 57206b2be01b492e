"""All formats give the same rows, without conversion of values."""

import gzip
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.classify import Classify
from bert_pretrain.finetune.rows import LabelledInput, read_rows
from bert_pretrain.finetune.run import TASK_CLASSES
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.text.hub_datasets import VALIDATION
from bert_pretrain.text.tokenizer import Tokenizer
from tests.finetune.conftest import write_rows

ROWS = [{"text": 'NA, "quoted"', "label": "007"}, {"text": "null", "label": "None"}, {"text": "天气", "label": "1.0"}]
CSV = 'text,label\n"NA, ""quoted""",007\nnull,None\n天气,1.0\n'


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV, encoding="utf-8-sig")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(CSV.encode()))
    (tmp_path / "a.tsv").write_text('text\tlabel\nNA, "quoted"\t007\nnull\tNone\n天气\t1.0\n', encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    for location in ("a.csv", "a.csv.gz", "a.tsv", "a.parquet", "a.jsonl", "a.json", "saved"):
        assert [row.values for row in read_rows(LabelledInput(str(tmp_path / location), "--train"))] == ROWS, location
    assert [row.values for row in read_rows(LabelledInput(f"dataset:{tmp_path}/saved", "--train"))] == ROWS


def test_rows_that_an_unclosed_quote_swallows_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"some text {number},pos\n" for number in range(9)]
    path = tmp_path / "a.csv"
    path.write_text("".join(["text,label\n", *rows[:2], '"', *rows[2:], 'the end",neg\n']))
    read_rows(LabelledInput(str(path), "--train"))
    assert f"(first: {path}: line 4)" in capsys.readouterr().out


def test_a_dataset_gives_the_split_of_the_flag_and_class_names(tmp_path: Path) -> None:
    label = datasets.ClassLabel(names=["neg", "pos"])
    features = datasets.Features({"label": label, "tags": datasets.Sequence(label)})

    def split(number: int) -> datasets.Dataset:
        return datasets.Dataset.from_list([{"label": number, "tags": [0, 1]}], features=features)

    datasets.DatasetDict(train=split(0), validation=split(1), test=split(-1)).save_to_disk(tmp_path / "saved")
    for flag, name in (("--train", "neg"), ("--validation", "pos"), ("--test", None)):
        (row,) = read_rows(LabelledInput(str(tmp_path / "saved"), flag))
        assert row.values == {"label": name, "tags": ["neg", "pos"]}
    (row,) = read_rows(LabelledInput(f"dataset:{tmp_path}/saved@validation", "--train"))
    assert row.values["label"] == "pos"
    datasets.DatasetDict({"train": split(0), VALIDATION[1]: split(1)}).save_to_disk(tmp_path / "other")
    assert read_rows(LabelledInput(str(tmp_path / "other"), "--validation"))[0].values["label"] == "pos"
    with pytest.raises(InputError) as caught:
        read_rows(LabelledInput(str(tmp_path / "other"), "--test"))
    assert (
        caught.value.remedy == f"choose one: dataset:{tmp_path}/other@train or dataset:{tmp_path}/other@{VALIDATION[1]}"
    )


@pytest.mark.parametrize(("task", "inputs"), [("classify", {"text": "good"}), ("tag", {"tokens": ["a", "b"]})])
def test_rows_with_a_list_that_lacks_a_label_are_skipped(tokenizer, tmp_path, capsys, task, inputs) -> None:
    names = datasets.List(datasets.ClassLabel(names=["B-A", "B-B"]))
    rows = [inputs | {"labels": labels} for labels in ([0, 1], [1, 1], [0, 0], [1, -100], [-1, -1], [0, None])]
    data = datasets.Dataset.from_list(rows).cast_column("labels", names)
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "a.parquet")
    for name in ("saved", "a.parquet"):
        reader = TASK_CLASSES[task](Settings(label_field="labels", tags_field="labels"), tokenizer)
        assert len(reader.read(LabelledInput(str(tmp_path / name), "--train"))) == 3
        reason = "'labels' has no label (empty, null or negative)"
        assert f"3 rows skipped because {reason} (first: row 4)" in capsys.readouterr().out
        test = reader.read(LabelledInput(str(tmp_path / name), "--test"))
        assert [example.label is None for example in test] == [False] * 3 + [True] * 3


def test_rows_without_a_column_are_skipped_unless_all_lack_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    task = Classify(Settings(), tokenizer)
    rows = [{"text": "a", "label": "x"}] * 3 + [{"text": "b"}]
    assert len(task.read(LabelledInput(write_rows(tmp_path / "a.jsonl", rows), "--train"))) == 3
    with pytest.raises(InputError, match="no column 'label'; 1 of 1 rows"):
        task.read(LabelledInput(write_rows(tmp_path / "b.jsonl", rows[3:]), "--train"))


def test_labels_that_look_equal_are_equal(read) -> None:
    rows = [
        {"text": "good", "label": label}
        for label in ("caf\u00e9", "cafe\u0301 ", " caf\u00e9", ["cafe\u0301", "a "], " ")
    ]
    examples, notes = read("classify", "a.jsonl", rows)
    assert [example.label for example in examples] == ["caf\u00e9"] * 3 + [["a", "caf\u00e9"]]
    assert "4 labels with blanks at the ends or not in NFC, which were changed (first: line 2)" in notes
    rows = [{"tokens": ["anna", "sings"], "tags": ["B-PER ", "O "]}]
    (example,), notes = read("tag", "b.jsonl", rows)
    assert example.label == ["B-PER", "O"]
    assert "2 labels with blanks" in notes


@pytest.mark.parametrize("flag", ["--train", "INPUT"])
def test_header_lines_of_joined_files_are_skipped_and_counted(read, flag: str) -> None:
    table = "text,label\ngood,a\nbad,b\n"
    examples, notes = read("classify", "a.csv", table * 2, flag)
    assert [example.inputs["text"] for example in examples] == ["good", "bad"] * 2
    assert notes == "1 header lines inside the file, which were skipped (first: line 4)\n"
    assert len(read("classify", "b.csv", "text\ngood\ntext\n", "INPUT")[0]) == 2  # a text, if there is one column
