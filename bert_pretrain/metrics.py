"""Read the metrics of runs, `metrics.jsonl`, and values of their manifests."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, StrictInt, ValidationError

from bert_pretrain.errors import DataError, first_problem
from bert_pretrain.io import manifest
from bert_pretrain.io.files import damage_of_files, did_you_mean

METRICS = "metrics.jsonl"
Metrics = list[dict[str, Any]]  # the lines of a run's metrics.jsonl


class _Line(BaseModel, extra="allow", allow_inf_nan=False):
    """A line of metrics: its step, where and when it was written, and numbers."""

    __pydantic_extra__: dict[str, int | float | None]
    step: StrictInt
    time: Any = None
    host: Any = None
    job: Any = None


def read_metrics(run: Path) -> Metrics:
    """Read the lines of a run's `metrics.jsonl`, without the fields `time`, `host` and `job`.

    Raises DataError if the file is missing, empty or damaged.
    """
    path = run / METRICS
    remedy = "name a folder written by 'bert-pretrain train'"
    if not path.is_file():
        raise DataError(
            f"{run} has no {METRICS}",
            where="RUN",
            remedy=did_you_mean(run, ("train", "train/*"), path.name) or remedy,
        )
    recorded = value_of(manifest.read_record(run), "metrics") if (run / manifest.MANIFEST).is_file() else None
    if recorded is not None and (damage := damage_of_files(run, {METRICS: recorded})):
        raise DataError(
            f"the metrics were changed after the end of the run: {damage}",
            where=str(path),
            remedy="restore the file, or copy it alone into another folder to read it as it is",
        )
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # incomplete: the run is writing it, or was killed
    if not lines:
        raise DataError("there are no metrics yet", where=str(path), remedy="wait for the first line")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_Line.model_validate_json(line).model_dump(exclude={"time", "host", "job"}))
        except ValidationError as error:
            raise DataError(
                f"not a line of metrics: {first_problem(error)}",
                where=f"{path}:{number}",
                remedy=remedy,
            ) from error
    return records


def value_of(record: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path such as `length.steps`, or None."""
    value: Any = record
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def number_of(record: Mapping[str, Any], path: str) -> float | None:
    """Return the number at a dotted path; None if it is missing or outside the range of numbers that runs write."""
    value = value_of(record, path)
    return value if type(value) in (int, float) and (value == 0 or 1e-9 <= value <= 1e15) else None


def frequency_loss(record: Mapping[str, Any]) -> float | None:
    """Return the loss in nats of a model that knows only the token frequencies, on held-out or else training data."""
    losses = [number_of(record, f"data.statistics.unigram_entropy.{split}") for split in ("validation", "train")]
    return next((loss for loss in losses if loss is not None), None)


def perplexity(loss: float) -> float:
    """Return exp(loss) for a loss in nats, limited so that it is finite."""
    return math.exp(min(loss, 700.0))
