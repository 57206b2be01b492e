"""Fine-tuning learns toy tasks, its metrics match other libraries, and `transformers` opens the result."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from scipy import stats
from seqeval.metrics import f1_score
from sklearn import metrics
from transformers import AutoTokenizer

from bert_pretrain.errors import ConfigError, DataError, OutputError
from bert_pretrain.finetune.classify import Classify
from bert_pretrain.finetune.run import finetune
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.training import STATE, open_network
from bert_pretrain.io.files import read_json, write_json
from bert_pretrain.text.tokenizer import Tokenizer
from tests.conftest import call, digests, wait_until
from tests.finetune.conftest import peer_of, predicted, questions, results, reviews, tagged_sentences, write_rows


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, toy_model: Path) -> dict[str, Any]:
    """Fine-tune a classifier and return the arguments of the call."""
    place = tmp_path_factory.mktemp("classifier")
    settings = Settings(learning_rate=3e-3, batch_size=16, epochs=5)
    call = {"output": place / "out", "settings": settings, "device": "cpu"}
    call["train"] = write_rows(place / "train.jsonl", reviews(200, 1))
    call["test"] = write_rows(place / "test.jsonl", reviews(60, 2))
    finetune("classify", toy_model, **call)
    return call


def columns(rows: list[dict[str, Any]], *names: str) -> Iterator[list[Any]]:
    return ([row[name] for row in rows] for name in names)


def test_a_separable_task_is_learned_and_metrics_match_scikit_learn(classifier: dict[str, Any]) -> None:
    report, lines = results(classifier["output"])
    assert report["rows"] == {"train": 180, "validation": 20, "test": 60}
    assert report["test"]["accuracy"] > 0.95
    truth, predictions = columns(lines, "label", "prediction")
    assert report["test"] == {
        "accuracy": pytest.approx(metrics.accuracy_score(truth, predictions)),
        "macro_f1": pytest.approx(metrics.f1_score(truth, predictions, average="macro")),
        "mcc": pytest.approx(metrics.matthews_corrcoef(truth, predictions)),
    }
    best = max(report["epochs"], key=lambda epoch: epoch["eval_accuracy"])
    assert report["best_epoch"] == best["epoch"]
    assert [epoch["epoch"] for epoch in report["epochs"]] == [1, 2, 3, 4, 5]
    rows = predicted(classifier["output"], classifier["test"])
    assert [row["predicted_label"] for row in rows] == predictions
    assert peer_of(classifier["output"], "SequenceClassification")[0].config.id2label == {0: "neg", 1: "pos"}


def test_the_model_card_has_the_metrics_and_the_warning(classifier: dict[str, Any]) -> None:
    report, _ = results(classifier["output"])
    head, _, body = (classifier["output"] / "README.md").read_text().removeprefix("---\n").partition("\n---\n")
    assert yaml.safe_load(head)["pipeline_tag"] == "text-classification"
    accuracies = " | ".join(f"{report[split]['accuracy']:.4f}" for split in ("validation", "test"))
    assert f"| accuracy | {accuracies} |" in body
    assert f"in {report['refit_epochs']} epochs over the rows for training and validation" in body
    assert f"**Warning:** {report['warning']}" in body
    assert report["warning"].startswith("not clearly better than words alone")


def test_a_head_is_kept_for_the_same_labels_and_reinitialized_for_others(classifier, tmp_path, capsys) -> None:
    output = classifier["output"]
    task = Classify(Settings(), Tokenizer.load(output))
    saved = load_file(output / "model.safetensors")
    for classes, is_kept in ((["neg", "pos"], True), (["pos", "neg"], False)):
        task.labels = classes
        network = open_network(output, task, Settings())
        assert torch.equal(network.classifier.weight.detach(), saved["classifier.weight"]) == is_kept
        assert ("classifier.weight" in capsys.readouterr().out) == (not is_kept)
    for name in ("bert.pooler.dense.weight", "bert.pooler.dense.bias"):  # as in a tagger with as many tags
        del saved[name]
    folder = shutil.copytree(output, tmp_path / "without pooler")
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    open_network(folder, task, Settings())
    assert "classifier.weight" in capsys.readouterr().out


def test_the_same_command_is_up_to_date_and_another_is_an_error(classifier, toy_model, capsys) -> None:
    output = classifier["output"]
    before = digests(output)
    finetune("classify", toy_model, **classifier)
    warning = results(output)[0]["warning"]
    assert capsys.readouterr().out.splitlines()[-2:] == [f"up to date: {output}", f"WARNING: {warning}"]
    other = {**classifier, "settings": replace(classifier["settings"], weight_decay=0.1)}
    with pytest.raises(OutputError, match=r"settings.weight_decay: 0.01 -> 0.1"):
        finetune("classify", toy_model, **other)
    assert digests(output) == before
    assert not (output / ".trials").exists()


@pytest.mark.parametrize(
    ("name", "size"), [("model.safetensors", None), ("model.safetensors", 8), ("checksums.json", None)]
)
def test_a_damaged_result_is_not_up_to_date(classifier, toy_model, tmp_path, name, size) -> None:
    output = shutil.copytree(classifier["output"], tmp_path / "out")
    (output / name).unlink() if size is None else os.truncate(output / name, size)
    with pytest.raises(DataError, match=f"is damaged: {name}"):
        finetune("classify", toy_model, **{**classifier, "output": output})


def test_regression_of_pairs_has_the_correlations_of_scipy(tune, tmp_path: Path) -> None:
    words = ["bad", "poor", "book", "fine", "good"]
    rows = [
        {"a": f"the {words[a]}", "b": f"is {words[b]}", "score": 1000.0 + 50 * (a - b)}
        for b in range(5)
        for a in range(5)
    ] * 4
    names = {"text_field": "a", "pair_field": "b", "label_field": "score", "regression": True}
    output = tune("classify", rows, test=rows, epochs=10, **names)
    report, lines = results(output)
    truth, predictions = columns(lines, "label", "prediction")
    scores = report["test"]
    assert scores["spearman"] == pytest.approx(stats.spearmanr(truth, predictions).statistic)
    assert scores["pearson"] == pytest.approx(stats.pearsonr(truth, predictions).statistic)
    assert scores["mse"] == pytest.approx(metrics.mean_squared_error(truth, predictions))
    assert scores["spearman"] > 0.8
    assert scores["mse"] < 0.5 * np.var(truth)  # labels may have any mean and scale
    peer_of(output, "SequenceClassification")
    (labels,) = columns(predicted(output, tmp_path / "test.jsonl"), "label")
    assert labels == pytest.approx(predictions, rel=1e-6)
    task = Classify(Settings(**names), Tokenizer.load(output))
    task.label_mean = 200.0
    task.label_deviation = 4.0
    bias = open_network(output, task, task.settings).classifier.bias.item()
    saved = load_file(output / "model.safetensors")["classifier.bias"].item()
    assert bias * 4.0 + 200.0 == pytest.approx(saved, rel=1e-6)


def test_tags_are_learned_in_sentences_longer_than_the_positions(tune, tmp_path: Path) -> None:
    output = tune("tag", tagged_sentences(120, 1), validation=tagged_sentences(30, 2), epochs=5)
    report, lines = results(output)
    truth, predictions = columns(lines, "tags", "prediction")
    assert [len(tags) for tags in predictions] == [len(tags) for tags in truth]
    assert max(map(len, truth)) > 32
    assert report["validation"]["f1"] == pytest.approx(f1_score(truth, predictions))
    assert report["validation"]["f1"] > 0.95
    peer_of(output, "TokenClassification")
    assert list(columns(predicted(output, tmp_path / "validation.jsonl"), "predicted_tags")) == [predictions]


def test_answers_and_missing_answers_are_predicted_in_long_contexts(tune, tmp_path: Path, capsys) -> None:
    output = tune("answer", questions(200, 1), test=questions(40, 2), epochs=4, max_answer_length=30)
    assert "split into overlapping windows" in capsys.readouterr().out
    report, lines = results(output)
    assert report["test"]["f1"] > 0.9
    assert report["test"]["no_answer_f1"] > 0.8
    exact = np.mean([line["prediction"] in (line["answers"] or [""]) for line in lines])
    assert report["test"]["exact_match"] == pytest.approx(exact)
    peer_of(output, "QuestionAnswering")
    rows = predicted(output, tmp_path / "test.jsonl")
    assert [row["answer"] for row in rows] == [line["prediction"] for line in lines]


@pytest.mark.parametrize(("max_length", "trained"), [(None, 20), (28, 28)])
def test_windows_have_at_most_the_trained_length_by_default(
    tune, toy_model: Path, tmp_path: Path, capsys, max_length: int | None, trained: int
) -> None:
    folder = shutil.copytree(toy_model, tmp_path / "model")
    (folder / "checksums.json").unlink()
    write_json(folder / "config.json", {**read_json(folder / "config.json"), "pretraining": {"max_seq_length": 20}})
    output = tune("answer", questions(20, seed=1), model=folder, max_length=max_length, epochs=1)
    shown = capsys.readouterr()
    assert shown.out.count("maximum length: 20 tokens") == (max_length is None)
    assert shown.err.count("--max-length is 28, but the model is trained for 20") == (max_length == 28)
    assert read_json(output / "config.json")["pretraining"]["max_seq_length"] == trained
    assert AutoTokenizer.from_pretrained(output).model_max_length == trained
    predicted(output, tmp_path / "train.jsonl")
    shown = capsys.readouterr()
    assert f"longer than {trained} tokens" in shown.out
    assert "--max-length" not in shown.out + shown.err


def test_a_missing_package_is_an_error_with_the_install_command(toy_model, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "seqeval", None)
    with pytest.raises(ConfigError, match="needs seqeval") as caught:
        finetune("tag", toy_model, train="t.tsv", output=tmp_path / "o")
    assert caught.value.remedy == 'pip install "bert-pretrain[finetune]"'


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["train", "all"])  # without the validation rows, or with them
def test_a_killed_run_resumes_to_the_same_weights(toy_model: Path, tmp_path: Path, stage: str) -> None:
    train = write_rows(tmp_path / "train.jsonl", reviews(500, 1))
    command = [sys.executable, "-m", "bert_pretrain", "finetune", "classify", str(toy_model), "--train", train]
    command += ["--learning-rate", "1e-3", "--epochs", "4", "--device", "cpu", "--output"]
    whole, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    subprocess.run([*command, whole], check=True)
    process = subprocess.Popen([*command, killed])
    wait_until((killed / ".trials" / stage / STATE).exists, process)
    process.kill()
    process.wait()
    assert not (killed / "config.json").exists()
    done = subprocess.run([*command, killed], check=True, capture_output=True, text=True)
    assert "continues after epoch " in done.stdout
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (whole, killed))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    (ours, rows), (theirs, same_rows) = results(whole), results(killed)
    assert rows == same_rows
    del ours["seconds"], theirs["seconds"]
    assert ours == theirs
    assert not (killed / ".trials").exists()


def test_unknown_words_are_reported(tune, tmp_path: Path, capsys) -> None:
    rows = [{"text": draw * 51, "label": label} for draw in ("AC", "GT", "CA", "TG") for label in "ab"]
    output = tune("classify", rows, epochs=1)
    message = capsys.readouterr().err
    assert "8 of 8 tokens are [UNK]: 'ACACAC" in message
    assert "a word of more than 100 characters is always [UNK]" in message
    predicted(output, tmp_path / "train.jsonl")
    assert "8 of 8 tokens are [UNK]: 'ACACAC" in capsys.readouterr().err


def test_finished_epochs_outlive_a_full_disk_and_a_damaged_state_is_an_error(toy_model, tmp_path, monkeypatch) -> None:
    save, limits, epochs = torch.save, resource.getrlimit(resource.RLIMIT_FSIZE), []

    def save_on_a_full_disk(*arguments: object) -> None:
        if epochs:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        epochs.append(save(*arguments))

    train = write_rows(tmp_path / "a.jsonl", reviews(40, 1))
    command = ["finetune", "classify", toy_model, "--train", train, "--epochs", 2, "--output"]
    output: Path = tmp_path / "out"
    monkeypatch.setattr(torch, "save", save_on_a_full_disk)
    try:
        message = call(*command, output, code=2).stderr
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert "check that the disk is not full" in message
    assert "without --overwrite, continues where it stopped" in message
    undamaged = shutil.copytree(output, tmp_path / "undamaged")
    (state,) = output.rglob(STATE)
    content = state.read_bytes()
    for length in (len(content) - 8, len(content) // 2, 20, 0):
        state.write_bytes(content[:length])
        assert "the state is damaged" in call(*command, output, code=2).stderr
    assert not (output / "config.json").exists()
    assert "continues" not in call(*command, output, "--overwrite").stdout
    assert "continues after epoch 1" in call(*command, undamaged).stdout
