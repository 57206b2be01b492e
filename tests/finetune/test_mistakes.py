"""Invalid input raises an error with what, where and a hint, and leaves no files."""

import json
from pathlib import Path

import pytest
import torch

from tests.conftest import call

GOOD = '{"text": "good", "label": "a"}\n{"text": "bad", "label": "b"}\n'
TAGGED = '{"tokens": ["anna", "is"], "tags": ["B-PER", "O"]}\n'
ASKED = {"id": "1", "question": "who ?", "context": "the anna", "answers": {"text": ["anna"], "answer_start": [4]}}


def asked(**changes: object) -> str:
    return json.dumps({**ASKED, **changes}) + "\n"


# name: (content of x.jsonl, task and options, part of the message, part of its place)
MISTAKES = {
    "missing label": (
        '{"text": "a", "label": null}\n' * 3,
        "classify",
        "no label (empty, null or negative); 3 of 3 rows",
        "x.jsonl: line 1",
    ),
    "one class": (
        '{"text": "good", "label": "a"}\n' * 3,
        "classify",
        "every row has the same label, 'a'",
        "x.jsonl: line 1",
    ),
    "fractions": ('{"text": "good", "label": 0.5}\n', "classify", "a word nor an integer", "x.jsonl: line 1"),
    "words in a regression": (GOOD, "classify --regression", "'a' is not a number", "x.jsonl: line 1"),
    "huge number": (f'{{"text": "a", "label": 1{"0" * 400}}}\n', "classify --regression", "is not a number", "line 1"),
    "empty file": ("\n", "classify", "no rows", "x.jsonl"),
    "nothing to hold out": (TAGGED, "tag", "there is only one row, so none can be held out", "--train"),
    "one context": (asked() + asked(id="2", question="where ?"), "answer", "there is only one context", "--train"),
    "a word per row": ('{"tokens": "Anna", "tags": "O"}\n', "tag", "a list of strings but 'Anna'", "x.jsonl: line 1"),
    "unequal length": ('{"tokens": ["a", "b"], "tags": ["O"]}\n', "tag", "'tags' differ", "x.jsonl: line 1"),
    "one plain tag": (
        '{"tokens": ["a"], "tags": ["NOUN"]}\n',
        "tag",
        "every row has the same label, ['NOUN']",
        "x.jsonl: line 1",
    ),
    "no entities": (
        '{"tokens": ["a"], "tags": ["O"]}\n',
        "tag",
        "every row has the same label, ['O']",
        "x.jsonl: line 1",
    ),
    "text for words": ('{"tokens": "a", "tags": ["O"]}\n', "tag", "not a list of strings", "x.jsonl: line 1"),
    "underscore in tags": (
        '{"tokens": ["a", "b"], "tags": ["B_PER", "O"]}\n',
        "tag",
        "'B_PER' is not a BIO",
        "--train",
    ),
    "small tags": ('{"tokens": ["a", "b"], "tags": ["o", "b-per"]}\n', "tag", "'b-per' is not a BIO", "--train"),
    "no words": ('{"tokens": [], "tags": []}\n', "tag", "no words", "x.jsonl: line 1"),
    "other spelling": (asked(answers=["Anna"]), "answer", "answer is not in the context", "x.jsonl: line 1"),
    "no answers at all": (
        asked(answers={"text": [], "answer_start": []}),
        "answer",
        "every row has the same label, []",
        "x.jsonl",
    ),
    "empty question": (asked(question=""), "answer", "question is empty", "x.jsonl: line 1"),
    "wrong format of answers": (asked(answers=[["anna", 4]]), "answer", "SQuAD's format", "x.jsonl: line 1"),
    "too long for the positions": (GOOD, "classify --max-length 64", "32 positions", "--max-length"),
    "one GPU of several": (GOOD, "classify --device cuda:3", "'cuda:3'", "--device"),
}


@pytest.mark.parametrize(("text", "words", "what", "where"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_rows_and_options_are_errors(toy_model, tmp_path, text, words, what, where) -> None:
    check(toy_model, tmp_path, text, words, what, where)


def check(model: Path, place: Path, text: str, words: str, what: str, where: str) -> None:
    (place / "x.jsonl").write_text(text)
    task, *flags = words.split()
    arguments = ["finetune", task, model, "--train", place / "x.jsonl", "--output", place / "o", *flags]
    message = call(*arguments, code=2).stderr.partition("error: ")[2]
    head, _, rest = message.partition("\n  where: ")
    assert what in head
    assert where in rest.split("\n  hint: ")[0]
    assert not (place / "o").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_device_is_an_error_before_reading(toy_model: Path, tmp_path: Path) -> None:
    check(toy_model, tmp_path, "{broken", "classify --device cuda", "this machine has 0 CUDA devices", "--device")


@pytest.mark.parametrize(
    ("task", "train", "row", "name", "where"),
    [
        ("classify", GOOD, '{"text": "fine", "label": "c"}\n', "c", "v.jsonl: line 3"),
        ("tag", TAGGED * 2, '{"tokens": ["paris"], "tags": ["B-LOC"]}\n', "LOC", "v.jsonl: line 3"),
    ],
)
def test_labels_without_training_rows_are_errors(toy_model, tmp_path, task, train, row, name, where) -> None:
    (tmp_path / "v.jsonl").write_text(train + row)
    check(toy_model, tmp_path, train, f"{task} --validation {tmp_path}/v.jsonl", f"'{name}' does not occur", where)
