"""Two ranks give the same results as one process, for every optimizer and across stops and restarts."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from bert_pretrain.errors import ConfigError
from bert_pretrain.io.files import read_json
from bert_pretrain.train.checkpoint import open_checkpoint
from bert_pretrain.train.distributed import SINGLE_PROCESS, DistContext, init_distributed, parallelize, shut_down
from bert_pretrain.train.inputs import check_inputs
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.optimizers import make_optimizers
from bert_pretrain.train.run import train
from bert_pretrain.train.sampled_softmax import CandidateSampler
from bert_pretrain.train.signals import checkpoint_paths, newest_step
from bert_pretrain.train.state import TrainState
from bert_pretrain.train.step import train_step
from tests.conftest import wait_until
from tests.train.conftest import (
    NO_DROPOUT,
    VOCAB_SIZE,
    Fit,
    NewData,
    cut,
    final_tensors,
    interrupted_copy,
    make_examples,
    make_model,
    metrics,
    tiny,
)
from tests.train.test_resume import RARE, command, num_lines, start


def ranks() -> list[dict[str, str]]:
    """Return the environment variables that torchrun sets for two ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return [{"RANK": rank, "LOCAL_RANK": rank, **shared} for rank in "01"]


def on_two_ranks(function: Callable[..., object], *arguments: object) -> None:
    """Call a function in two forked processes."""

    def run(environment: dict[str, str]) -> None:
        os.environ |= environment
        function(*arguments)
        dist.barrier()
        shut_down(0)

    processes = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in ranks()]
    for process in processes:
        process.start()
    for process in processes:
        process.join(180)
    assert [process.exitcode for process in processes] == [0, 0]


def assert_same_losses(left: Path, right: Path) -> None:
    for one, other in zip(metrics(left), metrics(right), strict=True):
        for name in one:
            if name.endswith(("step", "loss", "accuracy", "grad_norm", "examples", "tokens")):
                assert one[name] == pytest.approx(other[name], abs=1e-4, rel=1e-4), (one["step"], name)


def test_two_ranks_match_one_and_their_checkpoint_resumes_on_one(new_data_folder: NewData, tmp_path: Path) -> None:
    # 15 examples give the ranks shares and micro-batches of different sizes.
    data_folder = new_data_folder("dynamic", masking="dynamic")  # each rank draws the masks of whole shards
    config = tiny(
        model=NO_DROPOUT, max_steps=8, log_every=1, eval_every=3, save_every=4,
        global_batch_size=15, micro_batch_tokens=90, peak_lr=5e-3, keep_checkpoints=9,
    )  # fmt: skip
    two = tmp_path / "two"
    on_two_ranks(train, config, data_folder, two)
    assert num_ranks(two) == 2
    train(config, data_folder, tmp_path / "one")
    assert_same_losses(tmp_path / "one", two)
    mixed = interrupted_copy(two, tmp_path / "mixed", "step-00000008")
    train(config, data_folder, mixed)
    assert_same_losses(tmp_path / "one", mixed)
    torch.testing.assert_close(final_tensors(mixed), final_tensors(tmp_path / "one"), atol=1e-4, rtol=1e-4)


def test_more_ranks_than_examples_are_rejected(data_folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(ConfigError, match="5 processes"):
        check_inputs(tiny(global_batch_size=4), data_folder, tmp_path / "run")


def num_ranks(run: Path) -> int:
    """Return the number of ranks that wrote the newest checkpoint."""
    checkpoint = checkpoint_paths(run / "checkpoints")[-1]
    return int(open_checkpoint(checkpoint).record["ranks"])


def assert_stopped(run: Path) -> None:
    """Check that all ranks stopped at the same step with an intact checkpoint."""
    session = read_json(run / "status.json")
    assert (session["status"], session["step"]) == ("stopped", newest_step(run))
    assert "the same command continues" in session["message"]
    assert num_ranks(run) == 2


def test_killed_or_stopped_rank_ends_both_and_they_resume(fit: Fit, data_folder: Path, tmp_path: Path) -> None:
    settings, run = {"save_every": 10, "eval_every": 100_000, "log_every": 5}, tmp_path / "run"
    words = command(tiny(max_steps=100_000, **settings), data_folder, run)
    for number, receivers, exit_codes in (
        (signal.SIGKILL, [1], [1, -signal.SIGKILL]),
        (signal.SIGTERM, [1], [143, 143]),
        (signal.SIGTERM, [1, 0, 1], None),  # a cluster signals torchrun and its ranks, and torchrun forwards
    ):
        before, processes = newest_step(run), [start(words, **rank) for rank in ranks()]
        wait_until(lambda before=before: newest_step(run) > before, processes[0])
        for rank in receivers:
            os.kill(processes[rank].pid, number)
        for process in processes:
            process.join(180)
        assert exit_codes in (None, [process.exitcode for process in processes])
        if number == signal.SIGTERM:
            assert_stopped(run)
    last = newest_step(run)
    assert [line["step"] for line in metrics(run, "loss")] == list(range(5, last + 1, 5))
    fit(run, max_steps=last + 2, **settings)
    assert metrics(run, "loss")[-1]["step"] == last + 2


def torchrun(words: list[str]) -> "subprocess.Popen[str]":
    """Start the program with torchrun on two ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "bert_pretrain"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        [sys.executable, *launcher, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_missing_local_rank_is_an_error(monkeypatch) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match="LOCAL_RANK is not set"):
        init_distributed("cpu")


@pytest.mark.slow
def test_signals_to_torchrun_and_all_ranks_stop_them_at_the_same_step(data_folder: Path, tmp_path: Path) -> None:
    run, last = tmp_path / "run", 0
    for _ in range(20):
        process = torchrun(command(tiny(max_steps=100_000, **RARE), data_folder, run))
        wait_until(lambda last=last: num_lines(run) >= last // 3 + 4, process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in (process.pid, *map(int, children)):
            os.kill(pid, signal.SIGTERM)
        process.communicate(timeout=180)
        assert_stopped(run)
        before, last = last, newest_step(run)
        assert last > before


CASES = ("adamw", "lamb", "muon", "adamw in bf16", "adamw with candidates")


def trained(case: str, dist_context: DistContext) -> dict[str, Tensor]:
    """Return the first gradients, and the weights and metrics after three steps without dropout.

    With bf16, weights are cast as for compiled layers on CUDA, but nothing is compiled.
    """
    is_bf16 = "bf16" in case
    torch.set_autocast_enabled("cuda", is_bf16)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    config = tiny(model={**NO_DROPOUT, "hidden_size": 36}, optimizer=case.partition(" ")[0])
    model = make_model(config)
    network = parallelize(PretrainingLoss(model, compiled=is_bf16), dist_context)
    state = TrainState(model, network, make_optimizers(model, config.train), None)
    results: dict[str, Tensor] = {}
    for step in range(3):
        batch = cut(make_examples(30, step), 200, dist_context.rank, dist_context.size)
        if "candidates" in case:
            sampler = CandidateSampler(np.full(VOCAB_SIZE, 1 / VOCAB_SIZE), 60, seed=1)
            batch = batch.with_candidates(sampler.draw(step))
        with torch.compiler.set_stance("force_eager"):
            train_step(
                state,
                batch,
                config.train,
                step=step,
                learning_rate=5e-3,
                dtype=torch.bfloat16 if is_bf16 else torch.float32,
                dist_context=dist_context,
            )
        if not results:
            results = {f"{case}/gradient/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.set_autocast_enabled("cuda", False)
    results |= {f"{case}/weight/{name}": weight.detach() for name, weight in model.named_parameters()}
    return {**results, f"{case}/sums": state.sums}


def compute(folder: Path) -> None:
    """Compute all cases as one of two ranks."""
    dist_context = init_distributed("cpu")
    results: dict[str, Tensor] = {}
    for case in CASES:
        results |= trained(case, dist_context)
    save_file(results, folder / f"{dist_context.rank}.safetensors")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("ranks")
    on_two_ranks(compute, folder)
    return [load_file(folder / f"{rank}.safetensors") for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_steps_of_two_ranks_match_one_and_are_bit_equal_on_both(results: list[dict[str, Tensor]], case: str) -> None:
    ours, theirs = ({name: each for name, each in rank.items() if name.startswith(f"{case}/")} for rank in results)
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
    one = trained(case, SINGLE_PROCESS)
    if "bf16" not in case:
        tolerance = 1e-2 if case == "muon" else 1e-4
        torch.testing.assert_close(ours, one, atol=tolerance, rtol=tolerance)
        return
    gradients = {name: gradient for name, gradient in one.items() if "/gradient/" in name}
    apart = sum(float((ours[name] - gradient).square().sum()) for name, gradient in gradients.items())
    assert apart**0.5 < 0.01 * sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
    torch.testing.assert_close(ours[f"{case}/sums"], one[f"{case}/sums"], atol=0.1, rtol=1e-3)
