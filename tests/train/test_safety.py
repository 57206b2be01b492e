"""What protects a run: its time budget is kept, gradients that stay non-finite end it, and the batch is kept."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.figure  # noqa: F401  (a second that is not training's, where the time of a run is measured)
import pytest
import torch
from safetensors.torch import load_file, save_file

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError, DataError, UserError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.io.files import seal_folder
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.huggingface import load_weights
from bert_pretrain.train import checkpoint, loop
from bert_pretrain.train.checkpoint import open_checkpoint
from bert_pretrain.train.loader import TrainingData
from bert_pretrain.train.loss import pretraining_loss
from bert_pretrain.train.run import train
from tests.train.test_resume import metrics

Tiny = Callable[..., Config]


class StepClock:
    """A clock on which a step takes a second and all else no time: the same run on a machine of any load."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hanging_step: int = -1) -> None:
        self._seconds = 0.0
        self._hanging_step = hanging_step
        self._train_step = loop.train_step
        monkeypatch.setattr(loop, "time", self)
        monkeypatch.setattr(loop, "train_step", self.train_step)

    def perf_counter(self) -> float:
        return self._seconds

    def train_step(self, *arguments: Any, step: int, **options: Any) -> None:
        self._train_step(*arguments, step=step, **options)
        self._seconds += 10.0 if step == self._hanging_step else 1.0


def test_a_time_budget_ends_on_time_with_a_finished_model(
    tiny: Tiny, data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    StepClock(monkeypatch)
    run = tmp_path / "run"
    settings = {"max_steps": None, "eval_every": 1000, "save_every": 1000, "log_every": 1, "warmup_ratio": 0.1}
    config = tiny(**settings, time_budget="40s")
    train(config, data_folder, run)
    record = json.loads((run / "manifest.json").read_text())
    assert 38 <= record["progress"]["wall_seconds"] <= 40
    rates = [line["learning_rate"] for line in metrics(run) if "learning_rate" in line]
    assert max(rates) > 0.95e-3
    assert rates[-1] < 0.05e-3
    assert (run / "model" / "model.safetensors").exists()
    capsys.readouterr()
    train(config, data_folder, run)
    assert "up to date" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="already"):
        train(tiny(**settings, time_budget="10s"), data_folder, run)
    train(tiny(**settings, time_budget="50s"), data_folder, run)
    longer = json.loads((run / "manifest.json").read_text())["progress"]
    assert longer["step"] > record["progress"]["step"]
    assert 48 <= longer["wall_seconds"] <= 50


def test_a_step_that_hangs_shortly_before_the_end_makes_the_run_short_not_late(
    tiny: Tiny, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StepClock(monkeypatch, hanging_step=25)
    run = tmp_path / "run"
    train(tiny(max_steps=None, time_budget="40s", eval_every=1000, save_every=1000), data_folder, run)
    assert 35 < json.loads((run / "manifest.json").read_text())["progress"]["wall_seconds"] <= 40


@pytest.fixture
def poisoned(tiny: Tiny, data_folder: Path, tmp_path: Path) -> Callable[[str, int], Path]:
    """Make a model folder with NaN in one row of one of its tables."""

    def make(name: str, row: int) -> Path:
        train(tiny(max_steps=1), data_folder, tmp_path / "origin")
        path = tmp_path / "origin" / "model" / "model.safetensors"
        tensors = load_file(path)
        tensors[name][row] = float("nan")
        save_file(tensors, path, metadata={"format": "pt"})
        seal_folder(path.parent)
        return path.parent

    return make


def test_steps_that_are_not_finite_are_skipped_and_counted_and_the_others_count(
    tiny: Tiny, data_folder: Path, tmp_path: Path, poisoned: Callable[[str, int], Path]
) -> None:
    # Only the longest examples reach the last positions, and not every batch holds one.
    model = poisoned("bert.embeddings.position_embeddings.weight", 29)
    run = tmp_path / "run"
    train(tiny(log_every=1, global_batch_size=4), data_folder, run, init_from=model)
    training = [line for line in metrics(run) if "loss" in line]
    skipped = [line["skipped_steps"] for line in training]
    assert 0 < sum(skipped) < 12
    assert [line["loss"] is None for line in training] == [number == 1 for number in skipped]
    before, after = (load_file(path / "model.safetensors") for path in (model, run / "model"))
    assert not torch.equal(before["cls.predictions.bias"], after["cls.predictions.bias"])


def test_gradients_that_stay_non_finite_end_the_run_with_a_checkpoint_to_compute_the_step_again(
    tiny: Tiny, data_folder: Path, tmp_path: Path, poisoned: Callable[[str, int], Path]
) -> None:
    model = poisoned("bert.embeddings.token_type_embeddings.weight", 1)
    run = tmp_path / "run"
    with pytest.raises(UserError, match="30 steps in a row") as caught:
        train(tiny(max_steps=100), data_folder, run, init_from=model)
    folder = run / "checkpoints" / "step-00000030"
    assert str(folder) in str(caught.value)
    config, step = tiny(), open_checkpoint(folder).record["progress"]["step"]
    data = TrainingData(
        DataFolder.open(data_folder), seed=config.train.seed, global_batch_size=16, micro_batch_tokens=256
    )
    network = BertForPreTraining(config.model, 152)
    load_weights(network, folder, flag="checkpoint", seed=0)
    # Nothing but the step is needed to have the batch again that broke the run.
    assert pretraining_loss(network, data.global_batch(step - 1).micro_batches[0]).mlm_loss.isnan()
    before, after = (load_file(path / "model.safetensors") for path in (model, folder))
    assert all(torch.equal(before[name], after[name]) for name in before if "token_type" not in name)


def test_checkpoints_are_written_beside_training_one_at_a_time(
    tiny: Tiny, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing: list[str] = []
    steps_meanwhile: list[int] = []
    original_write, original_step = checkpoint.write_checkpoint, loop.train_step

    def slow_write(*arguments: Any) -> Path:
        assert not writing
        writing.append("one")
        time.sleep(0.3)
        path = original_write(*arguments)
        writing.pop()
        return path

    def noted_step(*arguments: Any, **rest: Any) -> None:
        if writing:
            steps_meanwhile.append(rest["step"])
        original_step(*arguments, **rest)

    monkeypatch.setattr(checkpoint, "write_checkpoint", slow_write)
    monkeypatch.setattr(loop, "train_step", noted_step)
    run = tmp_path / "run"
    train(tiny(save_every=3, keep_checkpoints=9), data_folder, run)
    assert len(steps_meanwhile) >= 3
    monkeypatch.undo()
    # A checkpoint holds its own step's state, whatever was computed while it was written.
    train(tiny(save_every=3, keep_checkpoints=9), data_folder, tmp_path / "straight")
    for step in (3, 6, 9, 12):
        name = f"checkpoints/step-{step:08d}/training_state.safetensors"
        one, other = (load_file(folder / name) for folder in (run, tmp_path / "straight"))
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("change", ["moved away", "another shard"])
def test_data_that_changes_under_a_run_stops_it_with_a_message_and_it_goes_on_later(
    tiny: Tiny, new_data_folder: Callable[..., Path], tmp_path: Path, change: str
) -> None:
    data = new_data_folder(shard_rows=(40, 40, 40, 40, 40, 40, 40, 40))
    config = tiny(max_steps=40, save_every=4, log_every=4, eval_every=4)
    run, aside = tmp_path / "run", tmp_path / "aside"
    original = loop.train_step
    changed: list[int] = []

    def change_data() -> None:
        if change == "moved away":
            data.rename(aside)
        else:
            shutil.copytree(data, aside)
            shards = sorted((data / "train").iterdir())
            for path in shards:
                path.write_bytes(path.read_bytes()[::-1])

    def step(*arguments: Any, **rest: Any) -> None:
        original(*arguments, **rest)
        if rest["step"] == 5 and not changed:
            changed.append(5)
            change_data()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", step)
        with pytest.raises(DataError) as caught:
            train(config, data, run)
    assert "shard" in str(caught.value)
    assert list((run / "checkpoints").iterdir())
    # The folder may come back at another place: what counts is its content.
    train(config, aside, run)
    assert metrics(run)[-1]["step"] == 40
