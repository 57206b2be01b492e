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
from typing import Any, NamedTuple

import numpy as np

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.rows import Example, LabelledInput, UnusableRow, check_columns, read_rows, read_text
from bert_pretrain.finetune.task import Task, Window, encode_texts
from bert_pretrain.text.readers import parse_json, repair_surrogates

N_BEST = 20
NOT_FOUND = -1
_IDEOGRAPH = r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]"

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
    label_names: tuple[str, ...] = ("start_positions", "end_positions")
    label_column = "answers"
    group_by = "context"

    def rows(self, source: LabelledInput) -> list[Example]:
        """Read questions from SQuAD's JSON, CMRC 2018's JSON, or flat rows."""
        check_columns(source)
        text = read_text(source) if source.kind == "json" else ""
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
            what = f"the file is not in SQuAD's format: {type(error).__name__} {error}"
            remedy = "write data > paragraphs > context, qas > id, question, answers > text, answer_start"
            raise InputError(what, where=source.location, remedy=remedy) from error
        return rows

    def model_config(self) -> dict[str, Any]:
        return {**super().model_config(), "num_labels": 2}  # start and end

    def inputs_of(self, row: Example) -> dict[str, Any]:
        inputs = {name: row.get(name) for name in ("question", "context")}
        for name, value in inputs.items():
            if not isinstance(value, str) or not value.strip():
                raise UnusableRow(f"the {name} is empty", where=row.where, remedy="add the text, or remove the row")
        return ({} if row.values.get("id") is None else {"id": str(row.values["id"])}) | inputs

    def label_of(self, row: Example, source: LabelledInput) -> list[TrueAnswer] | None:
        """Return the answers of a row with their positions: [] if there is no answer, None if it is unknown."""
        is_impossible = str(row.values.get("is_impossible")).lower() in ("true", "1")  # text in CSV
        answers = [] if is_impossible else row.get("answers")
        if answers is None:
            return None
        if isinstance(answers, str) or (isinstance(answers, dict) and isinstance(answers.get("text"), str)):
            answers = [answers]  # a single answer without a list
        try:
            if isinstance(answers, dict):
                texts = answers["text"]
                pairs = list(zip(texts, answers.get("answer_start", [NOT_FOUND] * len(texts)), strict=True))
            else:
                dicts = [{"text": each} if isinstance(each, str) else each for each in answers]
                pairs = [(each["text"], each.get("answer_start", NOT_FOUND)) for each in dicts]
            nonempty = [(text, _start_of(start)) for text, start in pairs if text.strip()]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            remedy = 'write {"text": ["…"], "answer_start": [0]}, with empty lists if there is no answer'
            raise InputError("'answers' is not in SQuAD's format", where=row.where, remedy=remedy) from error
        located = [_locate(answer, row.inputs["context"]) for answer in nonempty]
        if located and source.flag == "--train" and all(start == NOT_FOUND for _, start in located):
            raise UnusableRow("the answer is not in the context", where=row.where, remedy="fix the row, or remove it")
        moves = zip(nonempty, located, strict=True)
        if any(NOT_FOUND not in (old, new) and old != new for (_, old), (_, new) in moves):
            source.note("questions with a wrong answer_start, which was corrected", row.where)
        if any(start == NOT_FOUND for _, start in located):
            source.note("questions with an answer that is not in the context", row.where)
        if len(nonempty) < len(pairs):
            source.note("questions with an empty answer, which was ignored", row.where)
        return located

    def set_labels(self, train: list[Example], others: list[Example]) -> None:
        num_unanswered = sum(not question.label for question in train)
        if num_unanswered == len(train):
            where, remedy = f"{train[0].where} and all other rows", "provide questions with an answer"
            raise InputError("no question has an answer", where=where, remedy=remedy)
        if self.settings.max_answer_length is None:
            texts = [text for question in train for text, _ in question.label[:1]]
            lengths = [len(encoding) for encoding in encode_texts(self.tokenizer, texts, add_special_tokens=False)]
            longest = max(1, math.ceil(np.percentile(lengths, 99)))
            self.settings = dataclasses.replace(self.settings, max_answer_length=longest)
            print(f"maximum answer length: {longest} tokens, the 99th percentile in training (--max-answer-length)")
        self.allows_no_answer = num_unanswered > 0
        if self.allows_no_answer:
            print(f"{num_unanswered:,} of {len(train):,} training questions have no answer, so answers may be empty")
        elif any(question.label == [] for question in others):
            print("all training questions have an answer, so an answer is predicted even for questions without one")

    def encode(self, examples: list[Example], split: str) -> list[Window]:
        questions = self._truncated([example.inputs["question"] for example in examples])
        pairs = list(zip(questions, (example.inputs["context"] for example in examples), strict=True))
        truncation = {"max_length": self.settings.max_length, "stride": self.settings.stride, "strategy": "only_second"}
        has_labels = all(example.label is not None for example in examples)
        windows: list[Window] = []
        encodings = encode_texts(self.tokenizer, pairs, truncation)
        for number, (example, encoding) in enumerate(zip(examples, encodings, strict=True)):
            example.exceeds_window = bool(encoding.overflowing)
            for part in (encoding, *encoding.overflowing):
                # The context characters [begin, end) of each position, None outside the context.
                tokens = zip(part.sequence_ids, part.offsets, strict=True)
                positions = [offsets if sequence == 1 else None for sequence, offsets in tokens]
                labels = {}
                if has_labels:
                    labels = dict(zip(self.label_names, _answer_positions(positions, example.label), strict=True))
                # Only prediction needs the positions. They take much memory for millions of training windows.
                windows.append(Window(number, part.ids, part.type_ids, labels, positions if split != "train" else ()))
        return windows

    def _truncated(self, questions: list[str]) -> list[str]:
        """Truncate questions to 64 tokens and at most a third of a window, so that enough context fits."""
        assert self.settings.max_length is not None
        limit = min(64, self.settings.max_length // 3)
        encodings = encode_texts(self.tokenizer, questions, add_special_tokens=False)
        return [
            text[: encoding.offsets[limit - 1][1]] if len(encoding) > limit else text
            for text, encoding in zip(questions, encodings, strict=True)
        ]

    def decode(self, examples: list[Example], windows: list[Window], logits: Any) -> list[Prediction]:
        spans: list[set[Span]] = [set() for _ in examples]
        null_scores = [math.inf] * len(examples)
        max_tokens = self.settings.max_answer_length or 30  # the default of BERT's SQuAD code
        for window, starts, ends in zip(windows, *logits, strict=True):
            spans[window.example].update(best_spans(window.positions, starts, ends, max_tokens))
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
    """Return context[begin:end] with the combining marks that follow. Token offsets exclude marks that are stripped."""
    while end < len(context) and unicodedata.category(context[end]) == "Mn":
        end += 1
    return context[begin:end]


def best_spans(positions: Any, starts: np.ndarray, ends: np.ndarray, max_tokens: int) -> list[Span]:
    """Return the `N_BEST` best spans of one window from its start and end logits, which may be followed by padding.

    `positions` has the context characters [begin, end) of each position, None outside the context.
    """
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


def _answer_positions(positions: list[tuple[int, int] | None], answers: list[TrueAnswer]) -> tuple[int, int]:
    """Return the first and last position of the first located answer, (0, 0) if the window lacks or cuts it."""
    text, begin = next((answer for answer in answers if answer[1] != NOT_FOUND), ("", NOT_FOUND))
    end = begin + len(text.rstrip())
    begin += len(text) - len(text.lstrip())
    context = [(at, *characters) for at, characters in enumerate(positions) if characters is not None]
    covered = [token for token in context if token[1] < end and token[2] > begin]
    if not covered:  # also without a located answer, which would begin and end before the first character
        return 0, 0
    is_cut_before = covered[0][1] > begin and covered[0] == context[0]
    is_cut_after = covered[-1][2] < end and covered[-1] == context[-1]
    return (0, 0) if is_cut_before or is_cut_after else (covered[0][0], covered[-1][0])


def _squad_names(values: dict[str, Any]) -> dict[str, Any]:
    """Rename the keys of CMRC 2018 to those of SQuAD."""
    names = {"context_text": "context", "query_text": "question", "query_id": "id"}
    return {names.get(name, name): value for name, value in values.items()}


def _start_of(value: Any) -> int:
    """Return an `answer_start` as an integer. pandas writes 8.0, CSV has "8". Other values become NOT_FOUND."""
    match = re.fullmatch(r"(\d+)(\.0)?", str(value))
    return int(match[1]) if match else NOT_FOUND


def _locate(answer: TrueAnswer, context: str) -> TrueAnswer:
    """Return the answer with the start of its occurrence in the context that is nearest to its start, or NOT_FOUND."""
    text, start = answer
    if start >= 0 and context.startswith(text, start):
        return answer
    starts = [match.start() for match in re.finditer(re.escape(text.strip()), context)]
    return (text.strip(), min(starts, key=lambda each: abs(each - start))) if starts else (text, NOT_FOUND)


def squad_scores(truth: list[list[str]], predictions: list[str]) -> dict[str, float]:
    """Return SQuAD's exact match and F1, in [0, 1]: the maximum over the true answers, averaged over the questions.

    "" and [] mean no answer. Each Chinese, Japanese or Korean ideograph counts as a word. If some questions have no
    answer, the scores of questions with and without an answer are returned too.
    """
    exact, overlap = [], []
    for answers, prediction in zip(truth, predictions, strict=True):
        candidates = [answer for answer in answers if normalized_words(answer)] or [""]
        exact.append(max(float(normalized_words(answer) == normalized_words(prediction)) for answer in candidates))
        overlap.append(max(word_f1(answer, prediction) for answer in candidates))
    scores = {"f1": _mean(overlap), "exact_match": _mean(exact)}
    if not all(truth):
        for name, has_answer in (("has_answer", True), ("no_answer", False)):
            chosen = [number for number, answers in enumerate(truth) if bool(answers) is has_answer]
            scores[f"{name}_f1"] = _mean([overlap[number] for number in chosen])
            scores[f"{name}_exact_match"] = _mean([exact[number] for number in chosen])
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


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
