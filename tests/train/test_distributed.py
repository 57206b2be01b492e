"""Two processes train as one would, for every optimizer, and through stops and restarts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError
from bert_pretrain.train.distributed import SINGLE_PROCESS
from bert_pretrain.train.inputs import check_inputs
from bert_pretrain.train.run import train
from tests.train.conftest import NO_DROPOUT, Fit, final_tensors, interrupted_copy, metrics
from tests.train.test_resume import wait_until
from tests.train.two_ranks import CASES, trained

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
Tiny = Callable[..., Config]


def launch(config: Config, data: Path, output: Path, restarts: int = 0) -> "subprocess.Popen[str]":
    """Start torchrun with the command line's own `train`."""
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [*TORCHRUN, f"--max-restarts={restarts}", "--monitor-interval=0.1", "-m", "bert_pretrain", "train"]
    command += ["--data", str(data), "--output", str(output), "--config", str(file)]
    return subprocess.Popen(
        command, cwd=output.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )


def finish(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, out + err
    return out + err


def assert_same_losses(left: Path, right: Path) -> None:
    for one, other in zip(metrics(left), metrics(right), strict=True):
        for name in one:
            if name.endswith(("step", "loss", "accuracy", "grad_norm", "examples", "tokens")):
                assert one[name] == pytest.approx(other[name], abs=1e-4, rel=1e-4), (one["step"], name)


def test_two_ranks_have_the_losses_of_one_and_their_checkpoint_continues_on_one(
    tiny: Tiny, new_data_folder: Callable[..., Path], tmp_path: Path
) -> None:
    # 15 examples do not divide by two, and make several micro-batches of unequal numbers.
    data_folder = new_data_folder("dynamic", masking="dynamic")  # each rank draws the masks of whole shards
    config = tiny(
        model=NO_DROPOUT, max_steps=8, log_every=1, eval_every=3, save_every=4,
        global_batch_size=15, micro_batch_tokens=90, peak_lr=5e-3, keep_checkpoints=9,
    )  # fmt: skip
    two = tmp_path / "two"
    process = launch(config, data_folder, two)
    train(config, data_folder, tmp_path / "one")
    assert "processes  2" in finish(process)
    assert_same_losses(tmp_path / "one", two)
    mixed = interrupted_copy(two, tmp_path / "mixed", "step-00000008")
    train(config, data_folder, mixed)
    assert_same_losses(tmp_path / "one", mixed)
    torch.testing.assert_close(final_tensors(mixed), final_tensors(tmp_path / "one"), atol=1e-4, rtol=1e-4)


def test_more_ranks_than_examples_are_refused(
    tiny: Tiny, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(ConfigError, match="5 processes"):
        check_inputs(tiny(global_batch_size=4), data_folder, tmp_path / "run")


def newest_step(run: Path) -> int:
    return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")), default=0)


def ranks_of(process: "subprocess.Popen[str]") -> list[int]:
    """The processes that torchrun has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [pid for pid in map(int, children) if b"bert_pretrain" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def assert_stopped(process: "subprocess.Popen[str]", run: Path) -> str:
    """Check that all ranks have stopped at one step, whose checkpoint is whole, and return what they said."""
    out, err = process.communicate(timeout=180)
    assert "the same command continues" in err
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["step"]) == ("stopped", newest_step(run))
    state = run / "checkpoints" / f"step-{newest_step(run):08d}" / "training_state.json"
    assert json.loads(state.read_text())["ranks"] == 2
    return out + err


def test_a_killed_rank_is_restarted_from_the_last_checkpoint_and_a_signal_to_one_rank_stops_both(
    fit: Fit, tiny: Tiny, data_folder: Path, tmp_path: Path
) -> None:
    settings, run = {"save_every": 10, "eval_every": 100_000, "log_every": 5}, tmp_path / "run"
    process = launch(tiny(max_steps=100_000, **settings), data_folder, run, restarts=1)
    for send in (signal.SIGKILL, signal.SIGTERM):
        before = newest_step(run)
        wait_until(lambda before=before: newest_step(run) > before + 20, process)
        os.kill(ranks_of(process)[-1], send)
    assert "continues from step" in assert_stopped(process, run)
    last = newest_step(run)
    assert [line["step"] for line in metrics(run, "loss")] == list(range(5, last + 1, 5))
    fit(run, max_steps=last + 2, **settings)
    assert metrics(run, "loss")[-1]["step"] == last + 2


@pytest.mark.slow
def test_signals_to_torchrun_and_all_ranks_stop_all_of_them_at_one_step(
    tiny: Tiny, data_folder: Path, tmp_path: Path
) -> None:
    run, rare, last = tmp_path / "run", {"save_every": 100_000, "eval_every": 100_000, "log_every": 3}, 0
    for _ in range(20):
        process = launch(tiny(max_steps=100_000, **rare), data_folder, run)
        wait_until(
            lambda: (run / "metrics.jsonl").exists() and len(metrics(run, "loss")) >= last // 3 + 2,  # noqa: B023
            process,
        )
        for pid in (process.pid, *ranks_of(process)):
            os.kill(pid, signal.SIGTERM)
        assert_stopped(process, run)
        before, last = last, newest_step(run)
        assert last > before


@pytest.mark.slow
def test_compiled_layers_on_two_ranks_have_the_losses_of_plain_ones_on_one(
    fit: Fit, tiny: Tiny, data_folder: Path, tmp_path: Path
) -> None:
    settings = {"model": NO_DROPOUT, "max_steps": 4, "save_every": 2, "eval_every": 2, "log_every": 1}
    process = launch(tiny(**settings, compile=True), data_folder, tmp_path / "two")
    fit("one", **settings)
    assert "compiled   yes" in finish(process)
    assert_same_losses(tmp_path / "one", tmp_path / "two")


Found = list[dict[str, Tensor]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("ranks")
    command = [*TORCHRUN, str(REPOSITORY / "tests" / "train" / "two_ranks.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return [load_file(folder / f"rank-{rank}.safetensors") for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_steps_of_two_ranks_are_those_of_one_and_both_have_the_same_bits(found: Found, case: str) -> None:
    ours, theirs = ({name: each for name, each in rank.items() if name.startswith(f"{case}/")} for rank in found)
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]
    one = trained(case, SINGLE_PROCESS)
    if "bf16" not in case:
        tolerance = 1e-2 if case == "muon" else 1e-4
        torch.testing.assert_close(ours, one, atol=tolerance, rtol=tolerance)
        return
    gradients = {name: gradient for name, gradient in one.items() if "/gradient/" in name}
    apart = sum(float((ours[name] - gradient).square().sum()) for name, gradient in gradients.items())
    assert apart**0.5 < 0.01 * sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
    torch.testing.assert_close(ours[f"{case}/sums"], one[f"{case}/sums"], atol=0.1, rtol=1e-3)
