"""A run is drawn over the nearest measured one."""

import json
from pathlib import Path
from typing import Any

import pytest

from bert_pretrain.report.curves import draw_curves
from bert_pretrain.report.measured import METRICS, describe, measured_runs, nearest_run, points


def record(layers: int, hidden: int, language: str = "en") -> dict[str, Any]:
    model = {"num_hidden_layers": layers, "hidden_size": hidden}
    return {"config": {"model": model}, "data": {"statistics": {"language": language}}}


def metrics(tokens_per_step: int, last_step: int) -> list[dict[str, Any]]:
    return [{"step": step, "tokens": step * tokens_per_step} for step in range(10, last_step + 1, 10)]


def test_the_nearest_is_of_the_same_language_and_about_the_same_size() -> None:
    lines = metrics(2000, 1000)
    small = nearest_run(record(2, 128), lines)
    assert small is not None
    assert (small["size"], small["language"]) == ("2x128", "en")
    assert all(
        small["tokens"] >= run["tokens"]
        for run in measured_runs()
        if run["size"] == "2x128" and run["language"] == "en"
    )
    chinese = nearest_run(record(2, 128, "zh"), lines)
    assert chinese is not None
    assert chinese["language"] == "zh"
    assert "Chinese" in describe(chinese)
    assert nearest_run(record(24, 1024), lines) is None
    assert nearest_run({}, lines) is None
    assert nearest_run(record(2, 128), [{"step": 0, "validation_mlm_loss": 9.0}]) is None


def test_points_are_at_the_steps_that_have_seen_as_many_tokens() -> None:
    lines = metrics(1000, 500)
    run = nearest_run(record(2, 128), lines)
    assert run is not None
    for metric in METRICS:
        found = points(run, metric, lines)
        expected = [tokens / 1000 for tokens in run["curve"]["tokens"] if tokens <= 500_000]
        assert [step for step, _ in found] == pytest.approx(expected)
        assert found[0][1] == run["curve"][metric][0]
    assert points(run, "learning_rate", lines) == []


def test_the_picture_names_the_measured_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [{**line, "mlm_loss": 6.0, "validation_mlm_loss": 6.0} for line in metrics(2000, 1000)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "measured" not in draw_curves([tmp_path], tmp_path / "alone.svg").read_text()
    (tmp_path / "manifest.partial.json").write_text(json.dumps({"kind": "run", **record(2, 128)}))
    assert "measured" in draw_curves([tmp_path], tmp_path / "both.svg").read_text()
