"""Metrics are truncated on resume, sent to trackers and checked for hints."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.io.files import read_json
from bert_pretrain.io.manifest import PARTIAL, read_record
from bert_pretrain.metrics import read_metrics
from bert_pretrain.report.diagnosis import diagnose
from tests.conftest import reopen
from tests.train.conftest import Fit, assert_same_run, interrupted_copy, metrics


def test_resume_truncates_metrics_and_rejects_damaged_ones(fit: Fit, finished: Path, tmp_path: Path) -> None:
    run = interrupted_copy(finished, tmp_path / "run", "step-00000012")  # lines of the steps 0, 5, 6, 10, 12, 12
    path = run / "metrics.jsonl"
    before = path.read_bytes()
    path.write_bytes(before.replace(b'"step": 5', b'"step": 4'))
    damaged = path.read_bytes()
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        fit(run)
    assert path.read_bytes() == damaged
    path.write_bytes(before.replace(b'"step": 10', b'"step": 11'))  # after the checkpoint
    assert_same_run(finished, fit(run))
    without = interrupted_copy(finished, tmp_path / "without", "step-00000012")
    (without / "metrics.jsonl").unlink()
    assert [line["step"] for line in metrics(fit(without), "loss")] == [10, 12]


def test_tensorboard_has_the_logged_metrics(fit: Fit) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for max_steps in (6, 8):
        run = fit(trackers=["tensorboard"], max_steps=max_steps)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    assert shown == pytest.approx({line["step"]: line["loss"] for line in metrics(run, "loss")}, rel=1e-6)
    assert "validation/mlm_loss" in events.Tags()["scalars"]


def test_resume_continues_the_same_wandb_run(fit: Fit, monkeypatch) -> None:
    started: list[dict[str, Any]] = []
    steps: list[int] = []
    run = SimpleNamespace(
        log=lambda metrics, step: steps.append(step) if "train/loss" in metrics else None,
        finish=lambda: steps.append(-1),
    )
    service = SimpleNamespace(init=lambda **settings: started.append(settings) or run)  # it needs an account
    monkeypatch.setitem(sys.modules, "wandb", service)
    for max_steps in (2, 3):
        fit(trackers=["wandb"], max_steps=max_steps)
    assert started[0]["id"] == started[1]["id"]
    assert started[0]["resume"] == "allow"
    assert started[0]["config"]["train"]["max_steps"] == 2
    assert steps == [2, -1, 3, -1]


def test_missing_or_failing_tracker_is_an_error_after_the_partial_manifest_is_written(
    fit: Fit, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb"):
        fit(trackers=["wandb"])
    assert not (tmp_path / "run").exists()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())  # without `init`
    with pytest.raises(ConfigError, match="does not start"):
        fit(trackers=["wandb"])
    known = read_json(tmp_path / "run" / PARTIAL)
    assert known["length"]["steps"] == 12
    assert known["data"]["statistics"]["unigram_entropy"]["train"] == pytest.approx(3.87, abs=0.05)
    assert known["identity"]["data"] == known["data"]["content_hash"]


def test_hints_are_printed_once_and_can_be_recomputed_from_the_run_folder(fit: Fit, capsys) -> None:
    def printed() -> list[str]:
        return re.findall(r"hint: .* \(.*", capsys.readouterr().out)

    config = {"max_steps": 60, "peak_lr": 3.0, "warmup_ratio": 0.1, "log_every": 2, "eval_every": 20, "save_every": 30}
    run = fit(**config)
    hints = printed()
    assert [hint.split(" (")[0] for hint in hints] == ["hint: learning rate too high", "hint: nothing learned"]
    assert "**Nothing learned**" in (run / "model" / "README.md").read_text()
    assert "othing learned" not in (run / "checkpoints" / "step-00000060" / "README.md").read_text()
    reopen(run)
    fit(run, **config)
    assert printed() == hints[-1:]
    assert list(map(str, diagnose(read_record(run), read_metrics(run)))) == hints
