"""Questions with their contexts and answers, as SQuAD's JSON or flat rows, and SQuAD's two metrics."""

import itertools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.inputs import LabelledInput, UnusableRow
from bert_pretrain.finetune.tables import Row, iterate_rows, no_rows, read_text
from bert_pretrain.text.readers import parse_json, repair_surrogates


@dataclass(frozen=True)
class Question:
    """A question on a context; `answers` is None without a label, empty if there is no answer."""

    row: int
    where: str
    id: str
    question: str
    context: str
    answers: list[tuple[str, int]] | None
    """Text, and the character of the context at which it begins; NOT_FOUND if the context does not contain it."""


NOT_FOUND = -1
_OWN_NAMES = {"context_text": "context", "query_text": "question", "query_id": "id"}
"""SQuAD's names for those of CMRC 2018."""


def read_questions(source: LabelledInput) -> list[Question]:
    """Return the questions of an input: SQuAD's JSON, that of CMRC 2018, or flat rows."""
    rows = list(iterate_questions(source))
    if not rows:
        raise no_rows(source)
    is_test = source.flag == "--test"
    has_answers = not is_test or "answers" in rows[0].values
    seen: set[str] = set()

    def make(number: int, row: Row) -> Question:
        question, context = texts_of(row)
        name = str(number) if row.values.get("id") is None else str(row.values["id"])
        if name in seen:
            remedy = "give each question its own, or leave out --strict"
            error = InputError(f"the id {name!r} occurs twice", where=row.where, remedy=remedy)
            source.repair("repeated ids, made unique by a number", error)
            name = next(free for count in itertools.count(2) if (free := f"{name}-{count}") not in seen)
        seen.add(name)
        answers = _answers_of(row, source) if has_answers else None
        if answers is None:
            if not is_test:
                raise UnusableRow("it has no 'answers'", where=row.where, remedy="give them, or an empty list")
            return Question(number, row.where, name, question, context, answers=None)
        placed = [_placed(answer, context, row.where, source) for answer in answers]
        if placed and source.flag == "--train" and all(start == NOT_FOUND for _, start in placed):
            raise UnusableRow("its answer is not in its context", where=row.where, remedy="correct or remove it")
        return Question(number, row.where, name, question, context, answers=placed)

    return source.usable(rows, make)


def texts_of(row: Row) -> tuple[str, str]:
    """Return the question of a row and its context."""
    question, context = (row.get(name) for name in ("question", "context"))
    for name, value in (("question", question), ("context", context)):
        if not isinstance(value, str) or not value.strip():
            raise UnusableRow(f"its {name} is empty", where=row.where, remedy="fill it, or leave the row out")
    return question, context


def iterate_questions(source: LabelledInput) -> Iterator[Row]:
    """Yield a row with `question`, `context`, and if there are `id` and `answers`, for each question."""
    text = read_text(source) if source.kind == "json" else ""
    if '"qas"' not in text:
        return iterate_rows(source)
    return _flatten(repair_surrogates(parse_json(text, source.location)), source.location)


def _flatten(content: Any, location: str) -> Iterator[Row]:
    """Yield the questions of SQuAD's JSON, in paragraphs of articles, or of CMRC's, in a list of paragraphs."""
    try:
        for article in content if isinstance(content, list) else content["data"]:
            for paragraph in map(_renamed, article.get("paragraphs", [article])):
                for asked in map(_renamed, paragraph["qas"]):
                    values = {"context": paragraph["context"], **asked}
                    yield Row(values, f"{location}: question {asked.get('id')}")
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"it does not have SQuAD's format: {type(error).__name__} {error}",
            where=location,
            remedy="write data > paragraphs > context, qas > id, question, answers > text, answer_start",
        ) from error


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    return {_OWN_NAMES.get(name, name): value for name, value in values.items()}


def _answers_of(row: Row, source: LabelledInput) -> list[tuple[str, int]] | None:
    """Return the answers of a row with the positions it gives, empty if there is none, None if that is not known."""
    if row.values.get("is_impossible"):
        return []
    answers = row.get("answers")
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
    if len(pairs) < len(given):
        problem = InputError("an answer is empty", where=row.where, remedy="leave it out, or leave out --strict")
        source.repair("empty answers ignored", problem)
    return pairs


def _placed(answer: tuple[str, int], context: str, where: str, source: LabelledInput) -> tuple[str, int]:
    """Return an answer at its position, or else at the nearest one at which the context contains it, or NOT_FOUND."""
    text, start = answer
    if start >= 0 and context.startswith(text, start):
        return answer
    places = [match.start() for match in re.finditer(re.escape(text.strip()), context)]
    place = min(places, key=lambda each: abs(each - start), default=NOT_FOUND)
    if start == NOT_FOUND and places:
        source.say("answers have no answer_start: each is looked for in its context, and its first place taken")
        return text.strip(), place
    error = InputError(
        f"the answer {text[:60]!r} is not in the context at answer_start {start}; "
        + (f"it is at {place}" if places else "the context does not contain it"),
        where=where,
        remedy="count answer_start in characters from 0, and spell the answer as the context does",
    )
    source.repair("answers moved to where the context contains them" if places else "answers not in the context", error)
    return (text.strip() if places else text), place


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
    has_answer = [bool(answers) for answers in truth]
    if not all(has_answer):
        for name, wanted in (("has_answer", True), ("no_answer", False)):
            chosen = [number for number, value in enumerate(has_answer) if value is wanted]
            scores[f"{name}_f1"] = _mean([overlap[number] for number in chosen])
            scores[f"{name}_exact_match"] = _mean([exact[number] for number in chosen])
    return scores


def word_f1(answer: str, prediction: str) -> float:
    """Return the F1 of the words that two texts share, counted with repetitions."""
    ours, theirs = words_of(prediction), words_of(answer)
    if not ours or not theirs:
        return float(ours == theirs)
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs))


def words_of(text: str) -> list[str]:
    """Return the words of an answer after SQuAD's normalisation: no case, punctuation or articles.

    In a text with ideographs, punctuation of every script is removed, not only that of ASCII.
    """
    ideographs = re.search(IDEOGRAPH, text)
    dropped = set(string.punctuation)
    if ideographs:
        dropped |= {character for character in text if unicodedata.category(character).startswith("P")}
    text = "".join(character for character in text.lower() if character not in dropped)
    text = re.sub(r"\b(a|an|the)\b", " ", text)
    return re.sub(IDEOGRAPH, r" \g<0> ", text).split()


IDEOGRAPH = r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
