"""`tag`: a tag for every word, at the word's first piece; long sentences are divided into overlapping windows.

Tags are BIO, for entities, or plain, such as parts of speech, where no tag of the training rows has a prefix.

Every word is labelled in exactly one window, one in which it has context on both sides.
"""

import re
import warnings
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers.pre_tokenizers import BertPreTokenizer

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.baselines import most_frequent_tags
from bert_pretrain.finetune.rows import NEW, Example, LabelledInput, UnusableRow, first_lines, read_rows, read_text
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.task import IGNORED, Task, Window, encodings
from bert_pretrain.text.tokenizer import Tokenizer, bert_normalizer

OUTSIDE = "O"
_TAG = re.compile(r"O|([BIMESLUW])-(\S+)")
_TAGGED = re.compile(rf"-DOCSTART-.*|\S+[ \t](.*[ \t])?({_TAG.pattern})\s*")
_INSIDE, _LAST = "IMEL", "SUWEL"
"""Prefixes of all schemes: of an entity's words but the first, and of its last or only word."""
_FORM = 'lists of equal length: "tokens": ["Anna", "sings"], "tags": ["B-PER", "O"]'


class Tag(Task):
    """Labels, windows and metrics of the task."""

    model_class = "AutoModelForTokenClassification"
    main_metric = "f1"

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        super().__init__(settings, tokenizer)
        self.label_column = settings.tags_field
        self.is_plain: bool | None = None
        """Whether tags are not BIO; None until the training rows are read."""

    def rows(self, source: LabelledInput) -> list[Example]:
        """Return rows with lists of words; for `predict`, texts are split into words as BERT splits them."""
        rows = self._rows(source)
        if self.is_plain is None and source.flag != NEW:
            tags = {tag for row in rows for tag in _tags(row.values.get(self.label_column))}
            tags |= set(self.settings.tag_names)
            self.is_plain = bool(tags) and not any(map(_TAG.fullmatch, tags))
        return rows

    def _rows(self, source: LabelledInput) -> list[Example]:
        column, text_field, kind = self.settings.tokens_field, self.settings.text_field, source.kind
        names_text = text_field != Settings.text_field  # only `predict` takes it for a tagger
        is_text = False
        if source.flag == NEW and kind in ("tsv", "txt"):
            lines = first_lines(source)
            has_tags = bool(lines) and all(map(_TAGGED.fullmatch, lines))
            has_header = bool(lines) and text_field in lines[0].split("\t")
            is_text = not has_tags and (kind == "txt" or names_text or has_header)
        if kind in ("conll", "tsv", "txt", "") and not is_text:  # the ending may be one of its own, such as .train
            return read_word_per_line(source, column, self.label_column)
        rows = read_rows(source, text_field)
        if source.flag != NEW and rows and isinstance(rows[0].values.get("label"), dict):
            what = "entities as positions in a text, as in CLUENER, are not supported"
            raise InputError(what, where=rows[0].where, remedy=f"convert it to JSONL with {_FORM}")
        for row in rows if source.flag == NEW else ():
            if names_text and column not in row.values:
                row.get(text_field, "--text-field")
            text = row.values.get(text_field, 0)
            if column not in row.values and isinstance(text, str | None):
                row.values[column] = self._words_in(text or "")
        return rows

    def _words_in(self, text: str) -> list[str]:
        splits_ideographs = bool(self.tokenizer.settings["tokenize_chinese_chars"])
        normalizer = bert_normalizer(lowercase=False, strip_accents=False, handle_chinese_chars=splits_ideographs)
        return [word for word, _ in BertPreTokenizer().pre_tokenize_str(normalizer.normalize_str(text))]

    def inputs_of(self, row: Example) -> dict[str, Any]:
        words = _words_of(row, self.settings.tokens_field, "--tokens-field")
        if not words:
            raise UnusableRow("there are no words", where=row.where, remedy="remove the row")
        return {"tokens": words}

    def label_of(self, row: Example, source: LabelledInput) -> list[str] | None:
        tags = self._tags_of(row)
        if tags is None:
            return None
        if len(tags) != len(row.inputs["tokens"]):
            what = f"'{self.settings.tokens_field}' and '{self.label_column}' differ in length"
            raise UnusableRow(what, where=row.where, remedy="give each word one tag")
        if self.is_plain:
            return tags
        if wrong := [tag for tag in tags if not _TAG.fullmatch(tag)]:
            remedy = f"write O, B-KIND for the first word of an entity and I-KIND for its other words, such as {_FORM}"
            raise UnusableRow(f"the tag {wrong[0]!r} is not BIO", where=row.where, remedy=remedy)
        return as_bio(tags)

    def _tags_of(self, row: Example) -> list[str] | None:
        """Return the tags of a row; numbers by their names."""
        values, names = row.get(self.label_column, "--tags-field"), self.settings.tag_names
        if not isinstance(values, list) or not values or not all(type(value) is int for value in values):
            return _words_of(row, self.label_column, "--tags-field")
        if unknown := [value for value in values if not 0 <= value < len(names)]:
            what = f"the tag {unknown[0]} is a number without a name"
            where, remedy = row.where, "name the tags in their order, such as --tag-names O,B-PER,I-PER"
            raise InputError(what, where=where, remedy=remedy)
        return [names[value] for value in values]

    def classes_of(self, example: Example) -> list[str]:
        return example.label if self.is_plain else [tag[2:] for tag in example.label if tag != OUTSIDE]

    def set_labels(self, train: list[Example], others: list[Example]) -> None:
        first = 0 if self.is_plain else len("B-")
        kinds = sorted({tag[first:] for example in train for tag in example.label if tag != OUTSIDE or self.is_plain})
        if not kinds:
            where, remedy = f"{train[0].where} and all others", "give rows with entities"
            raise InputError("every tag is O", where=where, remedy=remedy)
        of_entities = [OUTSIDE, *(f"{prefix}-{kind}" for kind in kinds for prefix in "BI")]
        self.labels = kinds if self.is_plain else of_entities
        for example in others:
            if unknown := [tag for tag in example.label or () if tag not in self.labels]:
                what = f"the tag {unknown[0]!r} is of a kind that does not occur in the training rows"
                remedy = f"correct it (known kinds: {', '.join(kinds[:20])}), or add training rows with it"
                raise InputError(what, where=example.where, remedy=remedy)
        print(f"{'tags' if self.is_plain else 'kinds of entities'}: {', '.join(kinds[:20])}")

    def encode(self, examples: list[Example], split: str) -> list[Window]:
        assert self.settings.max_length is not None
        room = self.settings.max_length - 2
        ids = {name: number for number, name in enumerate(self.labels)}
        words = sorted({word for example in examples for word in example.inputs["tokens"]})
        encoded = encodings(self.tokenizer, words, special=False)
        # A word without pieces, such as a control character, becomes [UNK].
        pieces_of = {
            word: (each.ids or [self.tokenizer.unk_id])[:room] for word, each in zip(words, encoded, strict=True)
        }
        has_labels = all(example.label is not None for example in examples)
        windows = []
        for number, example in enumerate(examples):
            pieces = [pieces_of[word] for word in example.inputs["tokens"]]
            divided = divide([len(piece) for piece in pieces], room)
            example.is_cut = len(divided) > 1
            for shown, labelled in divided:
                input_ids, labels, positions = [self.tokenizer.cls_id], [IGNORED], []
                for word in shown:
                    positions += [(word, len(input_ids))] if word in labelled else []
                    first = ids[example.label[word]] if word in labelled and has_labels else IGNORED
                    labels += [first] + [IGNORED] * (len(pieces[word]) - 1)
                    input_ids += pieces[word]
                input_ids.append(self.tokenizer.sep_id)
                own_labels = {"labels": [*labels, IGNORED]} if has_labels else {}
                windows.append(Window(number, input_ids, [0] * len(input_ids), own_labels, positions))
        return windows

    def decode(self, examples: list[Example], windows: list[Window], logits: Any) -> list[list[str]]:
        """Return the most likely tag of every word; every entity begins with `B-`."""
        tags = [[OUTSIDE] * len(example.inputs["tokens"]) for example in examples]
        for window, scores in zip(windows, logits, strict=True):
            for word, position in window.positions:
                tags[window.example][word] = self.labels[int(np.argmax(scores[position]))]
        return list(map(as_bio, tags))

    def score(self, examples: list[Example], predictions: list[list[str]]) -> dict[str, float]:
        truth = [example.label for example in examples]
        if self.is_plain:  # every word is an entity of its own, and F1 the accuracy of words
            truth, predictions = ([[f"B-{tag}" for tag in tags] for tags in some] for some in (truth, predictions))
        return entity_scores(truth, predictions)

    def constant(self, examples: list[Example]) -> tuple[str, float]:
        if not self.is_plain:
            return "O for every word", 0.0
        (tag, count), total = _commonest(examples)
        return f"{tag} for every word", count / total

    def words_alone(self, train: list[Example], examples: list[Example]) -> list[list[str]] | None:
        known = [(example.inputs["tokens"], example.label) for example in train]
        default = _commonest(train)[0][0] if self.is_plain else OUTSIDE
        return most_frequent_tags(known, [example.inputs["tokens"] for example in examples], default)

    def columns(self, prediction: list[str]) -> dict[str, Any]:
        return {"tags": prediction}

    def record(self, example: Example, prediction: list[str]) -> dict[str, Any]:
        tags = {} if example.label is None else {"tags": example.label}
        return {"row": example.row, **example.inputs, **tags, "prediction": prediction}


def _commonest(examples: list[Example]) -> tuple[tuple[str, int], int]:
    """Return the most frequent tag with its count, and the number of all tags."""
    counts = Counter(tag for example in examples for tag in example.label)
    return min(counts.items(), key=lambda item: (-item[1], item[0])), counts.total()


def _tags(value: Any) -> list[str]:
    return [tag for tag in value if isinstance(tag, str)] if isinstance(value, list) else []


def entity_scores(truth: list[list[str]], predicted: list[list[str]]) -> dict[str, float]:
    """Return precision, recall and F1 of whole entities as `seqeval` counts them, F1 by kind, and word accuracy."""
    from seqeval import metrics

    with warnings.catch_warnings(action="ignore"):  # of kinds without an entity
        report = metrics.classification_report(truth, predicted, output_dict=True, zero_division=0)
    total = report["micro avg"]
    kinds = {name: scores for name, scores in report.items() if not name.endswith(" avg")}
    return {
        "f1": float(total["f1-score"]),
        "precision": float(total["precision"]),
        "recall": float(total["recall"]),
        "word_accuracy": float(metrics.accuracy_score(truth, predicted)),
        **{f"f1_{name}": float(scores["f1-score"]) for name, scores in kinds.items()},
    }


def divide(lengths: list[int], room: int) -> list[tuple[range, range]]:
    """Divide a sentence into windows of at most `room` pieces, by the number of pieces of each word.

    Returns for each window its words, and those of them that are labelled there. The labelled ones are consecutive:
    neighbours share about a third of the room, and the middle of the shared words separates their labelled parts.
    """
    shown, begin = [], 0
    while True:
        end, filled = begin, 0
        while end < len(lengths) and filled + lengths[end] <= room:
            filled += lengths[end]
            end += 1
        shown.append(range(begin, end))
        if end == len(lengths):
            break
        following, shared = end, 0
        while following > begin + 1 and shared + lengths[following - 1] <= room // 3:
            following -= 1
            shared += lengths[following]
        # The word that did not fit must fit into the next window, or there would be no progress.
        while sum(lengths[following : end + 1]) > room:
            following += 1
        begin = following
    borders = [0, *((first.stop + second.start) // 2 for first, second in pairwise(shown)), len(lengths)]
    return [(words, range(*labelled)) for words, labelled in zip(shown, pairwise(borders), strict=True)]


def read_word_per_line(source: LabelledInput, tokens_field: str, tags_field: str) -> list[Example]:
    """Read CoNLL's format: first on a line the word, last the tag; an empty line ends a sentence.

    A sentence of `predict` may have no tags.
    """
    if source.columns:
        what, remedy = "--columns is for tables, this is a word and its tag per line", "leave it out"
        raise InputError(what, where="--columns", remedy=remedy)
    rows: list[Example] = []
    lines: list[tuple[int, list[str]]] = []  # of the sentence: numbers and fields
    number_of_row = 0
    for number, line in enumerate([*read_text(source).split("\n"), ""], start=1):
        if line.strip() and not line.startswith("-DOCSTART-"):
            # Other blanks do not separate: a no-break space may be inside a number such as 10 000.
            text = line.strip(" \t\r")
            fields = [field for field in text.split("\t" if "\t" in text else " ") if field]
            is_first = not rows and not lines and source.flag != NEW
            if is_first and len(fields) > 4 and (not _TAG.fullmatch(fields[-1]) or all(map(_TAG.fullmatch, fields))):
                what = "a line is a whole sentence; sentences and tags in two parallel files (MSRA) are not supported"
                where, remedy = f"{source.location}: line {number}", f"convert it to JSONL with {_FORM}"
                raise InputError(what, where=where, remedy=remedy)
            lines.append((number, fields))
        elif lines:
            where = f"{source.location}: line {lines[0][0]}"
            untagged = [at for at, fields in lines if len(fields) == 1]
            row = Example(number_of_row, where, {tokens_field: [fields[0] for _, fields in lines]})
            if not untagged:
                row.values[tags_field] = [fields[-1] for _, fields in lines]
            if not untagged or source.flag == NEW:
                rows.append(row)
            else:
                where = f"{source.location}: line {untagged[0]}"
                remedy = f"write word TAB tag; for words without tags give JSONL with {_FORM}"
                source.leave_out(UnusableRow("a word has no tag", where=where, remedy=remedy))
            lines, number_of_row = [], number_of_row + 1
    return rows


def as_bio(tags: list[str]) -> list[str]:
    """Return the tags of a sentence as BIO, from BIO with stray `I-`, IOB1, IOBES (BIOES, BMES) or BILOU."""
    converted = []
    open_kind = None  # of the entity that the next tag may continue
    for tag in tags:
        prefix, kind = match.groups() if (match := _TAG.fullmatch(tag)) else (None, None)
        converted.append(f"{'I' if prefix in _INSIDE and kind == open_kind else 'B'}-{kind}" if prefix else tag)
        open_kind = kind if prefix and prefix not in _LAST else None
    return converted


def _words_of(row: Example, column: str, flag: str) -> list[str] | None:
    """Return the words or tags in a column; None if there are none."""
    values = row.get(column, flag)
    if values is None or (isinstance(values, list) and all(isinstance(value, str) for value in values)):
        return values
    raise InputError(f"'{column}' is not a list of words", where=row.where, remedy=f"write {_FORM}")
