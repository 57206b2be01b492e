"""`answer`: the span of a context that answers a question, or none; long contexts are seen in overlapping windows.

As in SQuAD's own BERT: a start and an end are scored for every position, the [CLS] position standing for no answer, and
the best span over all windows of a context wins. Spans are cut from the raw text by the offsets of their pieces.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding

from bert_pretrain.errors import InputError
from bert_pretrain.tokenizer import Tokenizer
from bert_pretrain.tools.finetune.questions import Question, read_questions, squad_scores
from bert_pretrain.tools.finetune.settings import Settings
from bert_pretrain.tools.finetune.windows import Window, encodings, say_cut

MAX_QUESTION_TOKENS = 64
N_BEST = 20
_MOST_SHOWN = 5


@dataclass(frozen=True)
class Found:
    """A span of a context, [begin, end) in characters, and the sum of its two logits."""

    begin: int
    end: int
    score: float


@dataclass(frozen=True)
class Prediction:
    """The best spans of a context, the best first, and the score of there being none."""

    text: str
    spans: list[Found]
    null_score: float


class Answer:
    """Windows, spans and metrics of the task."""

    model_class = "AutoModelForQuestionAnswering"
    main_metric = "f1"
    label_names: tuple[str, ...] = ("start_positions", "end_positions")

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.may_be_none = False

    def read(self, location: str, flag: str) -> list[Question]:
        return read_questions(location, flag)

    def settle(self, train: list[Question], validation: list[Question], test: list[Question]) -> None:
        unanswered = sum(not question.answers for question in train)
        if unanswered == len(train):
            raise InputError(
                "no question has an answer", where=f"{train[0].where} and all others", remedy="give some that have one"
            )
        self.may_be_none = unanswered > 0
        if self.may_be_none:
            print(f"{unanswered:,} of {len(train):,} training questions have no answer: none is a possible answer")
        elif any(question.answers == [] for question in [*validation, *test]):
            print("every training question has an answer, so one is always given, also where there should be none")

    def group(self, example: Question) -> str:
        return example.context  # questions on one context are not told apart in training and validation

    def content(self, example: Question) -> object:
        return [example.id, example.question, example.context, example.answers]

    def has_labels(self, examples: list[Question]) -> bool:
        return all(example.answers is not None for example in examples)

    def head(self) -> dict[str, Any]:
        return {}

    def encode(self, examples: list[Question], split: str) -> list[Window]:
        max_length, stride = self.settings.max_length, self.settings.stride
        assert max_length is not None
        assert stride is not None
        questions = self._shortened([example.question for example in examples], split)
        pairs = list(zip(questions, (example.context for example in examples), strict=True))
        cut = {"max_length": max_length, "stride": stride, "strategy": "only_second"}
        has_labels = self.has_labels(examples)
        windows: list[Window] = []
        divided = 0
        for number, encoding in enumerate(encodings(self.tokenizer, pairs, **cut)):
            divided += bool(encoding.overflowing)
            for part in (encoding, *encoding.overflowing):
                places = _places(part)
                labels = {}
                if has_labels:
                    first, last = _positions(places, examples[number].answers or [])
                    labels = {"start_positions": first, "end_positions": last}
                # Spans are read off what is predicted; of the training rows there may be millions.
                noted = places if split != "train" else ()
                windows.append(Window(number, part.ids, part.type_ids, labels, noted))
        say_cut(divided, len(examples), max_length, split, "seen in overlapping windows")
        self._say_lost(examples, windows, split)
        return windows

    def _shortened(self, questions: list[str], split: str) -> list[str]:
        assert self.settings.max_length is not None
        most = min(MAX_QUESTION_TOKENS, self.settings.max_length // 3)
        found = zip(questions, encodings(self.tokenizer, questions), strict=True)
        kept = [text[: encoding.offsets[most - 1][1]] if len(encoding) > most else text for text, encoding in found]
        too_long = sum(short != question for short, question in zip(kept, questions, strict=True))
        if too_long:
            print(f"{split}: {too_long:,} questions are longer than {most} tokens and were cut at the end")
        return kept

    def _say_lost(self, examples: list[Question], windows: list[Window], split: str) -> None:
        taught = {window.example for window in windows if window.labels.get("start_positions")}
        lost = sum(bool(example.answers) and number not in taught for number, example in enumerate(examples))
        if lost:
            print(f"{split}: {lost:,} answers fit into no window and are not learned from")

    def decode(self, examples: list[Question], windows: list[Window], logits: Any) -> list[Prediction]:
        spans: list[list[Found]] = [[] for _ in examples]
        nulls = [np.inf] * len(examples)
        for window, starts, ends in zip(windows, *logits, strict=True):
            spans[window.example] += best_spans(window.places, starts, ends, self.settings.max_answer_length)
            # A window without the answer says none with right; only if all do, there is none.
            nulls[window.example] = min(nulls[window.example], float(starts[0] + ends[0]))
        predictions = []
        for example, found, null in zip(examples, spans, nulls, strict=True):
            best = sorted(set(found), key=lambda span: (-span.score, span.begin, span.end))[:N_BEST]
            is_none = not best or (self.may_be_none and null > best[0].score)
            text = "" if is_none else example.context[best[0].begin : best[0].end]
            predictions.append(Prediction(text, best, null))
        return predictions

    def score(self, examples: list[Question], predictions: list[Prediction]) -> dict[str, float]:
        truth = [[text for text, _ in example.answers or []] for example in examples]
        return squad_scores(truth, [prediction.text for prediction in predictions])

    def record(self, example: Question, prediction: Prediction) -> dict[str, Any]:
        answers = {} if example.answers is None else {"answers": [text for text, _ in example.answers]}
        shown = [
            {
                "text": example.context[span.begin : span.end],
                "answer_start": span.begin,
                "score": round(span.score, 4),
            }
            for span in prediction.spans[:_MOST_SHOWN]
        ]
        null = {"null_score": round(prediction.null_score, 4)} if self.may_be_none else {}
        asked = {"row": example.row, "id": example.id, "question": example.question}
        return {**asked, **answers, "prediction": prediction.text, **null, "best": shown}


def best_spans(places: Any, starts: np.ndarray, ends: np.ndarray, max_tokens: int) -> list[Found]:
    """Return the best spans of one window.

    Args:
        places: for each position the characters of the context it stands for, or None.
        starts: (positions or more,) logits; ends likewise.
        max_tokens: a span may have.
    """
    length = len(places)
    likely_starts, likely_ends = (
        [position for position in np.argsort(-scores[:length], kind="stable") if places[position] is not None][:N_BEST]
        for scores in (starts, ends)
    )
    found = [
        Found(places[first][0], places[last][1], float(starts[first] + ends[last]))
        for first in likely_starts
        for last in likely_ends
        if first <= last < first + max_tokens
    ]
    return sorted(found, key=lambda span: -span.score)[:N_BEST]


def _places(encoding: Encoding) -> list[tuple[int, int] | None]:
    """Return for each position the characters of the context that it stands for, None outside the context."""
    pairs = zip(encoding.sequence_ids, encoding.offsets, strict=True)
    return [offsets if sequence == 1 else None for sequence, offsets in pairs]


def _positions(places: list[tuple[int, int] | None], answers: list[tuple[str, int]]) -> tuple[int, int]:
    """Return the first and the last position of the first answer, or those of [CLS] where the window lacks it."""
    if not answers:
        return 0, 0
    text, begin = answers[0]
    end = begin + len(text.rstrip())
    begin += len(text) - len(text.lstrip())
    shown = [position for position, place in enumerate(places) if place is not None]
    covered = [position for position in shown if places[position][0] < end and places[position][1] > begin]  # type: ignore[index]
    if not covered:
        return 0, 0
    # Where a window ends inside the answer, its first or last piece is not among the covered ones.
    is_cut_before = places[covered[0]][0] > begin and covered[0] == shown[0]  # type: ignore[index]
    is_cut_after = places[covered[-1]][1] < end and covered[-1] == shown[-1]  # type: ignore[index]
    return (0, 0) if is_cut_before or is_cut_after else (covered[0], covered[-1])
