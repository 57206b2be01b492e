"""Measured runs of this package, and which of them is nearest to a user's run, to draw both into one picture.

`measured_runs.jsonl` holds them, a row each as `scripts/bench_learning.py` writes them; the law of `plan/law.py` is
fitted to the same rows.
"""

import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

METRICS = ("validation_mlm_loss", "validation_mlm_accuracy", "validation_nsp_accuracy")
"""Of a row's curve, besides `tokens`."""
FAR = math.log(8)
"""A network with so many times more or fewer weights has no curve to compare with."""


def measured_runs() -> list[dict[str, Any]]:
    """Return all rows."""
    text = resources.files("bert_pretrain.report").joinpath("measured_runs.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def nearest_run(record: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the measured run of the nearest size in the same language, the longest of several; None if none is near.

    Args:
        record: of the run's manifest; one of an older version, or none, has no nearest.
        metrics: the lines of its `metrics.jsonl`.
    """
    model = record.get("config", {}).get("model", {})
    language = record.get("data", {}).get("statistics", {}).get("language")
    if not {"num_hidden_layers", "hidden_size"} <= model.keys() or language is None:
        return None
    weights = _weights(model["num_hidden_layers"], model["hidden_size"])
    rows = [row for row in measured_runs() if "curve" in row and (row["language"] == "zh") == (language == "zh")]
    distance, _, _, nearest = min(
        ((abs(math.log(weights / _weights(*_size(row)))), -row["tokens"], row["seed"], row) for row in rows),
        key=lambda found: found[:3],
    )
    return nearest if distance < FAR and _tokens_per_step(metrics) is not None else None


def points(run: Mapping[str, Any], metric: str, metrics: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return a measured run's figures at those steps of the user's run that have seen as many tokens."""
    per_step = _tokens_per_step(metrics)
    if metric not in METRICS or per_step is None:
        return []
    last = max(line["step"] for line in metrics)
    steps = [tokens / per_step for tokens in run["curve"]["tokens"]]
    values = run["curve"][metric]
    return [(step, value) for step, value in zip(steps, values, strict=True) if value is not None and step <= last]


def describe(run: Mapping[str, Any]) -> str:
    """Return what the run was, in a few words."""
    layers, hidden = _size(run)
    language = "Chinese" if run["language"] == "zh" else "English"
    return f"measured: L{layers}-H{hidden}, {language}, {run['tokens'] / 1e6:.0f}M tokens"


def _tokens_per_step(metrics: Sequence[Mapping[str, Any]]) -> float | None:
    for line in reversed(metrics):
        if line.get("tokens") and line["step"]:
            return float(line["tokens"]) / float(line["step"])
    return None


def _size(run: Mapping[str, Any]) -> tuple[int, int]:
    layers, hidden = map(int, run["size"].split("x"))
    return layers, hidden


def _weights(layers: int, hidden: int) -> int:
    return 12 * layers * hidden**2
