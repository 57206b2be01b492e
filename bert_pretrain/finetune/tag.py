"""`tag`: a BIO tag for every word, at the word's first piece; long sentences are divided into overlapping windows.

Every word is labelled in exactly one window, one in which it has context on both sides.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers.pre_tokenizers import BertPreTokenizer

from bert_pretrain.config import names_of
from bert_pretrain.errors import InputError
from bert_pretrain.finetune.baselines import most_frequent_tags
from bert_pretrain.finetune.inputs import LabelledInput, UnusableRow
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tables import Row, iterate_rows, no_rows, read_rows, read_text
from bert_pretrain.finetune.task import DIVIDED, IGNORED, Window, encodings, quiet_warnings
from bert_pretrain.text.readers import join_fields
from bert_pretrain.text.tokenizer import Tokenizer, bert_normalizer

OUTSIDE = "O"
_TAG = r"(O|[BIMESLUW]-\S+)"
MAX_COLUMNS = 4
"""Of CoNLL-2003; a line with more fields may be a whole sentence."""
_BEGIN, _INSIDE, _LAST = "BSUW", "IMEL", "SUWEL"
"""Prefixes of all schemes: of an entity's first word, of its other words, and of its last or only word."""


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
    may_be_none = False

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.tags: list[str] = []

    def read(self, source: LabelledInput) -> list[Example]:
        tokens, column = self.settings.tokens_field, self.settings.tags_field
        # A file of words and tags often has an ending of its own, such as .train.
        is_word_per_line = source.kind in ("conll", "tsv", "")
        rows = read_word_per_line(source, tokens, column) if is_word_per_line else read_rows(source)
        has_tags = source.flag != "--test" or column in rows[0].values
        if not is_word_per_line and isinstance(rows[0].values.get("label"), dict):
            raise _other_form("entities as positions in a text, as in CLUENER, are not supported", rows[0].where)
        is_iob1 = has_tags and _are_iob1([row.values.get(column) or [] for row in rows])
        if is_iob1:
            source.say("its tags are IOB1, read as BIO")

        def make(number: int, row: Row) -> Example:
            words = self.unlabelled(row, source).words
            tags = _words_of(row, column, "--tags-field") if has_tags else None
            if tags is None and source.flag != "--test":
                remedy = "tag every word; O is the tag of words outside of entities"
                raise UnusableRow("the sentence has no tags", where=row.where, remedy=remedy)
            if tags is not None and len(words) != len(tags):
                what = f"'{tokens}' and '{column}' differ in length"
                raise UnusableRow(what, where=row.where, remedy="give each word one tag")
            return Example(number, row.where, words, None if tags is None else as_bio(tags, row.where, source, is_iob1))

        return source.usable(rows, make)

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

    def encode(self, examples: list[Example], split: str, counts: Counter[str]) -> list[Window]:
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
        counts[DIVIDED.format(self.settings.max_length)] += divided
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
        return [self._begun(tags) for tags in found]

    def _begun(self, tags: list[str]) -> list[str]:
        """Return tags in which every entity begins with `B-`, if the model has that tag."""
        pairs = pairwise([OUTSIDE, *tags])
        begun = (f"B-{tag[2:]}" if tag[:2] == "I-" and before[2:] != tag[2:] else tag for before, tag in pairs)
        return [new if new in self.tags else tag for new, tag in zip(begun, tags, strict=True)]

    def score(self, examples: list[Example], predictions: list[list[str]]) -> dict[str, float]:
        return entity_scores([example.tags or [] for example in examples], predictions)

    def constant(self, examples: list[Example]) -> tuple[str, float]:
        return "O for every word", 0.0

    def words_alone(self, train: list[Example], examples: list[Example]) -> list[list[str]] | None:
        known = [(example.words, example.tags or []) for example in train]
        return most_frequent_tags(known, [example.words for example in examples], OUTSIDE)

    def use(self, labels: list[str], may_be_none: bool) -> None:
        self.tags = labels

    def rows(self, source: LabelledInput) -> Iterator[Row]:
        tokens, tags, fields = self.settings.tokens_field, self.settings.tags_field, self.settings.text_field
        is_untold = not source.kind and (source.ending != ".txt" or _has_tags(source))
        if is_untold or source.kind == "conll" or (source.kind == "tsv" and not source.names_text):
            if source.names_text:
                what, remedy = "a file of words and their tags has no columns", "leave it out, or give a table"
                raise InputError(what, where="--text-field", remedy=remedy)
            for row in read_word_per_line(source, tokens, tags):
                yield Row({tokens: row.values[tokens]}, row.where) if row.flaw else row
            return
        for row in iterate_rows(source, text_field=fields):
            texts = [row.values[field] for field in names_of(fields) if field in row.values]
            if not texts and source.names_text:
                raise row.no_column(names_of(fields)[0], "--text-field")
            if tokens in row.values or not texts or not all(text is None or isinstance(text, str) for text in texts):
                yield row
            else:
                yield replace(row, values={**row.values, tokens: self._split(join_fields(texts))})

    def unlabelled(self, row: Row, source: LabelledInput) -> Example:
        words = _words_of(row, self.settings.tokens_field, "--tokens-field")
        if not words:
            raise UnusableRow("there are no words", where=row.where, remedy="remove the row")
        return Example(0, row.where, words, None)

    def _split(self, text: str) -> list[str]:
        """Split a text as BERT does, at blanks, punctuation and ideographs."""
        splits_ideographs = bool(self.tokenizer.settings["tokenize_chinese_chars"])
        normalizer = bert_normalizer(lowercase=False, strip_accents=False, handle_chinese_chars=splits_ideographs)
        return [word for word, _ in BertPreTokenizer().pre_tokenize_str(normalizer.normalize_str(text))]

    def columns(self, example: Example, prediction: list[str]) -> dict[str, Any]:
        return {"tags": prediction}

    def record(self, example: Example, prediction: list[str]) -> dict[str, Any]:
        tags = {} if example.tags is None else {"tags": example.tags}
        return {"row": example.row, "tokens": example.words, **tags, "prediction": prediction}


def entity_scores(truth: list[list[str]], found: list[list[str]]) -> dict[str, float]:
    """Return precision, recall and F1 of whole entities as `seqeval` counts them, F1 by kind, and word accuracy."""
    from seqeval import metrics

    with quiet_warnings():
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


def read_word_per_line(source: LabelledInput, tokens_field: str, tags_field: str) -> list[Row]:
    """Read CoNLL's format: first on a line the word, last the tag; an empty line ends a sentence."""
    rows: list[Row] = []
    words: list[str] = []
    tags: list[str] = []
    begin = 1
    flaw: UnusableRow | None = None
    for number, line in enumerate([*read_text(source).split("\n"), ""], start=1):
        if not line.strip() or line.startswith("-DOCSTART-"):
            if words:
                rows.append(Row({tokens_field: words, tags_field: tags}, f"{source.location}: line {begin}", flaw))
            words, tags, begin, flaw = [], [], number + 1, None
            continue
        # Other blanks do not separate: a no-break space may be inside a number such as 10 000.
        text = line.strip(" \t\r")
        fields = [field for field in (text.split("\t") if "\t" in text else text.split(" ")) if field.strip()]
        if not rows and not words and len(fields) > MAX_COLUMNS and source.flag != "INPUT" and _is_sentence(fields):
            what = "a line is a whole sentence; sentences and tags in two parallel files (MSRA) are not supported"
            raise _other_form(what, f"{source.location}: line {number}")
        is_blank_word = len(fields) == 1 and line[0].isspace()
        if len(fields) == 1 and not is_blank_word:
            remedy = "write word TAB tag; for words without tags give JSONL with 'tokens'"
            flaw = UnusableRow("a word has no tag", where=f"{source.location}: line {number}", remedy=remedy)
        words.append("" if is_blank_word else fields[0])
        tags.append(fields[-1])
    if not rows:
        raise no_rows(source)
    sentences = [row.values[tokens_field] for row in rows]
    if all(map(_are_numbered, sentences)):
        source.say(f"its words are characters with their positions, such as {sentences[0][0]}: the digits are left out")
        for words in sentences:
            words[:] = [word[0] for word in words]
    return rows


def _are_numbered(words: list[str]) -> bool:
    """Whether each word is a character with its position in a word, as in Weibo NER: 科0 技1."""
    numbers = [int(word[1:]) if re.fullmatch(r"\D\d{1,2}", word) else -1 for word in words]
    return all(number in (0, before + 1) for before, number in pairwise([-1, *numbers]))


def _other_form(what: str, where: str) -> InputError:
    remedy = 'convert it to JSONL with lists of equal length: {"tokens": ["北", "京"], "tags": ["B-LOC", "I-LOC"]}'
    return InputError(what, where=where, remedy=remedy)


def _is_sentence(fields: list[str]) -> bool:
    """Whether the fields of a line are words alone or tags alone."""
    are_tags = [re.fullmatch(_TAG, field) is not None for field in fields]
    return all(are_tags) or not are_tags[-1]


def _has_tags(source: LabelledInput) -> bool:
    """Whether the first line of a text file that is not empty is a word and its tag, rather than a text."""
    rows = iterate_rows(source, text_field="line")
    first = next((row.values["line"] for row in rows if row.values["line"].strip()), "")
    return first.startswith("-DOCSTART-") or bool(re.fullmatch(rf"\S+[ \t](.*[ \t])?{_TAG}\s*", first))


def _are_iob1(sentences: list[list[str]]) -> bool:
    """Whether tags are IOB1, in which `B-` only separates two entities of one kind."""
    pairs = [pair for tags in sentences for pair in pairwise([OUTSIDE, *map(str, tags)])]
    begins = [tag[2:] == before[2:] for before, tag in pairs if tag.startswith("B-")]
    return all(begins) and any(tag.startswith("I-") and before == OUTSIDE for before, tag in pairs)


def as_bio(tags: list[str], where: str, source: LabelledInput, is_iob1: bool = False) -> list[str]:
    """Return the tags of a sentence as BIO, from BIO with stray `I-`, IOB1, IOBES (BIOES, BMES) or BILOU."""
    found = []
    open_kind = ""  # of the entity that the next tag may continue
    for tag in tags:
        prefix, _, kind = tag.partition("-")
        if tag == OUTSIDE:
            open_kind = ""
            found.append(tag)
            continue
        if not kind or prefix not in _BEGIN + _INSIDE:
            remedy = "write O, B-KIND for the first word of an entity and I-KIND for its other words"
            raise UnusableRow(f"the tag {tag!r} is not BIO", where=where, remedy=remedy)
        if prefix not in "BI":
            source.say("its tags are IOBES, BMES or BILOU, read as BIO")
        if prefix in _INSIDE and kind != open_kind and not is_iob1:
            what = f"the tag {tag!r} continues an entity that no tag before it began"
            remedy = f"write B-{kind} for its first word, or leave out --strict"
            source.repair("I- tags that begin an entity, read as B-", InputError(what, where=where, remedy=remedy))
        found.append(f"{'I' if prefix in _INSIDE and kind == open_kind else 'B'}-{kind}")
        open_kind = "" if prefix in _LAST else kind
    return found


def _words_of(row: Row, column: str, flag: str) -> list[str] | None:
    """Return the words or tags in a column; None if there are none."""
    values = row.get(column, flag)
    if values is None or (isinstance(values, list) and all(isinstance(value, str) for value in values)):
        return values
    raise InputError(
        f"'{column}' is not a list of words",
        where=row.where,
        remedy='write lists of equal length: "tokens": ["Anna", "sings"], "tags": ["B-PER", "O"]',
    )
