"""`tag`: a BIO tag for every word, at the word's first piece; long sentences are divided into overlapping windows.

Every word is labelled in exactly one window, one in which it has context on both sides.
"""

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers.pre_tokenizers import BertPreTokenizer

from bert_pretrain.config import names_of
from bert_pretrain.errors import InputError
from bert_pretrain.finetune.baselines import most_frequent_tags
from bert_pretrain.finetune.rows import LabelledInput, Row, UnusableRow, read_rows, read_text
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.task import DIVIDED, IGNORED, Example, Task, Window, encodings, quiet_warnings
from bert_pretrain.text.readers import join_fields
from bert_pretrain.text.tokenizer import Tokenizer, bert_normalizer

OUTSIDE = "O"
_TAG = re.compile(r"O|([BIMESLUW])-(\S+)")
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

    def rows(self, source: LabelledInput) -> list[Row]:
        """Return rows with lists of words; for `predict`, texts are split into words as BERT splits them."""
        column, fields, kind = self.settings.tokens_field, self.settings.text_field, source.kind
        is_new = source.flag == "INPUT"
        is_text = is_new and (source.names_text if kind == "tsv" else kind == "txt" and not _has_tags(source))
        if kind in ("conll", "tsv", "txt", "") and not is_text:  # the ending may be one of its own, such as .train
            if source.names_text:
                what, remedy = "a file of words and their tags has no columns", "leave it out, or give a table"
                raise InputError(what, where="--text-field", remedy=remedy)
            return read_word_per_line(source, column, self.label_column)
        if is_new:
            return [self._with_words(row, source) for row in read_rows(source, fields)]
        rows = read_rows(source)
        if isinstance(rows[0].values.get("label"), dict):
            what = "entities as positions in a text, as in CLUENER, are not supported"
            raise InputError(what, where=rows[0].where, remedy=f"convert it to JSONL with {_FORM}")
        return rows

    def _with_words(self, row: Row, source: LabelledInput) -> Row:
        names, column = names_of(self.settings.text_field), self.settings.tokens_field
        texts = [row.values[name] for name in names if name in row.values]
        if not texts and source.names_text:
            row.get(names[0], "--text-field")
        if column in row.values or not texts or not all(text is None or isinstance(text, str) for text in texts):
            return row
        splits_ideographs = bool(self.tokenizer.settings["tokenize_chinese_chars"])
        normalizer = bert_normalizer(lowercase=False, strip_accents=False, handle_chinese_chars=splits_ideographs)
        words = BertPreTokenizer().pre_tokenize_str(normalizer.normalize_str(join_fields(texts)))
        return replace(row, values={**row.values, column: [word for word, _ in words]})

    def inputs_of(self, row: Row, source: LabelledInput) -> dict[str, Any]:
        words = _words_of(row, self.settings.tokens_field, "--tokens-field")
        if not words:
            raise UnusableRow("there are no words", where=row.where, remedy="remove the row")
        return {"tokens": words}

    def label_of(self, row: Row, inputs: dict[str, Any], source: LabelledInput) -> list[str] | None:
        tags = _words_of(row, self.label_column, "--tags-field")
        if tags is None:
            return None
        if len(tags) != len(inputs["tokens"]):
            what = f"'{self.settings.tokens_field}' and '{self.label_column}' differ in length"
            raise UnusableRow(what, where=row.where, remedy="give each word one tag")
        if wrong := [tag for tag in tags if not _TAG.fullmatch(tag)]:
            remedy = f"write O, B-KIND for the first word of an entity and I-KIND for its other words, such as {_FORM}"
            raise UnusableRow(f"the tag {wrong[0]!r} is not BIO", where=row.where, remedy=remedy)
        if (converted := as_bio(tags)) != tags:
            source.say("its tags are IOB1, IOBES, BMES or BILOU, or have an I- that begins an entity; read as BIO")
        return converted

    def set_labels(self, train: list[Example], others: list[Example]) -> None:
        kinds = sorted({tag[2:] for example in train for tag in example.label if tag != OUTSIDE})
        if not kinds:
            where, remedy = f"{train[0].where} and all others", "give rows with entities"
            raise InputError("every tag is O", where=where, remedy=remedy)
        self.labels = [OUTSIDE, *(f"{prefix}-{kind}" for kind in kinds for prefix in "BI")]
        for example in others:
            if unknown := [tag for tag in example.label or () if tag not in self.labels]:
                what = f"the tag {unknown[0]!r} is of a kind that does not occur in the training rows"
                remedy = f"correct it (known kinds: {', '.join(kinds[:20])}), or add training rows with it"
                raise InputError(what, where=example.where, remedy=remedy)
        print(f"kinds of entities: {', '.join(kinds[:20])}")

    def encode(self, examples: list[Example], split: str, counts: Counter[str]) -> list[Window]:
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
            counts[DIVIDED.format(self.settings.max_length)] += len(divided) > 1
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
        return entity_scores([example.label for example in examples], predictions)

    def constant(self, examples: list[Example]) -> tuple[str, float]:
        return "O for every word", 0.0

    def words_alone(self, train: list[Example], examples: list[Example]) -> list[list[str]] | None:
        known = [(example.inputs["tokens"], example.label) for example in train]
        return most_frequent_tags(known, [example.inputs["tokens"] for example in examples], OUTSIDE)

    def columns(self, prediction: list[str]) -> dict[str, Any]:
        return {"tags": prediction}

    def record(self, example: Example, prediction: list[str]) -> dict[str, Any]:
        tags = {} if example.label is None else {"tags": example.label}
        return {"row": example.row, **example.inputs, **tags, "prediction": prediction}


def entity_scores(truth: list[list[str]], predicted: list[list[str]]) -> dict[str, float]:
    """Return precision, recall and F1 of whole entities as `seqeval` counts them, F1 by kind, and word accuracy."""
    from seqeval import metrics

    with quiet_warnings():
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


def read_word_per_line(source: LabelledInput, tokens_field: str, tags_field: str) -> list[Row]:
    """Read CoNLL's format: first on a line the word, last the tag; an empty line ends a sentence."""
    rows: list[Row] = []
    words: list[str] = []
    tags: list[str] = []
    begin, untagged = 1, 0
    for number, line in enumerate([*read_text(source).split("\n"), ""], start=1):
        if line.strip() and not line.startswith("-DOCSTART-"):
            # Other blanks do not separate: a no-break space may be inside a number such as 10 000.
            text = line.strip(" \t\r")
            fields = [field for field in text.split("\t" if "\t" in text else " ") if field]
            if not rows and not words and source.flag != "INPUT" and _is_sentence(fields):
                what = "a line is a whole sentence; sentences and tags in two parallel files (MSRA) are not supported"
                where, remedy = f"{source.location}: line {number}", f"convert it to JSONL with {_FORM}"
                raise InputError(what, where=where, remedy=remedy)
            words.append(fields[0])
            tags.append(fields[-1])
            untagged = untagged or (number if len(fields) == 1 else 0)
            continue
        where = f"{source.location}: line {begin}"
        if words and untagged and source.flag == "INPUT":
            rows.append(Row({tokens_field: words}, where))
        elif words:
            remedy = f"write word TAB tag; for words without tags give JSONL with {_FORM}"
            error = UnusableRow("a word has no tag", where=f"{source.location}: line {untagged}", remedy=remedy)
            rows.append(Row({tokens_field: words, tags_field: tags}, where, error if untagged else None))
        words, tags, begin, untagged = [], [], number + 1, 0
    if not rows:
        raise source.no_rows()
    sentences = [row.values[tokens_field] for row in rows]
    if all(map(_are_numbered, sentences)):
        source.say(f"its words are characters with their positions, such as {sentences[0][0]}: the digits are left out")
        for words in sentences:
            words[:] = [word[0] for word in words]
    return rows


def _is_sentence(fields: list[str]) -> bool:
    """Whether a line has more fields than CoNLL-2003's four, which are words alone or tags alone."""
    are_tags = [_TAG.fullmatch(field) is not None for field in fields]
    return len(fields) > 4 and (all(are_tags) or not are_tags[-1])


def _are_numbered(words: list[str]) -> bool:
    """Whether each word is a character with its position in a word, as in Weibo NER: 科0 技1."""
    numbers = [int(word[1:]) if re.fullmatch(r"\D\d{1,2}", word) else -1 for word in words]
    return all(number in (0, before + 1) for before, number in pairwise([-1, *numbers]))


def _has_tags(source: LabelledInput) -> bool:
    """Whether a text file begins with a word and its tag, rather than with a text."""
    first = read_text(source).lstrip().partition("\n")[0]
    return first.startswith("-DOCSTART-") or bool(re.fullmatch(rf"\S+[ \t](.*[ \t])?({_TAG.pattern})\s*", first))


def as_bio(tags: list[str]) -> list[str]:
    """Return the tags of a sentence as BIO, from BIO with stray `I-`, IOB1, IOBES (BIOES, BMES) or BILOU."""
    converted = []
    open_kind = None  # of the entity that the next tag may continue
    for tag in tags:
        prefix, kind = match.groups() if (match := _TAG.fullmatch(tag)) else (None, None)
        converted.append(f"{'I' if prefix in _INSIDE and kind == open_kind else 'B'}-{kind}" if prefix else tag)
        open_kind = kind if prefix and prefix not in _LAST else None
    return converted


def _words_of(row: Row, column: str, flag: str) -> list[str] | None:
    """Return the words or tags in a column; None if there are none."""
    values = row.get(column, flag)
    if values is None or (isinstance(values, list) and all(isinstance(value, str) for value in values)):
        return values
    raise InputError(f"'{column}' is not a list of words", where=row.where, remedy=f"write {_FORM}")
