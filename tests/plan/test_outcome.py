"""What `run auto` says at its end: forecast, outcome, and the likely cause where they differ."""

import json
from pathlib import Path
from typing import Any

import pytest

from bert_pretrain.plan.outcome import FORECAST, compare, write_forecast
from tests.plan.test_planner import plan

MADE = plan()
TOKENS = MADE.training.tokens


LOW, HIGH = MADE.training.forecast.mlm_loss
EXPECTED = sum(MADE.training.forecast.nsp_accuracy) / 2


def outcome(folder: Path, loss: float, accuracy: float | None = EXPECTED, tokens: float = TOKENS, **more: Any) -> str:
    """Compare the forecast with a run that ended with these held-out figures after so many million tokens."""
    write_forecast(MADE, folder)
    last = {"step": 9, "validation_mlm_loss": loss, "validation_nsp_accuracy": accuracy}
    (folder / "metrics.jsonl").write_text(json.dumps(last) + "\n")
    statistics = {"next_sentence": "nsp", "unigram_entropy": {"train": 6.5}}
    record = {"data": {"statistics": statistics}, "progress": {"tokens": round(1e6 * tokens)}}
    (folder / "manifest.json").write_text(json.dumps(record))
    return compare(folder, folder, **more) or ""


def test_an_outcome_inside_of_the_forecast_is_said(tmp_path: Path) -> None:
    for loss in ((LOW + HIGH) / 2, round(HIGH, 2) + 0.004):  # printed as the end of the range
        line = outcome(tmp_path, loss)
        assert line.count("inside") == 2
        assert "cause" not in line


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        ({"loss": 6.6}, "nothing learnt"),
        ({"loss": HIGH + 0.1, "changed": ["train.peak_lr"]}, "train.peak_lr"),
        ({"loss": HIGH + 0.1, "changed": ["data.encoding"]}, "text unlike the corpora"),
        ({"loss": HIGH + 0.1, "tokens": TOKENS / 2}, "instead of"),
        ({"loss": (LOW + HIGH) / 2, "accuracy": 0.95}, "text unlike the corpora"),
        ({"loss": LOW - 0.3, "tokens": 2 * TOKENS}, "instead of"),
    ],
)
def test_an_outcome_outside_gets_its_likely_cause(figures: dict[str, Any], cause: str, tmp_path: Path) -> None:
    line = outcome(tmp_path, **figures)
    assert "outside" in line
    assert cause in line.partition("likely cause: ")[2]


def test_without_a_readable_forecast_or_held_out_figures_nothing_is_said(tmp_path: Path) -> None:
    assert outcome(tmp_path, LOW, None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "mlm_loss": 5.0}\n')
    assert compare(tmp_path, tmp_path) is None
    (tmp_path / FORECAST).write_text("{")
    assert compare(tmp_path, tmp_path) is None
    (tmp_path / FORECAST).unlink()
    assert compare(tmp_path, tmp_path) is None
