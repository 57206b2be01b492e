"""`classify`: predicts a class, or with `--regression` a number, for a text or a pair of texts."""

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.baselines import fit_and_predict_tfidf
from bert_pretrain.finetune.rows import Example, LabelledInput, UnusableRow, read_rows
from bert_pretrain.finetune.settings import Settings, flag_of
from bert_pretrain.finetune.task import Task, Window, encode_texts
from bert_pretrain.text.readers import ClassName
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.texts import is_empty

_USE_REGRESSION = "pass --regression to predict numbers, or write classes as words or integers"


class Classify(Task):
    """The classification and regression task, with one label per row."""

    model_class = "AutoModelForSequenceClassification"
    pipeline_tag = "text-classification"
    main_metric = "accuracy"
    overflow_action = "truncated"

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        super().__init__(settings, tokenizer)
        if settings.regression:
            self.main_metric = "spearman"
        self.label_column = settings.label_field
        self.dash_is_class = True  # False: `-` means that annotators disagree (SNLI, OCNLI)

    def rows(self, source: LabelledInput) -> list[Example]:
        rows = read_rows(source, self.settings.text_field)
        if source.flag == "--train":
            values = [row.values.get(self.label_column) for row in rows]
            others = {str(value).strip() for value in values if value is not None} - {"", "-"}
            self.dash_is_class = "+" in others or len(others) < 2
        return rows

    def inputs_of(self, row: Example) -> dict[str, Any]:
        """Return the one or two texts of a row. The second text may be empty."""
        inputs = {}
        for name, setting in (("text", "text_field"), ("pair", "pair_field")):
            column = getattr(self.settings, setting)
            if column is None:
                continue
            value = row.get(column, flag_of(setting))
            if value is not None and not isinstance(value, str):
                what = f"'{column}' is not text but {type(value).__name__}"
                raise UnusableRow(what, where=row.where, remedy="fix the value, or remove the row")
            inputs[name] = value if value and value.strip() else ""
        if is_empty(inputs["text"], strips_accents=self.tokenizer.strips_accents):
            reason = "has only characters that the tokenizer removes" if inputs["text"] else "is empty"
            what = f"'{self.settings.text_field}' {reason}"
            raise UnusableRow(what, where=row.where, remedy="add the text, or remove the row")
        return inputs

    def label_of(self, row: Example, source: LabelledInput) -> Any:
        label = row.get(self.label_column, "--label-field")
        if label is None or label != label or not str(label).strip():  # NaN differs from itself
            return None
        if self.settings.regression:
            if (value := _number_of(label)) is None:
                remedy = "fix the label, or remove --regression"
                raise InputError(f"the label {label!r} is not a number", where=row.where, remedy=remedy)
            return value
        if isinstance(label, list):
            return sorted({self._class_of(each, row, source) for each in label})
        name = self._class_of(label, row, source)
        if name == "-" and not self.dash_is_class:
            what, remedy = "the label is '-' (annotators disagree)", "label the row, or remove it"
            raise UnusableRow(what, where=row.where, remedy=remedy)
        return name

    def _class_of(self, label: Any, row: Example, source: LabelledInput) -> str:
        if isinstance(label, ClassName):
            return label
        if isinstance(label, float) and label.is_integer():
            label = int(label)
        if not isinstance(label, str | int):  # bool is a subclass of int: the classes "True" and "False"
            what = f"the label {label!r} is neither a word nor an integer but {type(label).__name__}"
            raise InputError(what, where=row.where, remedy=_USE_REGRESSION)
        return source.normalized(str(label), row.where)

    def set_labels(self, train: list[Example], others: list[Example]) -> None:
        counts = Counter(example.label for example in train)
        if len(counts) == 1:
            what, where = f"every row has the label {train[0].label!r}", f"{train[0].where} and all other rows"
            raise InputError(what, where=where, remedy="training rows need at least two different labels")
        if self.settings.regression:
            values = np.array([example.label for example in train])
            self.label_mean, self.label_deviation = float(values.mean()), float(values.std()) or 1.0
            return
        non_integers = [name for name in counts if not name.lstrip("+-").isdigit()]
        if non_integers and all(_number_of(name) is not None for name in counts):
            where = next(example.where for example in train if example.label == non_integers[0])
            what = f"the labels are not integers, for example {non_integers[0]}"
            raise InputError(what, where=where, remedy=_USE_REGRESSION)
        for example in others:
            if isinstance(example.label, list):
                remedy = "use lists in the training rows too, or nowhere"
                raise InputError(f"the label {example.label!r} is a list", where=example.where, remedy=remedy)
        self.set_classes(counts, others)

    def set_classes(self, counts: Mapping[str, int], others: list[Example]) -> None:
        """Set the classes from their counts in the training rows, check the labels of `others`, print the counts."""
        self.labels = sorted(counts, key=class_order)
        for example in others:
            names = example.label if isinstance(example.label, list) else [example.label]
            if example.label is not None and (unknown := [name for name in names if name not in self.labels]):
                what = f"the label {unknown[0]!r} does not occur in the training rows"
                remedy = f"fix it (known labels: {', '.join(self.labels[:10])}), or add training rows with it"
                raise InputError(what, where=example.where, remedy=remedy)
        print(f"classes: {', '.join(f'{name} {counts[name]:,}' for name in self.labels[:20])}")

    def classes_of(self, example: Example) -> list[str]:
        return [] if self.settings.regression else [example.label]

    def target(self, label: Any) -> Any:
        """Convert a label to the target of the loss."""
        if self.settings.regression:
            return (label - self.label_mean) / self.label_deviation
        return self.labels.index(label)

    def model_config(self) -> dict[str, Any]:
        if self.settings.regression:
            return {"num_labels": 1, "problem_type": "regression"}
        return {**super().model_config(), "problem_type": "single_label_classification"}

    def encode(self, examples: list[Example], split: str) -> list[Window]:
        has_labels = all(example.label is not None for example in examples)
        # As in BERT's code, a pair with an empty second text is encoded as a single text.
        texts = [tuple(each.inputs.values()) if each.inputs.get("pair") else each.inputs["text"] for each in examples]
        windows, truncation = [], {"max_length": self.settings.max_length, "strategy": "longest_first"}
        encodings = encode_texts(self.tokenizer, texts, truncation)
        for number, (example, encoding) in enumerate(zip(examples, encodings, strict=True)):
            labels = {"labels": self.target(example.label)} if has_labels else {}
            example.exceeds_window = bool(encoding.overflowing)
            windows.append(Window(number, encoding.ids, encoding.type_ids, labels))
        return windows

    def decode(self, examples: list[Example], windows: list[Window], logits: Any) -> list[Any]:
        """Return the probabilities (classes,) of each example, or its predicted value in a regression."""
        rows = np.asarray(logits, dtype=np.float64)[np.argsort([window.example for window in windows])]
        if self.settings.regression:
            return list(rows[:, 0])
        powers = np.exp(rows - rows.max(axis=1, keepdims=True))
        return list(powers / powers.sum(axis=1, keepdims=True))  # softmax

    def score(self, examples: list[Example], predictions: list[Any]) -> dict[str, float]:
        from sklearn import metrics

        truth = [example.label for example in examples]
        if self.settings.regression:
            return _regression_scores(np.array(truth), np.array(predictions))
        predicted = [self.labels[int(np.argmax(prediction))] for prediction in predictions]
        with warnings.catch_warnings(action="ignore"):  # scikit-learn warns if all rows have one class
            return {
                "accuracy": float(metrics.accuracy_score(truth, predicted)),
                "macro_f1": float(metrics.f1_score(truth, predicted, average="macro", zero_division=0)),
                "mcc": float(metrics.matthews_corrcoef(truth, predicted)),
            }

    def constant_baseline(self, examples: list[Example]) -> tuple[str, float]:
        if self.settings.regression:
            return "one number for all rows", 0.0
        name, count = Counter(example.label for example in examples).most_common(1)[0]
        return f"always '{name}'", count / len(examples)

    def word_baseline(self, train: list[Example], examples: list[Example]) -> list[Any] | None:
        train_texts, texts = ([list(example.inputs.values()) for example in rows] for rows in (train, examples))
        return list(fit_and_predict_tfidf(train_texts, [example.label for example in train], texts, self.labels))

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
        scores = {name: round(float(score), 6) for name, score in zip(self.labels, prediction, strict=True)}
        return {**row, "probabilities": scores}


def _regression_scores(truth: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Return the mean squared error and both correlations, which are 0 if labels or predictions are constant."""
    from scipy import stats

    is_defined = np.ptp(truth) > 0 and np.ptp(predicted) > 0
    return {
        "spearman": float(stats.spearmanr(truth, predicted).statistic) if is_defined else 0.0,
        "pearson": float(stats.pearsonr(truth, predicted).statistic) if is_defined else 0.0,
        "mse": float(np.mean((truth - predicted) ** 2)),
    }


def _number_of(label: Any) -> float | None:
    if isinstance(label, str) and "_" in label:  # `float` reads "1_1" as 11
        return None
    try:
        value = float(label)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def class_order(name: str) -> tuple[int, float, str]:
    """Return a sort key: `ClassName`s by number, then numeric labels by value, then words alphabetically."""
    if isinstance(name, ClassName):
        return (0, float(name.number), name)
    value = _number_of(name)
    return (2, 0.0, name) if value is None else (1, value, name)
