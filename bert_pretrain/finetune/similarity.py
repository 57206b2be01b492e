"""`similarity`: sentence vectors whose cosine says how similar two texts are.

There are three kinds of training rows: texts (unsupervised SimCSE, Gao et al., 2021), pairs of texts that mean the
same, and pairs with a score. Validation and test rows are pairs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.finetune.classify import (
    CHANCE,
    Example,
    label_in,
    no_better_number,
    number_of,
    regression_scores,
    text_of,
    texts_of,
)
from bert_pretrain.finetune.inputs import LabelledInput
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tables import Row, read_rows
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.texts import Texts

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Comparison:
    """What the vectors say of one pair."""

    cosine: float
    rank: int
    """Of the second text among the second texts of all pairs, by their cosine with the first; from 1."""


class Similarity:
    """Rows and metrics of the task."""

    model_class = "SentenceTransformer"
    group_field = "row"
    may_be_none = False

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.kind = ""
        """Of the training rows: `texts`, `pairs` or `scores`."""
        self.main_metric: str | None = None

    def read(self, source: LabelledInput) -> list[Example]:
        field, is_test = self.settings.label_field, source.flag == "--test"
        if source.flag == "--train" and (self.settings.pair_field is None or not source.kind):
            return self._read_texts(source)
        if self.settings.pair_field is None:
            what, remedy = f"{source.flag} needs pairs of texts", "give a table of pairs, and --pair-field"
            raise InputError(what, where=f"{source.flag} {source.location}", remedy=remedy)
        rows = read_rows(source, self.settings.text_field)
        has_labels = field in rows[0].values

        def make(number: int, row: Row) -> Example:
            text, pair = texts_of(row, self.settings)
            label = label_in(row, field, is_test=is_test) if has_labels else None
            return Example(number, row.where, text, pair, None if label is None else number_of(label, row, _NO_SCORE))

        return source.usable(rows, make)

    def _read_texts(self, source: LabelledInput) -> list[Example]:
        """Return each text once: twice in a batch, it would be a negative of itself."""
        field = self.settings.text_field
        texts: dict[str, str] = {}
        if source.kind:
            for text, where in source.usable(
                read_rows(source, field), lambda _, row: (text_of(row, field, "--text-field"), row.where)
            ):
                texts.setdefault(text, where)
        else:  # a line each
            for line in Texts.open([source.location], field, encoding=source.encoding, skip_empty=True):
                texts.setdefault(line.text, line.where)
        return [Example(number, where, text, None, None) for number, (text, where) in enumerate(texts.items())]

    def set_labels(self, train: list[Example], validation: list[Example], test: list[Example]) -> None:
        self.kind = "texts" if train[0].pair is None else "scores" if self.has_labels(train) else "pairs"
        print(f"training rows: {_KINDS[self.kind]}")
        if self.kind == "texts" and self.settings.dropout == 0:
            what, remedy = "without dropout the two vectors of a text are the same", "leave it out, or give 0.1"
            raise ConfigError(what, where="--dropout", remedy=remedy)
        if len(train) < 2 or (self.kind == "scores" and len({example.label for example in train}) == 1):
            what = "every score is the same" if self.kind == "scores" else "there is only one row"
            where, remedy = f"{train[0].where} and all others", "give more: there is nothing to compare"
            raise InputError(what, where=where, remedy=remedy)
        if self.kind == "scores" and validation and not self.has_labels(validation):
            what = f"there is no column '{self.settings.label_field}', which the training rows have"
            raise InputError(what, where=validation[0].where, remedy="give the scores of the pairs")
        if validation or self.kind != "texts":
            self.main_metric = "spearman" if self.has_labels(validation or train) else "mrr"

    def content(self, example: Example) -> object:
        return [example.text, example.pair, example.label]

    def has_labels(self, examples: list[Example]) -> bool:
        return all(example.label is not None for example in examples)

    def is_scored(self, examples: list[Example]) -> bool:
        return self.kind != "scores" or self.has_labels(examples)

    def compare(self, examples: list[Example], vectors: dict[str, np.ndarray]) -> list[Comparison]:
        """Return what the vectors say of each pair; `vectors` are (size,) by text, of length 1."""
        candidates = {text: number for number, text in enumerate(dict.fromkeys(_pair(each) for each in examples))}
        seconds = np.stack([vectors[text] for text in candidates])  # (candidates, size)
        comparisons: list[Comparison] = []
        for begin in range(0, len(examples), _ROWS_AT_ONCE):
            some = examples[begin : begin + _ROWS_AT_ONCE]
            cosines = np.stack([vectors[example.text] for example in some]) @ seconds.T  # (some, candidates)
            own = cosines[np.arange(len(some)), [candidates[_pair(example)] for example in some]]
            # Ties count against it: vectors that are all equal find nothing.
            ranks = (cosines >= own[:, None]).sum(axis=1)
            comparisons += [Comparison(float(cosine), int(rank)) for cosine, rank in zip(own, ranks, strict=True)]
        return comparisons

    def score(self, examples: list[Example], predictions: list[Comparison]) -> dict[str, float]:
        if self.has_labels(examples):
            truth = np.array([example.label for example in examples])
            found = regression_scores(truth, np.array([prediction.cosine for prediction in predictions]))
            return {name: found[name] for name in ("spearman", "pearson")}
        ranks = np.array([prediction.rank for prediction in predictions])
        return {"mrr": float((1 / ranks).mean()), "accuracy_at_1": float((ranks == 1).mean())}

    def no_better_than(self, examples: list[Example], predictions: list[Comparison]) -> str:
        from scipy import stats

        if self.has_labels(examples):
            truth = np.array([example.label for example in examples])
            return no_better_number(truth, np.array([prediction.cosine for prediction in predictions]))
        ranks = np.array([prediction.rank for prediction in predictions])
        number = len({example.pair for example in examples})
        # A sign test: whether the second text is in the first half of all, or in the second.
        wins, losses = int((2 * ranks < number + 1).sum()), int((2 * ranks > number + 1).sum())
        is_better = wins > losses and stats.binomtest(wins, wins + losses, alternative="greater").pvalue < CHANCE
        return "" if is_better else f"a random order (mrr {(1 / np.arange(1, number + 1)).mean():.4f})"

    def record(self, example: Example, prediction: Comparison) -> dict[str, Any]:
        label = {} if example.label is None else {"label": example.label}
        texts = {"text": example.text, "pair": example.pair}
        return {
            "row": example.row,
            **texts,
            **label,
            "prediction": round(prediction.cosine, 6),
            "rank": prediction.rank,
        }


_KINDS = {
    "texts": "texts, each compared with itself under another dropout mask",
    "pairs": "pairs of texts that mean the same",
    "scores": "pairs of texts with a score",
}
_NO_SCORE = "give a number, or remove the column: pairs without scores are taken to mean the same"


def _pair(example: Example) -> str:
    assert example.pair is not None
    return example.pair
