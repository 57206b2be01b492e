"""All formats give the same rows, without conversion of values."""

import gzip
from pathlib import Path
from typing import Any

import datasets
import pytest

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.rows import LabelledInput, read_rows
from bert_pretrain.text.hub_datasets import VALIDATION
from tests.text.test_readers import ROWS, write_tables


def values(location: object, flag: str = "--train") -> list[dict[str, Any]]:
    return [row.values for row in read_rows(LabelledInput(str(location), flag))]


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    write_tables(tmp_path)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    for location in (*tmp_path.iterdir(), f"dataset:{tmp_path}/a.dataset"):
        assert values(location) == ROWS, location


def test_rows_that_an_unclosed_quote_swallows_are_reported(read) -> None:
    lines = [f"some text {number},pos" for number in range(40)]
    lines[19] = f'"{lines[19]}'
    lines[29] = f'{lines[29]}"'
    article = '"One line, and more.\nTwo lines\n\nThree, four, five.\nSix.",neg'
    examples, notes = read("classify", "a.csv", "\n".join(["text,label", *lines, article, ""]))
    assert len(examples) == 30  # the row with the quote has one field
    assert "warning: 1 CSV fields with lines that look like rows (first: " in notes
    assert "a.csv: line 21)" in notes


def test_a_dataset_gives_the_split_of_the_flag_and_class_names(tmp_path: Path) -> None:
    label = datasets.ClassLabel(names=["neg", "pos"])
    features = datasets.Features({"label": label, "tags": datasets.Sequence(label)})

    def save(name: str, **numbers: int) -> Path:
        rows = {split: [{"label": number, "tags": [0, 1]}] for split, number in numbers.items()}
        splits = {split: datasets.Dataset.from_list(each, features=features) for split, each in rows.items()}
        datasets.DatasetDict(splits).save_to_disk(tmp_path / name)
        return tmp_path / name

    saved = save("saved", train=0, validation=1, test=-1)
    for flag, name in (("--train", "neg"), ("--validation", "pos"), ("--test", None)):
        assert values(saved, flag) == [{"label": name, "tags": ["neg", "pos"]}]
    assert values(f"dataset:{saved}@validation")[0]["label"] == "pos"
    other = save("other", **{"train": 0, VALIDATION[1]: 1})
    assert values(other, "--validation")[0]["label"] == "pos"
    with pytest.raises(InputError, match=f"choose one: dataset:{other}@train or dataset:{other}@{VALIDATION[1]}"):
        values(other, "--test")


@pytest.mark.parametrize(("task", "inputs"), [("classify", {"text": "good"}), ("tag", {"tokens": ["a", "b"]})])
def test_rows_with_a_list_that_lacks_a_label_are_skipped(read, tmp_path, task, inputs) -> None:
    names = datasets.List(datasets.ClassLabel(names=["B-A", "B-B"]))
    rows = [inputs | {"labels": labels} for labels in ([0, 1], [1, 1], [0, 0], [1, -100], [-1, -1], [0, None])]
    data = datasets.Dataset.from_list(rows).cast_column("labels", names)
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "a.parquet")
    settings = {"label_field" if task == "classify" else "tags_field": "labels"}
    for name in ("saved", "a.parquet"):
        examples, notes = read(task, name, settings=settings)
        assert len(examples) == 3
        assert "3 rows skipped because 'labels' has no label (empty, null or negative) (first: row 4)" in notes
        test, _ = read(task, name, flag="--test", settings=settings)
        assert [example.label is None for example in test] == [False] * 3 + [True] * 3


def test_rows_without_a_column_are_skipped_unless_all_lack_it(read) -> None:
    rows = [{"text": "a", "label": "x"}] * 3 + [{"text": "b"}]
    assert len(read("classify", "a.jsonl", rows)[0]) == 3
    with pytest.raises(InputError, match="no column 'label'; 1 of 1 rows"):
        read("classify", "b.jsonl", rows[3:])


def test_labels_that_look_equal_are_equal(read) -> None:
    labels = ["caf\u00e9", "cafe\u0301 ", " caf\u00e9", ["cafe\u0301", "a "], " "]
    examples, notes = read("classify", "a.jsonl", [{"text": "good", "label": label} for label in labels])
    assert [example.label for example in examples] == ["caf\u00e9"] * 3 + [["a", "caf\u00e9"]]
    assert "4 labels with blanks at the ends or not in NFC, which were changed (first: line 2)" in notes
    (example,), notes = read("tag", "b.jsonl", [{"tokens": ["anna", "sings"], "tags": ["B-PER ", "O "]}])
    assert example.label == ["B-PER", "O"]
    assert "2 labels with blanks" in notes


@pytest.mark.parametrize("flag", ["--train", "INPUT"])
def test_header_lines_of_joined_files_are_skipped_and_counted(read, flag: str) -> None:
    table = "text,label\ngood,a\nbad,b\n"
    examples, notes = read("classify", "a.csv", table * 2, flag)
    assert [example.inputs["text"] for example in examples] == ["good", "bad"] * 2
    assert notes == "1 header lines inside the file, which were skipped (first: line 4)\n"
    assert len(read("classify", "b.csv", "text\ngood\ntext\n", "INPUT")[0]) == 2  # a text, if there is one column
