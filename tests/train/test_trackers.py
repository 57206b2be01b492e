"""Trackers receive the lines of `metrics.jsonl`; one that is not installed is refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bert_pretrain.config import Config
from bert_pretrain.train.run import train

Tiny = Callable[..., Config]


def test_tensorboard_shows_what_the_metrics_hold(tiny: Tiny, data_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    train(tiny(trackers=["tensorboard"], max_steps=6), data_folder, run)
    train(tiny(trackers=["tensorboard"], max_steps=8), data_folder, run)  # free to change, and continued
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = {line["step"]: line["loss"] for line in lines if "loss" in line}
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    assert shown == pytest.approx(expected, rel=1e-6)
    assert "validation/mlm_loss" in events.Tags()["scalars"]


def test_weights_and_biases_gets_figures_by_step_under_the_same_name_again(
    tiny: Tiny, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []
    logged: list[tuple[int, dict[str, float]]] = []
    finished: list[bool] = []

    class Run:
        def log(self, figures: dict[str, float], step: int) -> None:
            logged.append((step, figures))

        def finish(self) -> None:
            finished.append(True)

    module: Any = ModuleType("wandb")  # the service needs an account
    module.init = lambda **settings: started.append(settings) or Run()
    monkeypatch.setitem(sys.modules, "wandb", module)
    for steps in (2, 3):
        train(tiny(trackers=["wandb"], max_steps=steps), data_folder, tmp_path / "run")
    assert started[0]["id"] == started[1]["id"]
    assert started[0]["resume"] == "allow"
    assert started[0]["config"]["train"]["max_steps"] == 2
    assert [step for step, figures in logged if "train/loss" in figures] == [2, 3]
    assert finished == [True, True]
