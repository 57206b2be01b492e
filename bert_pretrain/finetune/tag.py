"""`tag`: predicts a tag for every word, at the first WordPiece token of the word.

Tags are BIO tags of entities, or plain classes of words such as parts of speech if no tag has a prefix. Long sentences
are split into overlapping windows. Each word is labelled in exactly one window: the one in which it is farther from the
edge.
"""

import re
import warnings
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import PreTokenizedString
from tokenizers.pre_tokenizers import BertPreTokenizer

from bert_pretrain.errors import InputError
from bert_pretrain.examples.examples import IGNORE_INDEX
from bert_pretrain.finetune.baselines import most_frequent_tags
from bert_pretrain.finetune.conll import ENTITY_TAG, FORMAT, OUTSIDE, is_entity_tag, read_conll, sentences_of
from bert_pretrain.finetune.rows import INPUT, Example, LabelledInput, UnusableRow, first_lines, read_rows
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.task import Task, Window, encode_texts
from bert_pretrain.text.tokenizer import Tokenizer, bert_normalizer

_OTHER_SPELLING = re.compile(r"[BIMESLUW][-_.:/]\S+|\S+[-_.:/][BIMESLUW]", re.IGNORECASE)
_BARE_TAGS, _BARE_KIND = set("BIMESLUW"), "ENTITY"  # tags without a kind, and the kind that they get


class Tag(Task):
    """The token classification task."""

    model_class = "AutoModelForTokenClassification"
    pipeline_tag = "token-classification"
    main_metric = "f1"

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        super().__init__(settings, tokenizer)
        self.label_column = settings.tags_field
        self.has_plain_tags: bool | None = None  # None until the training rows are read

    def rows(self, source: LabelledInput) -> list[Example]:
        """Read rows with lists of words. For `predict`, texts are split into words as BERT's tokenizer does."""
        rows = self._rows(source)
        if self.has_plain_tags is None and source.flag != INPUT:
            values = [row.values.get(self.label_column) for row in rows]
            tags = {tag.strip() for value in values if isinstance(value, list) for tag in value if isinstance(tag, str)}
            tags |= set(self.settings.tag_names)
            has_prefix = any(map(ENTITY_TAG.fullmatch, tags - {OUTSIDE}))
            self.has_plain_tags = not has_prefix and not tags <= _BARE_TAGS | {OUTSIDE}
            if self.has_plain_tags:
                _check_spelling(tags, source)
        return rows

    def _rows(self, source: LabelledInput) -> list[Example]:
        column, text_field, kind = self.settings.tokens_field, self.settings.text_field, source.kind
        predicts, has_text_field = source.flag == INPUT, text_field != Settings.text_field  # is --text-field given
        is_conll = kind in ("conll", "tsv", "txt", "")  # "": CoNLL files have many suffixes, such as .train
        is_text = predicts and is_conll and kind != "conll" and (has_text_field or self._has_texts(source))
        if is_text and kind == "":
            remedy = "name it .txt if each line is a text, or pass --format conll if each line is a word"
            raise InputError(f"'{source.location}' has an unknown file format", where=source.flag, remedy=remedy)
        if is_conll and not is_text:
            return read_conll(source, self.settings)
        rows = read_rows(source, text_field)
        if not predicts and rows and isinstance(rows[0].values.get("label"), dict):
            what = "entities as positions in a text (the format of CLUENER) are not supported"
            raise InputError(what, where=rows[0].where, remedy=f"convert the file to JSONL with {FORMAT}")
        for row in rows if predicts else ():
            if has_text_field or (column not in row.values and (is_text or text_field in row.values)):
                text = row.get(text_field, "--text-field")
                row.values[column] = self._split_words(text) if isinstance(text, str) else []
        return rows

    def _has_texts(self, source: LabelledInput) -> bool:
        """Return whether the lines of a file are texts. Tags of punctuation do not count: texts also end in `.`."""
        columns, sentences = sentences_of(first_lines(source), self.settings)
        words = [fields for sentence in sentences for _, fields in sentence]
        known = {label for label in self.labels if label[:1].isalnum()}
        num_tagged = sum(tag in known or is_entity_tag(tag) for tag in map(columns.tag_of, words))
        have_several_words = 2 * sum(len(fields) > 1 for fields in words) > len(words)
        return 2 * num_tagged <= len(words) and (source.kind != "" or have_several_words)

    def _split_words(self, text: str) -> list[str]:
        """Split a text as BERT does. Words keep characters that the tokenizer removes, such as joiners in Persian."""
        if self.tokenizer.whole_words:
            return text.split()
        splits_ideographs = bool(self.tokenizer.settings["tokenize_chinese_chars"])
        normalizer = bert_normalizer(lowercase=False, strip_accents=False, handle_chinese_chars=splits_ideographs)
        words = PreTokenizedString(text)
        words.normalize(normalizer.normalize)
        BertPreTokenizer().pre_tokenize(words)
        return [text[begin:end] for _, (begin, end), _ in words.get_splits("original", "char")]

    def inputs_of(self, row: Example) -> dict[str, Any]:
        words = _string_list(row, self.settings.tokens_field, "--tokens-field")
        if not words:
            raise UnusableRow("the row has no words", where=row.where, remedy="remove the row")
        return {"tokens": words}

    def label_of(self, row: Example, source: LabelledInput) -> list[str] | None:
        tags = self._tags_of(row)
        if tags is None:
            return None
        if len(tags) != len(row.inputs["tokens"]):
            what = f"'{self.settings.tokens_field}' and '{self.label_column}' differ in length"
            raise UnusableRow(what, where=row.where, remedy="write one tag per word")
        tags = [source.normalized(tag, row.where) for tag in tags]
        if self.has_plain_tags:
            return tags
        tags = [f"{tag}-{_BARE_KIND}" if tag in _BARE_TAGS else tag for tag in tags]
        if wrong := [tag for tag in tags if not ENTITY_TAG.fullmatch(tag)]:
            remedy = f"write O, B-KIND for the first word of an entity and I-KIND for its other words; {FORMAT}"
            raise UnusableRow(f"the tag {wrong[0]!r} is not a BIO tag", where=row.where, remedy=remedy)
        return to_bio(tags)

    def _tags_of(self, row: Example) -> list[str] | None:
        """Return the tags of a row, with numbers replaced by their names; None if the row has no tags."""
        values, names = row.get(self.label_column, "--tags-field"), self.settings.tag_names
        if not isinstance(values, list) or not values or not all(type(value) is int for value in values):
            return _string_list(row, self.label_column, "--tags-field")
        if unknown := [value for value in values if not 0 <= value < len(names)]:
            remedy = "pass the names of all tags in order, for example --tag-names O,B-PER,I-PER"
            raise InputError(f"the tag {unknown[0]} is a number without a name", where=row.where, remedy=remedy)
        return [names[value] for value in values]

    def classes_of(self, example: Example) -> list[str]:
        return example.label if self.has_plain_tags else [tag[2:] for tag in example.label if tag != OUTSIDE]

    def set_labels(self, train: list[Example], others: list[Example]) -> None:
        kinds = sorted({kind for example in train for kind in self.classes_of(example)})
        if len(kinds) < (2 if self.has_plain_tags else 1):
            where, remedy = f"{train[0].where} and all other rows", "provide rows with other tags"
            raise InputError(f"every tag is {''.join(kinds) or OUTSIDE}", where=where, remedy=remedy)
        bio_tags = [OUTSIDE, *(f"{prefix}-{kind}" for kind in kinds for prefix in "BI")]
        self.labels = kinds if self.has_plain_tags else bio_tags
        tags = [(tag, example.where) for example in others for tag in example.label or ()]
        known = set(self.labels)
        unknown = [(tag, where) for tag, where in tags if tag not in known]
        if len(unknown) > 0.01 * len(tags):  # up to 1 % of the tags may be missing in the training rows
            tag, where = unknown[0]
            remedy = f"fix it (known: {', '.join(kinds[:20])}), or add training rows with it"
            raise InputError(f"the tag {tag!r} does not occur in the training rows", where=where, remedy=remedy)
        if unknown:
            print(f"tags without training rows, counted as wrong: {', '.join(sorted({tag for tag, _ in unknown}))}")
        print(f"{'tags' if self.has_plain_tags else 'kinds of entities'}: {', '.join(kinds[:20])}")

    def encode(self, examples: list[Example], split: str) -> list[Window]:
        assert self.settings.max_length is not None
        max_tokens = self.settings.max_length - 2
        label_ids = {name: number for number, name in enumerate(self.labels)}
        words = sorted({word for example in examples for word in example.inputs["tokens"]})
        encodings = encode_texts(self.tokenizer, words, add_special_tokens=False)
        # The normalizer removes words of control characters. They become [UNK].
        ids = ((encoding.ids or [self.tokenizer.unk_id])[:max_tokens] for encoding in encodings)
        ids_of = dict(zip(words, ids, strict=True))
        has_labels = all(example.label is not None for example in examples)
        windows = []
        for number, example in enumerate(examples):
            word_ids = [ids_of[word] for word in example.inputs["tokens"]]
            parts = split_sentence(list(map(len, word_ids)), max_tokens)
            example.exceeds_window = len(parts) > 1
            for shown, labelled in parts:
                input_ids, positions = [self.tokenizer.cls_id], []
                for word in shown:
                    if word in labelled:
                        positions.append((word, len(input_ids)))
                    input_ids += word_ids[word]
                input_ids.append(self.tokenizer.sep_id)
                labels = [IGNORE_INDEX] * len(input_ids)
                for word, position in positions if has_labels else ():
                    labels[position] = label_ids.get(example.label[word], IGNORE_INDEX)
                window_labels = {"labels": labels} if has_labels else {}
                windows.append(Window(number, input_ids, [0] * len(input_ids), window_labels, positions))
        return windows

    def decode(self, examples: list[Example], windows: list[Window], logits: Any) -> list[list[str]]:
        """Return the most likely tag of every word. The first tag of each entity is changed to `B-`."""
        tags = [[OUTSIDE] * len(example.inputs["tokens"]) for example in examples]
        for window, scores in zip(windows, logits, strict=True):
            for word, position in window.positions:
                tags[window.example][word] = self.labels[int(np.argmax(scores[position]))]
        return list(map(to_bio, tags))

    def score(self, examples: list[Example], predictions: list[list[str]]) -> dict[str, float]:
        truth = [example.label for example in examples]
        if self.has_plain_tags:  # each word becomes an entity, so F1 equals the word accuracy
            truth, predictions = ([[f"B-{tag}" for tag in tags] for tags in rows] for rows in (truth, predictions))
        return entity_scores(truth, predictions)

    def constant_baseline(self, examples: list[Example]) -> tuple[str, float]:
        if not self.has_plain_tags:
            return "O for every word", 0.0
        tag, share = _most_frequent_tag(examples)
        return f"{tag} for every word", share

    def word_baseline(self, train: list[Example], examples: list[Example]) -> list[list[str]] | None:
        tagged = [(example.inputs["tokens"], example.label) for example in train]
        default = _most_frequent_tag(train)[0] if self.has_plain_tags else OUTSIDE
        return most_frequent_tags(tagged, [example.inputs["tokens"] for example in examples], default)

    def columns(self, prediction: list[str]) -> dict[str, Any]:
        return {"tags": prediction}

    def record(self, example: Example, prediction: list[str]) -> dict[str, Any]:
        tags = {} if example.label is None else {"tags": example.label}
        return {"row": example.row, **example.inputs, **tags, "prediction": prediction}


def _most_frequent_tag(examples: list[Example]) -> tuple[str, float]:
    """Return the most frequent tag and its share. If several are equally frequent, take the first in the alphabet."""
    tags = sorted(tag for example in examples for tag in example.label)
    tag, count = Counter(tags).most_common(1)[0]  # the first of the most frequent
    return tag, count / len(tags)


def entity_scores(truth: list[list[str]], predicted: list[list[str]]) -> dict[str, float]:
    """Return entity-level precision, recall and F1 from `seqeval`, F1 by kind of entity, and word accuracy."""
    from seqeval import metrics

    with warnings.catch_warnings(action="ignore"):  # about kinds without an entity
        report = metrics.classification_report(truth, predicted, output_dict=True, zero_division=0)
    total = report["micro avg"]
    return {
        "f1": float(total["f1-score"]),
        "precision": float(total["precision"]),
        "recall": float(total["recall"]),
        "word_accuracy": float(metrics.accuracy_score(truth, predicted)),
        **{f"f1_{kind}": float(each["f1-score"]) for kind, each in report.items() if not kind.endswith(" avg")},
    }


def split_sentence(lengths: list[int], max_tokens: int) -> list[tuple[range, range]]:
    """Split a sentence into overlapping windows of at most `max_tokens` tokens, given the number of tokens per word.

    Return the range of words in each window, and the range of words that are labelled in it. Consecutive windows share
    at most a third of `max_tokens`, and each labels its half of the shared words. No word may exceed `max_tokens`.
    """
    shown, begin = [], 0
    while True:
        end, num_tokens = begin, 0
        while end < len(lengths) and num_tokens + lengths[end] <= max_tokens:
            num_tokens += lengths[end]
            end += 1
        shown.append(range(begin, end))
        if end == len(lengths):
            break
        following, shared = end, 0
        while following > begin + 1 and shared + lengths[following - 1] <= max_tokens // 3:
            following -= 1
            shared += lengths[following]
        # Start the next window at a later word if the word at `end` does not fit; otherwise the loop is endless.
        while sum(lengths[following : end + 1]) > max_tokens:
            following += 1
        begin = following
    borders = [0, *((first.stop + second.start) // 2 for first, second in pairwise(shown)), len(lengths)]
    return [(words, range(*labelled)) for words, labelled in zip(shown, pairwise(borders), strict=True)]


def _check_spelling(tags: set[str], source: LabelledInput) -> None:
    """Raise InputError for BIO tags in another spelling, such as `B_PER` or `b-per`."""
    others = sorted(tag for tag in tags if tag.upper() != OUTSIDE)
    has_outside = len(others) < len(tags)
    if has_outside and others and all(map(_OTHER_SPELLING.fullmatch, others)):
        what, where = f"the tag {others[0]!r} is not a BIO tag", f"{source.flag} {source.location}"
        raise InputError(what, where=where, remedy="write O, B-KIND and I-KIND, with capital letters and a hyphen")


def to_bio(tags: list[str]) -> list[str]:
    """Convert the tags of a sentence to BIO from BIO with stray `I-`, IOB1, IOBES (BIOES, BMES) or BILOU."""
    converted = []
    open_kind = None  # kind of the entity that the next tag may continue
    for tag in tags:
        prefix, kind = match.groups() if (match := ENTITY_TAG.fullmatch(tag)) else (None, None)
        continues = prefix is not None and prefix in "IMEL" and kind == open_kind
        converted.append(f"{'I' if continues else 'B'}-{kind}" if prefix else tag)
        open_kind = kind if prefix and prefix not in "SUWEL" else None  # these end an entity
    return converted


def _string_list(row: Example, column: str, flag: str) -> list[str] | None:
    """Return the words or tags in a column, or None if the value is null."""
    values = row.get(column, flag)
    if values is None or (isinstance(values, list) and all(isinstance(value, str) for value in values)):
        return values
    table = "a table with one word per row must become .conll: word, tab, tag; a blank line after each sentence"
    what, remedy = f"'{column}' is not a list of strings but {values!r:.40}", f"write {FORMAT}; {table}"
    raise InputError(what, where=row.where, remedy=remedy)
