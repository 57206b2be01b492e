"""Metrics: truncated at a checkpoint, shown on the console, and sent to trackers."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bert_pretrain.config import Config
from bert_pretrain.errors import DataError
from bert_pretrain.train.log import MetricsFile, console_line
from bert_pretrain.train.run import train


def test_metrics_are_cut_back_to_a_checkpoint_and_a_torn_line_goes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, kept=None)
    for step in (5, 10):
        first.write({"step": step, "loss": 1.0})
    position = first.position
    first.write({"step": 15, "loss": 1.0})
    first.close()
    path.write_text(path.read_text() + '{"step": 7, "l')
    log = MetricsFile(path, kept=position)
    assert log.position == position
    assert log.newest == {"training": {"step": 10, "loss": 1.0}}
    log.write({"step": 12, "validation_mlm_loss": 2.0})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [5, 10, 12]
    MetricsFile(path, kept=None).close()
    assert path.read_text() == ""


@pytest.mark.parametrize("damage", ["another figure", "a lost line"])
def test_metrics_that_were_damaged_are_refused_and_may_be_given_up(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsFile(path, kept=None)
    log.write({"step": 5, "loss": 1.5})
    position = log.position
    log.close()
    path.write_text(path.read_text().replace("1.5", "1.7") if damage == "another figure" else "")
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"metrics\.jsonl is damaged"):
        MetricsFile(path, kept=position)
    assert path.read_bytes() == before
    path.unlink()
    MetricsFile(path, kept=position).close()
    assert "is missing" in capsys.readouterr().out


@pytest.mark.parametrize("change", [b"", b"a", b"a line more\n"])
def test_metrics_that_are_changed_during_the_run_end_it(tmp_path: Path, change: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsFile(path, kept=None)
    log.write({"step": 5, "loss": 1.5})
    path.write_bytes(path.read_bytes() + change if len(change) > 1 else change)
    with pytest.raises(DataError, match=r"metrics\.jsonl is damaged: another program has changed it"):
        log.write({"step": 10, "loss": 1.5})
    with pytest.raises(DataError, match="another program"):
        log.position  # noqa: B018
    log.close()


def test_an_interval_of_skipped_steps_has_no_losses_and_a_line_all_the_same() -> None:
    line = {"step": 5, "loss": None, "skipped_steps": 5}
    assert "all 5 steps skipped" in console_line(line, 100)


def test_rates_are_left_out_where_only_the_first_step_was_done() -> None:
    line = dict.fromkeys(("tokens_per_second", "examples_per_second", "mfu", "nsp_loss", "nsp_accuracy"))
    line |= {"step": 1, "loss": 1.0, "mlm_loss": 1.0, "mlm_accuracy": 0.5, "learning_rate": 1e-3, "grad_norm": 1.0}
    assert console_line({**line, "skipped_steps": 0}, 10).endswith("lr 1.00e-03  norm  1.000")


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
