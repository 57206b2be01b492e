"""SQuAD's layout and scores, and spans that are exactly what is in the context."""

import json

import pytest

from bert_pretrain.finetune.answer import Answer, squad_scores, word_f1, words_of
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.text.tokenizer import Tokenizer
from tests.finetune.conftest import Read

CONTEXT = "Äpfel, grown\u00a0in  BERLIN since 1900."
ASKED = [
    {"id": "a", "question": "Where?", "answers": [{"text": "BERLIN", "answer_start": CONTEXT.index("BERLIN")}]},
    {"id": "b", "question": "Why?", "answers": [], "is_impossible": True},
]
SQUAD = json.dumps({"data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": ASKED}]}]})


def test_labels_mark_the_pieces_of_the_raw_answer_in_every_window_that_holds_it(read: Read) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz0123456789.,?"]
    tokens += [f"##{token}" for token in "abcdefghijklmnopqrstuvwxyz0123456789"]
    tokenizer = Tokenizer(tokens, lowercase=True, strip_accents=None, handle_chinese_chars=True)
    task = Answer(Settings(max_length=24, stride=8).resolve("answer", 64), tokenizer)
    examples, _ = read("answer", "squad.json", SQUAD)
    windows = task.encode(examples, "validation")
    assert not any(window.positions for window in task.encode(examples, "train"))
    own = [window for window in windows if window.example == 0]
    assert len(own) > 1
    assert all(len(window.input_ids) <= 24 for window in windows)
    answered = [window for window in own if window.labels["start_positions"]]
    assert answered
    for window in own:
        first, last = window.labels["start_positions"], window.labels["end_positions"]
        if window in answered:
            assert CONTEXT[window.positions[first][0] : window.positions[last][1]] == "BERLIN"
        else:
            assert (first, last) == (0, 0)
    assert all(window.labels["end_positions"] == 0 for window in windows if window.example == 1)


def test_scores_are_those_that_squad_defines() -> None:
    assert words_of("The  Cat's (big) hat, a an") == ["cats", "big", "hat"]
    assert word_f1("the big cat", "a cat") == pytest.approx(2 / 3)
    assert word_f1("to be or not to be", "to be") == pytest.approx(0.5)
    scores = squad_scores([["in Berlin", "Berlin"], ["1900"], []], ["Berlin.", "in 1900", ""])
    assert scores["exact_match"] == pytest.approx(2 / 3)
    assert scores["f1"] == pytest.approx((1 + 2 / 3 + 1) / 3)
    assert scores["no_answer_exact_match"] == 1.0
    assert scores["has_answer_f1"] == pytest.approx(5 / 6)
    assert squad_scores([[]], ["something"])["f1"] == 0.0


def test_chinese_answers_are_compared_by_character() -> None:
    assert words_of("《北京》大学。") == ["北", "京", "大", "学"]
    assert word_f1("北京大学", "北京") == pytest.approx(2 / 3)
    assert words_of("“quoted”") == ["“quoted”"]  # without ideographs exactly SQuAD, which knows ASCII's marks only
