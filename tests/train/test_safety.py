"""Time budgets, non-finite gradients and micro-batches that do not fit into memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bert_pretrain.config import DEFAULT_EVAL_EVERY
from bert_pretrain.errors import ConfigError, UserError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.io.files import read_json
from bert_pretrain.model.huggingface import load_model
from bert_pretrain.train import loop, schedule
from bert_pretrain.train import run as run_module
from bert_pretrain.train.checkpoint import open_checkpoint
from bert_pretrain.train.cuda_graph import StepGraphs
from bert_pretrain.train.loader import TrainingData
from bert_pretrain.train.loss import PretrainingLoss, pretraining_loss
from bert_pretrain.train.packing import Batch
from bert_pretrain.train.run import train
from tests.train.conftest import NO_DROPOUT, Fit, metrics, tiny


class Clock:
    """A clock for training: a step takes one second, one in `hanging` ten, what is delayed its time, and else none."""

    def __init__(self, monkeypatch) -> None:
        self.seconds = 0.0
        self.hanging: list[int] = []
        self.patch = monkeypatch.setattr
        for module in (run_module, loop, schedule):
            self.patch(module, "time", self)
        self.delay(loop, "train_step", lambda options: 10.0 if options["step"] in self.hanging else 1.0)

    def perf_counter(self) -> float:
        return self.seconds

    def delay(self, module: Any, name: str, seconds: Callable[[dict[str, Any]], float]) -> None:
        function = getattr(module, name)

        def delayed(*arguments: Any, **options: Any) -> Any:
            self.seconds += seconds(options)
            return function(*arguments, **options)

        self.patch(module, name, delayed)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def test_time_budget_ends_on_time_with_a_finished_model(fit: Fit, tmp_path: Path, clock: Clock) -> None:
    run = tmp_path / "run"
    settings = {"max_steps": None, "eval_every": 1001, "save_every": 1000, "log_every": 1, "warmup_ratio": 0.1}

    def progress(time_budget: str) -> dict[str, Any]:
        fit(run, **settings, time_budget=time_budget)
        return read_json(run / "manifest.json")["progress"]

    first = progress("40s")
    assert 38 <= first["wall_seconds"] <= 40
    assert len(metrics(run, "validation_mlm_loss")) == 2  # before the first step and at the end
    rates = [line["learning_rate"] for line in metrics(run, "learning_rate")]
    assert max(rates) > 0.95e-3
    assert rates[-1] < 0.05e-3
    assert (run / "model" / "model.safetensors").exists()
    assert progress("40s") == first
    with pytest.raises(ConfigError, match="already"):
        progress("10s")
    longer = progress("50s")
    assert longer["step"] > first["step"]
    assert 48 <= longer["wall_seconds"] <= 50


def test_slow_steps_near_the_end_of_a_time_budget_do_not_exceed_it(fit: Fit, clock: Clock) -> None:
    clock.hanging += [25, 27]  # the run ends before another slow one
    run = fit(max_steps=None, time_budget="40s", eval_every=1000, save_every=1000)
    assert 35 < read_json(run / "manifest.json")["progress"]["wall_seconds"] <= 40


def test_time_budget_includes_the_initial_weights_but_keeps_the_warm_up(fit: Fit, clock: Clock) -> None:
    clock.delay(run_module, "start_from_cooccurrences", lambda _: 20.0)
    run = fit(max_steps=None, time_budget="50s", init="cooccurrences", warmup_ratio=0.5, log_every=1)
    progress = read_json(run / "manifest.json")["progress"]
    assert 48 <= progress["wall_seconds"] <= 50
    assert progress["elapsed_seconds"] <= 30  # the training loop gets the rest of the budget
    rates = [line["learning_rate"] for line in metrics(run, "learning_rate")]
    assert rates[0] < 0.1 * max(rates)


@pytest.mark.parametrize("num_slow_steps", [1, 2])
def test_the_warm_up_by_the_clock_begins_after_the_first_evaluation_and_the_slow_steps(
    fit: Fit, clock: Clock, monkeypatch, num_slow_steps: int
) -> None:
    clock.hanging += range(num_slow_steps)
    clock.delay(loop, "evaluate_batches", lambda _: 10.0)
    if num_slow_steps == 2:  # as if the second step captured a graph
        make_graphs = lambda self: StepGraphs(self.state.model, self.state.optimizers)  # noqa: E731
        monkeypatch.setattr(loop.Loop, "_make_graphs", make_graphs)
    run = fit(max_steps=None, time_budget="100s", warmup_ratio=0.6, log_every=1, eval_every=1000, save_every=1000)
    rates = [line["learning_rate"] for line in metrics(run, "learning_rate")]
    assert max(rates[: num_slow_steps + 2]) < 0.2 * max(rates)
    assert read_json(run / "manifest.json")["progress"]["warmup_start"] == 10 * (1 + num_slow_steps)


def test_time_budget_evaluates_eight_times_by_default(fit: Fit, clock: Clock) -> None:
    run = fit(max_steps=None, time_budget="80s", eval_every=DEFAULT_EVAL_EVERY, save_every=1000)
    assert len(metrics(run, "validation_mlm_loss")) == 9


def poison(model: Path, name: str, row: int) -> None:
    """Write numbers into one row of a weight of a model folder whose squares overflow, so that its outputs are NaN."""
    tensors = load_file(model / "model.safetensors")
    tensors[name][row] = 1e25
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def test_non_finite_steps_are_skipped_and_counted(fit: Fit, model: Path) -> None:
    # Only the longest examples reach the last positions, and not every batch has one.
    poison(model, "bert.embeddings.position_embeddings.weight", 29)
    run = fit(init_from=model, log_every=1, global_batch_size=4)
    training = metrics(run, "loss")
    skipped = [line["skipped_steps"] for line in training]
    assert 0 < sum(skipped) < 12
    assert [line["loss"] is None for line in training] == [number == 1 for number in skipped]
    before, after = (load_file(path / "model.safetensors") for path in (model, run / "model"))
    assert not torch.equal(before["cls.predictions.bias"], after["cls.predictions.bias"])


def test_persistent_non_finite_gradients_stop_the_run_with_a_reproducible_checkpoint(
    data_folder: Path, tmp_path: Path, model: Path
) -> None:
    poison(model, "bert.embeddings.token_type_embeddings.weight", 1)
    run, config = tmp_path / "run", tiny(max_steps=100)
    folder = run / "checkpoints" / "step-00000030"
    with pytest.raises(UserError, match="30 steps in a row") as caught:
        train(config, data_folder, run, init_from=model)
    assert str(folder) in str(caught.value)
    # The step is enough to reproduce the batch.
    step = open_checkpoint(folder).record["progress"]["step"]
    data = TrainingData(
        DataFolder.open(data_folder), seed=config.train.seed, global_batch_size=16, micro_batch_tokens=256
    )
    network = load_model(folder).model
    assert pretraining_loss(network, data.global_batch(step - 1).micro_batches[0]).mlm_loss.isnan()
    before, after = (load_file(path / "model.safetensors") for path in (model, folder))
    assert all(torch.equal(before[name], after[name]) for name in before if "token_type" not in name)


def limit_memory(monkeypatch, tokens: int) -> None:
    """Simulate a GPU that runs out of memory on larger micro-batches, from the third forward pass on."""
    forward, calls = PretrainingLoss.forward, 0

    def limited(self: PretrainingLoss, batch: Batch) -> Any:
        nonlocal calls
        calls += self.training
        if self.training and calls > 2 and batch.num_tokens > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, batch)

    monkeypatch.setattr(PretrainingLoss, "forward", limited)


def test_out_of_memory_halves_micro_batches_without_changing_losses(fit: Fit, tmp_path: Path, monkeypatch) -> None:
    config = {"model": NO_DROPOUT, "micro_batch_tokens": "auto"}  # dropout depends on micro-batches
    fit("large", **config)
    limit_memory(monkeypatch, 200)
    fit("small", **config)
    small, large = metrics(tmp_path / "small"), metrics(tmp_path / "large")
    assert [line["step"] for line in small] == [line["step"] for line in large]
    assert small[-1]["validation_mlm_loss"] == pytest.approx(large[-1]["validation_mlm_loss"], rel=1e-4)
    newest = open_checkpoint(tmp_path / "small" / "checkpoints" / "step-00000012")
    assert newest.record["micro_batch_tokens"] < 512


@pytest.mark.parametrize(("tokens", "word"), [("auto", "one example"), (64, "micro_batch_tokens")])
def test_out_of_memory_is_an_error_for_one_example_or_a_configured_size(
    fit: Fit, monkeypatch, tokens: str | int, word: str
) -> None:
    limit_memory(monkeypatch, 0)
    with pytest.raises(ConfigError, match=word):
        fit(micro_batch_tokens=tokens)
