"""Two processes train as one would: equal losses for every optimizer, and through stops and restarts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.io import manifest
from bert_pretrain.train.batches import cut
from bert_pretrain.train.inputs import check_sizes
from bert_pretrain.train.run import train

Tiny = Callable[..., Config]
NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
REPOSITORY = Path(__file__).resolve().parents[2]


def launch(config: Config, data: Path, output: Path, *, ranks: int = 2, restarts: int = 0) -> "subprocess.Popen[str]":
    """Start torchrun with the command line's own `train`."""
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", "-m", "bert_pretrain", "train"]
    command += ["--data", str(data), "--output", str(output), "--config", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        command, cwd=output.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def finish(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, out + err
    return out + err


def lines_with(name: str, run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if name in line]


def assert_same_losses(left: Path, right: Path, tolerance: float) -> None:
    for kind in ("loss", "validation_mlm_loss"):
        ours, theirs = lines_with(kind, left), lines_with(kind, right)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        for one, other in zip(ours, theirs, strict=True):
            for name in one:
                if name.endswith(("loss", "accuracy", "grad_norm")) or name in ("examples", "tokens"):
                    assert one[name] == pytest.approx(other[name], abs=tolerance, rel=tolerance), (one["step"], name)


@pytest.mark.parametrize(
    ("optimizer", "tolerance"),
    [("adamw", 1e-4), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("lamb", 1e-4), ("muon", 1e-2)))],
)
def test_two_ranks_have_the_losses_of_one_and_their_checkpoint_continues_on_one(
    tiny: Tiny, data_folder: Path, tmp_path: Path, optimizer: str, tolerance: float
) -> None:
    # 15 examples do not divide by two, and make several micro-batches of unequal numbers.
    config = tiny(
        model=NO_DROPOUT, optimizer=optimizer, max_steps=8, log_every=1, eval_every=3, save_every=4,
        global_batch_size=15, micro_batch_tokens=90, peak_lr=5e-3, keep_checkpoints=9,
    )  # fmt: skip
    two = tmp_path / "two"
    process = launch(config, data_folder, two)
    train(config, data_folder, tmp_path / "one")
    out = finish(process)
    assert "processes  2" in out
    assert_same_losses(tmp_path / "one", two, tolerance)
    # From the middle on, one rank continues what two have begun.
    shutil.rmtree(two / "checkpoints" / "step-00000008")
    shutil.rmtree(two / "model")
    manifest.reopen(two)
    train(config, data_folder, two)
    assert_same_losses(tmp_path / "one", two, tolerance)
    one, both = (load_file(run / "model" / "model.safetensors") for run in (tmp_path / "one", two))
    for name in one:
        torch.testing.assert_close(one[name], both[name], atol=tolerance, rtol=0.0)
    names = [
        set(load_file(run / "checkpoints" / "step-00000004" / "training_state.safetensors"))
        for run in (two, tmp_path / "one")
    ]
    assert names[0] == names[1]


def test_ranks_hold_about_equally_many_tokens(examples: Callable[..., Any]) -> None:
    table = examples(101)
    for budget, ranks in ((100, 4), (1000, 3), (40, 7), (1, 8)):
        shares = [cut(table, budget, rank, ranks) for rank in range(ranks)]
        tokens = [sum(micro.num_tokens for micro in share.micro_batches) for share in shares]
        assert sum(tokens) == len(table.input_ids)
        assert sum(micro.num_sequences for share in shares for micro in share.micro_batches) == 101
        assert max(tokens) - min(tokens) <= 2 * table.lengths.max()
        assert {share.num_tokens for share in shares} == {len(table.input_ids)}
        if budget > table.lengths.max():
            assert all(micro.num_tokens <= budget for share in shares for micro in share.micro_batches)


def test_more_ranks_than_examples_are_refused(tiny: Tiny, data_folder: Path) -> None:
    with pytest.raises(ConfigError, match="4 examples cannot be shared by 5 processes"):
        check_sizes(tiny(global_batch_size=4), DataFolder.open(data_folder), 5)


def newest_step(run: Path) -> int:
    return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")), default=0)


def status_of(run: Path) -> dict[str, Any]:
    found = json.loads((run / "status.json").read_text())
    assert found["step"] == newest_step(run)
    return found  # type: ignore[no-any-return]


def wait_for_step(run: Path, step: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 180
    while newest_step(run) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ranks_of(process: "subprocess.Popen[str]") -> list[int]:
    """Return the process ids that torchrun has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [pid for pid in map(int, children) if b"bert_pretrain" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_killed_rank_is_restarted_and_all_resume_from_the_last_checkpoint(
    tiny: Tiny, data_folder: Path, tmp_path: Path
) -> None:
    config = tiny(max_steps=150, save_every=5, eval_every=150, log_every=10)
    run = tmp_path / "run"
    process = launch(config, data_folder, run, restarts=1)
    wait_for_step(run, 5, process)
    os.kill(ranks_of(process)[-1], signal.SIGKILL)
    out = finish(process)
    assert "continues from step" in out
    assert "another rank has ended" in out
    assert "gloo" not in out
    assert status_of(run)["status"] == "done"
    assert [line["step"] for line in lines_with("loss", run)] == list(range(10, 151, 10))


@pytest.mark.parametrize("trials", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_signals_to_torchrun_and_its_ranks_together_lose_no_checkpoint(
    tiny: Tiny, data_folder: Path, tmp_path: Path, trials: int
) -> None:
    config = tiny(max_steps=100_000, save_every=100_000, eval_every=100_000, log_every=3)
    run, last = tmp_path / "run", 0
    for _ in range(trials):
        process, lines = launch(config, data_folder, run), (run / "metrics.jsonl")
        deadline = time.monotonic() + 180
        while not lines.exists() or len(lines_with("loss", run)) < last // 3 + 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for pid in (process.pid, *ranks_of(process)):
            os.kill(pid, signal.SIGTERM)
        _, err = process.communicate(timeout=180)
        assert "the same command continues" in err
        assert status_of(run)["status"] == "stopped"
        assert newest_step(run) > last
        last = newest_step(run)
    train(tiny(max_steps=last + 2, save_every=10, eval_every=100_000, log_every=3), data_folder, run)
    assert lines_with("loss", run)[-1]["step"] == last + 2


def test_a_signal_to_one_rank_stops_all_of_them_at_one_step(tiny: Tiny, data_folder: Path, tmp_path: Path) -> None:
    config = tiny(max_steps=100_000, save_every=10, eval_every=100_000, log_every=10)
    run = tmp_path / "run"
    process = launch(config, data_folder, run)
    wait_for_step(run, 10, process)
    os.kill(ranks_of(process)[-1], signal.SIGTERM)
    _, err = process.communicate(timeout=180)
    assert "the same command continues" in err
    assert 'Traceback (most recent call last):\n  File "/' not in err.split("torch.distributed")[0]
    step = newest_step(run)
    assert json.loads((run / "checkpoints" / f"step-{step:08d}" / "training_state.json").read_text())["ranks"] == 2


@pytest.mark.slow
def test_twenty_runs_of_two_ranks_leave_cleanly(tiny: Tiny, data_folder: Path, tmp_path: Path) -> None:
    for number in range(20):
        out = finish(launch(tiny(max_steps=2), data_folder, tmp_path / str(number)))
        assert "terminate called" not in out


@pytest.mark.slow
def test_compiled_layers_on_two_ranks_have_the_losses_of_plain_ones_on_one(
    tiny: Tiny, data_folder: Path, tmp_path: Path
) -> None:
    settings = {"model": NO_DROPOUT, "max_steps": 4, "save_every": 2, "eval_every": 2, "log_every": 1}
    process = launch(tiny(**settings, compile=True), data_folder, tmp_path / "two")
    train(tiny(**settings), data_folder, tmp_path / "one")
    assert "compiled   yes" in finish(process)
    assert_same_losses(tmp_path / "one", tmp_path / "two", 1e-4)
