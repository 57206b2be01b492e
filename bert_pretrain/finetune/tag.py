"""`tag`: predicts a tag for every word, at the first WordPiece token of the word.

Tags are BIO tags of entities, or plain classes of words such as parts of speech if no tag has a prefix. Long sentences
are split into overlapping windows. A word in two windows gets its tag from the one where it is farther from the edge.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Encoding, PreTokenizedString
from tokenizers.pre_tokenizers import BertPreTokenizer

from bert_pretrain.errors import InputError
from bert_pretrain.examples.examples import IGNORE_INDEX
from bert_pretrain.finetune.baselines import most_frequent_tags
from bert_pretrain.finetune.conll import ENTITY_TAG, FORMAT, OUTSIDE, read_conll
from bert_pretrain.finetune.rows import INPUT, Example, LabelledInput, read_rows
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.task import Task, Window
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.text.tokenizer_folder import TextRules

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
        self.has_plain_tags = False  # or BIO tags
        self.splits_texts = False

    def rows(self, source: LabelledInput) -> list[Example]:
        """Read rows with lists of words or, for `predict`, with texts."""
        self.splits_texts = source.flag == INPUT
        if self.splits_texts and source.kind in ("", "txt", "tsv") and source.format is None:
            remedy = "pass --format conll (a word per line), --format txt (a text per line) or --format tsv (a table)"
            raise InputError("a line may be a word or a text", where=source.name, remedy=remedy)
        has_words = not self.splits_texts and not source.columns and source.kind in ("", "txt", "tsv")
        if source.kind == "conll" or has_words:  # CoNLL files have many suffixes, such as .train
            rows = read_conll(source, self.settings)
        else:
            rows = read_rows(source, self.settings.text_field)
        if source.flag == "--train":
            self._decide_kind_of_tags(rows, source)
        return rows

    def _decide_kind_of_tags(self, rows: list[Example], source: LabelledInput) -> None:
        """Decide whether tags are plain. Raise InputError for BIO tags in another spelling, such as B_PER or b-per."""
        tags = set(self.settings.tag_names)
        for row in rows:
            values = row.values.get(self.label_column)
            tags.update(str(value).strip() for value in (values if isinstance(values, list) else ()))
        others = sorted(tag for tag in tags if tag.upper() != OUTSIDE)
        self.has_plain_tags = not any(map(ENTITY_TAG.fullmatch, others)) and not _BARE_TAGS.issuperset(others)
        has_outside = len(others) < len(tags)
        if self.has_plain_tags and has_outside and all(map(_OTHER_SPELLING.fullmatch, others)):
            raise InputError(
                f"the tag {others[0]!r} is not a BIO tag",
                where=source.name,
                remedy="write O, B-KIND and I-KIND, with capital letters and a hyphen",
            )

    def inputs_of(self, row: Example) -> dict[str, Any]:
        column, text_field = self.settings.tokens_field, self.settings.text_field
        has_words = column in row.values and text_field == Settings.text_field  # --text-field is not given
        if self.splits_texts and not has_words:
            text = row.get(text_field, "--text-field")
            row.values[column] = self._split_words(text) if isinstance(text, str) else []
        words = row.get(column, "--tokens-field")
        if not words:
            raise row.unusable("the row has no words")
        self._check_strings(row, column)
        return {"tokens": words}

    def _split_words(self, text: str) -> list[str]:
        """Split a text as BERT does. Words keep characters that the tokenizer removes, such as joiners in Persian."""
        if self.tokenizer.whole_words:
            return text.split()
        rules = TextRules(lowercase=False, handle_chinese_chars=self.tokenizer.rules.handle_chinese_chars)
        words = PreTokenizedString(text)
        words.normalize(rules.normalizer.normalize)
        BertPreTokenizer().pre_tokenize(words)
        return [text[begin:end] for _, (begin, end), _ in words.get_splits("original", "char")]

    def _check_strings(self, row: Example, column: str) -> None:
        values = row.values[column]
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            table = "a table with one word per row must become .conll: word, tab, tag; a blank line after each sentence"
            remedy = f"write {FORMAT}; name numbers in order with --tag-names O,B-PER,I-PER; {table}"
            raise row.unusable(f"'{column}' is not a list of strings but {values!r:.40}", remedy)

    def label_of(self, row: Example, source: LabelledInput) -> list[str] | None:
        tags = row.get(self.label_column, "--tags-field")
        if tags is None:
            return None
        names = self.settings.tag_names
        if names and isinstance(tags, list):
            named = dict(enumerate(names))
            tags = row.values[self.label_column] = [named.get(tag, tag) if type(tag) is int else tag for tag in tags]
        self._check_strings(row, self.label_column)
        if len(tags) != len(row.inputs["tokens"]):
            what = f"'{self.settings.tokens_field}' and '{self.label_column}' differ in length"
            raise row.unusable(what, "write one tag per word")
        tags = [source.normalized(tag, row.where) for tag in tags]
        if self.has_plain_tags:
            return tags
        tags = [f"{tag}-{_BARE_KIND}" if tag in _BARE_TAGS else tag for tag in tags]
        if wrong := [tag for tag in tags if not ENTITY_TAG.fullmatch(tag)]:
            remedy = f"write O, B-KIND for the first word of an entity and I-KIND for its other words; {FORMAT}"
            raise row.unusable(f"the tag {wrong[0]!r} is not a BIO tag", remedy)
        return to_bio(tags)

    def classes_of(self, label: list[str]) -> list[str]:
        """Return the plain tags, or the kind of each entity."""
        return label if self.has_plain_tags else [tag[2:] for tag in label if tag.startswith("B-")]

    def outputs_of(self, classes: Sequence[str]) -> list[str]:
        if self.has_plain_tags:
            return sorted(classes)
        return [OUTSIDE, *(f"{prefix}-{kind}" for kind in sorted(classes) for prefix in "BI")]

    def set_labels(self, train: list[Example], others: list[Example]) -> None:
        self.min_classes = 2 if self.has_plain_tags else 1
        super().set_labels(train, others)

    def encodings(self, examples: list[Example]) -> Iterator[Encoding]:
        words = [self.tokenizer.separated(example.inputs["tokens"]) for example in examples]
        return self.encode_texts(
            words,
            is_pretokenized=True,
            max_length=self.settings.max_length,
            stride=self.settings.stride,
        )

    def positions_of(self, encoding: Encoding, *, is_first: bool) -> list[tuple[int, int]]:
        """Return each word that starts in a window, with the position of its first token."""
        positions = []
        for position, (before, word) in enumerate(pairwise(encoding.word_ids), start=1):
            is_start = position > 1 or is_first  # a later window may begin inside a word
            if is_start and word not in (None, before):
                positions.append((word, position))
        return positions

    def targets_of(
        self,
        label: list[str],
        positions: Sequence[Any],
        num_tokens: int,
    ) -> dict[str, Any]:
        number_of = {name: number for number, name in enumerate(self.labels)}
        labels = [IGNORE_INDEX] * num_tokens
        for word, position in positions:
            labels[position] = number_of.get(label[word], IGNORE_INDEX)
        return {"labels": labels}

    def decode(
        self,
        examples: list[Example],
        windows: list[Window],
        logits: Any,
    ) -> list[list[str]]:
        """Return the most likely tag of every word. The first tag of each entity is changed to `B-`.

        A word without tokens, such as a control character, gets the first label.
        """
        tags = [[self.labels[0]] * len(example.inputs["tokens"]) for example in examples]
        distances = [[0] * len(each) for each in tags]  # of the first token of each word from the edge of its window
        for window, scores in zip(windows, logits, strict=True):
            best = np.argmax(scores, axis=1)
            for word, position in window.positions:
                distance = min(position, len(window.input_ids) - 1 - position)
                if distance > distances[window.example][word]:
                    distances[window.example][word] = distance
                    tags[window.example][word] = self.labels[best[position]]
        return list(map(to_bio, tags))

    def score(self, examples: list[Example], predictions: list[list[str]]) -> dict[str, float]:
        truth = [example.label for example in examples]
        if self.has_plain_tags:  # each word becomes an entity, so F1 equals the word accuracy
            truth, predictions = ([[f"B-{tag}" for tag in tags] for tags in rows] for rows in (truth, predictions))
        return entity_scores(truth, predictions)

    def constant_baseline(self, examples: list[Example]) -> tuple[str, float]:
        tag, share = self._most_frequent_tag(examples)
        return f"{tag} for every word", share if self.has_plain_tags else 0.0

    def word_baseline(self, train: list[Example], examples: list[Example]) -> list[list[str]] | None:
        tagged = [(example.inputs["tokens"], example.label) for example in train]
        words = [example.inputs["tokens"] for example in examples]
        return most_frequent_tags(tagged, words, self._most_frequent_tag(train)[0])

    def _most_frequent_tag(self, examples: list[Example]) -> tuple[str, float]:
        """Return the most frequent plain tag and its share, or `O`."""
        if not self.has_plain_tags:
            return OUTSIDE, 0.0
        counts = Counter(tag for example in examples for tag in example.label)
        tag, count = counts.most_common(1)[0]
        return tag, count / counts.total()

    def columns(self, prediction: list[str]) -> dict[str, Any]:
        return {"tags": prediction}

    def record(self, example: Example, prediction: list[str]) -> dict[str, Any]:
        tags = {} if example.label is None else {"tags": example.label}
        return {"row": example.row, **example.inputs, **tags, "prediction": prediction}


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
