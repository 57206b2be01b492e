"""`classify`: a class, or with `--regression` a number, for a text or a pair of texts, from the [CLS] token."""

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.baselines import predict_from_words
from bert_pretrain.finetune.rows import Example, LabelledInput, UnusableRow, read_rows
from bert_pretrain.finetune.settings import Settings, flag_of
from bert_pretrain.finetune.task import Task, Window, encodings
from bert_pretrain.text.readers import ClassName
from bert_pretrain.text.tokenizer import Tokenizer

_USE_REGRESSION = "add --regression to predict numbers, or write classes as words or whole numbers"


class Classify(Task):
    """Labels, windows and metrics of the task."""

    model_class = "AutoModelForSequenceClassification"
    cut = "truncated"

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        super().__init__(settings, tokenizer)
        self.main_metric = "spearman" if settings.regression else "accuracy"
        self.label_column = settings.label_field
        self.has_dash = True
        """Whether `-` is a label like others, rather than that of rows on which annotators disagree."""

    def rows(self, source: LabelledInput) -> list[Example]:
        rows = read_rows(source, self.settings.text_field)
        if source.flag == "--train":
            labels = {str(row.values.get(self.label_column) or "") for row in rows} - {""}
            self.has_dash = "+" in labels or len(labels) < 3
        return rows

    def inputs_of(self, row: Example) -> dict[str, Any]:
        """Return the texts of a row; the second of a pair may be empty."""
        fields = {"text": ("text_field", self.settings.text_field), "pair": ("pair_field", self.settings.pair_field)}
        inputs = {}
        for name, (setting, column) in fields.items():
            if column is None:
                continue
            value = row.get(column, flag_of(setting))
            if value is not None and not isinstance(value, str):
                what = f"'{column}' is not a text but {type(value).__name__}"
                raise UnusableRow(what, where=row.where, remedy="correct it, or remove the row")
            inputs[name] = value if value and value.strip() else ""
        if not inputs["text"]:
            what = f"'{self.settings.text_field}' is empty"
            raise UnusableRow(what, where=row.where, remedy="fill it, or remove the row")
        return inputs

    def label_of(self, row: Example, source: LabelledInput) -> Any:
        label = row.get(self.label_column, "--label-field")
        if label is None or label == "" or label != label:  # NaN
            return None
        if isinstance(label, list) and not self.settings.regression:
            return sorted({self._class_of(each, row) for each in label})
        if self.settings.regression:
            if (value := _number_of(label)) is None:
                remedy = "correct it, or leave out --regression"
                raise InputError(f"the label {label!r} is not a number", where=row.where, remedy=remedy)
            return value
        if label == "-" and not self.has_dash:  # annotators of SNLI and OCNLI disagree
            what, remedy = "its label is '-', no agreement", "label the row, or remove it"
            raise UnusableRow(what, where=row.where, remedy=remedy)
        return self._class_of(label, row)

    def _class_of(self, label: Any, row: Example) -> str:
        if isinstance(label, ClassName):
            return label
        if isinstance(label, float) and label.is_integer():
            label = int(label)
        if not isinstance(label, str | int):  # a boolean is an int too: "True" or "False"
            what = f"the label {label!r} is neither a word nor a whole number but {type(label).__name__}"
            raise InputError(what, where=row.where, remedy=_USE_REGRESSION)
        return str(label)

    def set_labels(self, train: list[Example], others: list[Example]) -> None:
        counts = Counter(example.label for example in train)
        if len(counts) == 1:
            what = f"every row has the label {train[0].label!r}"
            where, remedy = f"{train[0].where} and all others", "give training rows of at least two labels"
            raise InputError(what, where=where, remedy=remedy)
        if self.settings.regression:
            return
        self.labels = sorted(counts, key=class_order)
        fractions = [name for name in counts if not name.strip().lstrip("+-").isdigit()]
        if fractions and all(_number_of(name) is not None for name in counts):
            where = next(example.where for example in train if example.label == fractions[0])
            what = f"the labels are numbers with fractions, such as {fractions[0]}"
            raise InputError(what, where=where, remedy=_USE_REGRESSION)
        for example in others:
            self.check_known(example, [] if example.label is None else [example.label])
        self.print_classes(counts)

    def check_known(self, example: Example, names: Iterable[str]) -> None:
        """Refuse labels that the training rows do not have."""
        for name in names:
            if name not in self.labels:
                what = f"the label {name!r} does not occur in the training rows"
                remedy = f"correct it (known: {', '.join(self.labels[:10])}), or add training rows with it"
                raise InputError(what, where=example.where, remedy=remedy)

    def print_classes(self, counts: Mapping[str, int]) -> None:
        """Print how many training rows each class has."""
        print(f"classes: {', '.join(f'{name} {counts[name]:,}' for name in self.labels[:20])}")

    def classes_of(self, example: Example) -> list[str]:
        return [] if self.settings.regression else [example.label]

    def target(self, label: Any) -> Any:
        """Return what the loss takes for a label."""
        return label if self.settings.regression else self.labels.index(label)

    def model_config(self) -> dict[str, Any]:
        if self.settings.regression:
            return {"num_labels": 1, "problem_type": "regression"}
        return {**super().model_config(), "problem_type": "single_label_classification"}

    def encode(self, examples: list[Example], split: str) -> list[Window]:
        has_labels = all(example.label is not None for example in examples)
        # As in BERT's code, a pair whose second text is empty is a single text.
        texts = [tuple(each.inputs.values()) if each.inputs.get("pair") else each.inputs["text"] for each in examples]
        windows, length = [], self.settings.max_length
        encoded = encodings(self.tokenizer, texts, {"max_length": length, "strategy": "longest_first"})
        for number, (example, encoding) in enumerate(zip(examples, encoded, strict=True)):
            labels = {"labels": self.target(example.label)} if has_labels else {}
            example.is_cut = bool(encoding.overflowing)
            windows.append(Window(number, encoding.ids, encoding.type_ids, labels))
        return windows

    def decode(self, examples: list[Example], windows: list[Window], logits: Any) -> list[Any]:
        """Return a number for each example, or (classes,) probabilities."""
        rows = np.asarray(logits, dtype=np.float64)
        rows = rows[np.argsort([window.example for window in windows])]
        if self.settings.regression:
            return list(rows[:, 0])
        powers = np.exp(rows - rows.max(axis=1, keepdims=True))
        return list(powers / powers.sum(axis=1, keepdims=True))

    def score(self, examples: list[Example], predictions: list[Any]) -> dict[str, float]:
        from sklearn import metrics

        truth = [example.label for example in examples]
        if self.settings.regression:
            return _regression_scores(np.array(truth), np.array(predictions))
        predicted = [self.labels[int(np.argmax(prediction))] for prediction in predictions]
        with warnings.catch_warnings(action="ignore"):  # of rows of one class
            return {
                "accuracy": float(metrics.accuracy_score(truth, predicted)),
                "macro_f1": float(metrics.f1_score(truth, predicted, average="macro", zero_division=0)),
                "mcc": float(metrics.matthews_corrcoef(truth, predicted)),
            }

    def constant(self, examples: list[Example]) -> tuple[str, float]:
        if self.settings.regression:
            return "one number for all", 0.0
        name, count = Counter(example.label for example in examples).most_common(1)[0]
        return f"always '{name}'", count / len(examples)

    def words_alone(self, train: list[Example], examples: list[Example]) -> list[Any] | None:
        texts, others = ([list(example.inputs.values()) for example in rows] for rows in (train, examples))
        return list(predict_from_words(texts, [example.label for example in train], others, self.labels))

    def columns(self, prediction: Any) -> dict[str, Any]:
        if self.settings.regression:
            return {"label": float(prediction)}
        best = int(np.argmax(prediction))
        return {"label": self.labels[best], "score": round(float(prediction[best]), 6)}

    def record(self, example: Example, prediction: Any) -> dict[str, Any]:
        label = {} if example.label is None else {"label": example.label}
        row = {"row": example.row, **example.inputs, **label, "prediction": self.columns(prediction)["label"]}
        if self.settings.regression:
            return row
        shares = {name: round(float(share), 6) for name, share in zip(self.labels, prediction, strict=True)}
        return {**row, "probabilities": shares}


def _regression_scores(truth: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation, 0 where a constant side leaves them undefined, and the MSE."""
    from scipy import stats

    is_defined = np.ptp(truth) > 0 and np.ptp(predicted) > 0
    return {
        "spearman": float(stats.spearmanr(truth, predicted).statistic) if is_defined else 0.0,
        "pearson": float(stats.pearsonr(truth, predicted).statistic) if is_defined else 0.0,
        "mse": float(np.mean((truth - predicted) ** 2)),
    }


def _number_of(label: Any) -> float | None:
    try:
        value = float(label)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def class_order(name: str) -> tuple[int, float, str]:
    """Sort classes of `datasets` by their number, then numbers by value, then words alphabetically."""
    if isinstance(name, ClassName):
        return (0, float(name.number), name)
    value = _number_of(name)
    return (2, 0.0, name) if value is None else (1, value, name)
