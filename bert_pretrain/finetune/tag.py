"""`tag`: a BIO tag for every word, at the word's first piece; long sentences are divided into overlapping windows.

Every word is labelled in exactly one window, one in which it has context on both sides.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tables import ending_of, read_rows, read_text
from bert_pretrain.finetune.task import IGNORED, Window, encodings, report_long
from bert_pretrain.text.tokenizer import Tokenizer

OUTSIDE = "O"
_WORD_PER_LINE = (".tsv", ".txt", ".conll")


@dataclass(frozen=True)
class Example:
    """The words of a sentence, with their tags if they have any."""

    row: int
    where: str
    words: list[str]
    tags: list[str] | None


class Tag:
    """Labels, windows and metrics of the task."""

    model_class = "AutoModelForTokenClassification"
    main_metric = "f1"
    label_names: tuple[str, ...] = ("labels",)
    group_field = "row"

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.tags: list[str] = []

    def read(self, location: str, flag: str) -> list[Example]:
        if ending_of(location) in _WORD_PER_LINE:
            sentences = list(_read_word_per_line(location))
        else:
            sentences = list(self._read_lists(location, flag))
        if not sentences:
            raise InputError("it holds no sentence", where=f"{flag} {location}", remedy="give sentences with tags")
        examples = []
        for number, (where, words, tags) in enumerate(sentences):
            if tags is None and flag != "--test":
                remedy = "tag every word; O is the tag of words outside of entities"
                raise InputError("the sentence has no tags", where=where, remedy=remedy)
            _check(where, words, tags)
            examples.append(Example(number, where, words, tags))
        return examples

    def _read_lists(self, location: str, flag: str) -> Iterator[tuple[str, list[str], list[str] | None]]:
        rows = read_rows(location, flag)
        column = self.settings.tags_field
        has_tags = flag != "--test" or column in rows[0].values
        for row in rows:
            words, tags = row.get(self.settings.tokens_field), row.get(column) if has_tags else None
            for name, values in ((self.settings.tokens_field, words), (column, tags)):
                is_list = isinstance(values, list) and all(isinstance(value, str) for value in values)
                if not is_list and (values is not None or name != column):
                    raise InputError(
                        f"'{name}' is not a list of words",
                        where=row.where,
                        remedy='write lists of equal length: "tokens": ["Anna", "sings"], "tags": ["B-PER", "O"]',
                    )
            yield row.where, words, tags

    def set_labels(self, train: list[Example], validation: list[Example], test: list[Example]) -> None:
        kinds = sorted({tag[2:] for example in train for tag in example.tags or () if tag != OUTSIDE})
        if not kinds:
            where, remedy = f"{train[0].where} and all others", "give rows with entities"
            raise InputError("every tag is O", where=where, remedy=remedy)
        self.tags = [OUTSIDE, *(f"{prefix}-{kind}" for kind in kinds for prefix in "BI")]
        for example in [*validation, *test]:
            unknown = [tag for tag in example.tags or () if tag not in self.tags]
            if unknown:
                raise InputError(
                    f"the tag {unknown[0]!r} is of a kind that does not occur in the training rows",
                    where=example.where,
                    remedy=f"correct it (known kinds: {', '.join(kinds[:20])}), or add training rows with it",
                )
        print(f"kinds of entities: {', '.join(kinds[:20])}")

    def content(self, example: Example) -> object:
        return [example.words, example.tags]

    def model_config(self) -> dict[str, Any]:
        names = dict(enumerate(self.tags))
        return {"id2label": names, "label2id": {name: number for number, name in names.items()}}

    def encode(self, examples: list[Example], split: str) -> list[Window]:
        assert self.settings.max_length is not None
        room = self.settings.max_length - 2
        ids = {name: number for number, name in enumerate(self.tags)}
        pieces_of = self._pieces({word for example in examples for word in example.words})
        has_labels = all(example.tags is not None for example in examples)
        windows = []
        for number, example in enumerate(examples):
            pieces = [pieces_of[word][:room] for word in example.words]
            for span in spans([len(piece) for piece in pieces], room):
                input_ids, labels, positions = [self.tokenizer.cls_id], [IGNORED], []
                for word in range(span.begin, span.end):
                    is_own = span.own_begin <= word < span.own_end
                    positions += [(word, len(input_ids))] if is_own else []
                    first = ids[example.tags[word]] if is_own and example.tags is not None else IGNORED
                    labels += [first] + [IGNORED] * (len(pieces[word]) - 1)
                    input_ids += pieces[word]
                input_ids.append(self.tokenizer.sep_id)
                own_labels = {"labels": [*labels, IGNORED]} if has_labels else {}
                windows.append(Window(number, input_ids, [0] * len(input_ids), own_labels, positions))
        divided = sum(count > 1 for count in Counter(window.example for window in windows).values())
        report_long(divided, len(examples), self.settings.max_length, split, "divided into overlapping windows")
        return windows

    def _pieces(self, words: set[str]) -> dict[str, list[int]]:
        """Return the ids of words; a word without pieces, such as a control character, becomes [UNK]."""
        ordered = sorted(words)
        found = zip(ordered, encodings(self.tokenizer, ordered), strict=True)
        return {word: encoding.ids or [self.tokenizer.unk_id] for word, encoding in found}

    def decode(self, examples: list[Example], windows: list[Window], logits: Any) -> list[list[str]]:
        """Return the most likely tag of every word."""
        found = [[OUTSIDE] * len(example.words) for example in examples]
        for window, scores in zip(windows, logits, strict=True):
            for word, position in window.positions:
                found[window.example][word] = self.tags[int(np.argmax(scores[position]))]
        return found

    def score(self, examples: list[Example], predictions: list[list[str]]) -> dict[str, float]:
        return entity_scores([example.tags or [] for example in examples], predictions)

    def record(self, example: Example, prediction: list[str]) -> dict[str, Any]:
        tags = {} if example.tags is None else {"tags": example.tags}
        return {"row": example.row, "tokens": example.words, **tags, "prediction": prediction}


def entity_scores(truth: list[list[str]], found: list[list[str]]) -> dict[str, float]:
    """Return precision, recall and F1 of whole entities as `seqeval` counts them, F1 by kind, and word accuracy."""
    from seqeval import metrics

    report = metrics.classification_report(truth, found, output_dict=True, zero_division=0)
    total = report["micro avg"]
    kinds = {name: scores for name, scores in report.items() if not name.endswith(" avg")}
    return {
        "f1": float(total["f1-score"]),
        "precision": float(total["precision"]),
        "recall": float(total["recall"]),
        "word_accuracy": float(metrics.accuracy_score(truth, found)),
        **{f"f1_{name}": float(scores["f1-score"]) for name, scores in kinds.items()},
    }


@dataclass(frozen=True)
class Span:
    """The words of a window, [begin, end), and those that are labelled in it."""

    begin: int
    end: int
    own_begin: int
    own_end: int


def spans(lengths: list[int], room: int) -> list[Span]:
    """Divide a sentence into windows of at most `room` pieces, by the number of pieces of each word.

    The labelled parts of the spans are consecutive. Neighbours share about a third of the room, and the middle of the
    shared words separates their labelled parts.
    """
    shown = []
    begin = 0
    while True:
        end, filled = begin, 0
        while end < len(lengths) and filled + lengths[end] <= room:
            filled += lengths[end]
            end += 1
        shown.append((begin, end))
        if end == len(lengths):
            break
        shared = 0
        following = end
        while following > begin + 1 and shared + lengths[following - 1] <= room // 3:
            following -= 1
            shared += lengths[following]
        # The word that did not fit must fit into the next window, or there would be no progress.
        while sum(lengths[following : end + 1]) > room:
            following += 1
        begin = following
    borders = [0, *((first[1] + second[0]) // 2 for first, second in pairwise(shown)), len(lengths)]
    return [Span(*bounds, *own) for bounds, own in zip(shown, pairwise(borders), strict=True)]


def _read_word_per_line(location: str) -> Iterator[tuple[str, list[str], list[str] | None]]:
    """Read CoNLL's format: first on a line the word, last the tag; an empty line ends a sentence."""
    words: list[str] = []
    tags: list[str] = []
    begin = 1
    for number, line in enumerate([*read_text(location).split("\n"), ""], start=1):
        if not line.strip() or line.startswith("-DOCSTART-"):
            if words:
                yield f"{location}: line {begin}", words, tags
            words, tags, begin = [], [], number + 1
            continue
        # Other blanks do not separate: a no-break space may be inside a number such as 10 000.
        line = line.strip(" \t\r")
        fields = [field for field in (line.split("\t") if "\t" in line else line.split(" ")) if field.strip()]
        if len(fields) < 2:
            raise InputError(
                f"the word {line.strip()!r} has no tag",
                where=f"{location}: line {number}",
                remedy="write word TAB tag; for words without tags give JSONL with 'tokens'",
            )
        words.append(fields[0])
        tags.append(fields[-1])


def _check(where: str, words: list[str], tags: list[str] | None) -> None:
    if not words or not all(word.strip() for word in words):
        what = "there is an empty word" if words else "there are no words"
        raise InputError(what, where=where, remedy="remove or correct it")
    if tags is None:
        return
    if len(words) != len(tags):
        what = f"there are {len(words)} words and {len(tags)} tags"
        raise InputError(what, where=where, remedy="give each word one tag")
    for before, tag in pairwise([OUTSIDE, *tags]):
        if tag != OUTSIDE and not (tag[:2] in ("B-", "I-") and len(tag) > 2):
            remedy = "write O, B-KIND for the first word of an entity and I-KIND for its other words"
            raise InputError(f"the tag {tag!r} is not BIO", where=where, remedy=remedy)
        if tag.startswith("I-") and before[2:] != tag[2:]:
            raise InputError(
                f"the tag {tag!r} continues an entity that {before!r} before it did not begin",
                where=where,
                remedy=f"write B-{tag[2:]} for its first word; files of the IOB1 kind must be converted",
            )
