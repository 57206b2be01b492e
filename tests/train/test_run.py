"""A run from data folder to model folder: its files and metrics, dry runs, evaluation, and input checks."""

import math
import platform
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForPreTraining

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError, DataError, OutputError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.shards import read_shard
from bert_pretrain.io.files import read_json
from bert_pretrain.model.huggingface import load_model
from bert_pretrain.train.distributed import DistContext
from bert_pretrain.train.evaluation import evaluate
from bert_pretrain.train.loader import evaluation_batches
from bert_pretrain.train.packing import pack
from tests.train.conftest import NO_DROPOUT, Fit, NewData, metrics, rows_of, tiny

TRAINING_NAMES = (
    "step epoch examples tokens elapsed_seconds loss mlm_loss mlm_accuracy nsp_loss nsp_accuracy learning_rate "
    "grad_norm examples_per_second tokens_per_second mfu padding_share data_wait_share peak_memory_bytes "
    "skipped_steps time host job"
)
VALIDATION_NAMES = (
    "step validation_mlm_loss validation_mlm_accuracy validation_nsp_loss validation_nsp_accuracy "
    "validation_examples validation_documents time host job"
)


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_run_folder_has_the_documented_files(finished: Path) -> None:
    model = "README.md checksums.json config.json model.safetensors tokenizer.json tokenizer_config.json vocab.txt"
    for folder, expected in {
        "": "checkpoints config.yaml manifest.json metrics.jsonl model status.json",
        "checkpoints": "step-00000004 step-00000008 step-00000012",
        "model": f"{model} curves.png",
        "checkpoints/step-00000008": f"{model} training_state.json training_state.safetensors",
    }.items():
        assert {path.name for path in (finished / folder).iterdir()} == set(expected.split())


def test_the_configuration_of_a_run_has_the_vocabulary_and_the_data_it_used(finished: Path, data_folder: Path) -> None:
    config, data = load_config(finished / "config.yaml"), DataFolder.open(data_folder)
    assert config.data == data.config
    assert config.vocab.size == data.tokenizer().vocab_size


def test_metrics_have_the_documented_names(finished: Path) -> None:
    training, validation = metrics(finished, "loss"), metrics(finished, "validation_mlm_loss")
    assert [line["step"] for line in training] == [5, 10, 12]
    assert [line["step"] for line in validation] == [0, 6, 12]
    assert {" ".join(line) for line in training} == {TRAINING_NAMES}
    assert {" ".join(line) for line in validation} == {VALIDATION_NAMES}
    assert datetime.fromisoformat(training[0]["time"])
    last = training[-1]
    assert (last["host"], last["examples"], last["mfu"]) == (platform.node(), 12 * 16, None)
    assert last["epoch"] == pytest.approx(12 * 16 / 360)
    assert 0 < last["padding_share"] < 0.6


def test_final_metrics_equal_those_of_evaluate(finished: Path, data_folder: Path) -> None:
    last = read_json(finished / "manifest.json")["validation"]
    metrics = evaluate(finished / "model", data_folder, config=tiny().train)
    for name in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"):
        assert metrics[name] == pytest.approx(last[f"validation_{name}"], rel=1e-6)
    assert metrics["mlm_perplexity"] == pytest.approx(math.exp(metrics["mlm_loss"]))


def test_dry_run_reports_the_same_errors_and_changes_nothing(fit: Fit, finished: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(finished, tmp_path / "run")
    before = times(tmp_path)

    def dry(output: str = "run", **settings: Any) -> str:
        fit(output, dry_run=True, **settings)
        return capsys.readouterr().out

    assert "for 12 steps" in dry("new")
    assert "1d 0h" in dry("new", max_steps=None, time_budget="24h")
    assert "up to date" in dry()
    assert "for 8 steps" in dry(max_steps=20)
    assert "for 12 steps" in dry(peak_lr=2e-3, overwrite=True)
    with pytest.raises(OutputError):
        dry(peak_lr=2e-3)
    with pytest.raises(ConfigError):
        dry(max_steps=8)
    assert times(tmp_path) == before


def test_resume_needs_the_same_data_but_not_the_same_path(
    fit: Fit, finished: Path, data_folder: Path, new_data_folder: NewData, tmp_path: Path
) -> None:
    before = times(finished)
    with pytest.raises(OutputError, match="data: "):
        fit(finished, data=new_data_folder(shard_rows=(100,)))
    shutil.copytree(data_folder, tmp_path / "elsewhere")
    fit(finished, data=tmp_path / "elsewhere", log_every=3, device="auto")  # both may change
    assert {path: time for path, time in times(finished).items() if path.is_file()}.items() <= before.items()


def test_run_without_validation_split_has_no_validation_metrics(fit: Fit, new_data_folder: NewData) -> None:
    assert not metrics(fit(data=new_data_folder(validation_rows=0), max_steps=3), "validation_mlm_loss")


def test_without_pairs_only_mlm_is_trained_and_evaluated(fit: Fit, new_data_folder: NewData) -> None:
    data = new_data_folder(next_sentence="none", masking="dynamic")
    run = fit(data=data)
    for line in metrics(run):
        assert [value for name, value in line.items() if "nsp" in name] == [None, None]
    assert all(line["loss"] == pytest.approx(line["mlm_loss"], rel=0.05) for line in metrics(run, "loss"))
    results = evaluate(run / "model", data, config=tiny().train)
    assert not [name for name in results if "nsp" in name]
    assert results["mlm_loss"] == pytest.approx(metrics(run)[-1]["validation_mlm_loss"], rel=1e-6)
    _, info = AutoModelForPreTraining.from_pretrained(run / "model", output_loading_info=True)
    assert not info["missing_keys"]
    ours, fresh = (load_model(run / "model").model for _ in range(2))
    fresh.initialize(tiny().train.seed)
    for name, weight in ours.named_parameters():
        assert torch.equal(weight, fresh.get_parameter(name)) == name.startswith(("pooler", "nsp_head")), name


def test_tiny_model_learns(fit: Fit, new_data_folder: NewData) -> None:
    data = new_data_folder(shard_rows=(1000, 1000), validation_rows=200)
    rare = {"log_every": 100, "eval_every": 1000, "save_every": 1000}
    batch = {"global_batch_size": 64, "micro_batch_tokens": 2048}
    config = {"model": NO_DROPOUT, "max_steps": 300, "peak_lr": 5e-3, "warmup_ratio": 0.1, **rare, **batch}
    last = metrics(fit(data=data, **config))[-1]
    records = DataFolder.open(data).shards("train")
    shares = np.bincount(np.concatenate([read_shard(data, record).masks.original_ids for record in records]))
    shares = shares[shares > 0] / shares.sum()
    assert last["validation_mlm_loss"] < -float((shares * np.log(shares)).sum()) - 0.7
    assert last["validation_nsp_accuracy"] > 0.75


def test_vocabulary_with_other_words_is_rejected(
    fit: Fit, model: Path, data_folder: Path, new_data_folder: NewData
) -> None:
    other = new_data_folder("swapped")
    for folder in (other / "tokenizer", model):
        words = (folder / "vocab.txt").read_text().splitlines()
        (folder / "vocab.txt").write_text("\n".join([*words[:-2], words[-1], words[-2]]) + "\n")
        (folder / "tokenizer.json").unlink()  # contains the vocabulary too
    with pytest.raises(DataError, match="made the data"):
        fit(data=other)
    for use, settings in (
        (fit, {"init_from": model}),
        (fit, {"teacher": str(model)}),
        (evaluate, {"model": model, "data": data_folder, "config": tiny().train}),
    ):
        with pytest.raises(DataError, match="differs from the vocabulary of the data"):
            use(**settings)


def test_non_finite_metrics_are_null(fit: Fit) -> None:
    assert metrics(fit(peak_lr=1e30, warmup_steps=0))[-1]["validation_mlm_loss"] is None


def test_partial_evaluation_takes_evenly_spaced_rows(fit: Fit, new_data_folder: NewData) -> None:
    data = DataFolder.open(new_data_folder(validation_rows=23))
    rows = read_shard(data.path, data.shards("validation")[0])
    few = rows_of(evaluation_batches(data, "validation", 64, max_rows=5))
    chosen = np.linspace(0, 23, 5, endpoint=False).astype(int)
    assert sorted(few) == sorted(rows_of([pack(rows.take(chosen))]))
    full = list(evaluation_batches(data, "validation", 64, max_rows=100))
    assert sum(batch.num_sequences for batch in full) == 23
    ranks = [list(evaluation_batches(data, "validation", 64, dist_context=DistContext(rank, 3))) for rank in range(3)]
    for number, batch in enumerate(full):  # ranks take batches in turn
        assert torch.equal(ranks[number % 3][number // 3].input_ids, batch.input_ids)
    assert sum(map(len, ranks)) == len(full)
    lines = metrics(fit(data=data.path, eval_examples=5), "validation_examples")
    assert [line["validation_examples"] for line in lines] == [5, 5, 23]
