"""Hints: each planted problem is reported once, within a tenth of the run; healthy runs have none.

`healthy_runs.json` and `sick_runs.json` hold metrics of real runs (`record_runs.py` of commit 1858912).
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.report.diagnosis import PRESETS, Diagnosis, diagnose, nothing_learned, too_large

HEALTHY: dict[str, Any] = json.loads(Path(__file__).with_name("healthy_runs.json").read_text())
SICK: dict[str, Any] = json.loads(Path(__file__).with_name("sick_runs.json").read_text())
NAMES = ("step", "elapsed_seconds", "mlm_loss", "nsp_accuracy", "grad_norm", "validation_mlm_loss")
ENTROPY, STEPS = 7.0, 100_000
STATISTICS = {"next_sentence": "nsp", "unigram_entropy": {"train": ENTROPY, "validation": ENTROPY}}
RECORD: dict[str, Any] = {
    "length": {"steps": STEPS, "seconds": None},
    "config": {"train": {"warmup_ratio": 0.01, "max_grad_norm": 1.0}},
    "data": {"statistics": STATISTICS},
}
Curve = Callable[[float], float]


def lines_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of a recorded run as in `metrics.jsonl`."""
    lines = []
    for values in run["lines"]:
        line = dict(zip(NAMES, values, strict=True))
        names = NAMES[:5] if line["validation_mlm_loss"] is None else ("step", "validation_mlm_loss")
        lines.append({name: line[name] for name in names})
    return lines


def healthy_loss(share: float) -> float:
    """Fall from 10.3 nats to a plateau at 7, then to 2."""
    fallen = 10.3 - 3.3 * min(1.0, share / 0.02)
    return fallen if share < 0.06 else 2 + 5 * math.exp(-8 * (share - 0.06))


def run(num_lines: int = 200, **metrics: Curve) -> list[dict[str, Any]]:
    """Return the lines of a healthy run of 100,000 steps, with metrics replaced by functions of the share."""
    noise = np.random.default_rng(0).normal(size=num_lines)
    normal: dict[str, Curve] = {
        "mlm_loss": healthy_loss,
        "nsp_accuracy": lambda share: 0.5 + 0.48 * min(1.0, share / 0.2) ** 2,
        "grad_norm": lambda share: 0.8 + math.exp(-30 * share),
    }
    lines: list[dict[str, Any]] = [{"step": 0, "validation_mlm_loss": healthy_loss(0)}]
    for number in range(1, num_lines + 1):
        share = number / num_lines
        values = {name: curve(share) for name, curve in {**normal, **metrics}.items()}
        values["mlm_loss"] += 0.02 * noise[number - 1]
        lines.append({"step": round(share * STEPS), "elapsed_seconds": 36_000 * share, **values})
        if number % (num_lines // 20) == 0:
            held_out = metrics.get("mlm_loss", healthy_loss)(share)
            lines.append({"step": round(share * STEPS), "validation_mlm_loss": held_out})
    return lines


def reported(lines: list[dict[str, Any]], record: dict[str, Any] = RECORD) -> dict[str, float]:
    """Return each cause and the share of the run at which it was reported."""
    diagnosis, causes = Diagnosis(record), {}
    for line in lines:
        for hint in diagnosis.add(line):
            assert hint.cause not in causes
            causes[hint.cause] = line["step"] / lines[-1]["step"]
    return causes


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_run_has_no_hint(name: str) -> None:
    lines = lines_of(HEALTHY[name])
    assert sum("mlm_loss" in line for line in lines) >= 15
    assert diagnose(HEALTHY[name], lines) == []


@pytest.mark.parametrize("name", SICK)
def test_recorded_sick_run_has_its_hint(name: str) -> None:
    assert [hint.cause for hint in diagnose(SICK[name], lines_of(SICK[name]))] == [SICK[name]["cause"]]


@pytest.mark.parametrize("num_lines", [20, 200, 10_000])
def test_healthy_curve_has_no_hint_for_any_number_of_lines(num_lines: int) -> None:
    assert reported(run(num_lines)) == {}
    assert reported(run(num_lines, mlm_loss=lambda share: 10.3 - 2 * share * (2 - share))) == {}  # slow progress


def rises(share: float) -> float:
    return healthy_loss(share) + (0 if share < 0.4 else min(4.0, 40 * (share - 0.4)))


def stays(share: float) -> float:
    return max(7.0, healthy_loss(share))


# Cause, metrics that show it, and share of the run at which they start.
PLANTED: list[tuple[str, dict[str, Curve], float]] = [
    ("plateau", {"mlm_loss": stays}, 0.21),
    ("learning rate too high", {"mlm_loss": rises}, 0.4),
    ("learning rate too high", {"mlm_loss": lambda share: 7.8 if share > 0.02 else 10.3}, 0.21),
    ("learning rate too high", {"mlm_loss": lambda share: 12.0 if share < 0.4 else healthy_loss(share)}, 0.01),
    ("learning rate too high", {"grad_norm": lambda share: 0.8 if share < 0.3 else 80.0}, 0.3),
    ("next sentence not learned", {"nsp_accuracy": lambda _: 0.501}, 0.27),
]


@pytest.mark.parametrize(("cause", "metrics", "start"), PLANTED)
@pytest.mark.parametrize("num_lines", [40, 2000])
def test_planted_cause_is_reported_once_within_a_tenth_of_the_run(cause, metrics, start, num_lines) -> None:
    causes = reported(run(num_lines, **metrics))
    assert list(causes) == [cause]
    assert start <= causes[cause] <= start + max(0.1, 12 / num_lines) + 0.01


def test_run_length_comes_from_the_record() -> None:
    short = [{**line, "step": line["step"] * 298 // STEPS} for line in run(nsp_accuracy=lambda _: 0.501)]
    assert reported(short, {**RECORD, "length": {"steps": 298, "seconds": None}}) == {}
    timed = {**RECORD, "length": {"steps": None, "seconds": 36_000.0}}
    assert reported(run(), timed) == {}
    assert list(reported(run(mlm_loss=rises), timed)) == ["learning rate too high"]


@pytest.mark.parametrize("name", ["grad_norm", "mlm_loss", "nsp_accuracy"])
def test_missing_and_non_finite_metrics_are_ignored(name: str) -> None:
    lines = run(**{name: lambda _: math.nan})
    for line in lines[5:8]:
        line.update({name: None for name in line if name != "step"})
    assert reported(lines) == {}


def test_loss_that_becomes_non_finite_has_one_hint() -> None:
    lines = [*run(), {"step": STEPS, "validation_mlm_loss": None}]
    for record in (RECORD, {**RECORD, "progress": {"step": STEPS}}):
        assert [hint.cause for hint in diagnose(record, lines)] == ["learning rate too high"]


FREQUENCIES = "only token frequencies learned"


@pytest.mark.parametrize(
    ("first", "loss", "cause"),
    [(10.3, 10.3, "nothing learned"), (10.3, 6.95, FREQUENCIES), (10.3, 6.85, None), (7.2, 6.51, None)],
)
def test_finished_model_no_better_than_token_frequencies_has_a_hint(first, loss, cause) -> None:
    lines = [{"step": 0, "validation_mlm_loss": first}, {"step": 9, "mlm_loss": 2.0}]
    lines += [{"step": 9, "validation_mlm_loss": loss}]
    hint = nothing_learned(RECORD, lines)
    assert (hint.cause if hint else None) == cause
    assert (hint in diagnose({**RECORD, "progress": {"step": 9}}, lines)) == bool(cause)
    assert hint not in diagnose(RECORD, lines)


def test_sizes_of_advised_presets() -> None:
    for name, size in PRESETS.items():
        model = load_config(name).model
        assert (model.num_hidden_layers, model.hidden_size) == size
        assert model.intermediate_size == 4 * model.hidden_size


@pytest.mark.parametrize(
    ("size", "tokens", "advised"),
    [
        ((24, 1024), 3e6, "medium"),
        ((24, 1024), 1000, "tiny"),  # no preset is small enough
        ((4, 512), 22.3e6, None),  # planned on an H200
        ((2, 128), 0.5e6, None),  # `make demo`
        ((2, 128), 1000, ""),
        ((1, 64), 1000, ""),
    ],
)
def test_too_large_model_gets_advice(size: tuple[int, int], tokens: float, advised: str | None) -> None:
    hint = too_large(12 * size[0] * size[1] ** 2, tokens)
    assert (hint is None) == (advised is None)
    if hint is not None:
        assert "more text" in hint.remedy
        assert hint.remedy.rpartition("--config ")[2 if advised else 1] == advised
