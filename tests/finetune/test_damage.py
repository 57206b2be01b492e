"""Fine-tuning resumes only from complete checkpoints."""

import json
import os
import resource
from pathlib import Path

import pytest
from transformers import Trainer

from bert_pretrain.errors import DataError
from bert_pretrain.finetune.run import finetune
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.training import last_checkpoint
from tests.conftest import call
from tests.finetune.conftest import reviews, write_rows


def make_checkpoint(folder: Path, step: int, best: int) -> Path:
    """Write the state of a checkpoint as the Trainer does, with the path of the best checkpoint."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    state = {"global_step": step, "best_model_checkpoint": str(folder / f"checkpoint-{best}")}
    (path / "trainer_state.json").write_text(json.dumps(state))
    return path


@pytest.mark.parametrize("size", [None, 0, 20])
def test_an_incomplete_checkpoint_is_skipped(tmp_path: Path, size: int | None) -> None:
    assert last_checkpoint(tmp_path) is None
    before, newest = make_checkpoint(tmp_path, 90, 90), make_checkpoint(tmp_path, 180, 90)
    assert last_checkpoint(tmp_path) == newest
    state = newest / "trainer_state.json"
    state.unlink() if size is None else os.truncate(state, size)
    assert last_checkpoint(tmp_path) == before


def test_moved_checkpoints_and_those_without_the_best_one_are_ignored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "here", 9, 9)
    (tmp_path / "here").rename(tmp_path / "there")
    assert last_checkpoint(tmp_path / "there") is None
    make_checkpoint(tmp_path / "lost", 18, 9)
    assert last_checkpoint(tmp_path / "lost") is None


def test_a_damaged_checkpoint_is_an_error_and_overwrite_starts_over(toy_model, tmp_path, monkeypatch) -> None:
    def killed(trainer: Trainer) -> None:
        raise KeyboardInterrupt

    call = {"train": write_rows(tmp_path / "a.jsonl", reviews(40, 1)), "output": tmp_path / "out"}
    settings = Settings(epochs=1, batch_size=8, max_length=16, dropout=0.1)
    monkeypatch.setattr(Trainer, "_load_best_model", killed)
    with pytest.raises(KeyboardInterrupt):
        finetune("classify", toy_model, **call, settings=settings)
    monkeypatch.undo()
    (checkpoint,) = (tmp_path / "out").rglob("checkpoint-*")
    for name in ("optimizer.pt", "model.safetensors"):
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(content[:-8])
        with pytest.raises(DataError, match="a checkpoint is damaged"):
            finetune("classify", toy_model, **call, settings=settings)
        (checkpoint / name).write_bytes(content if name == "optimizer.pt" else b"")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(DataError, match="a checkpoint is damaged"):
        finetune("classify", toy_model, **call, settings=settings)
    assert not (tmp_path / "out" / "config.json").exists()
    assert finetune("classify", toy_model, **call, settings=settings, overwrite=True) == tmp_path / "out"


def test_finished_epochs_are_kept_when_the_disk_is_full(toy_model, tmp_path, monkeypatch, capsys) -> None:
    save, limits = Trainer._save_checkpoint, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_on_a_full_disk(trainer: Trainer, *arguments: object, **options: object) -> None:
        if trainer.state.epoch > 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        save(trainer, *arguments, **options)

    train = write_rows(tmp_path / "a.jsonl", reviews(40, 1))
    command = ["finetune", "classify", toy_model, "--train", train, "--output", tmp_path / "out", "--epochs", 2]
    monkeypatch.setattr(Trainer, "_save_checkpoint", save_on_a_full_disk)
    try:
        message = call(*command, code=2).stderr
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert "File too large" in message
    assert "without --overwrite, continues where it stopped" in message
    assert "continues from checkpoint-" in call(*command).stdout
