"""`classify`: a class, or with `--regression` a number, for a text or a pair of texts, from the [CLS] token."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from bert_pretrain.config import TextField, names_of
from bert_pretrain.errors import InputError
from bert_pretrain.finetune.baselines import predict_from_words
from bert_pretrain.finetune.inputs import LabelledInput, UnusableRow
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tables import Row, iterate_rows, read_rows
from bert_pretrain.finetune.task import Window, encodings, quiet_warnings, softmax
from bert_pretrain.text.readers import ClassName, join_fields
from bert_pretrain.text.tokenizer import Tokenizer

_USE_REGRESSION = "add --regression to predict numbers, or write classes as words or whole numbers"


@dataclass(frozen=True)
class Example:
    """A text or a pair, with its label if it has one."""

    row: int
    where: str
    text: str
    pair: str | None
    label: Any


class Classify:
    """Labels, windows and metrics of the task."""

    model_class = "AutoModelForSequenceClassification"
    label_names: tuple[str, ...] = ("labels",)
    group_field = "row"
    may_be_none = False

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.classes: list[str] = []
        self.has_dash = False
        self.main_metric = "spearman" if settings.regression else "accuracy"

    def read(self, source: LabelledInput) -> list[Example]:
        rows, field = read_rows(source, self.settings.text_field), self.settings.label_field
        is_test = source.flag == "--test"
        has_labels = not is_test or field in rows[0].values
        if source.flag == "--train":
            labels = {str(row.values.get(field) or "") for row in rows} - {""}
            self.has_dash = "+" in labels or len(labels) < 3

        def make(number: int, row: Row) -> Example:
            text, pair = self._texts_of(row, source)
            label = _label_in(row, field, is_test=is_test) if has_labels else None
            if label == "-" and not self.has_dash:  # annotators of SNLI and OCNLI disagree
                remedy = "label or remove it, or leave out --strict"
                raise UnusableRow("its label is '-', no agreement", where=row.where, remedy=remedy)
            return Example(number, row.where, text, pair, None if label is None else self._label_of(label, row))

        return source.usable(rows, make)

    def _label_of(self, label: Any, row: Row) -> str | float:
        if self.settings.regression:
            return _number_of(label, row)
        if isinstance(label, ClassName):
            return label
        if isinstance(label, (str, int)):  # a boolean is an int too: "True" or "False"
            return str(label)
        if isinstance(label, float) and label.is_integer():
            return str(int(label))
        what = "a fraction" if isinstance(label, float) else f"not a word or number but {type(label).__name__}"
        raise InputError(f"the label {label!r} is {what}", where=row.where, remedy=_USE_REGRESSION)

    def set_labels(self, train: list[Example], validation: list[Example], test: list[Example]) -> None:
        if self.settings.regression:
            if len({example.label for example in train}) == 1:
                raise _one_class(train, "every label is the same number")
            return
        counts = Counter(example.label for example in train)
        self.classes = sorted(counts, key=_order)
        if len(counts) == 1:
            raise _one_class(train, "there is only one class")
        if all(_is_number(name) for name in counts) and not all(_is_whole(name) for name in counts):
            name = next(name for name in self.classes if not _is_whole(name))
            raise InputError(
                f"the labels are numbers with fractions, such as {name}",
                where=next(example.where for example in train if example.label == name),
                remedy=_USE_REGRESSION,
            )
        for example in [*validation, *test]:
            if example.label is not None and example.label not in counts:
                shown = ", ".join(self.classes[:10]) + (" …" if len(self.classes) > 10 else "")
                raise InputError(
                    f"the label {example.label!r} does not occur in the training rows",
                    where=example.where,
                    remedy=f"correct it (known: {shown}), or add training rows with it",
                )
        print(f"classes: {', '.join(f'{name} {counts[name]:,}' for name in self.classes[:20])}")

    def content(self, example: Example) -> object:
        return [example.text, example.pair, example.label]

    def model_config(self) -> dict[str, Any]:
        if self.settings.regression:
            return {"num_labels": 1, "problem_type": "regression"}
        names = dict(enumerate(self.classes))
        return {
            "id2label": names,
            "label2id": {name: number for number, name in names.items()},
            "problem_type": "single_label_classification",
        }

    def encode(self, examples: list[Example], split: str, counts: Counter[str]) -> list[Window]:
        assert self.settings.max_length is not None
        has_labels = all(example.label is not None for example in examples)
        has_pairs = examples[0].pair is not None
        numbers = {name: number for number, name in enumerate(self.classes)}
        firsts = encodings(self.tokenizer, [example.text for example in examples])
        seconds = encodings(self.tokenizer, [example.pair for example in examples]) if has_pairs else repeat(None)
        cls_id, sep_id = self.tokenizer.cls_id, self.tokenizer.sep_id
        windows = []
        for number, (example, first, second) in enumerate(zip(examples, firsts, seconds, strict=has_pairs)):
            # As in BERT's code, a pair whose second text is empty is a single text.
            room = self.settings.max_length - (3 if second else 2)
            kept_first, kept_second = longest_first_lengths(len(first), len(second or ()), room)
            is_truncated = kept_first < len(first) or kept_second < len(second or ())
            counts[f"are longer than {self.settings.max_length} tokens and were truncated"] += is_truncated
            ids = [cls_id, *first.ids[:kept_first], sep_id]
            types = [0] * len(ids)
            if second:
                ids += [*second.ids[:kept_second], sep_id]
                types += [1] * (len(ids) - len(types))
            labels = {"labels": numbers.get(example.label, example.label)} if has_labels else {}
            windows.append(Window(number, ids, types, labels))
        return windows

    def decode(self, examples: list[Example], windows: list[Window], logits: Any) -> list[Any]:
        """Return a number for each example, or (classes,) probabilities."""
        rows = np.asarray(logits, dtype=np.float64)
        ordered = np.empty_like(rows)
        ordered[[window.example for window in windows]] = rows
        return list(ordered[:, 0] if self.settings.regression else softmax(ordered))

    def score(self, examples: list[Example], predictions: list[Any]) -> dict[str, float]:
        from sklearn import metrics

        if self.settings.regression:
            return _regression_scores(np.array([example.label for example in examples]), np.array(predictions))
        found = [self.classes[int(np.argmax(prediction))] for prediction in predictions]
        truth = [example.label for example in examples]
        with quiet_warnings():
            return {
                "accuracy": float(metrics.accuracy_score(truth, found)),
                "macro_f1": float(metrics.f1_score(truth, found, average="macro", zero_division=0)),
                "mcc": float(metrics.matthews_corrcoef(truth, found)),
            }

    def constant(self, examples: list[Example]) -> tuple[str, float]:
        if self.settings.regression:
            return "one number for all", 0.0
        name, count = Counter(example.label for example in examples).most_common(1)[0]
        return f"always '{name}'", count / len(examples)

    def words_alone(self, train: list[Example], examples: list[Example]) -> list[Any] | None:
        def texts(rows: list[Example]) -> list[list[str]]:
            return [[row.text] if row.pair is None else [row.text, row.pair] for row in rows]

        labels = [example.label for example in train]
        return list(predict_from_words(texts(train), labels, texts(examples), self.classes))

    def use(self, labels: list[str], may_be_none: bool) -> None:
        self.classes = labels

    def rows(self, source: LabelledInput) -> Iterator[Row]:
        return iterate_rows(source, text_field=self.settings.text_field)

    def unlabelled(self, row: Row, source: LabelledInput) -> Example:
        return Example(0, row.where, *self._texts_of(row, source), label=None)

    def _texts_of(self, row: Row, source: LabelledInput) -> tuple[str, str | None]:
        """Return the texts of a row; the second of a pair may be empty, which is counted."""
        text, column = _text_of(row, self.settings.text_field, "--text-field"), self.settings.pair_field
        if column is None:
            return text, None
        if not _is_empty(row.get(column, "--pair-field")):
            return text, _text_of(row, column, "--pair-field")
        error = UnusableRow(f"'{column}' is empty", where=row.where, remedy="fill it, or leave out --strict")
        source.repair(f"rows kept whose second text, '{column}', is empty", error)
        return text, ""

    def columns(self, example: Example, prediction: Any) -> dict[str, Any]:
        if self.settings.regression:
            return {"label": float(prediction)}
        best = int(np.argmax(prediction))
        return {"label": self.classes[best], "score": round(float(prediction[best]), 6)}

    def record(self, example: Example, prediction: Any) -> dict[str, Any]:
        texts = {"text": example.text} | ({} if example.pair is None else {"pair": example.pair})
        label = {} if example.label is None else {"label": example.label}
        if self.settings.regression:
            return {"row": example.row, **texts, **label, "prediction": float(prediction)}
        shares = {name: round(float(share), 6) for name, share in zip(self.classes, prediction, strict=True)}
        found = self.classes[int(np.argmax(prediction))]
        return {"row": example.row, **texts, **label, "prediction": found, "probabilities": shares}


def longest_first_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of two texts to keep if `room` fit in all: the longer text is truncated first.

    As `longest_first` of `tokenizers` does.
    """
    if first + second <= room:
        return first, second
    half = room // 2
    if min(first, second) <= half:
        return (first, room - first) if first <= second else (room - second, second)
    return (half, room - half) if first <= second else (room - half, half)


def _regression_scores(truth: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation, 0 where a constant side leaves them undefined, and the MSE."""
    from scipy import stats

    is_defined = np.ptp(truth) > 0 and np.ptp(found) > 0
    return {
        "spearman": float(stats.spearmanr(truth, found).statistic) if is_defined else 0.0,
        "pearson": float(stats.pearsonr(truth, found).statistic) if is_defined else 0.0,
        "mse": float(np.mean((truth - found) ** 2)),
    }


def _label_in(row: Row, column: str, *, is_test: bool) -> Any:
    """Return the label of a row, or None if it has none."""
    label = row.get(column, "--label-field")
    if label is not None and label != "" and not (isinstance(label, float) and math.isnan(label)):
        return label
    if not is_test:
        raise UnusableRow(f"'{column}' holds no label", where=row.where, remedy="label the row, or remove it")
    return None


def _number_of(label: Any, row: Row) -> float:
    try:
        value = float(label)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        remedy = "correct it, or leave out --regression"
        raise InputError(f"the label {label!r} is not a number", where=row.where, remedy=remedy)
    return value


def _text_of(row: Row, field: TextField, flag: str) -> str:
    """Return the text of a column, or of several that are joined as in pretraining; `flag` names them."""
    names = names_of(field)
    names = tuple(name for name in names if name in row.values) or names[:1]
    values = [row.get(name, flag) for name in names]
    for name, value in zip(names, values, strict=True):
        if value is not None and not isinstance(value, str):
            what = f"'{name}' is not a text but {type(value).__name__}"
            raise UnusableRow(what, where=row.where, remedy="correct it, or remove the row")
    text = join_fields(values)
    if _is_empty(text):
        what = " and ".join(f"'{name}'" for name in names) + (" is empty" if len(names) == 1 else " are empty")
        raise UnusableRow(what, where=row.where, remedy="fill it, or remove the row")
    return text


def _is_empty(text: Any) -> bool:
    """Whether a value is a text of nothing but blanks, or null."""
    return text is None or (isinstance(text, str) and not text.strip())


def _one_class(train: list[Example], what: str) -> InputError:
    return InputError(
        f"{what}: {train[0].label!r}",
        where=f"{train[0].where} and all others",
        remedy="give training rows of at least two; there is nothing to learn from one",
    )


def _order(name: str) -> tuple[int, float, str]:
    """Sort classes of `datasets` by their number, then numbers by value, then words alphabetically."""
    if isinstance(name, ClassName):
        return (0, float(name.number), name)
    return (1, float(name), name) if _is_number(name) else (2, 0.0, name)


def _is_number(name: str) -> bool:
    try:
        return math.isfinite(float(name))
    except ValueError:
        return False


def _is_whole(name: str) -> bool:
    return name.strip().lstrip("+-").isdigit()
