"""`answer`: the span of a context that answers a question, or none; long contexts are divided into overlapping windows.

As in BERT's SQuAD code: every position has a start and an end score, the [CLS] position means no answer, and the best
span over all windows of a context is the answer. Spans are cut from the raw text by the offsets of their pieces.
"""

import dataclasses
import math
import re
import string
import unicodedata
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.rows import Example, LabelledInput, UnusableRow, read_rows, read_text
from bert_pretrain.finetune.task import Task, Window, encodings
from bert_pretrain.text.readers import parse_json, repair_surrogates

MAX_QUESTION_TOKENS = 64
DEFAULT_ANSWER_LENGTH = 30
"""The most tokens of an answer, of a model whose folder does not say."""
N_BEST = 20
_MAX_SHOWN = 5

Given = tuple[str, int]
"""A text, and the character of the context at which it begins; NOT_FOUND if the context does not contain it."""
NOT_FOUND = -1
_CMRC_NAMES = {"context_text": "context", "query_text": "question", "query_id": "id"}
_IDEOGRAPH = r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]"

Span = tuple[int, int, float]
"""A span of a context, [begin, end) in characters, and the sum of its two logits."""


class Prediction(NamedTuple):
    """The answer, "" for none; the best spans of the context, the best first; and the score of no answer."""

    text: str
    spans: list[Span]
    null_score: float


class Answer(Task):
    """Windows, spans and metrics of the task."""

    model_class = "AutoModelForQuestionAnswering"
    main_metric = "f1"
    label_names: tuple[str, ...] = ("start_positions", "end_positions")
    label_column = "answers"
    group = "context"

    def rows(self, source: LabelledInput) -> list[Example]:
        return read_questions(source)

    def inputs_of(self, row: Example) -> dict[str, Any]:
        inputs = {name: row.get(name) for name in ("question", "context")}
        for name, value in inputs.items():
            if not isinstance(value, str) or not value.strip():
                raise UnusableRow(f"its {name} is empty", where=row.where, remedy="fill it, or leave the row out")
        return ({} if row.values.get("id") is None else {"id": str(row.values["id"])}) | inputs

    def label_of(self, row: Example, source: LabelledInput) -> list[Given] | None:
        return answers_of(row, row.inputs["context"], source)

    def set_labels(self, train: list[Example], others: list[Example]) -> None:
        unanswered = sum(not question.label for question in train)
        if unanswered == len(train):
            where, remedy = f"{train[0].where} and all others", "give some that have one"
            raise InputError("no question has an answer", where=where, remedy=remedy)
        if self.settings.max_answer_length is None:
            texts = [text for question in train for text, _ in question.label[:1]]
            lengths = [len(encoding) for encoding in encodings(self.tokenizer, texts, special=False)]
            longest = max(1, math.ceil(np.percentile(lengths, 99)))
            self.settings = dataclasses.replace(self.settings, max_answer_length=longest)
            print(f"answers have at most {longest} tokens, as 99 % of those in training (--max-answer-length)")
        self.may_be_none = unanswered > 0
        if self.may_be_none:
            print(f"{unanswered:,} of {len(train):,} training questions have no answer, so none is a possible answer")
        elif any(question.label == [] for question in others):
            print("every training question has an answer, so one is always given, even to questions without one")

    def encode(self, examples: list[Example], split: str) -> list[Window]:
        max_length, stride = self.settings.max_length, self.settings.stride
        questions = self._truncated([example.inputs["question"] for example in examples])
        pairs = list(zip(questions, (example.inputs["context"] for example in examples), strict=True))
        truncation = {"max_length": max_length, "stride": stride, "strategy": "only_second"}
        has_labels = all(example.label is not None for example in examples)
        windows: list[Window] = []
        for number, encoding in enumerate(encodings(self.tokenizer, pairs, truncation)):
            examples[number].is_cut = bool(encoding.overflowing)
            for part in (encoding, *encoding.overflowing):
                positions = _characters(part)
                bounds = _label(positions, examples[number].label) if has_labels else ()
                labels = dict(zip(self.label_names, bounds, strict=False))
                # Only predictions need the characters, and there may be millions of training windows.
                kept = positions if split != "train" else ()
                windows.append(Window(number, part.ids, part.type_ids, labels, kept))
        return windows

    def _truncated(self, questions: list[str]) -> list[str]:
        """Return questions cut to their first tokens, so that most of a window holds context."""
        assert self.settings.max_length is not None
        limit = min(MAX_QUESTION_TOKENS, self.settings.max_length // 3)
        encoded = zip(questions, encodings(self.tokenizer, questions, special=False), strict=True)
        return [text[: encoding.offsets[limit - 1][1]] if len(encoding) > limit else text for text, encoding in encoded]

    def decode(self, examples: list[Example], windows: list[Window], logits: Any) -> list[Prediction]:
        spans: list[set[Span]] = [set() for _ in examples]
        nulls = [math.inf] * len(examples)
        longest = self.settings.max_answer_length or DEFAULT_ANSWER_LENGTH
        for window, starts, ends in zip(windows, *logits, strict=True):
            spans[window.example].update(best_spans(window.positions, starts, ends, longest))
            # A window without the answer correctly predicts none; there is none only if all windows do.
            nulls[window.example] = min(nulls[window.example], float(starts[0] + ends[0]))
        predictions = []
        for example, candidates, null in zip(examples, spans, nulls, strict=True):
            best = sorted(candidates, key=lambda span: (-span[2], span))[:N_BEST]
            is_none = not best or (self.may_be_none and null > best[0][2])
            text = "" if is_none else example.inputs["context"][slice(*best[0][:2])]
            predictions.append(Prediction(text, best, null))
        return predictions

    def score(self, examples: list[Example], predictions: list[Prediction]) -> dict[str, float]:
        return squad_scores(_texts(examples), [prediction.text for prediction in predictions])

    def constant(self, examples: list[Example]) -> tuple[str, float]:
        return "no answer to any question", squad_scores(_texts(examples), [""] * len(examples))["f1"]

    def columns(self, prediction: Prediction) -> dict[str, Any]:
        score = prediction.spans[0][2] if prediction.text else prediction.null_score
        return {"answer": prediction.text, "score": round(score, 4)}

    def record(self, example: Example, prediction: Prediction) -> dict[str, Any]:
        inputs = {name: value for name, value in example.inputs.items() if name != "context"}
        answers = {} if example.label is None else {"answers": [text for text, _ in example.label]}
        null = {"null_score": round(prediction.null_score, 4)} if self.may_be_none else {}
        best = [
            {"text": example.inputs["context"][begin:end], "answer_start": begin, "score": round(score, 4)}
            for begin, end, score in prediction.spans[:_MAX_SHOWN]
        ]
        return {"row": example.row, **inputs, **answers, "prediction": prediction.text, **null, "best": best}


def _texts(examples: list[Example]) -> list[list[str]]:
    return [[text for text, _ in example.label] for example in examples]


def best_spans(positions: Any, starts: np.ndarray, ends: np.ndarray, max_tokens: int) -> list[Span]:
    """Return the best spans of one window, by its logits (positions or more,) and the characters of its positions."""
    likely_starts, likely_ends = (
        [at for at in np.argsort(-scores[: len(positions)], kind="stable") if positions[at] is not None][:N_BEST]
        for scores in (starts, ends)
    )
    candidates = [
        (positions[first][0], positions[last][1], float(starts[first] + ends[last]))
        for first in likely_starts
        for last in likely_ends
        if first <= last < first + max_tokens
    ]
    return sorted(candidates, key=lambda span: -span[2])[:N_BEST]


def _characters(encoding: Encoding) -> list[tuple[int, int] | None]:
    """Return for each position its characters in the context, None outside the context."""
    pairs = zip(encoding.sequence_ids, encoding.offsets, strict=True)
    return [offsets if sequence == 1 else None for sequence, offsets in pairs]


def _label(positions: list[tuple[int, int] | None], answers: list[Given]) -> tuple[int, int]:
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


def read_questions(source: LabelledInput) -> list[Example]:
    """Return the questions of an input: SQuAD's JSON, that of CMRC 2018, or flat rows."""
    text = read_text(source) if source.kind == "json" else ""
    if '"qas"' not in text:
        return read_rows(source)
    rows: list[Example] = []
    content = repair_surrogates(parse_json(text, source.location))
    try:
        for article in content if isinstance(content, list) else content["data"]:  # CMRC has a list of paragraphs
            for paragraph in map(_renamed, article.get("paragraphs", [article])):
                for asked in map(_renamed, paragraph["qas"]):
                    where = f"{source.location}: question {asked.get('id')}"
                    rows.append(Example(len(rows), where, {"context": paragraph["context"], **asked}))
    except (KeyError, TypeError, AttributeError) as error:
        what = f"it does not have SQuAD's format: {type(error).__name__} {error}"
        remedy = "write data > paragraphs > context, qas > id, question, answers > text, answer_start"
        raise InputError(what, where=source.location, remedy=remedy) from error
    return rows


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    return {_CMRC_NAMES.get(name, name): value for name, value in values.items()}


def answers_of(row: Example, context: str, source: LabelledInput) -> list[Given] | None:
    """Return the answers of a row at their positions, empty if there is none, None if that is not known."""
    answers = [] if row.values.get("is_impossible") else row.get("answers")
    if answers is None:
        return None
    if isinstance(answers, str) or (isinstance(answers, dict) and isinstance(answers.get("text"), str)):
        answers = [answers]
    try:
        if isinstance(answers, dict):
            texts = answers["text"]
            given = list(zip(texts, answers.get("answer_start", [NOT_FOUND] * len(texts)), strict=True))
        else:
            found = [{"text": each} if isinstance(each, str) else each for each in answers]
            given = [(each["text"], each.get("answer_start", NOT_FOUND)) for each in found]
        pairs = [(text, start if isinstance(start, int) else NOT_FOUND) for text, start in given if text.strip()]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            "its 'answers' do not have SQuAD's format",
            where=row.where,
            remedy='write {"text": ["…"], "answer_start": [0]}, both lists empty where there is no answer',
        ) from error
    placed = [_placed(answer, context) for answer in pairs]
    if placed and source.flag == "--train" and all(start == NOT_FOUND for _, start in placed):
        raise UnusableRow("its answer is not in its context", where=row.where, remedy="correct or remove it")
    moves = ((start, found) for (_, start), (_, found) in zip(pairs, placed, strict=True))
    if any(NOT_FOUND not in move and len(set(move)) > 1 for move in moves):
        source.note("questions whose answer was moved to where the context contains it", row.where)
    if any(start == NOT_FOUND for _, start in placed):
        source.note("questions with an answer that the context does not contain", row.where)
    if len(pairs) < len(given):
        source.note("questions with an empty answer, which was ignored", row.where)
    return placed


def _placed(answer: Given, context: str) -> Given:
    """Return an answer at its position, or else at the nearest one at which the context contains it, or NOT_FOUND."""
    text, start = answer
    if start >= 0 and context.startswith(text, start):
        return answer
    places = [match.start() for match in re.finditer(re.escape(text.strip()), context)]
    if not places:
        return text, NOT_FOUND
    return text.strip(), min(places, key=lambda each: abs(each - start))


def squad_scores(truth: list[list[str]], found: list[str]) -> dict[str, float]:
    """Return SQuAD's exact match and F1, the best of each question's answers; "" and an empty list mean no answer.

    Every Chinese, Japanese or Korean ideograph counts as a word, so F1 is by character there.
    """
    exact, overlap = [], []
    for answers, prediction in zip(truth, found, strict=True):
        candidates = [answer for answer in answers if words_of(answer)] or [""]
        exact.append(max(float(words_of(answer) == words_of(prediction)) for answer in candidates))
        overlap.append(max(word_f1(answer, prediction) for answer in candidates))
    scores = {"f1": _mean(overlap), "exact_match": _mean(exact)}
    if not all(truth):
        for name, wanted in (("has_answer", True), ("no_answer", False)):
            chosen = [number for number, answers in enumerate(truth) if bool(answers) is wanted]
            scores[f"{name}_f1"] = _mean([overlap[number] for number in chosen])
            scores[f"{name}_exact_match"] = _mean([exact[number] for number in chosen])
    return scores


def word_f1(answer: str, prediction: str) -> float:
    """Return the F1 of the words that two texts share, counted with repetitions."""
    ours, theirs = words_of(prediction), words_of(answer)
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * (Counter(ours) & Counter(theirs)).total() / (len(ours) + len(theirs))


def words_of(text: str) -> list[str]:
    """Return the words of an answer after SQuAD's normalisation: no case, punctuation or articles.

    In a text with ideographs, punctuation of every script is removed, not only that of ASCII.
    """
    dropped = set(string.punctuation)
    if re.search(_IDEOGRAPH, text):
        dropped |= {character for character in text if unicodedata.category(character).startswith("P")}
    text = "".join(character for character in text.lower() if character not in dropped)
    text = re.sub(r"\b(a|an|the)\b", " ", text)
    return re.sub(_IDEOGRAPH, r" \g<0> ", text).split()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
