"""SQuAD metrics, by character for Chinese."""

import numpy as np
import pytest

from bert_pretrain.finetune.answer import Answer, cut, normalized_words, squad_scores, word_f1
from bert_pretrain.finetune.rows import Example
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.task import Window


def test_scores_match_the_squad_definition() -> None:
    assert normalized_words("The  Cat's (big) hat, a an") == ["cats", "big", "hat"]
    assert word_f1("the big cat", "a cat") == pytest.approx(2 / 3)
    assert word_f1("to be or not to be", "to be") == pytest.approx(0.5)
    scores = squad_scores([["in Berlin", "Berlin"], ["1900"], []], ["Berlin.", "in 1900", ""])
    assert scores["exact_match"] == pytest.approx(2 / 3)
    assert scores["f1"] == pytest.approx((1 + 2 / 3 + 1) / 3)
    assert scores["no_answer_exact_match"] == 1.0
    assert scores["has_answer_f1"] == pytest.approx(5 / 6)
    assert squad_scores([[]], ["something"])["f1"] == 0.0


def test_answers_keep_their_last_combining_mark() -> None:
    assert cut("the cafe\u0301 is", 4, 8) == "cafe\u0301"
    assert cut("the cafe is", 4, 8) == "cafe"


@pytest.mark.parametrize(("value", "expected"), [("False", 1), ("", 1), ("True", 0)])
def test_impossible_questions_of_csv(read, value: str, expected: int) -> None:
    answers = '"{""text"": [""anna""], ""answer_start"": [0]}"'
    text = f"question,context,answers,is_impossible\nwho ?,anna is good,{answers},{value}\n"
    (example,) = read("answer", "a.csv", text, flag="--test")[0]
    assert len(example.label) == expected


def test_a_span_of_several_windows_is_kept_once_with_its_highest_score(tokenizer) -> None:
    example = Example(0, "", {}, {"question": "who ?", "context": "anna"})
    windows = [Window(0, [2, 5, 3], [0, 1, 1], {}, [None, (0, 4), None])] * 2
    scores = [np.array([0.0, 3.0, 0.0]), np.array([0.0, 1.0, 0.0])]
    (prediction,) = Answer(Settings().resolve("answer", 32), tokenizer).decode([example], windows, (scores, scores))
    assert prediction.spans == [(0, 4, 6.0)]


def test_chinese_answers_are_compared_by_character() -> None:
    assert normalized_words("《北京》大学。") == ["北", "京", "大", "学"]
    assert word_f1("北京大学", "北京") == pytest.approx(2 / 3)
    assert normalized_words("“quoted”") == ["“quoted”"]  # SQuAD removes only ASCII punctuation
