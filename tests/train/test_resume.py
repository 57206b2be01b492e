"""A run that was stopped, killed, extended or damaged resumes with bit-equal results."""

import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from bert_pretrain.cli import main
from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError, DataError, Interrupted, OutputError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.io.files import read_json
from bert_pretrain.train import loop
from bert_pretrain.train.checkpoint import open_checkpoint
from bert_pretrain.train.inputs import check_inputs
from bert_pretrain.train.run import train
from bert_pretrain.train.signals import checkpoint_paths, newest_step
from tests.conftest import digests, reopen, wait_until
from tests.train.conftest import (
    Fit,
    NewData,
    assert_same_run,
    final_tensors,
    flip_bit,
    interrupted_copy,
    metrics,
    status,
    tiny,
)

RARE = {"save_every": 100_000, "eval_every": 100_000, "log_every": 3}


def command(config: Config, data: Path, output: Path) -> list[str]:
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return ["train", "--config", str(file), "--data", str(data), "--output", str(output)]


def start(words: list[str], first: Callable[[], object] = dict, **environment: str) -> BaseProcess:
    """Start the program in a forked process, which need not import torch again."""

    def run() -> None:
        first()
        os.environ |= environment
        sys.argv = ["bert-pretrain", *words]
        main()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def num_lines(run: Path) -> int:
    return (run / "metrics.jsonl").read_text().count("\n") if (run / "metrics.jsonl").exists() else 0


@pytest.mark.parametrize("objective", ["mlm", "electra"])
def test_repeatedly_killed_run_is_bit_equal(objective: str, data_folder: Path, tmp_path: Path) -> None:
    rare = {"save_every": 7, "log_every": 10, "eval_every": 20, "keep_checkpoints": 2}
    config = tiny(objective=objective, max_steps=100, **rare)
    train(config, data_folder, tmp_path / "straight")
    run = tmp_path / "killed"
    for number in range(1, 5):
        process = start(command(config, data_folder, run))
        wait_until(lambda step=14 * number: newest_step(run) >= step, process)
        time.sleep(0.004 * number)  # may interrupt the writing of a checkpoint
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (run / "manifest.json").exists()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "lo')  # a partly written line
    train(config, data_folder, run)
    assert_same_run(tmp_path / "straight", run)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000098", "step-00000100"]


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_signals_save_a_checkpoint_and_stop_signals_exit(
    fit: Fit, data_folder: Path, tmp_path: Path, number: int, exit_code: int
) -> None:
    run = tmp_path / "run"
    process = start(command(tiny(max_steps=100_000, **RARE), data_folder, run))
    wait_until(lambda: num_lines(run) >= 2, process)
    os.kill(process.pid, signal.SIGUSR1)
    wait_until(lambda: newest_step(run), process)
    saved = newest_step(run)
    wait_until(lambda: metrics(run)[-1]["step"] > saved + 3, process)
    os.kill(process.pid, number)
    process.join(180)
    assert process.exitcode == exit_code
    step = newest_step(run)
    assert [path.name for path in checkpoint_paths(run / "checkpoints")] == [f"step-{saved:08d}", f"step-{step:08d}"]
    assert open_checkpoint(run / "checkpoints" / f"step-{step:08d}").step == step
    assert status(run) == "stopped"
    fit(run, max_steps=step + 3, **RARE)
    assert metrics(run)[-1]["step"] == step + 3
    assert status(run) == "done"


@pytest.mark.parametrize(("ending", "exit_code"), [("pipe", 130), ("terminal", 129), ("nohup", 143)])
def test_run_whose_console_has_ended_saves_a_checkpoint(
    data_folder: Path, tmp_path: Path, ending: str, exit_code: int
) -> None:
    """By Ctrl-C in `train 2>&1 | tee log`, which ends `tee` too, or the end of an ssh connection, without `nohup`."""
    run = tmp_path / "run"
    ours, theirs = os.pipe() if ending == "pipe" else os.openpty()

    def attach() -> None:
        os.close(ours)
        if ending == "pipe":
            os.dup2(theirs, 2)
        else:
            os.login_tty(theirs)
        sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        if ending == "nohup":
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process = start(command(tiny(max_steps=100_000, **RARE), data_folder, run), first=attach)
    os.close(theirs)
    wait_until(lambda: num_lines(run) >= 2, process)
    os.close(ours)  # if this is a terminal, the kernel sends SIGHUP
    if ending == "nohup":
        before = num_lines(run)
        wait_until(lambda: num_lines(run) > before + 1, process)
    if ending != "terminal":
        os.kill(process.pid, signal.SIGINT if ending == "pipe" else signal.SIGTERM)
    process.join(180)
    assert process.exitcode == exit_code
    assert status(run) == "stopped"
    assert newest_step(run) >= metrics(run)[-1]["step"] > 0


@pytest.mark.parametrize(("owner", "name"), [(loop, "train_step"), (loop.Loop, "evaluate")])
def test_stop_signals_in_every_step_or_evaluation_change_nothing(
    fit: Fit, finished: Path, tmp_path: Path, owner: Any, name: str
) -> None:
    """An evaluation that a stop omits is made up for. After the last one, the command stops without a model."""

    def and_stop(*arguments: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        original(*arguments, **options)

    original = getattr(owner, name)
    run = tmp_path / "run"
    while newest_step(run) < 12:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, and_stop)
            with pytest.raises(Interrupted, match=r"SIGTERM at .*step-000000"):
                fit(run)
    assert not (run / "model").exists()
    fit(run)
    assert_same_run(finished, run)


def test_finished_run_is_extended_or_moved_aside(fit: Fit, finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    fit(run, max_steps=16)
    assert metrics(run)[-1]["step"] == 16
    assert read_json(run / "manifest.json")["progress"]["step"] == 16
    with pytest.raises(ConfigError, match="it is at step 16"):
        fit(run)
    fit(run, overwrite=True, peak_lr=2e-3, max_steps=2)
    (aside,) = tmp_path.glob("run.old-*")
    assert (aside / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("masking", "settings"),
    [
        ("static", {"optimizer": "lamb"}),
        ("dynamic", {"optimizer": "muon", "softmax_candidates": 40}),
        ("static", {"bias_correction": False}),
    ],
    ids=str,
)
def test_resume_is_bit_equal_for_every_optimizer(
    fit: Fit, new_data_folder: NewData, tmp_path: Path, masking: str, settings: dict[str, Any]
) -> None:
    # An epoch has 11 steps and a part of one.
    settings = {**settings, "data": new_data_folder(masking=masking), "global_batch_size": 32}
    straight = fit("straight", **settings)
    run = interrupted_copy(straight, tmp_path / "run", "step-00000012")
    assert_same_run(straight, fit(run, **settings))
    losses = [line["loss"] for line in metrics(run, "loss")]
    assert losses[-1] < losses[0]
    with pytest.raises(OutputError, match=r"train\."):
        fit(run, data=settings["data"])


@pytest.mark.parametrize(
    ("origin", "settings", "error", "word"),
    [
        ("model", {}, DataError, r"training_state\.json"),
        ("checkpoints/step-00000008", {"max_steps": 8}, ConfigError, "step 8"),
        ("checkpoints/step-00000008", {"optimizer": "muon"}, ConfigError, "muon"),
        ("model", {"model": {"hidden_size": 48}}, ConfigError, "hidden_size is 48"),
    ],
)
def test_carry_optimizer_rejects_mismatches(
    fit: Fit, finished: Path, origin: str, settings: dict[str, Any], error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word):
        fit(init_from=finished / origin, carry_optimizer="model" not in settings, **settings)


def test_resume_is_bit_equal_with_scaled_embeddings(fit: Fit) -> None:
    config = {"model": {"initializer_range": 0.2}}
    run = fit(**config)
    tensors, checkpoint = final_tensors(run), run / "checkpoints" / "step-00000008"
    assert open_checkpoint(checkpoint).record["embedding_exponent"] == 2
    carried = fit("carried", init_from=checkpoint, carry_optimizer=True, **config)
    for name in ("checkpoints/step-00000012", "model"):
        shutil.rmtree(run / name)
    for again in (fit(**config), carried):
        ours = final_tensors(again)
        assert all(torch.equal(ours[name], tensors[name]) for name in tensors if not name.startswith("interval"))


@pytest.mark.parametrize(("is_other_data", "batch_size"), [(True, 16), (False, 32)])
def test_carry_optimizer_continues_the_epoch_of_the_same_data_only(
    fit: Fit, finished: Path, data_folder: Path, new_data_folder: NewData, is_other_data: bool, batch_size: int
) -> None:
    data = new_data_folder("other", shard_rows=(97,)) if is_other_data else data_folder
    checkpoint = finished / "checkpoints" / "step-00000008"
    settings = {"max_steps": 9, "log_every": 1, "global_batch_size": batch_size}
    (line,) = metrics(fit(data=data, init_from=checkpoint, carry_optimizer=True, **settings), "epoch")
    before = 0 if is_other_data else 8 * 16
    assert line["epoch"] == pytest.approx((before + batch_size) / DataFolder.open(data).rows("train"))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("training_state.safetensors", flip_bit),
        ("training_state.json", Path.unlink),
        ("checksums.json", Path.unlink),
    ],
)
def test_broken_newest_checkpoint_falls_back_with_a_warning(
    fit: Fit, finished: Path, tmp_path: Path, capsys, name: str, damage: Callable[[Path], object]
) -> None:
    run = interrupted_copy(finished, tmp_path / "run")
    damage(run / "checkpoints" / "step-00000012" / name)
    assert_same_run(finished, fit(run))
    assert "step-00000012 is broken" in capsys.readouterr().err
    assert (run / "checkpoints" / "broken-step-00000012").is_dir()


def test_run_without_an_intact_checkpoint_does_not_start_over(fit: Fit, finished: Path, tmp_path: Path) -> None:
    run = interrupted_copy(finished, tmp_path / "run")
    for path in run.glob("checkpoints/*/config.json"):
        path.write_text(path.read_text().replace('"layer_norm_eps": 1e-12', '"layer_norm_eps": 1e-02'))
    before = digests(run)
    for _ in range(2):
        with pytest.raises(DataError, match=r"config\.json"):
            fit(run)
    assert digests(run) == before


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_damaged_final_model_is_rewritten(fit: Fit, finished: Path, tmp_path: Path, name: str) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    os.truncate(run / "model" / name, 100)
    with pytest.raises(DataError, match=name):
        fit("other", init_from=run / "model")
    fit(run)
    assert (run / "model" / name).read_bytes() == (finished / "model" / name).read_bytes()
    os.truncate(run / "model" / name, 100)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(OutputError, match="no checkpoint"):
        fit(run)
    assert (run / "manifest.json").exists()


@pytest.mark.parametrize("last_step", [2, 11])
def test_moved_run_folder_is_an_error(fit: Fit, tmp_path: Path, monkeypatch, last_step: int) -> None:
    run, train_step = tmp_path / "run", loop.train_step

    def and_remove(*arguments: Any, step: int, **options: Any) -> None:
        train_step(*arguments, step=step, **options)
        if step == last_step:
            run.rename(tmp_path / "removed")

    with monkeypatch.context() as patched:
        patched.setattr(loop, "train_step", and_remove)
        with pytest.raises(OutputError, match="moved or removed"):
            fit(run)
    fit(run)  # the same command starts again


def test_damaged_shard_stops_the_run_with_a_checkpoint_and_verify_finds_it_earlier(
    fit: Fit, new_data_folder: NewData, tmp_path: Path
) -> None:
    config, data = {"max_steps": 24, "save_every": 1000, "log_every": 2}, new_data_folder()
    shard = data / "train" / "00002.parquet"  # the second of the first epoch, after 90 examples
    straight = fit("straight", data=data, **config)
    flip_bit(shard)
    with pytest.raises(DataError, match="damaged"):
        fit(data=data, **config)
    assert newest_step(tmp_path / "run") == 5
    with pytest.raises(DataError, match=r"00002\.parquet"):
        check_inputs(tiny(), data, tmp_path / "other", verify=True)
    flip_bit(shard)
    assert_same_run(straight, fit(data=data, **config))


def test_full_disk_keeps_earlier_checkpoints(fit: Fit, tmp_path: Path, monkeypatch) -> None:
    calls = []

    def write_some(tensors: Any, path: Path, **rest: Any) -> None:
        calls.append(path)
        if len(calls) > 3:  # two files per checkpoint: the second file of the second one
            raise OSError(28, "No space left on device")
        save_file(tensors, path, **rest)

    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr("bert_pretrain.model.huggingface.save_file", write_some)
        with pytest.raises(OSError, match="No space left"):
            fit(run)
    assert newest_step(run) == 4
    fit(run)
    assert newest_step(run) == 12


def test_run_without_steps_left_evaluates_all_examples_once(fit: Fit, finished: Path, tmp_path: Path) -> None:
    run = interrupted_copy(finished, tmp_path / "run", "step-00000012")
    fit(run, max_steps=8, eval_examples=16)
    assert [line["step"] for line in metrics(run, "validation_mlm_loss")] == [0, 6, 8]
    last = metrics(run)[-1]
    assert last["validation_examples"] == metrics(finished)[-1]["validation_examples"]
    reopen(run)
    shutil.rmtree(run / "model")
    fit(run, max_steps=8, eval_examples=16)
    assert read_json(run / "manifest.json")["validation"]["step"] == 8
