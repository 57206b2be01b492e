"""What a run reads again was damaged, or its folder goes away: one message, never another model."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bert_pretrain.config import Config
from bert_pretrain.errors import DataError, OutputError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.train import loop, model_card
from bert_pretrain.train.run import train
from tests.train.test_resume import assert_same_run, change, interrupted_copy

Tiny = Callable[..., Config]


def test_without_a_whole_checkpoint_the_run_does_not_begin_again_unasked(
    finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path
) -> None:
    run = interrupted_copy(finished, tmp_path / "run")
    for path in (run / "checkpoints").iterdir():
        change(path / "config.json", '"layer_norm_eps": 1e-12', '"layer_norm_eps": 1e-02')
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    for _ in range(2):
        with pytest.raises(DataError, match=r"none of the run's checkpoints is whole.*config\.json has changed"):
            train(tiny(), data_folder, run)
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == before


def test_a_picture_that_finds_the_disk_full_is_drawn_by_the_same_command(
    finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = interrupted_copy(finished, tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(model_card, "CURVES", "/dev/full")
        with pytest.raises(OSError, match="No space left on device"):
            train(tiny(), data_folder, run)
    train(tiny(), data_folder, run)
    assert (run / "model" / "curves.png").is_file()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_final_model_is_written_again(
    finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    os.truncate(run / "model" / name, 100)
    with pytest.raises(DataError, match=f"{name} has 100 bytes"):
        train(tiny(), data_folder, tmp_path / "other", init_from=run / "model")
    train(tiny(), data_folder, run)
    assert f"missing or damaged ({name} has 100 bytes" in capsys.readouterr().out
    assert (run / "model" / name).read_bytes() == (finished / "model" / name).read_bytes()
    os.truncate(run / "model" / name, 100)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(OutputError, match="no checkpoint from which its final model"):
        train(tiny(), data_folder, run)
    assert (run / "manifest.json").exists()


def test_damaged_figures_are_one_message(finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path) -> None:
    run = interrupted_copy(finished, tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines.replace('"loss": 5', '"loss": 4', 1))
    with pytest.raises(DataError, match=r"metrics\.jsonl is damaged"):
        train(tiny(), data_folder, run)
    (run / "metrics.jsonl").write_text(lines)
    train(tiny(), data_folder, run)
    assert_same_run(finished, run)


@pytest.mark.parametrize(
    ("last_step", "left"),
    [
        (2, []),
        (11, []),
        (11, ["config.yaml"]),
        (11, ["config.yaml", "checkpoints", "metrics.jsonl"]),
        (11, ["checkpoints"]),
    ],
)
def test_a_run_whose_folder_goes_away_does_not_end_well(
    tiny: Tiny, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_step: int, left: list[str]
) -> None:
    run, train_step = tmp_path / "run", loop.train_step

    def and_remove(*arguments: Any, step: int, **options: Any) -> None:
        train_step(*arguments, step=step, **options)
        if step == last_step:
            run.rename(tmp_path / "removed")
            for name in left:  # by a thread that writes at this moment, or because the removal did not end
                copy = shutil.copytree if (tmp_path / "removed" / name).is_dir() else shutil.copyfile
                run.mkdir(exist_ok=True)
                copy(tmp_path / "removed" / name, run / name)

    monkeypatch.setattr(loop, "train_step", and_remove)
    with pytest.raises(OutputError, match="was moved or removed"):
        train(tiny(), data_folder, run)
    monkeypatch.undo()
    train(tiny(), data_folder, run)  # the same command continues, or begins again


def test_verify_finds_a_flipped_bit_before_the_first_step(new_data_folder: Callable[..., Path], tmp_path: Path) -> None:
    data = new_data_folder()
    shard = data / "train" / "00002.parquet"
    content = shard.read_bytes()
    shard.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    DataFolder.open(data)
    command = [sys.executable, "-m", "bert_pretrain", "train", "--data", data, "--output", tmp_path / "run", "--verify"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert "00002.parquet is damaged" in found.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["status.json"]
