"""Labelled rows out of a plain corpus: one sentence a line, blank lines between documents.

A rule reads each label off the text and takes its cue away: quotation marks, the final mark, order, capitals, the
borders of words. Training, validation and test rows come from different documents.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from bert_pretrain import rng
from bert_pretrain.config import DataConfig
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.make_data.plan import split_order
from bert_pretrain.text.tokenizer import Tokenizer

Document = list[str]
Row = dict[str, Any]
MOST_ROWS_A_DOCUMENT = 30
_QUOTES = "\"'“”‘’"
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Recipe:
    """How a task is made and scored."""

    task: str
    """Of `finetune`."""
    metric: str
    baseline: str
    """What the answer of the baseline is, in words."""
    rows: Callable[[Document, np.random.Generator], Iterator[Row]]
    """Yield the rows of a document."""
    columns: dict[str, Any]
    """Settings of the fine-tuning."""
    balanced: bool = False
    """Whether labels are made equally frequent within each document."""


def read_documents(corpus: Path) -> list[Document]:
    """Return the documents of a file as lists of sentences."""
    blocks = re.split(r"\n[ \t\r]*\n", corpus.read_text(encoding="utf-8"))
    documents = [[line.strip() for line in block.split("\n") if line.strip()] for block in blocks]
    return [document for document in documents if document]


def held_out_documents(documents: list[Document], data: Path) -> list[int]:
    """Return the numbers of the documents that a data folder holds out, found as make-data found them.

    Raises:
        SystemExit: when the corpus is not the one that the folder was made from.
    """
    folder = DataFolder.open(data)
    config = DataConfig(**folder.manifest["config"]["data"])
    if folder.manifest["corpus"]["documents"] != len(documents):
        made_from = folder.manifest["corpus"]["documents"]
        raise SystemExit(f"{data} was made from {made_from} documents, the corpus has {len(documents)}")
    count = max(2, round(config.validation_fraction * len(documents)))
    numbers = sorted(split_order(range(len(documents)), config)(np.arange(count)).tolist())
    _check_held_out([documents[number] for number in numbers], data, folder.tokenizer())
    return numbers


def _check_held_out(documents: list[Document], data: Path, tokenizer: Tokenizer) -> None:
    """Make sure that the validation examples of a data folder stand in these documents, word for word."""
    ids = [[token for sentence in document for token in tokenizer.encode_text(sentence)] for document in documents]
    text = "\n".join(" " + " ".join(map(str, each)) + " " for each in ids)
    columns = ["input_ids", "segment_b_start", "masked_lm_positions", "masked_lm_ids"]
    examples = pq.read_table(next((data / "validation").glob("*.parquet")), columns=columns).to_pylist()[:200]
    for example in examples:
        tokens = example["input_ids"]
        for position, token in zip(example["masked_lm_positions"], example["masked_lm_ids"], strict=True):
            tokens[position] = token
        if " " + " ".join(map(str, tokens[1 : example["segment_b_start"] - 1])) + " " not in text:
            raise SystemExit(f"the validation examples of {data} do not stand in the documents that should be held out")


def direct_speech(document: Document, draw: np.random.Generator) -> Iterator[Row]:
    """Sentences that begin with a quotation mark, and those without one; all marks are taken away."""
    for sentence in document:
        words = _WORD.findall("".join(character for character in sentence if character not in _QUOTES))
        if 5 <= len(words) <= 40:
            if sentence[0] in _QUOTES:
                yield {"text": " ".join(words), "label": "speech"}
            elif not any(mark in sentence for mark in '"“”'):
                yield {"text": " ".join(words), "label": "narration"}


def question(document: Document, draw: np.random.Generator) -> Iterator[Row]:
    """Sentences that end with a question mark or with a full stop; the mark is taken away."""
    for sentence in document:
        bare = sentence.rstrip("”」』’\"'")
        if 6 <= len(bare) <= 60 and bare[-1] in "？?。":
            yield {"text": bare[:-1], "label": "statement" if bare[-1] == "。" else "question"}


def following(document: Document, draw: np.random.Generator) -> Iterator[Row]:
    """Two sentences that follow one another, or of which the second stands elsewhere in the same document."""
    for number in range(0, len(document) - 1, 2):
        far = [other for other in (number - 12, number + 12) if 0 <= other < len(document)]
        if not far or min(len(document[number]), len(document[number + 1])) < 8:
            continue
        follows = bool(draw.integers(2))
        second = number + 1 if follows else int(draw.choice(far))
        label = "follows" if follows else "elsewhere"
        yield {"text": document[number][:400], "second": document[second][:400], "label": label}


def make_exchanged(language: str) -> Callable[[Document, np.random.Generator], Iterator[Row]]:
    """Return the maker of sentences as they are, or with two neighbouring words (Chinese: characters) exchanged.

    A probe of what is known of a language's word order: "bigram shift" of Conneau et al., 2018.
    """

    def exchanged(document: Document, draw: np.random.Generator) -> Iterator[Row]:
        for sentence in document:
            units = list(sentence) if language == "zh" else sentence.lower().split(" ")
            is_intact = bool(draw.integers(2))
            places = [place for place in range(len(units) - 1) if _can_change(units[place], units[place + 1])]
            if not 6 <= len(units) <= 40 or not places:
                continue
            place = int(draw.choice(places))
            if not is_intact:
                units[place], units[place + 1] = units[place + 1], units[place]
            text = ("" if language == "zh" else " ").join(units)
            yield {"text": text, "label": "intact" if is_intact else "exchanged"}

    return exchanged


def _can_change(first: str, second: str) -> bool:
    return first.isalpha() and second.isalpha() and first != second


def make_names(documents: list[Document]) -> Callable[[Document, np.random.Generator], Iterator[Row]]:
    """Return the maker of rows with names tagged: words with a capital, inside a sentence, that rarely lack one."""
    capital, small = _capitals(documents)

    def is_name(words: list[str], place: int) -> bool:
        word = words[place]
        inside = place > 0 and (words[place - 1].isalnum() or words[place - 1] in ",;")
        return inside and bool(re.fullmatch("[A-Z][a-z]+", word)) and capital[word.lower()] > 4 * small[word.lower()]

    def names(document: Document, draw: np.random.Generator) -> Iterator[Row]:
        for sentence in document:
            words = _WORD.findall(sentence)
            if not 8 <= len(words) <= 40 or sum(word[0].isupper() for word in words) > 0.4 * len(words):
                continue
            tags: list[str] = ["O"]
            for place in range(1, len(words)):
                goes_on = tags[-1] != "O"
                tags.append(("I-NAME" if goes_on else "B-NAME") if is_name(words, place) else "O")
            if "B-NAME" in tags or draw.random() < 0.1:
                # Of the first word nothing can be told.
                yield {"tokens": [word.lower() for word in words[1:]], "tags": tags[1:]}

    return names


def _capitals(documents: list[Document]) -> tuple[Counter[str], Counter[str]]:
    """Count how often words stand inside sentences with a capital and without."""
    capital: Counter[str] = Counter()
    small: Counter[str] = Counter()
    for document in documents:
        for sentence in document:
            for word in re.findall(r"(?<=[a-z,] )[A-Za-z][a-z]+\b", sentence):
                (capital if word[0].isupper() else small)[word.lower()] += 1
    return capital, small


def words_of_chinese(document: Document, draw: np.random.Generator) -> Iterator[Row]:
    """The words that jieba finds, as tags of characters."""
    import rjieba

    for sentence in document:
        if 8 <= len(sentence) <= 60 and len(re.findall("[\u4e00-\u9fff]", sentence)) > 0.8 * len(sentence):
            words = [word for word in rjieba.cut(sentence) if word.strip()]
            tags = [tag for word in words for tag in ["B-WORD", *["I-WORD"] * (len(word) - 1)]]
            yield {"tokens": [character for word in words for character in word], "tags": tags}


def cloze(document: Document, draw: np.random.Generator) -> Iterator[Row]:
    """A sentence with a name left out that stands once in the four sentences before, beside at least one other name."""
    for number in range(4, len(document)):
        context, asked = " ".join(document[number - 4 : number]), document[number]
        if not 60 <= len(context) <= 450 or not 20 <= len(asked) <= 160:
            continue
        found = Counter(re.findall(r"(?<=[a-z,;] )[A-Z][a-z]{2,}\b", context))
        names = [name for name in found if len(re.findall(rf"\b{name}\b", context)) == 1]
        wanted = [name for name in names if len(re.findall(rf"\b{name}\b", asked)) == 1]
        if len(found) > 1 and wanted:
            name = str(draw.choice(wanted))
            answers = {"text": [name], "answer_start": [re.search(rf"\b{name}\b", context).start()]}  # type: ignore[union-attr]
            yield {"question": re.sub(rf"\b{name}\b", "_", asked), "context": context, "answers": answers}


def recipes(language: str, documents: list[Document]) -> dict[str, Recipe]:
    """Return the tasks of a language; `documents` tell which words are names."""
    pair = Recipe(
        "classify", "accuracy", "the commoner class", following, {"pair_field": "second", "max_length": 128}, True
    )
    order = Recipe("classify", "accuracy", "the commoner class", make_exchanged(language), {"max_length": 64}, True)
    if language == "zh":
        single = Recipe("classify", "accuracy", "the commoner class", question, {"max_length": 64}, True)
        tags = Recipe("tag", "f1", "each character a word", words_of_chinese, {"max_length": 64})
        return {
            "question or statement": single,
            "two characters exchanged": order,
            "sentence that follows": pair,
            "words (jieba's)": tags,
        }
    single = Recipe("classify", "accuracy", "the commoner class", direct_speech, {"max_length": 64}, True)
    tags = Recipe("tag", "f1", "no name", make_names(documents), {"max_length": 64})
    answer = Recipe("answer", "exact_match", "the last name of the context", cloze, {"max_length": 192})
    return {
        "direct speech or narration": single,
        "two words exchanged": order,
        "sentence that follows": pair,
        "names, lower-cased": tags,
        "name left out (cloze)": answer,
    }


def make_rows(
    recipe: Recipe, documents: list[Document], numbers: list[int], count: int, seed: int, name: str
) -> list[Row]:
    """Return at most `count` rows of documents, at most thirty of each, in an order drawn by the seed."""
    rows: list[Row] = []
    for number in rng.stream(seed, name).permutation(numbers):
        draw = rng.stream(seed, name, document=int(number))
        own = list(recipe.rows(documents[number], draw))
        own = [own[place] for place in draw.permutation(len(own))]
        if recipe.balanced:
            own = _balanced(own)
        rows += own[:MOST_ROWS_A_DOCUMENT]
        if len(rows) >= count:
            break
    return [rows[place] for place in rng.stream(seed, name, document=-1).permutation(len(rows))][:count]


def _balanced(rows: list[Row]) -> list[Row]:
    """Take turns between two labels while both last."""
    by_label: dict[str, list[Row]] = {}
    for row in rows:
        by_label.setdefault(row["label"], []).append(row)
    if len(by_label) < 2:
        return []
    return [row for pair in zip(*by_label.values(), strict=False) for row in pair]
