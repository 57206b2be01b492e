"""The command `run`: all stages and phases of one configuration."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bert_pretrain import pipeline
from bert_pretrain.config import Config
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError, OutputError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.io.files import LOCK
from bert_pretrain.io.manifest import exclusive
from bert_pretrain.pipeline import with_one_schedule
from bert_pretrain.train.schedule import too_long
from tests.conftest import call, run_stages


def test_phases_with_different_objectives(english_text: Path, tmp_path: Path, capsys) -> None:
    config = Config.model_validate(
        {
            "inputs": [str(english_text)],
            "vocab": {"size": 1500},
            "data": {"max_seq_length": 32, "dupe_factor": 1, "validation_fraction": 0.05},
            "model": SMALL_MODEL,
            "train": {"max_steps": 3, "global_batch_size": 16, "micro_batch_tokens": 1024, "device": "cpu"},
            "phases": [
                {"name": "words", "data": {"next_sentence": "none", "masking": "dynamic"}},
                {"name": "order", "data": {"next_sentence": "sop", "max_seq_length": 64}},
            ],
        }
    )
    model = run_stages(config, tmp_path / "out")
    assert model == tmp_path / "out" / "train" / "order" / "model"
    out = capsys.readouterr().out
    assert "hint: nothing learned (" in out.splitlines()[-1]
    assert "at most 64 tokens" in out
    assert "at most 64 tokens" in (model / "README.md").read_text()
    table = [line.split() for line in out[out.index("held out            MLM") :].splitlines()[1:5]]
    assert [(line[0], line[-1] == "–") for line in table] == [("words", True)] * 2 + [("order", False)] * 2
    last = json.loads((model.parent / "metrics.jsonl").read_text().splitlines()[-2])
    assert last["step"] == 6
    assert last["nsp_loss"] > 0
    shutil.rmtree(model.parent / "checkpoints")  # a finished last phase does not need them
    assert run_stages(config, tmp_path / "out") == model
    (model.parent / "metrics.jsonl").write_text("{broken")  # does not fail a finished run
    assert run_stages(config, tmp_path / "out") == model
    assert "no metrics: " in capsys.readouterr().out
    shutil.rmtree(tmp_path / "out" / "train" / "words" / "checkpoints")
    with pytest.raises(OutputError, match="no checkpoint"):
        run_stages(config, tmp_path / "out")


def test_warm_up_may_span_phases_up_to_their_total(data_folder: Path) -> None:
    rows = DataFolder.open(data_folder).rows("train")
    first, last, longer = (
        Config.model_validate({"train": {"max_epochs": epochs, "global_batch_size": rows, "warmup_steps": warmup}})
        for epochs, warmup in ((1, None), (2, 3), (2, 4))
    )
    shared = [stage.train for stage in with_one_schedule([first, last], [data_folder, data_folder])]
    assert [(train.max_steps, train.schedule_steps) for train in shared] == [(1, 3), (3, 3)]
    with pytest.raises(ConfigError, match="3 steps"):
        with_one_schedule([first, longer], [data_folder, data_folder])
    long_schedule = Config.model_validate({"train": {"max_steps": 5, "schedule_steps": 100}})
    assert with_one_schedule([long_schedule], [data_folder]) == [long_schedule]


def test_input_arguments_replace_inputs_of_the_file(english_text, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.txt").write_bytes(english_text.read_bytes())
    (tmp_path / "second.txt").write_text("One sentence.\nAnother one.\n\nA second document.\nIts end.\n")
    (tmp_path / "mine.yaml").write_text(
        "extends: tiny\ninputs: [nosuch.txt]\nvocab: {size: 1000}\ndata: {max_seq_length: 32, dupe_factor: 1}\n"
        "model: {hidden_size: 16, num_attention_heads: 2, intermediate_size: 32}\ntrain: {precision: fp32}\n"
    )
    flags = "--output out --workers 1 --steps 2 --learning-rate 3e-3 --batch-size 8 --device cpu"
    call("run", "mine.yaml", "first.txt", "second.txt", *flags.split())
    manifest = json.loads((tmp_path / "out" / "data" / "manifest.json").read_text())
    assert [item["location"] for item in manifest["inputs"]] == ["first.txt", "second.txt"]
    trained = load_config(tmp_path / "out" / "train" / "config.yaml").train
    assert (trained.max_steps, trained.max_epochs, trained.peak_lr) == (2, None, 3e-3)
    assert (trained.global_batch_size, trained.device, trained.optimizer) == (8, "cpu", "muon")


def test_positions_of_a_later_phase_are_checked_before_the_first(english_text: Path, tmp_path: Path) -> None:
    phases = [{"name": "short", "data": {"max_seq_length": 32}}, {"name": "long", "data": {"max_seq_length": 128}}]
    body = {"inputs": [str(english_text)], "model": {**SMALL_MODEL, "max_position_embeddings": 64}, "phases": phases}
    with pytest.raises(ConfigError, match="up to 128 tokens, but the model has only 64 positions"):
        run_stages(Config.model_validate(body), tmp_path / "out")
    assert not (tmp_path / "out" / "vocab").exists()


def test_run_is_refused_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun"):
        run_stages(Config(inputs=("a.txt",)), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_missing_tracker_is_reported_before_any_work(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb"):
        run_stages(Config.model_validate({"inputs": ["a.txt"], "train": {"trackers": ["wandb"]}}), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_two_commands_cannot_write_the_same_output(english_text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with exclusive(out):
        for command in (["tiny"], ["auto", "--time", "5m", "--overwrite"]):
            assert "another process" in call("run", *command, english_text, "--output", out, code=2).stderr
            assert [path.name for path in out.iterdir()] == [LOCK]
    call("run", "tiny", "nosuch.txt", "--output", out, code=2)
    assert not out.exists()


def test_overwrite_moves_all_stages_but_not_again_after_a_restart(
    english_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, reached = tmp_path / "out", []

    def train(*_: Any, **__: Any) -> Path:
        reached.append([len(list(out.glob(f"{name}.old-*"))) for name in ("vocab", "data")])
        raise KeyboardInterrupt

    def run(size: int, *flags: str) -> None:
        settings = [f"--set={key}" for key in (f"vocab.size={size}", "data.max_seq_length=32", "data.dupe_factor=1")]
        call("run", "tiny", english_text, "--output", out, *settings, *flags, code=130)

    monkeypatch.setattr("bert_pretrain.train.run.train", train)
    run(1500)
    run(1600, "--overwrite")
    run(1600)  # resumes the command with --overwrite
    call("run", "tiny", "nosuch.txt", "--output", out, "--overwrite", code=2)  # moves nothing
    run(1600)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run(1600, "--overwrite")
    run(1700, "--overwrite")  # another command, so the old output is moved aside
    assert reached == [[0, 0], [1, 1], [1, 1], [1, 1], [1, 1], [2, 2]]


def test_estimate_of_more_than_a_day_has_a_warning() -> None:
    assert not too_long(86_000)
    assert "1d 1h" in too_long(90_000)


SMALL_MODEL = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64,
}  # fmt: skip


def test_compiling_ahead_stops_between_parts_and_ignores_errors(tmp_path: Path, monkeypatch) -> None:
    parts: list[str] = []
    started, go_on = threading.Event(), threading.Event()

    def compile_ahead(_: Config) -> Iterator[None]:
        parts.append("first")
        started.set()
        go_on.wait(60.0)
        yield
        parts.append("second")
        raise RuntimeError

    monkeypatch.setattr("bert_pretrain.plan.timing.compile_ahead", compile_ahead)
    monkeypatch.setattr(pipeline, "NVIDIA_DRIVER", tmp_path / "driver")
    with pipeline.BackgroundCompiler(Config()) as ahead:  # without a driver
        ahead.wait()
    assert parts == []
    pipeline.NVIDIA_DRIVER.touch()
    with pipeline.BackgroundCompiler(Config()) as ahead:
        go_on.set()
        ahead.wait()
    assert parts == ["first", "second"]
    started.clear()
    go_on.clear()
    with pipeline.BackgroundCompiler(Config()) as ahead:
        started.wait(60.0)
        ahead._is_closed = True  # as on leaving the context, but before the thread goes on
        go_on.set()
    assert parts == ["first", "second", "first"]


def test_an_error_does_not_wait_for_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    code = """
import pathlib, sys, time
from bert_pretrain import cli, pipeline
from bert_pretrain.plan import timing
timing.compile_ahead = lambda _: (time.sleep(100) for _ in [0])
pipeline.NVIDIA_DRIVER = pathlib.Path("/")
sys.argv = ["", "run", "tiny", "empty.txt", "--output", "o", "--set", "train.device=auto"]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "the file is empty" in done.stderr
