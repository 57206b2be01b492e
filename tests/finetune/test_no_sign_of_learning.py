"""A model that is no better than a constant is not called finished without a warning."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_pretrain.finetune.answer import Answer, Prediction
from bert_pretrain.finetune.classify import Classify, Example
from bert_pretrain.finetune.questions import Question
from bert_pretrain.finetune.run import finetune
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tag import Example as Sentence
from bert_pretrain.finetune.tag import Tag
from bert_pretrain.text.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(toy_model: Path) -> Tokenizer:
    return Tokenizer.load(toy_model)


@pytest.mark.parametrize("has_cue", [True, False])
def test_labels_that_no_text_tells_give_a_warning_in_the_last_line_and_the_card(
    toy_model: Path, tmp_path: Path, reviews, as_jsonl, capsys: pytest.CaptureFixture[str], has_cue: bool
) -> None:
    rows = {name: reviews(count, seed) for name, count, seed in (("train", 160, 1), ("test", 200, 2))}
    draw = random.Random(3)
    for row in () if has_cue else [*rows["train"], *rows["test"]]:
        row["label"] = draw.choice(["pos", "neg"])
    call: dict[str, Any] = {name: as_jsonl(tmp_path / f"{name}.jsonl", each) for name, each in rows.items()}
    call |= {"output": tmp_path / "o", "device": "cpu"}
    call["settings"] = Settings(learning_rate=3e-3, batch_size=16, epochs=3)
    finetune("classify", toy_model, **call)
    last = capsys.readouterr().out.splitlines()[-1]
    card = (tmp_path / "o" / "README.md").read_text()
    warning = json.loads((tmp_path / "o" / "metrics.json").read_text())["warning"]
    if has_cue:
        assert last.startswith("best epoch")
        assert not warning
        assert "Warning" not in card
        return
    assert last == f"WARNING: {warning}"
    assert warning.startswith("no sign of learning: accuracy 0.")
    assert "on the 200 test rows is no better, beyond chance, than always '" in warning
    assert "**Warning:** no sign of learning: accuracy 0." in card
    finetune("classify", toy_model, **call)
    assert capsys.readouterr().out.splitlines()[-2:] == [f"up to date: {tmp_path / 'o'}", last]


def classified(tokenizer: Tokenizer, truth: str, found: str) -> str:
    """Return what is as good as predictions, both written as a letter per example."""
    task = Classify(Settings(), tokenizer)
    task.classes = ["a", "b"]
    examples = [Example(row, "", "text", None, label) for row, label in enumerate(truth)]
    return task.no_better_than(examples, [np.eye(2)["ab".index(label)] for label in found])


def test_a_classifier_must_beat_the_largest_class_beyond_chance(tokenizer: Tokenizer) -> None:
    assert not classified(tokenizer, "a" * 60 + "b" * 40, "a" * 60 + "b" * 40)
    assert not classified(tokenizer, "a" * 60 + "b" * 40, "a" * 72 + "b" * 28)
    assert classified(tokenizer, "a" * 60 + "b" * 40, "a" * 100) == "always 'a' (accuracy 0.6000)"
    assert classified(tokenizer, "a" * 60 + "b" * 40, "ab" * 50)  # worse
    assert classified(tokenizer, "a" * 60 + "b" * 40, "a" * 57 + "b" * 7 + "a" * 36)  # 61 right, which chance gives
    assert classified(tokenizer, "ab", "ab")  # of two rows nothing follows
    assert not classified(tokenizer, "ab" * 5, "ab" * 5)


def test_numbers_must_correlate_beyond_chance(tokenizer: Tokenizer) -> None:
    task = Classify(Settings(regression=True), tokenizer)
    truth = np.arange(20.0)
    examples = [Example(row, "", "text", None, label) for row, label in enumerate(truth)]
    assert not task.no_better_than(examples, list(truth**3))
    for found in (np.zeros(20), -truth, np.random.default_rng(0).permutation(truth)):
        assert task.no_better_than(examples, list(found)) == "one number for all (spearman 0)"


def test_a_tagger_must_find_an_entity_and_a_reader_an_answer(tokenizer: Tokenizer) -> None:
    tag = Tag(Settings(), tokenizer)
    sentences = [Sentence(0, "", ["anna", "is"], ["B-PER", "O"])] * 2
    assert not tag.no_better_than(sentences, [["B-PER", "O"], ["O", "O"]])
    assert tag.no_better_than(sentences, [["O", "B-PER"], ["O", "O"]]) == "O for every word (f1 0)"
    answer = Answer(Settings(), tokenizer)
    questions = [Question(0, "", "0", "who ?", "the anna", answers) for answers in ([("anna", 4)], [])]
    right, nothing = (Prediction(text, [], 0.0) for text in ("anna", ""))
    assert not answer.no_better_than(questions, [right, nothing])
    assert answer.no_better_than(questions, [nothing, nothing]) == "no answer to any question (f1 0.5000)"
    assert answer.no_better_than(questions, [right, right])
