"""`answer`: the span of a context that answers a question, or none; long contexts are divided into overlapping windows.

As in BERT's SQuAD code: every position has a start and an end score, the [CLS] position means no answer, and the best
span over all windows of a context is the answer. Spans are cut from the raw text by the offsets of their pieces.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.inputs import LabelledInput
from bert_pretrain.finetune.questions import (
    NOT_FOUND,
    Question,
    iterate_questions,
    read_questions,
    squad_scores,
    texts_of,
)
from bert_pretrain.finetune.settings import MAX_ANSWER_LENGTH, Settings
from bert_pretrain.finetune.tables import Row
from bert_pretrain.finetune.task import DIVIDED, Window, encodings
from bert_pretrain.text.tokenizer import Tokenizer

MAX_QUESTION_TOKENS = 64
N_BEST = 20
_MAX_SHOWN = 5


@dataclass(frozen=True)
class AnswerSpan:
    """A span of a context, [begin, end) in characters, and the sum of its two logits."""

    begin: int
    end: int
    score: float


@dataclass(frozen=True)
class Prediction:
    """The best spans of a context, the best first, and the score of no answer."""

    text: str
    spans: list[AnswerSpan]
    null_score: float


class Answer:
    """Windows, spans and metrics of the task."""

    model_class = "AutoModelForQuestionAnswering"
    main_metric = "f1"
    label_names: tuple[str, ...] = ("start_positions", "end_positions")
    group_field = "context"

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.may_be_none = False

    def read(self, source: LabelledInput) -> list[Question]:
        return read_questions(source)

    def set_labels(self, train: list[Question], validation: list[Question], test: list[Question]) -> None:
        unanswered = sum(not question.answers for question in train)
        if unanswered == len(train):
            where, remedy = f"{train[0].where} and all others", "give some that have one"
            raise InputError("no question has an answer", where=where, remedy=remedy)
        if self.settings.max_answer_length is None:
            texts = [text for question in train for text, _ in (question.answers or [])[:1]]
            lengths = [len(encoding) for encoding in encodings(self.tokenizer, texts)]
            longest = max(1, math.ceil(np.percentile(lengths, 99)))
            self.settings = dataclasses.replace(self.settings, max_answer_length=longest)
            print(f"answers have at most {longest} tokens, as 99 % of those in training (--max-answer-length)")
        self.may_be_none = unanswered > 0
        if self.may_be_none:
            print(f"{unanswered:,} of {len(train):,} training questions have no answer, so none is a possible answer")
        elif any(question.answers == [] for question in [*validation, *test]):
            print("every training question has an answer, so one is always given, even to questions without one")

    def content(self, example: Question) -> object:
        return [example.id, example.question, example.context, example.answers]

    def model_config(self) -> dict[str, Any]:
        return {}

    def encode(self, examples: list[Question], split: str, counts: Counter[str]) -> list[Window]:
        max_length, stride = self.settings.max_length, self.settings.stride
        assert max_length is not None
        assert stride is not None
        questions = self._truncated([example.question for example in examples], counts)
        pairs = list(zip(questions, (example.context for example in examples), strict=True))
        truncation = {"max_length": max_length, "stride": stride, "strategy": "only_second"}
        has_labels = all(question.answers is not None for question in examples)
        windows: list[Window] = []
        for number, encoding in enumerate(encodings(self.tokenizer, pairs, **truncation)):
            counts[DIVIDED.format(max_length)] += bool(encoding.overflowing)
            for part in (encoding, *encoding.overflowing):
                positions = _characters(part)
                labels = {}
                if has_labels:
                    first, last = _label(positions, examples[number].answers or [])
                    labels = {"start_positions": first, "end_positions": last}
                # Only predictions need the characters, and there may be millions of training windows.
                windows.append(Window(number, part.ids, part.type_ids, labels, positions if split != "train" else ()))
        learned = {window.example for window in windows if window.labels.get("start_positions")}
        has_place = [any(start != NOT_FOUND for _, start in example.answers or ()) for example in examples]
        lost = sum(each and number not in learned for number, each in enumerate(has_place))
        counts["have an answer longer than any window, which is not learned"] += lost if has_labels else 0
        return windows

    def _truncated(self, questions: list[str], counts: Counter[str]) -> list[str]:
        assert self.settings.max_length is not None
        limit = min(MAX_QUESTION_TOKENS, self.settings.max_length // 3)
        found = zip(questions, encodings(self.tokenizer, questions), strict=True)
        kept = [text[: encoding.offsets[limit - 1][1]] if len(encoding) > limit else text for text, encoding in found]
        too_long = sum(short != question for short, question in zip(kept, questions, strict=True))
        counts[f"have a question longer than {limit} tokens, which was truncated"] += too_long
        return kept

    def decode(self, examples: list[Question], windows: list[Window], logits: Any) -> list[Prediction]:
        spans: list[list[AnswerSpan]] = [[] for _ in examples]
        nulls = [np.inf] * len(examples)
        longest = self.settings.max_answer_length or MAX_ANSWER_LENGTH
        for window, starts, ends in zip(windows, *logits, strict=True):
            spans[window.example] += best_spans(window.positions, starts, ends, longest)
            # A window without the answer correctly predicts none; there is none only if all windows do.
            nulls[window.example] = min(nulls[window.example], float(starts[0] + ends[0]))
        predictions = []
        for example, found, null in zip(examples, spans, nulls, strict=True):
            best = sorted(set(found), key=lambda span: (-span.score, span.begin, span.end))[:N_BEST]
            is_none = not best or (self.may_be_none and null > best[0].score)
            text = "" if is_none else example.context[best[0].begin : best[0].end]
            predictions.append(Prediction(text, best, null))
        return predictions

    def score(self, examples: list[Question], predictions: list[Prediction]) -> dict[str, float]:
        return squad_scores(_texts(examples), [prediction.text for prediction in predictions])

    def constant(self, examples: list[Question]) -> tuple[str, float]:
        return "no answer to any question", squad_scores(_texts(examples), [""] * len(examples))["f1"]

    def words_alone(self, train: list[Question], examples: list[Question]) -> None:
        return None

    def use(self, labels: list[str], may_be_none: bool) -> None:
        self.may_be_none = may_be_none

    def rows(self, source: LabelledInput) -> Iterator[Row]:
        return iterate_questions(source)

    def unlabelled(self, row: Row, source: LabelledInput) -> Question:
        return Question(0, row.where, "", *texts_of(row), answers=None)

    def columns(self, example: Question, prediction: Prediction) -> dict[str, Any]:
        score = prediction.spans[0].score if prediction.text else prediction.null_score
        return {"answer": prediction.text, "score": round(score, 4)}

    def record(self, example: Question, prediction: Prediction) -> dict[str, Any]:
        answers = {} if example.answers is None else {"answers": [text for text, _ in example.answers]}
        shown = [
            {"text": example.context[span.begin : span.end], "answer_start": span.begin, "score": round(span.score, 4)}
            for span in prediction.spans[:_MAX_SHOWN]
        ]
        null = {"null_score": round(prediction.null_score, 4)} if self.may_be_none else {}
        asked = {"row": example.row, "id": example.id, "question": example.question}
        return {**asked, **answers, "prediction": prediction.text, **null, "best": shown}


def _texts(examples: list[Question]) -> list[list[str]]:
    return [[text for text, _ in example.answers or []] for example in examples]


def best_spans(positions: Any, starts: np.ndarray, ends: np.ndarray, max_tokens: int) -> list[AnswerSpan]:
    """Return the best spans of one window, by its logits (positions or more,) and the characters of its positions."""
    likely_starts, likely_ends = (
        [at for at in np.argsort(-scores[: len(positions)], kind="stable") if positions[at] is not None][:N_BEST]
        for scores in (starts, ends)
    )
    found = [
        AnswerSpan(positions[first][0], positions[last][1], float(starts[first] + ends[last]))
        for first in likely_starts
        for last in likely_ends
        if first <= last < first + max_tokens
    ]
    return sorted(found, key=lambda span: -span.score)[:N_BEST]


def _characters(encoding: Encoding) -> list[tuple[int, int] | None]:
    """Return for each position its characters in the context, None outside the context."""
    pairs = zip(encoding.sequence_ids, encoding.offsets, strict=True)
    return [offsets if sequence == 1 else None for sequence, offsets in pairs]


def _label(positions: list[tuple[int, int] | None], answers: list[tuple[str, int]]) -> tuple[int, int]:
    """Return the first and the last position of the first answer, or those of [CLS] if the window lacks it."""
    text, begin = next((answer for answer in answers if answer[1] != NOT_FOUND), ("", NOT_FOUND))
    if begin == NOT_FOUND:
        return 0, 0
    end = begin + len(text.rstrip())
    begin += len(text) - len(text.lstrip())
    shown = [(at, *characters) for at, characters in enumerate(positions) if characters is not None]
    covered = [piece for piece in shown if piece[1] < end and piece[2] > begin]
    if not covered:
        return 0, 0
    # If the window begins or ends inside the answer, its first or last piece is not among the covered ones.
    is_cut_before = covered[0][1] > begin and covered[0] == shown[0]
    is_cut_after = covered[-1][2] < end and covered[-1] == shown[-1]
    return (0, 0) if is_cut_before or is_cut_after else (covered[0][0], covered[-1][0])
