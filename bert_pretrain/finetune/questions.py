"""Questions with their contexts and answers, as SQuAD's JSON or flat rows, and SQuAD's two metrics."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.tables import Row, ending_of, read_rows, read_text
from bert_pretrain.text.records import parse_json, repair_surrogates


@dataclass(frozen=True)
class Question:
    """A question on a context; `answers` is None without a label, empty if there is no answer."""

    row: int
    where: str
    id: str
    question: str
    context: str
    answers: list[tuple[str, int]] | None
    """Text, and the character of the context at which it begins."""


def read_questions(location: str, flag: str) -> list[Question]:
    """Return the checked questions of an input.

    Raises:
        InputError: when it cannot be read, a text is empty, an id occurs twice or an answer is not at its position.
    """
    text = read_text(location) if ending_of(location) == ".json" else ""
    head = text.lstrip()[:1]
    is_squad = head == "{" and '"paragraphs"' in text
    found = list(_read_squad(text, location) if is_squad else _read_flat(location, flag))
    if not found:
        raise InputError("it holds no question", where=f"{flag} {location}", remedy="give questions with answers")
    questions, seen = [], set()
    for number, (where, name, question, context, answers) in enumerate(found):
        if answers is None and flag != "--test":
            raise InputError("the question has no 'answers'", where=where, remedy="give them, or an empty list")
        name = str(number) if name is None else str(name)
        if name in seen:
            raise InputError(f"the id {name!r} occurs twice", where=where, remedy="give each question its own")
        seen.add(name)
        for kind, value in (("question", question), ("context", context)):
            if not isinstance(value, str) or not value.strip():
                raise InputError(f"its {kind} is empty", where=where, remedy="fill it, or leave the row out")
        pairs = None if answers is None else [_checked(answer, context, where) for answer in answers]
        questions.append(Question(number, where, name, question, context, pairs))
    return questions


_Found = Iterator[tuple[str, Any, Any, Any, list[tuple[Any, Any]] | None]]


def _read_squad(text: str, location: str) -> _Found:
    content = repair_surrogates(parse_json(text, location))
    try:
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    answers = asked.get("answers")
                    pairs = None if answers is None else [(each["text"], each["answer_start"]) for each in answers]
                    if asked.get("is_impossible"):
                        pairs = []
                    where = f"{location}: question {asked.get('id')}"
                    yield where, asked.get("id"), asked["question"], paragraph["context"], pairs
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"it does not have SQuAD's format: {type(error).__name__} {error}",
            where=location,
            remedy="write data > paragraphs > context, qas > id, question, answers > text, answer_start",
        ) from error


def _read_flat(location: str, flag: str) -> _Found:
    rows = read_rows(location, flag)
    for row in rows:
        is_labelled = flag != "--test" or "answers" in row.values
        answers = _pairs(row) if is_labelled else None
        yield row.where, row.values.get("id"), row.get("question"), row.get("context"), answers


def _pairs(row: Row) -> list[tuple[Any, Any]] | None:
    answers = row.get("answers")
    try:
        if isinstance(answers, dict):
            return list(zip(answers["text"], answers["answer_start"], strict=True))
        return None if answers is None else [(each["text"], each["answer_start"]) for each in answers]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            "its 'answers' do not have SQuAD's format",
            where=row.where,
            remedy='write {"text": ["…"], "answer_start": [0]}, both lists empty where there is no answer',
        ) from error


def _checked(answer: tuple[Any, Any], context: str, where: str) -> tuple[str, int]:
    text, start = answer
    if not isinstance(text, str) or not text.strip() or not isinstance(start, int):
        raise InputError(
            f"the answer {text!r} at {start!r} is not a text at a whole number", where=where, remedy="correct it"
        )
    if start < 0 or context[start : start + len(text)] != text:
        at = context.find(text)
        found = f"it is at {at}" if at >= 0 else "the context does not contain it"
        raise InputError(
            f"the answer {text[:60]!r} is not in the context at answer_start {start}; {found}",
            where=where,
            remedy="count answer_start in characters from 0, and spell the answer as the context does",
        )
    return text, start


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
    ideographs = re.search(_IDEOGRAPH, text)
    text = "".join(character for character in text.lower() if not _is_dropped(character, bool(ideographs)))
    text = re.sub(r"\b(a|an|the)\b", " ", text)
    return re.sub(_IDEOGRAPH, r" \g<0> ", text).split()


_IDEOGRAPH = r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]"


def _is_dropped(character: str, everywhere: bool) -> bool:
    return character in string.punctuation or (everywhere and unicodedata.category(character).startswith("P"))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
