"""What a fine-tuning has written is whole before it is used: checkpoints to continue from, and the finished folder."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Trainer

from bert_pretrain.errors import DataError
from bert_pretrain.finetune.run import KIND, _is_complete, finetune
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.training import _point_to_best, _Seal, newest_checkpoint
from bert_pretrain.storage import manifest
from bert_pretrain.storage.checksums import damage_of_folder, seal_folder


def make_checkpoint(folder: Path, step: int, best: int) -> Path:
    """Write a checkpoint as the Trainer does, which notes the path of the best one so far."""
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    (path / "optimizer.pt").write_bytes(b"state" * 20)
    state = {"global_step": step, "best_model_checkpoint": str(folder / f"checkpoint-{best}")}
    (path / "trainer_state.json").write_text(json.dumps(state))
    _Seal().on_save(SimpleNamespace(output_dir=str(folder)), SimpleNamespace(global_step=step), None)
    return path


@pytest.mark.parametrize("name", ["optimizer.pt", "trainer_state.json", "checksums.json"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    before, newest = make_checkpoint(tmp_path, 9, 9), make_checkpoint(tmp_path, 18, 9)
    assert newest_checkpoint(tmp_path) == newest
    content = bytearray((newest / name).read_bytes())
    content[len(content) // 2] ^= 1
    (newest / name).write_bytes(content)
    assert newest_checkpoint(tmp_path) == before
    assert f"{newest} is damaged and was removed" in capsys.readouterr().err


def test_a_checkpoint_whose_best_one_is_damaged_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best, _ = make_checkpoint(tmp_path, 9, 9), make_checkpoint(tmp_path, 18, 9)
    os.truncate(best / "optimizer.pt", 10)
    assert newest_checkpoint(tmp_path) is None
    assert "the best one before it, checkpoint-9, is not whole" in capsys.readouterr().err


def test_a_checkpoint_without_checksums_was_killed_and_goes_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, newest = make_checkpoint(tmp_path, 9, 9), make_checkpoint(tmp_path, 18, 9)
    (newest / "checksums.json").unlink()
    assert newest_checkpoint(tmp_path) == before
    assert not newest.exists()
    assert capsys.readouterr().err == ""


def test_a_moved_checkpoint_names_its_best_one_and_stays_whole(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    make_checkpoint(tmp_path / "here", 9, 9)
    (tmp_path / "here").rename(tmp_path / "there")
    moved = tmp_path / "there" / "checkpoint-9"
    assert newest_checkpoint(tmp_path / "there") == moved
    _point_to_best(moved)
    assert json.loads((moved / "trainer_state.json").read_text())["best_model_checkpoint"] == str(moved)
    assert damage_of_folder(moved) is None


@pytest.mark.parametrize("name", ["model.safetensors", "checksums.json"])
def test_a_result_without_one_of_its_files_is_not_up_to_date(tmp_path: Path, name: str) -> None:
    output, work = make_result(tmp_path), tmp_path / "out.partial"
    (output / name).unlink()
    with pytest.raises(DataError, match=f"is damaged: {name} is missing"):
        _is_complete(output, work, {"seed": 1}, overwrite=False)


def make_result(folder: Path) -> Path:
    """Write a finished folder with weights only."""
    output = folder / "out"
    output.mkdir()
    (output / "model.safetensors").write_bytes(b"weights" * 9)
    seal_folder(output)
    manifest.complete(output, KIND, {"seed": 1}, {})
    return output


def test_a_damaged_result_is_not_up_to_date(tmp_path: Path) -> None:
    output, work = make_result(tmp_path), tmp_path / "out.partial"
    assert _is_complete(output, work, {"seed": 1}, overwrite=False)
    os.truncate(output / "model.safetensors", 8)
    with pytest.raises(DataError, match=r"model\.safetensors has 8 bytes instead of 63"):
        _is_complete(output, work, {"seed": 1}, overwrite=False)


@pytest.mark.parametrize("change", ["flip", "cut"])
def test_a_best_checkpoint_that_changes_while_it_trains_is_refused_and_the_next_command_succeeds(
    toy_model: Path,
    reviews: Callable[[int, int], list[dict[str, Any]]],
    as_jsonl: Callable[[Path, list[dict[str, Any]]], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    load = Trainer._load_best_model

    def damaged(trainer: Trainer) -> None:
        path = Path(trainer.state.best_model_checkpoint) / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content if change == "flip" else content[:-8])
        load(trainer)

    call = {"train": as_jsonl(tmp_path / "a.jsonl", reviews(40, 1)), "output": tmp_path / "out"}
    settings = Settings(epochs=1, batch_size=8, max_length=16)
    monkeypatch.setattr(Trainer, "_load_best_model", damaged)
    with pytest.raises(DataError, match="a checkpoint was changed while the command ran"):
        finetune("classify", toy_model, **call, settings=settings)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert finetune("classify", toy_model, **call, settings=settings) == tmp_path / "out"
