"""What `run auto` says at its end: forecast, outcome, and the likely cause where they differ."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bert_pretrain.plan.outcome import FORECAST, compare, write_forecast
from tests.plan.test_planner import ENGLISH, plan

MADE = plan()
TOKENS = MADE.training.tokens


def outcome(
    folder: Path,
    *,
    loss: float,
    accuracy: float | None,
    tokens: float = MADE.training.tokens,
    pairs: str = "nsp",
    **more: Any,
) -> str | None:
    """Compare the forecast of a plan with a run that ended with these held-out figures after so many million tokens."""
    write_forecast(MADE if pairs == "nsp" else plan(replace(ENGLISH, documents=2.0)), folder)
    last = {"step": 9, "validation_mlm_loss": loss, "validation_nsp_accuracy": accuracy}
    (folder / "metrics.jsonl").write_text(json.dumps(last) + "\n")
    statistics = {"next_sentence": pairs, "unigram_entropy": {"train": 6.5}}
    record = {"data": {"statistics": statistics}, "progress": {"tokens": round(1e6 * tokens)}}
    (folder / "manifest.json").write_text(json.dumps(record))
    return compare(folder, folder, **more)


LOW, HIGH = MADE.training.forecast.mlm_loss
EXPECTED = sum(MADE.training.forecast.nsp_accuracy) / 2


def test_an_outcome_inside_of_the_forecast_is_said(tmp_path: Path) -> None:
    line = outcome(tmp_path, loss=(LOW + HIGH) / 2, accuracy=EXPECTED)
    assert line is not None
    assert f"inside {LOW:.2f} to {HIGH:.2f};" in line
    assert line.count("inside") == 2
    assert "cause" not in line
    assert "\n" not in line
    edge = outcome(tmp_path, loss=round(HIGH, 2) + 0.004, accuracy=EXPECTED)  # printed as the end of the range
    assert edge is not None
    assert "outside" not in edge


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        ({"loss": 6.6, "accuracy": EXPECTED}, "nothing learnt (the held-out loss"),
        ({"loss": HIGH + 0.1, "accuracy": EXPECTED, "changed": ["train.peak_lr"]}, "train.peak_lr not as planned"),
        ({"loss": HIGH + 0.1, "accuracy": EXPECTED, "changed": ["data.encoding"]}, "text unlike the corpora"),
        ({"loss": HIGH + 0.1, "accuracy": EXPECTED, "changed": ["train.seed"]}, "text unlike the corpora"),
        ({"loss": HIGH + 0.1, "accuracy": EXPECTED, "tokens": MADE.training.tokens / 2}, "instead of"),
        ({"loss": (LOW + HIGH) / 2, "accuracy": 0.95}, "text unlike the corpora"),
        ({"loss": LOW - 0.3, "accuracy": EXPECTED, "tokens": 2 * MADE.training.tokens}, "instead of"),
    ],
)
def test_an_outcome_outside_gets_its_likely_cause(figures: dict[str, Any], cause: str, tmp_path: Path) -> None:
    line = outcome(tmp_path, **figures)
    assert line is not None
    assert "outside" in line
    assert cause in line.partition("likely cause: ")[2]


def test_without_a_readable_forecast_or_held_out_figures_nothing_is_said(tmp_path: Path) -> None:
    assert outcome(tmp_path, loss=float(LOW), accuracy=None) is not None
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "mlm_loss": 5.0}\n')
    assert compare(tmp_path, tmp_path) is None
    (tmp_path / FORECAST).write_text("{")
    assert compare(tmp_path, tmp_path) is None
    (tmp_path / FORECAST).unlink()
    assert compare(tmp_path, tmp_path) is None
