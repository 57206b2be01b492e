"""The tasks of the fine-tuning benchmark are what they say: no cue left in, no document in two splits."""

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # the benchmark imports its tasks by that name
    spec.loader.exec_module(module)
    return module


tasks = load("bench_finetune_tasks")
bench = load("bench_finetune")
DRAW = np.random.default_rng(0)


def test_quotation_marks_tell_the_label_and_are_gone() -> None:
    document = [
        '"You will be late," he said.',
        "He went home by the old road.",
        'He called it "a joke" at once.',
        "No.",
    ]
    assert list(tasks.direct_speech(document, DRAW)) == [
        {"text": "You will be late , he said .", "label": "speech"},
        {"text": "He went home by the old road .", "label": "narration"},
    ]


def test_the_final_mark_tells_the_label_and_is_gone() -> None:
    document = ["你今天去不去学校？", "他昨天去了学校。", "“你今天去不去学校？”"]
    assert [tuple(row.values()) for row in tasks.question(document, DRAW)] == [
        ("你今天去不去学校", "question"),
        ("他昨天去了学校", "statement"),
        ("“你今天去不去学校", "question"),
    ]


@pytest.mark.parametrize(("language", "sentence"), [("en", "we went home by the road ."), ("zh", "他昨天回家去了。")])
def test_two_neighbours_change_places_or_nothing_does(language: str, sentence: str) -> None:
    rows = list(tasks.make_exchanged(language)([sentence] * 50, DRAW))
    changes = {row["text"]: row["label"] for row in rows}
    assert changes.pop(sentence) == "intact"
    assert set(changes.values()) == {"exchanged"}
    for text in changes:
        assert sorted(text) == sorted(sentence)
        assert text[-1] == sentence[-1]


def test_a_sentence_follows_or_stands_elsewhere() -> None:
    document = [f"Sentence number {number}." for number in range(60)]
    rows = list(tasks.following(document, DRAW))
    for row in rows:
        first, second = (int(row[key].split()[-1].rstrip(".")) for key in ("text", "second"))
        assert (second == first + 1) == (row["label"] == "follows")
    assert {row["label"] for row in rows} == {"follows", "elsewhere"}


def test_names_are_told_by_capitals_which_are_gone() -> None:
    known = ["we saw Anna Berg there", "then Berg went to Paris", "he saw Anna in Paris"] * 3
    (row,) = tasks.make_names([known])(["Yesterday old Anna Berg, who was tired, went to Paris."], DRAW)
    assert row["tokens"][:4] == ["old", "anna", "berg", ","]
    assert row["tags"][:4] == ["O", "B-NAME", "I-NAME", "O"]
    assert row["tags"][row["tokens"].index("paris")] == "B-NAME"
    assert not any(token[0].isupper() for token in row["tokens"])


def test_characters_are_tagged_as_the_words_they_form() -> None:
    pytest.importorskip("rjieba")
    (row,) = tasks.words_of_chinese(["我们今天去学校学习历史"], DRAW)
    assert "".join(row["tokens"]) == "我们今天去学校学习历史"
    assert row["tags"][:4] == ["B-WORD", "I-WORD", "B-WORD", "I-WORD"]


def test_the_name_left_out_stands_once_in_the_context() -> None:
    before = [
        "In the evening old Anna came to us again.",
        "There she met Berg, who was tired.",
        "They talked.",
        "So it was.",
    ]
    (row,) = tasks.cloze([*before, "After supper we walked home with Anna."], DRAW)
    assert row["question"] == "After supper we walked home with _."
    assert row["answers"] == {"text": ["Anna"], "answer_start": [row["context"].index("Anna")]}
    assert bench.last_name(row) == "So"


def test_held_out_documents_are_those_of_the_data_folder(english_text: Path, data_folder: Path) -> None:
    documents = tasks.read_documents(english_text)
    numbers = tasks.held_out_documents(documents, data_folder)
    assert len(numbers) == round(0.1 * len(documents))
    shuffled = random.Random(1).sample(documents, len(documents))
    with pytest.raises(SystemExit, match="do not stand"):
        tasks.held_out_documents(shuffled, data_folder)
    with pytest.raises(SystemExit, match="documents, the corpus has"):
        tasks.held_out_documents(documents[1:], data_folder)


def test_no_document_is_in_two_splits(tmp_path: Path) -> None:
    documents = [[f"Document {number}, sentence {line}." for line in range(40)] for number in range(60)]
    recipe = tasks.recipes("en", documents)["sentence that follows"]
    held_out = list(range(0, len(documents), 5))
    splits = bench.write_rows(recipe, documents, held_out, tmp_path, 120)
    homes = {split: {int(row["text"].split()[1].rstrip(",")) for row in rows} for split, rows in splits.items()}
    assert homes["test"] <= set(held_out)
    assert not homes["train"] & homes["validation"]
    assert not (homes["train"] | homes["validation"]) & homes["test"]
    labels = [row["label"] for row in splits["train"]]
    assert abs(labels.count("follows") / len(labels) - 0.5) < 0.1
    written = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    assert written == splits["test"]
    assert bench.baseline(recipe, splits["train"], splits["test"]) == pytest.approx(0.5, abs=0.1)
