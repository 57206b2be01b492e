"""A model that is no better than a constant is not called finished without a warning."""

import json
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("is_true", [True, False])
def test_predictions_worse_than_one_class_give_a_warning_in_the_last_line_and_the_card(
    toy_model: Path, tmp_path: Path, reviews, as_jsonl, capsys: pytest.CaptureFixture[str], is_true: bool
) -> None:
    rows = {name: reviews(count, seed) for name, count, seed in (("train", 160, 1), ("test", 200, 2))}
    for row in () if is_true else rows["test"]:
        row["label"] = {"pos": "neg", "neg": "pos"}[row["label"]]
    call: dict[str, Any] = {name: as_jsonl(tmp_path / f"{name}.jsonl", each) for name, each in rows.items()}
    call |= {"output": tmp_path / "o", "device": "cpu"}
    call["settings"] = Settings(learning_rate=(3e-3,), dropout=0.1, batch_size=16, epochs=2)
    finetune("classify", toy_model, **call)
    last = capsys.readouterr().out.splitlines()[-1]
    card = (tmp_path / "o" / "README.md").read_text()
    warning = json.loads((tmp_path / "o" / "metrics.json").read_text())["warning"]
    if is_true:
        assert warning.startswith("not clearly better than words alone")  # which tell the two classes apart
        assert warning in last
        assert warning in card
        return
    assert last == f"WARNING: {warning}"
    assert warning.startswith("no sign of learning: accuracy 0.")
    assert "on the 200 test rows is no better than always '" in warning
    assert "**Warning:** no sign of learning: accuracy 0." in card
    finetune("classify", toy_model, **call)
    assert capsys.readouterr().out.splitlines()[-2:] == [f"up to date: {tmp_path / 'o'}", last]


def test_the_constants_have_the_score_that_the_metric_gives_them(tokenizer: Tokenizer) -> None:
    classify = Classify(Settings(), tokenizer)
    examples = [Example(row, "", "text", None, label) for row, label in enumerate("aab")]
    assert classify.constant(examples) == ("always 'a'", 2 / 3)
    number = Classify(Settings(regression=True), tokenizer)
    examples = [Example(row, "", "text", None, float(row)) for row in range(3)]
    assert number.score(examples, [1.0] * 3)["spearman"] == number.constant(examples)[1]
    tag = Tag(Settings(), tokenizer)
    sentences = [Sentence(0, "", ["anna", "is"], ["B-PER", "O"])] * 2
    assert tag.score(sentences, [["O", "O"]] * 2)["f1"] == tag.constant(sentences)[1]
    answer = Answer(Settings(), tokenizer)
    questions = [Question(0, "", "0", "who ?", "the anna", answers) for answers in ([("anna", 4)], [])]
    assert answer.score(questions, [Prediction("", [], 0.0)] * 2)["f1"] == answer.constant(questions)[1] == 0.5
