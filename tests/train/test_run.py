"""A run from data folder to model folder: it learns, says what it does, and refuses what does not fit."""

import json
import math
import platform
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from bert_pretrain.cli import stages
from bert_pretrain.config import Config, TrainConfig
from bert_pretrain.errors import DataError, OutputError
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.train.evaluation import evaluate
from bert_pretrain.train.resolved import ResolvedRun
from bert_pretrain.train.run import train
from tests.train.test_resume import metrics

Tiny = Callable[..., Config]

TRAINING_NAMES = [
    *("step", "epoch", "examples", "tokens", "elapsed_seconds", "loss", "mlm_loss", "mlm_accuracy", "nsp_loss"),
    *("nsp_accuracy", "learning_rate", "grad_norm", "examples_per_second", "tokens_per_second", "mfu"),
    *("padding_share", "data_wait_share", "peak_memory_bytes", "skipped_steps"),
    *("time", "host", "job"),
]

VALIDATION_NAMES = [
    *("step", "validation_mlm_loss", "validation_mlm_accuracy", "validation_nsp_loss", "validation_nsp_accuracy"),
    *("time", "host", "job"),
]


def test_a_run_folder_holds_what_the_design_names(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "checkpoints", "model", "manifest.json"}
    steps = {path.name for path in (finished / "checkpoints").iterdir()}
    assert steps == {"step-00000004", "step-00000008", "step-00000012"}
    for folder in (finished / "model", finished / "checkpoints" / "step-00000008"):
        names = {path.name for path in folder.iterdir()}
        assert {"config.json", "model.safetensors", "vocab.txt", "tokenizer.json", "tokenizer_config.json"} <= names
        assert not [name for name in names if name.endswith((".pt", ".bin", ".pkl"))]


def test_metrics_have_the_names_of_the_design(finished: Path) -> None:
    lines = metrics(finished)
    training = [line for line in lines if "loss" in line]
    validation = [line for line in lines if "validation_mlm_loss" in line]
    assert [line["step"] for line in training] == [5, 10, 12]
    assert [line["step"] for line in validation] == [0, 6, 12]
    assert all(list(line) == TRAINING_NAMES for line in training)
    assert all(list(line) == VALIDATION_NAMES for line in validation)
    assert datetime.fromisoformat(training[0]["time"]) <= datetime.fromisoformat(training[-1]["time"])
    assert training[-1]["host"] == platform.node()
    assert training[-1]["examples"] == 12 * 16
    assert training[-1]["epoch"] == pytest.approx(12 * 16 / 360)
    assert training[0]["mfu"] is None
    assert 0 < training[0]["padding_share"] < 0.6


def test_the_final_figures_are_those_of_evaluate(finished: Path, data_folder: Path, tiny: Tiny) -> None:
    manifest = json.loads((finished / "manifest.json").read_text())
    figures = evaluate(finished / "model", data_folder, config=tiny().train)
    for name in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"):
        assert figures[name] == pytest.approx(manifest["validation"][f"validation_{name}"], rel=1e-6)
    assert figures["mlm_perplexity"] == pytest.approx(math.exp(figures["mlm_loss"]))


def test_the_same_command_again_finds_the_run_done(
    finished: Path, tiny: Tiny, data_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    train(tiny(log_every=3, device="auto"), data_folder, finished)
    assert "up to date" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}


def test_the_command_opens_its_data_once_and_finds_the_run_done(
    finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    original = DataFolder.open

    def noted(path: Path, flag: str = "--data", *, verify: bool = False) -> DataFolder:
        opened.append(path)
        return original(path, flag, verify=verify)

    monkeypatch.setattr(DataFolder, "open", staticmethod(noted))
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tiny().model_dump(mode="json")))
    stages.train(str(data_folder), str(finished), config=str(file))
    assert opened == [data_folder]


def test_other_data_is_refused_and_moved_data_is_not(
    finished: Path, tiny: Tiny, data_folder: Path, new_data_folder: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(OutputError, match="data: "):
        train(tiny(), new_data_folder(shard_rows=(100,)), finished)
    shutil.copytree(data_folder, tmp_path / "elsewhere")
    train(tiny(), tmp_path / "elsewhere", finished)


def test_a_run_without_validation_split_says_so(
    tiny: Tiny, new_data_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(max_steps=3), new_data_folder(validation_rows=0), tmp_path / "run")
    assert "no validation split" in capsys.readouterr().out
    assert all("validation_mlm_loss" not in line for line in metrics(tmp_path / "run"))


def test_a_tiny_run_learns(tiny: Tiny, new_data_folder: Callable[..., Path], tmp_path: Path) -> None:
    data = new_data_folder(shard_rows=(1000, 1000), validation_rows=200)
    config = tiny(
        model={"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
        max_steps=300,
        global_batch_size=64,
        micro_batch_tokens=2048,
        peak_lr=5e-3,
        warmup_ratio=0.1,
        log_every=100,
        eval_every=1000,
        save_every=1000,
    )
    train(config, data, tmp_path / "run")
    folder = DataFolder.open(data)
    labels = np.concatenate([read_shard(data, record).masks.original_ids for record in folder.shards("train")])
    shares = np.bincount(labels) / len(labels)
    unigram_entropy = -float((shares[shares > 0] * np.log(shares[shares > 0])).sum())
    last = metrics(tmp_path / "run")[-1]
    assert last["validation_mlm_loss"] < unigram_entropy - 0.7
    assert last["validation_nsp_accuracy"] > 0.75


def test_a_vocabulary_of_equal_size_but_other_words_is_refused(
    finished: Path, tiny: Tiny, data_folder: Path, new_data_folder: Callable[..., Path], tmp_path: Path
) -> None:
    other = new_data_folder("swapped")
    vocabulary = other / "tokenizer" / "vocab.txt"
    words = vocabulary.read_text().splitlines()
    vocabulary.write_text("\n".join([*words[:-2], words[-1], words[-2]]) + "\n")
    vocabulary.with_name("tokenizer.json").unlink()  # which holds the vocabulary too
    with pytest.raises(DataError, match="is not the one that made the data"):
        train(tiny(), other, tmp_path / "run")
    model = shutil.copytree(finished / "model", tmp_path / "model")
    (model / "checksums.json").unlink()
    shutil.copy(vocabulary, model / "vocab.txt")
    (model / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="is not that of the data"):
        train(tiny(), data_folder, tmp_path / "run", init_from=model)
    with pytest.raises(DataError, match="is not that of the data"):
        evaluate(model, data_folder, config=tiny().train)


def test_a_run_that_diverges_ends_with_null_for_what_is_not_finite(
    tiny: Tiny, data_folder: Path, tmp_path: Path
) -> None:
    train(tiny(peak_lr=1e30, warmup_steps=0), data_folder, tmp_path / "run")
    assert metrics(tmp_path / "run")[-1]["validation_mlm_loss"] is None


@pytest.mark.parametrize(
    ("before", "after", "reserve", "every", "due"),
    [(10, 11, 1, 1000, False), (12, 13, 1, 1000, True), (12, 13, 9, 1000, False), (12, 13, 1, 500, False)],
)
def test_a_time_budget_is_evaluated_after_every_eighth(
    before: float, after: float, reserve: float, every: int, due: bool
) -> None:
    length = SimpleNamespace(seconds=100.0)
    run: Any = SimpleNamespace(length=length, config=SimpleNamespace(train=TrainConfig(eval_every=every)))
    assert ResolvedRun.evaluates_by_clock(run, before, after, reserve) == due
