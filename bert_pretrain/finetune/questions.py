"""Questions with their contexts and answers, as SQuAD's JSON or flat rows, and SQuAD's two metrics."""

import re
import string
import unicodedata
from collections import Counter
from typing import Any

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.rows import Example, LabelledInput, UnusableRow, read_rows, read_text
from bert_pretrain.text.readers import parse_json, repair_surrogates

Answer = tuple[str, int]
"""A text, and the character of the context at which it begins; NOT_FOUND if the context does not contain it."""
NOT_FOUND = -1
_CMRC_NAMES = {"context_text": "context", "query_text": "question", "query_id": "id"}


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


def answers_of(row: Example, context: str, source: LabelledInput) -> list[Answer] | None:
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
    if any(NOT_FOUND != given != start for (_, given), (_, start) in zip(pairs, placed, strict=True)):
        source.notes["questions whose answer was moved to where the context contains it"].append(row.where)
    return placed


def _placed(answer: Answer, context: str) -> Answer:
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


_IDEOGRAPH = r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
