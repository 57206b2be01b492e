"""Time budgets, non-finite gradients and micro-batches that do not fit into memory."""

from pathlib import Path
from types import SimpleNamespace
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
from bert_pretrain.train.checkpoint import open_checkpoint
from bert_pretrain.train.loader import TrainingData
from bert_pretrain.train.loss import PretrainingLoss, pretraining_loss
from bert_pretrain.train.packing import Batch
from bert_pretrain.train.run import train
from tests.train.conftest import NO_DROPOUT, Fit, metrics, tiny


@pytest.fixture
def hanging_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Patch the clock: a step takes one second, a step in the returned list ten, everything else none."""
    hanging: list[int] = []
    seconds, train_step = [0.0], loop.train_step

    def timed_step(*arguments: Any, step: int, **options: Any) -> None:
        train_step(*arguments, step=step, **options)
        seconds[0] += 10.0 if step in hanging else 1.0

    for module in (loop, schedule):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    monkeypatch.setattr(loop, "train_step", timed_step)
    return hanging


def test_time_budget_ends_on_time_with_a_finished_model(fit: Fit, tmp_path: Path, hanging_steps: list[int]) -> None:
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


def test_slow_step_near_the_end_of_a_time_budget_does_not_exceed_it(
    fit: Fit, tmp_path: Path, hanging_steps: list[int]
) -> None:
    hanging_steps.append(25)
    run = tmp_path / "run"
    fit(run, max_steps=None, time_budget="40s", eval_every=1000, save_every=1000)
    assert 35 < read_json(run / "manifest.json")["progress"]["wall_seconds"] <= 40


def test_time_budget_evaluates_eight_times_by_default(fit: Fit, hanging_steps: list[int]) -> None:
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


def limit_memory(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Simulate a GPU that runs out of memory on larger micro-batches, from the third forward pass on."""
    forward, calls = PretrainingLoss.forward, 0

    def limited(self: PretrainingLoss, batch: Batch) -> Any:
        nonlocal calls
        calls += self.training
        if self.training and calls > 2 and batch.num_tokens > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, batch)

    monkeypatch.setattr(PretrainingLoss, "forward", limited)


def test_out_of_memory_halves_micro_batches_without_changing_losses(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    fit: Fit, monkeypatch: pytest.MonkeyPatch, tokens: str | int, word: str
) -> None:
    limit_memory(monkeypatch, 0)
    with pytest.raises(ConfigError, match=word):
        fit(micro_batch_tokens=tokens)
