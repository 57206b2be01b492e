"""`classify` with lists of labels: a text may have any number of classes, each predicted by a sigmoid."""

import itertools
import warnings
from collections import Counter
from typing import Any

import numpy as np

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.classify import Classify
from bert_pretrain.finetune.rows import Example

THRESHOLD = 0.5


class MultiLabel(Classify):
    """The multi-label variant of `Classify`."""

    main_metric = "micro_f1"

    def set_labels(self, train: list[Example], others: list[Example]) -> None:
        for example in train + others:
            if example.label is not None and not isinstance(example.label, list):
                what = f"the label {example.label!r} is not a list, but other rows have lists"
                raise InputError(what, where=example.where, remedy='write ["name", ...] in every row, [] for no label')
        counts = Counter(name for example in train for name in example.label)
        if len(counts) < 2:
            remedy = "provide training rows with at least two labels"
            raise InputError(f"the lists have {len(counts)} different label(s)", where=train[0].where, remedy=remedy)
        self.set_classes(counts, others)

    def model_config(self) -> dict[str, Any]:
        return {**super().model_config(), "problem_type": "multi_label_classification"}

    def target(self, label: Any) -> tuple[float, ...]:
        return tuple(float(name in label) for name in self.labels)

    def classes_of(self, example: Example) -> list[str]:
        return list(example.label)

    def decode(self, examples: list[Example], windows: list[Any], logits: Any) -> list[Any]:
        """Return an array (classes,) for each example: the probability of each class by itself. The sum is not 1."""
        order = np.argsort([window.example for window in windows])  # each example has one window
        rows = np.asarray(logits, dtype=np.float64)[order]
        return list(0.5 + 0.5 * np.tanh(rows / 2))  # the sigmoid

    def score(self, examples: list[Example], predictions: list[Any]) -> dict[str, float]:
        from sklearn import metrics

        truth = np.array([self.target(example.label) for example in examples])
        predicted = np.array(predictions) > THRESHOLD
        with warnings.catch_warnings(action="ignore"):  # about classes without rows
            return {
                f"{average}_f1": float(metrics.f1_score(truth, predicted, average=average, zero_division=0))
                for average in ("micro", "macro")
            }

    def constant_baseline(self, examples: list[Example]) -> tuple[str, float]:
        counts = Counter(name for example in examples for name in example.label).most_common()
        num_labels = sum(count for _, count in counts)
        # Micro F1 of predicting the n most frequent classes for every example, for each n.
        correct = itertools.accumulate(count for _, count in counts)
        scores = [2 * right / (num_labels + len(examples) * n) for n, right in enumerate(correct, start=1)]
        best = max(range(len(scores)), key=scores.__getitem__, default=-1)
        names = [name for name, _ in counts[: best + 1]]
        return f"always {names}", scores[best] if scores else 0.0

    def columns(self, prediction: Any) -> dict[str, Any]:
        scores = dict(zip(self.labels, map(float, prediction), strict=True))
        labels = [name for name, score in scores.items() if score > THRESHOLD]
        return {"label": labels, "scores": {name: round(score, 6) for name, score in scores.items()}}
