"""`answer`: predicts the span of a context that answers a question, or no answer.

As in BERT's SQuAD code, every position has a start and an end logit, the [CLS] position means no answer, and the best
span over all overlapping windows of a context is the answer. Its text is cut from the raw context by token offsets.
"""

import dataclasses
import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.rows import Example, LabelledInput, read_rows
from bert_pretrain.finetune.task import Task, Window
from bert_pretrain.text.readers import parse_json, repair_surrogates

N_BEST = 20
NOT_FOUND = -1
_MAX_QUESTION_TOKENS = 64
_IDEOGRAPH = r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]"
_SQUAD_NAMES = {"context_text": "context", "query_text": "question", "query_id": "id"}  # of the keys of CMRC 2018

TrueAnswer = tuple[str, int]  # text, and its first character in the context or NOT_FOUND
Span = tuple[int, int, float]  # [begin, end) in characters of the context, and the sum of its two logits


class Prediction(NamedTuple):
    """A predicted answer, with the other spans that were considered."""

    text: str  # "" for no answer
    spans: list[Span]  # best first
    null_score: float  # of no answer


class Answer(Task):
    """The extractive question answering task."""

    model_class = "AutoModelForQuestionAnswering"
    pipeline_tag = "question-answering"
    main_metric = "f1"
    label_column = "answers"
    group_by = "context"

    def rows(self, source: LabelledInput) -> list[Example]:
        """Read questions from SQuAD's JSON, CMRC 2018's JSON, or flat rows."""
        text = source.read_text() if source.kind == "json" else ""
        if '"qas"' not in text:
            return read_rows(source)
        rows: list[Example] = []
        content = repair_surrogates(parse_json(text, source.location))
        try:
            for article in content if isinstance(content, list) else content["data"]:  # CMRC has a list of paragraphs
                for paragraph in map(_squad_names, article.get("paragraphs", [article])):
                    for question in map(_squad_names, paragraph["qas"]):
                        where = f"{source.location}: question {question.get('id')}"
                        rows.append(Example(len(rows), where, {"context": paragraph["context"], **question}))
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"the file is not in SQuAD's format: {type(error).__name__} {error}",
                where=source.location,
                remedy="write data > paragraphs > context, qas > id, question, answers > text, answer_start",
            ) from error
        return rows

    def model_config(self) -> dict[str, Any]:
        return {**super().model_config(), "num_labels": 2}  # start and end

    def inputs_of(self, row: Example) -> dict[str, Any]:
        inputs = {} if row.values.get("id") is None else {"id": str(row.values["id"])}
        for name in ("question", "context"):
            value = row.get(name)
            if not isinstance(value, str) or not value.strip():
                raise row.unusable(f"the {name} is empty")
            inputs[name] = value
        return inputs

    def label_of(self, row: Example, source: LabelledInput) -> list[TrueAnswer] | None:
        """Return the answers of a row with their positions: [] if there is no answer, None if it is unknown."""
        is_impossible = str(row.values.get("is_impossible")).lower() in ("true", "1")  # text in CSV
        answers = [] if is_impossible else row.get("answers")
        if answers is None:
            return None
        try:
            given = _answers_of(answers)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            remedy = 'write {"text": ["…"], "answer_start": [0]}, with empty lists if there is no answer'
            raise row.unusable("'answers' is not in SQuAD's format", remedy) from error
        located = [_locate(answer, row.inputs["context"]) for answer in given]
        starts = [start for _, start in located]
        if located and source.flag == "--train" and set(starts) == {NOT_FOUND}:
            raise row.unusable("the answer is not in the context")
        if any(NOT_FOUND not in (old, new) and old != new for (_, old), new in zip(given, starts, strict=True)):
            source.note("questions with a wrong answer_start, which was corrected", row.where)
        if NOT_FOUND in starts:
            source.note("questions with an answer that is not in the context", row.where)
        return located

    def set_labels(self, train: list[Example], others: list[Example]) -> None:
        num_unanswered = sum(not question.label for question in train)
        if num_unanswered == len(train):
            raise self.nothing_to_learn(train)
        if self.settings.max_answer_length is None:
            texts = [text for question in train for text, _ in question.label[:1]]
            lengths = [len(encoding) for encoding in self.encode_texts(texts, add_special_tokens=False)]
            longest = max(1, math.ceil(np.percentile(lengths, 99)))
            self.settings = dataclasses.replace(self.settings, max_answer_length=longest)
            print(f"maximum answer length: {longest} tokens, the 99th percentile in training (--max-answer-length)")
        self.allows_no_answer = num_unanswered > 0
        if self.allows_no_answer:
            print(f"{num_unanswered:,} of {len(train):,} training questions have no answer, so answers may be empty")

    def encodings(self, examples: list[Example]) -> Iterator[Encoding]:
        assert self.settings.max_length is not None
        # Short questions leave room for the context.
        limit = min(_MAX_QUESTION_TOKENS, self.settings.max_length // 3)
        questions = [example.inputs["question"] for example in examples]
        pairs = []
        for example, encoding in zip(examples, self.encode_texts(questions, add_special_tokens=False), strict=True):
            end = max((stop for _, stop in encoding.offsets[:limit]), default=0)
            pairs.append((example.inputs["question"][:end], example.inputs["context"]))
        return self.encode_texts(
            pairs,
            strategy="only_second",
            max_length=self.settings.max_length,
            stride=self.settings.stride,
        )

    def positions_of(self, encoding: Encoding, *, is_first: bool) -> list[tuple[int, int] | None]:
        """Return the context characters [begin, end) of each position, None outside the context."""
        tokens = zip(encoding.sequence_ids, encoding.offsets, strict=True)
        return [characters if sequence == 1 else None for sequence, characters in tokens]

    def targets_of(
        self,
        label: list[TrueAnswer],
        positions: Sequence[Any],
        num_tokens: int,
    ) -> dict[str, Any]:
        return dict(zip(("start_positions", "end_positions"), _answer_positions(positions, label), strict=True))

    def decode(
        self,
        examples: list[Example],
        windows: list[Window],
        logits: Any,
    ) -> list[Prediction]:
        spans: list[list[Span]] = [[] for _ in examples]
        null_scores = [math.inf] * len(examples)
        max_tokens = self.settings.max_answer_length or 30  # the default of BERT's SQuAD code
        for window, starts, ends in zip(windows, *logits, strict=True):
            spans[window.example] += best_spans(window.positions, starts, ends, max_tokens)
            # Windows without the answer score high on [CLS], so take the minimum over all windows.
            null_scores[window.example] = min(null_scores[window.example], float(starts[0] + ends[0]))
        predictions = []
        for example, candidates, null_score in zip(examples, spans, null_scores, strict=True):
            highest = {span[:2]: span for span in sorted(candidates, key=lambda span: span[2])}  # windows overlap
            best = sorted(highest.values(), key=lambda span: (-span[2], span))[:N_BEST]
            is_null = not best or (self.allows_no_answer and null_score > best[0][2])
            text = "" if is_null else cut(example.inputs["context"], *best[0][:2])
            predictions.append(Prediction(text, best, null_score))
        return predictions

    def score(self, examples: list[Example], predictions: list[Prediction]) -> dict[str, float]:
        truth = [[text for text, _ in example.label] for example in examples]
        return squad_scores(truth, [prediction.text for prediction in predictions])

    def constant_baseline(self, examples: list[Example]) -> tuple[str, float]:
        no_answer = Prediction(text="", spans=[], null_score=0.0)
        return "no answer to any question", self.score(examples, [no_answer] * len(examples))["f1"]

    def columns(self, prediction: Prediction) -> dict[str, Any]:
        score = prediction.spans[0][2] if prediction.text else prediction.null_score
        return {"answer": prediction.text, "score": round(score, 4)}

    def record(self, example: Example, prediction: Prediction) -> dict[str, Any]:
        inputs = {name: value for name, value in example.inputs.items() if name != "context"}
        answers = {} if example.label is None else {"answers": [text for text, _ in example.label]}
        null = {"null_score": round(prediction.null_score, 4)} if self.allows_no_answer else {}
        best = [
            {"text": cut(example.inputs["context"], begin, end), "answer_start": begin, "score": round(score, 4)}
            for begin, end, score in prediction.spans[:5]
        ]
        return {"row": example.row, **inputs, **answers, "prediction": prediction.text, **null, "best": best}


def cut(context: str, begin: int, end: int) -> str:
    """Return context[begin:end] without blanks at its ends, and with the combining marks that follow.

    Token offsets exclude marks that are stripped. In byte-level BPE, they include the blank before a word.
    """
    while end < len(context) and unicodedata.category(context[end]) == "Mn":
        end += 1
    return context[begin:end].strip()


def best_spans(
    positions: Any,
    starts: np.ndarray,
    ends: np.ndarray,
    max_tokens: int,
) -> list[Span]:
    """Return the `N_BEST` best spans of one window from its start and end logits, which may be followed by padding.

    `positions` has the context characters [begin, end) of each position, None outside the context.
    """
    context = np.array([position is not None for position in positions]).nonzero()[0]
    likely_starts = context[np.argsort(-starts[context], kind="stable")[:N_BEST]]
    likely_ends = context[np.argsort(-ends[context], kind="stable")[:N_BEST]]
    candidates = [
        (positions[first][0], positions[last][1], float(starts[first] + ends[last]))
        for first in likely_starts
        for last in likely_ends
        if first <= last < first + max_tokens
    ]
    return sorted(candidates, key=lambda span: -span[2])[:N_BEST]


def _answer_positions(positions: Sequence[Any], answers: list[TrueAnswer]) -> tuple[int, int]:
    """Return the first and last position of the first located answer, (0, 0) if the window lacks or cuts it."""
    text, begin = next((answer for answer in answers if answer[1] != NOT_FOUND), ("", NOT_FOUND))
    end = begin + len(text)
    starts, ends = np.array([characters or (0, 0) for characters in positions]).T
    covered = np.flatnonzero((starts < end) & (ends > begin))  # empty without a located answer
    if not len(covered) or starts[ends > 0].min() > begin or ends.max() < end:
        return 0, 0
    return int(covered[0]), int(covered[-1])


def _squad_names(values: dict[str, Any]) -> dict[str, Any]:
    return {_SQUAD_NAMES.get(name, name): value for name, value in values.items()}


def _answers_of(answers: Any) -> list[TrueAnswer]:
    """Return the texts that are not empty and their starts, from SQuAD's lists, a list of answers or one answer."""
    if isinstance(answers, dict) and isinstance(answers["text"], list):
        texts = answers["text"]
        starts = answers.get("answer_start", [NOT_FOUND] * len(texts))
    else:
        several = answers if isinstance(answers, list) else [answers]
        dicts = [{"text": each} if isinstance(each, str) else each for each in several]
        texts = [each["text"] for each in dicts]
        starts = [each.get("answer_start") for each in dicts]
    return [(text, _start_of(start)) for text, start in zip(texts, starts, strict=True) if text.strip()]


def _start_of(value: Any) -> int:
    """Return an `answer_start` as an integer. pandas writes 8.0, CSV has "8". Other values become NOT_FOUND."""
    match = re.fullmatch(r"(\d+)(\.0)?", str(value))
    return int(match[1]) if match else NOT_FOUND


def _locate(answer: TrueAnswer, context: str) -> TrueAnswer:
    """Return an answer without blanks at its ends, with the start of its occurrence that is nearest to its start."""
    text, start = answer[0].strip(), answer[1]
    starts = [match.start() for match in re.finditer(re.escape(text), context)]
    return text, min(starts, key=lambda each: abs(each - start), default=NOT_FOUND)


def squad_scores(truth: list[list[str]], predictions: list[str]) -> dict[str, float]:
    """Return SQuAD's exact match and F1, in [0, 1]: the maximum over the true answers, averaged over the questions.

    "" and [] mean no answer. Each Chinese, Japanese or Korean ideograph counts as a word. If some questions have no
    answer, the scores of questions with and without an answer are returned too.
    """
    f1, exact = [], []
    for answers, prediction in zip(truth, predictions, strict=True):
        candidates = [answer for answer in answers if normalized_words(answer)] or [""]
        f1.append(max(word_f1(answer, prediction) for answer in candidates))
        exact.append(normalized_words(prediction) in map(normalized_words, candidates))
    groups = {"": np.full(len(truth), True)}
    if not all(truth):
        groups["has_answer_"] = np.array(list(map(bool, truth)))
        groups["no_answer_"] = ~groups["has_answer_"]
    scores = {}
    for prefix, rows in groups.items():
        for name, values in (("f1", f1), ("exact_match", exact)):
            scores[prefix + name] = float(np.mean(np.array(values)[rows])) if rows.any() else 0.0
    return scores


def word_f1(answer: str, prediction: str) -> float:
    """Return the F1 of the words shared by two texts, with repetitions."""
    predicted, true = normalized_words(prediction), normalized_words(answer)
    if not predicted or not true:
        return float(predicted == true)
    return 2 * (Counter(predicted) & Counter(true)).total() / (len(predicted) + len(true))


def normalized_words(text: str) -> list[str]:
    """Split an answer into lowercase words, without ASCII punctuation and articles, as SQuAD's evaluation does.

    If the text contains ideographs, all Unicode punctuation is removed.
    """
    removed = set(string.punctuation)
    if re.search(_IDEOGRAPH, text):
        removed |= {character for character in text if unicodedata.category(character).startswith("P")}
    text = "".join(character for character in text.lower() if character not in removed)
    text = re.sub(r"\b(a|an|the)\b", " ", text)
    return re.sub(_IDEOGRAPH, r" \g<0> ", text).split()
