"""Fine-tuning continues after its last finished epoch."""

import os
import resource
from pathlib import Path

import pytest
import torch

from bert_pretrain.errors import DataError
from bert_pretrain.finetune.run import finetune
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.training import STATE
from tests.conftest import call
from tests.finetune.conftest import reviews, write_rows


def test_a_damaged_state_is_an_error_and_overwrite_starts_over(toy_model, tmp_path, monkeypatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    call = {"train": write_rows(tmp_path / "a.jsonl", reviews(40, 1)), "output": tmp_path / "out"}
    settings = Settings(epochs=2, batch_size=8, max_length=16, dropout=0.1)
    save, epochs = torch.save, []

    def save_once(*arguments: object) -> None:
        if epochs:
            stopped()
        epochs.append(save(*arguments))

    monkeypatch.setattr(torch, "save", save_once)
    with pytest.raises(KeyboardInterrupt):
        finetune("classify", toy_model, **call, settings=settings)
    monkeypatch.undo()
    (state,) = (tmp_path / "out").rglob(STATE)
    size = state.stat().st_size
    for length in (size - 8, size // 2, 20, 0):
        os.truncate(state, length)
        with pytest.raises(DataError, match="the state is damaged"):
            finetune("classify", toy_model, **call, settings=settings)
    assert not (tmp_path / "out" / "config.json").exists()
    assert finetune("classify", toy_model, **call, settings=settings, overwrite=True) == tmp_path / "out"


def test_finished_epochs_are_kept_when_the_disk_is_full(toy_model: Path, tmp_path: Path, monkeypatch) -> None:
    save, limits, epochs = torch.save, resource.getrlimit(resource.RLIMIT_FSIZE), []

    def save_on_a_full_disk(*arguments: object) -> None:
        if epochs:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        epochs.append(save(*arguments))

    train = write_rows(tmp_path / "a.jsonl", reviews(40, 1))
    command = ["finetune", "classify", toy_model, "--train", train, "--output", tmp_path / "out", "--epochs", 2]
    monkeypatch.setattr(torch, "save", save_on_a_full_disk)
    try:
        message = call(*command, code=2).stderr
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert "check that the disk is not full" in message
    assert "without --overwrite, continues where it stopped" in message
    assert "continues after epoch 1" in call(*command).stdout
