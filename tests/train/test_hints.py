"""A run prints its hints while it trains, and `report` finds them again in its folder."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError
from bert_pretrain.io.files import read_json
from bert_pretrain.io.manifest import PARTIAL, read_record, reopen
from bert_pretrain.report.curves import read_metrics
from bert_pretrain.report.diagnosis import diagnose
from bert_pretrain.report.report import write_report
from bert_pretrain.train.run import train

Tiny = Callable[..., Config]


def hints(output: str) -> list[str]:
    """Return the hints among what was printed."""
    return [line[line.index("hint: ") :] for line in output.splitlines() if "hint: " in line and " (" in line]


def test_a_run_prints_each_hint_once_and_report_finds_them_again(
    tiny: Tiny, data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    run = tmp_path / "run"
    config = tiny(max_steps=60, peak_lr=3.0, warmup_ratio=0.1, log_every=2, eval_every=20, save_every=30)
    train(config, data_folder, run)
    printed = hints(capsys.readouterr().out)
    assert [hint.split(" (")[0] for hint in printed] == [
        "hint: learning rate too high",
        "hint: nothing learnt",
    ]
    # At its end it says only what the end is; and of two runs the hints are named.
    reopen(run)
    train(config, data_folder, run)
    assert hints(capsys.readouterr().out) == printed[-1:]
    assert list(map(str, diagnose(read_record(run), read_metrics(run)))) == printed
    write_report([run, run], tmp_path / "both.png")
    assert capsys.readouterr().out.splitlines() == [f"run: {hint}" for hint in printed] * 2
    assert "learning rate too high" in (tmp_path / "both.html").read_text()


def test_a_run_notes_at_its_start_what_hints_need(
    tiny: Tiny, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb"):  # after the run has begun, before its first step
        train(tiny(trackers=["wandb"]), data_folder, tmp_path / "run")
    known = read_json(tmp_path / "run" / PARTIAL)
    assert known["length"]["steps"] == 12
    assert known["data"]["statistics"]["unigram_entropy"]["train"] == pytest.approx(3.87, abs=0.05)
    assert known["identity"]["data"] == known["data"]["content_hash"]
    train(tiny(), data_folder, tmp_path / "run")
    assert not (tmp_path / "run" / PARTIAL).exists()


def test_a_model_that_has_learnt_nothing_is_not_finished_without_a_word(
    tiny: Tiny, data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = train(tiny(max_steps=2, peak_lr=1e-30), data_folder, tmp_path / "run")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("hint: nothing learnt (the held-out loss of masked tokens began at 5.0")
    card = (model / "README.md").read_text()
    assert f"**Nothing learnt**: {last.partition('(')[2].partition(')')[0]}." in card
    assert "nothing learnt" not in (model.parent / "checkpoints" / "step-00000002" / "README.md").read_text()
