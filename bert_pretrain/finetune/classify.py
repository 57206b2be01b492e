"""`classify`: predicts a class, or with `--regression` a number, for a text or a pair of texts.

With lists of labels, a text may have any number of classes (`MultiLabel`), each predicted by a sigmoid.
"""

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tokenizers import Encoding

from bert_pretrain.errors import InputError
from bert_pretrain.examples.examples import IGNORE_INDEX
from bert_pretrain.finetune.baselines import fit_and_predict_tfidf
from bert_pretrain.finetune.rows import Example, LabelledInput, read_rows
from bert_pretrain.finetune.settings import Settings, flag_of
from bert_pretrain.finetune.task import Task, Window
from bert_pretrain.text.readers import ClassName
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.texts import is_empty

THRESHOLD = 0.5  # of the probability of a class, if a text may have several
_INTEGER = re.compile(r"[+-]?\d+")
_FRACTION = re.compile(r"[+-]?\d*\.\d+")


class Classify(Task):
    """The classification and regression task, with one label per row."""

    model_class = "AutoModelForSequenceClassification"
    pipeline_tag = "text-classification"
    main_metric = "accuracy"
    overflow_action = "truncated"
    problem_type = "single_label_classification"
    has_lists = False  # as labels

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        super().__init__(settings, tokenizer)
        if settings.regression:
            self.main_metric = "spearman"
        self.label_column = settings.label_field
        self.dash_is_class = True  # False: `-` means that annotators disagree (SNLI, OCNLI)

    def rows(self, source: LabelledInput) -> list[Example]:
        rows = read_rows(source, self.settings.text_field)
        if source.flag == "--train":
            labels = {str(row.values.get(self.label_column)).strip() for row in rows}
            self.dash_is_class = "+" in labels or len(labels - {"", "-", "None"}) < 2
        return rows

    def inputs_of(self, row: Example) -> dict[str, Any]:
        """Return the one or two texts of a row. The second text may be empty."""
        inputs = {}
        for name, setting in (("text", "text_field"), ("pair", "pair_field")):
            if column := getattr(self.settings, setting):
                value = row.get(column, flag_of(setting)) or ""
                if not isinstance(value, str):
                    raise row.unusable(f"'{column}' is not text but {type(value).__name__}")
                inputs[name] = value if value.strip() else ""
        if is_empty(inputs["text"], self.tokenizer):
            raise row.unusable(f"'{self.settings.text_field}' is empty", "add the text, or remove the row")
        return inputs

    def label_of(self, row: Example, source: LabelledInput) -> Any:
        label = row.get(self.label_column, "--label-field")
        if label is None or label != label or not str(label).strip():  # NaN differs from itself
            return None
        if self.settings.regression:
            if (value := _number_of(label)) is None:
                raise row.unusable(f"the label {label!r:.40} is not a number", "fix it, or remove --regression")
            return value
        if isinstance(label, list):
            return sorted({self._class_of(each, row, source) for each in label})
        name = self._class_of(label, row, source)
        if name == "-" and not self.dash_is_class:
            raise row.unusable("the label is '-' (annotators disagree)")
        return name

    def _class_of(
        self,
        label: Any,
        row: Example,
        source: LabelledInput,
    ) -> str:
        if isinstance(label, ClassName):
            return label
        if isinstance(label, float) and label.is_integer():
            label = int(label)
        name = source.normalized(str(label), row.where)
        # `bool` is a subclass of `int`: the classes "True" and "False".
        if not isinstance(label, str | int) or _FRACTION.fullmatch(name):
            remedy = "pass --regression to predict numbers, or write classes as words or integers"
            raise row.unusable(f"the label {label!r:.40} is neither a word nor an integer", remedy)
        return name

    def classes_of(self, label: Any) -> list[str]:
        return [] if self.settings.regression else [label]

    def outputs_of(self, classes: Sequence[str]) -> list[str]:
        return sorted(classes, key=class_order)

    def set_labels(self, train: list[Example], others: list[Example]) -> None:
        if self.settings.regression:
            values = np.array([example.label for example in train])
            self.label_mean, self.label_deviation = float(values.mean()), float(values.std())
            if not self.label_deviation:
                raise self.nothing_to_learn(train)
            return
        for example in train + others:
            if example.label is not None and isinstance(example.label, list) != self.has_lists:
                raise InputError(
                    f"the label {example.label!r} is {'not ' * self.has_lists}a list, unlike those of other rows",
                    where=example.where,
                    remedy='write ["name", ...] in every row, [] for no label',
                )
        super().set_labels(train, others)

    def target_of(self, label: Any) -> Any:
        """Convert a label to the target of the loss."""
        if self.settings.regression:
            return (label - self.label_mean) / self.label_deviation
        return self.labels.index(label) if label in self.labels else IGNORE_INDEX

    def targets_of(
        self,
        label: Any,
        positions: Sequence[Any],
        num_tokens: int,
    ) -> dict[str, Any]:
        return {"labels": self.target_of(label)}

    def model_config(self) -> dict[str, Any]:
        if self.settings.regression:
            return {"num_labels": 1, "problem_type": "regression"}
        return {**super().model_config(), "problem_type": self.problem_type}

    def encodings(self, examples: list[Example]) -> Iterator[Encoding]:
        # As in BERT's code, a pair with an empty second text is encoded as a single text.
        texts = [tuple(each.inputs.values()) if each.inputs.get("pair") else each.inputs["text"] for each in examples]
        return self.encode_texts(texts, max_length=self.settings.max_length, strategy="longest_first")

    def decode(
        self,
        examples: list[Example],
        windows: list[Window],
        logits: Any,
    ) -> list[Any]:
        """Return the probabilities (classes,) of each example, or its predicted value in a regression."""
        order = np.argsort([window.example for window in windows])  # each example has one window
        rows = np.asarray(logits, dtype=np.float64)[order]
        return list(rows[:, 0] if self.settings.regression else self.probabilities_of(rows))

    def probabilities_of(self, logits: np.ndarray) -> np.ndarray:
        """Return the softmax of logits (rows, classes)."""
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def score(self, examples: list[Example], predictions: list[Any]) -> dict[str, float]:
        from scipy import stats
        from sklearn import metrics

        truth = [example.label for example in examples]
        with warnings.catch_warnings(action="ignore"):  # about equal labels or predictions
            if self.settings.regression:
                return {
                    "spearman": float(np.nan_to_num(stats.spearmanr(truth, predictions).statistic)),
                    "pearson": float(np.nan_to_num(stats.pearsonr(truth, predictions).statistic)),
                    "mse": float(metrics.mean_squared_error(truth, predictions)),
                }
            predicted = [self.columns(prediction)["label"] for prediction in predictions]
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
        labels = [example.label if self.settings.regression else self.classes_of(example.label) for example in train]
        return list(fit_and_predict_tfidf(train_texts, labels, texts, self.labels))

    def columns(self, prediction: Any) -> dict[str, Any]:
        if self.settings.regression:
            return {"label": float(prediction)}
        best = int(np.argmax(prediction))
        return {"label": self.labels[best], "score": round(float(prediction[best]), 6)}

    def record(self, example: Example, prediction: Any) -> dict[str, Any]:
        label = {} if example.label is None else {"label": example.label}
        row = {"row": example.row, **example.inputs, **label, "prediction": self.columns(prediction)["label"]}
        return row if self.settings.regression else {**row, "probabilities": self.scores_of(prediction)}

    def scores_of(self, prediction: Any) -> dict[str, float]:
        """Return the rounded probability of each class."""
        return {name: round(float(score), 6) for name, score in zip(self.labels, prediction, strict=True)}


class MultiLabel(Classify):
    """The classification task with a list of labels per row."""

    main_metric = "micro_f1"
    problem_type = "multi_label_classification"
    has_lists = True

    def classes_of(self, label: Any) -> list[str]:
        return list(label)

    def target_of(self, label: Any) -> tuple[float, ...]:
        return tuple(float(name in label) for name in self.labels)

    def probabilities_of(self, logits: np.ndarray) -> np.ndarray:
        """Return the sigmoids of logits (rows, classes): the probability of each class by itself."""
        return 0.5 + 0.5 * np.tanh(logits / 2)

    def score(self, examples: list[Example], predictions: list[Any]) -> dict[str, float]:
        from sklearn import metrics

        truth = np.array([self.target_of(example.label) for example in examples])
        predicted = np.array(predictions) > THRESHOLD
        with warnings.catch_warnings(action="ignore"):  # about classes without rows
            return {
                f"{average}_f1": float(metrics.f1_score(truth, predicted, average=average, zero_division=0))
                for average in ("micro", "macro")
            }

    def constant_baseline(self, examples: list[Example]) -> tuple[str, float]:
        counts = Counter(name for example in examples for name in example.label)
        names = [name for name, count in counts.items() if count > len(examples) / 3] or list(counts)[:1]
        prediction = [float(name in names) for name in self.labels]
        return f"always {names}", self.score(examples, [prediction] * len(examples))["micro_f1"]

    def columns(self, prediction: Any) -> dict[str, Any]:
        scores = self.scores_of(prediction)
        return {"label": [name for name, score in scores.items() if score > THRESHOLD], "scores": scores}


def _number_of(label: Any) -> float | None:
    if isinstance(label, str) and "_" in label:  # `float` reads "1_1" as 11
        return None
    try:
        value = float(label)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def class_order(name: str) -> tuple[int, int, str]:
    """Return a sort key: `ClassName`s by number, then integers by value, then words alphabetically."""
    if isinstance(name, ClassName):
        return (0, name.number, name)
    return (1, int(name), name) if _INTEGER.fullmatch(name) else (2, 0, name)
