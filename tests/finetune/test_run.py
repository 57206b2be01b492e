"""Fine-tuning learns toy tasks, its metrics match other libraries, and `transformers` opens the result."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from scipy import stats
from seqeval.metrics import f1_score
from sklearn import metrics as sklearn_metrics

from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import ConfigError, DataError, OutputError
from bert_pretrain.finetune.classify import Classify
from bert_pretrain.finetune.predict import predict
from bert_pretrain.finetune.run import finetune
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.training import STATE, open_network
from bert_pretrain.text.tokenizer import Tokenizer
from tests.conftest import wait_until
from tests.finetune.conftest import peer_of, questions, reviews, tagged_sentences, write_rows

FAST = {"learning_rate": 3e-3, "dropout": 0.1, "batch_size": 16}


def results(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads((folder / "metrics.json").read_text()), [json.loads(line) for line in lines]


def predicted(folder: Path, source: str, column: str) -> list[Any]:
    """Run `predict` and return a column of its output."""
    output = folder.with_suffix(".jsonl")
    predict(folder, source, output, config=TrainConfig(device="cpu", precision="fp32"))
    return [json.loads(line)[column] for line in output.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, toy_model: Path) -> dict[str, Any]:
    """Fine-tune a classifier and return the arguments of the call."""
    place = tmp_path_factory.mktemp("classifier")
    call = {"output": place / "out", "settings": Settings(**FAST, epochs=5), "device": "cpu"}
    call["train"] = write_rows(place / "train.jsonl", reviews(200, 1))
    call["test"] = write_rows(place / "test.jsonl", reviews(60, 2))
    finetune("classify", toy_model, **call)
    return call


def test_a_separable_task_is_learned_and_metrics_match_scikit_learn(classifier: dict[str, Any]) -> None:
    report, lines = results(classifier["output"])
    assert report["rows"] == {"train": 180, "validation": 20, "test": 60}
    assert report["test"]["accuracy"] > 0.95
    truth, predictions = ([line[key] for line in lines] for key in ("label", "prediction"))
    assert report["test"] == {
        "accuracy": pytest.approx(sklearn_metrics.accuracy_score(truth, predictions)),
        "macro_f1": pytest.approx(sklearn_metrics.f1_score(truth, predictions, average="macro")),
        "mcc": pytest.approx(sklearn_metrics.matthews_corrcoef(truth, predictions)),
    }
    best = max(report["epochs"], key=lambda epoch: epoch["eval_accuracy"])
    assert report["best_epoch"] == best["epoch"]
    assert [epoch["epoch"] for epoch in report["epochs"]] == [1, 2, 3, 4, 5]
    assert predicted(classifier["output"], classifier["test"], "predicted_label") == predictions
    assert peer_of(classifier["output"], "SequenceClassification")[0].config.id2label == {0: "neg", 1: "pos"}


def test_the_model_card_has_the_metrics_and_the_warning(classifier: dict[str, Any]) -> None:
    report, _ = results(classifier["output"])
    head, _, body = (classifier["output"] / "README.md").read_text().removeprefix("---\n").partition("\n---\n")
    assert yaml.safe_load(head)["pipeline_tag"] == "text-classification"
    metrics = (report[split]["accuracy"] for split in ("validation", "test"))
    assert f"| accuracy | {' | '.join(f'{value:.4f}' for value in metrics)} |" in body
    assert f"in {report['refit_epochs']} epochs over the rows for training and validation" in body
    assert f"**Warning:** {report['warning']}" in body
    assert report["warning"].startswith("not clearly better than words alone")


def test_a_head_is_kept_for_the_same_labels_and_reinitialized_for_others(classifier, tmp_path, capsys) -> None:
    tokenizer = Tokenizer.load(classifier["output"])
    saved = load_file(classifier["output"] / "model.safetensors")["classifier.weight"]
    for classes, is_kept in ((["neg", "pos"], True), (["pos", "neg"], False)):
        task = Classify(Settings(), tokenizer)
        task.labels = classes
        network = open_network(classifier["output"], task, Settings(dropout=0.1))
        assert torch.equal(network.classifier.weight.detach(), saved) == is_kept
        assert ("classifier.weight" in capsys.readouterr().out) == (not is_kept)
    saved = load_file(classifier["output"] / "model.safetensors")
    for name in ("bert.pooler.dense.weight", "bert.pooler.dense.bias"):  # as in a tagger with as many tags
        del saved[name]
    folder = shutil.copytree(classifier["output"], tmp_path / "without pooler")
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    open_network(folder, task, Settings())
    assert "classifier.weight" in capsys.readouterr().out


def test_the_same_command_is_up_to_date_and_another_is_an_error(classifier, toy_model, capsys) -> None:
    before = (classifier["output"] / "model.safetensors").stat().st_mtime_ns
    finetune("classify", toy_model, **classifier)
    warning = results(classifier["output"])[0]["warning"]
    assert capsys.readouterr().out.splitlines()[-2:] == [f"up to date: {classifier['output']}", f"WARNING: {warning}"]
    other = {**classifier, "settings": Settings(**FAST, epochs=5, weight_decay=0.1)}
    with pytest.raises(OutputError, match=r"settings.weight_decay: 0.01 -> 0.1"):
        finetune("classify", toy_model, **other)
    assert (classifier["output"] / "model.safetensors").stat().st_mtime_ns == before
    assert not (classifier["output"] / ".trials").exists()


@pytest.mark.parametrize(
    ("name", "size"), [("model.safetensors", None), ("model.safetensors", 8), ("checksums.json", None)]
)
def test_a_damaged_result_is_not_up_to_date(classifier, toy_model, tmp_path, name, size) -> None:
    output = shutil.copytree(classifier["output"], tmp_path / "out")
    (output / name).unlink() if size is None else os.truncate(output / name, size)
    with pytest.raises(DataError, match=f"is damaged: {name}"):
        finetune("classify", toy_model, **{**classifier, "output": output})


def test_regression_of_pairs_has_the_correlations_of_scipy(toy_model: Path, tmp_path: Path) -> None:
    words = ["bad", "poor", "book", "fine", "good"]
    rows = [
        {"a": f"the {words[a]}", "b": f"is {words[b]}", "score": 1000.0 + 50 * (a - b)}
        for b in range(5)
        for a in range(5)
    ] * 4
    settings = Settings(**FAST, epochs=10, text_field="a", pair_field="b", label_field="score", regression=True)
    source = write_rows(tmp_path / "pairs.jsonl", rows)
    output = finetune("classify", toy_model, train=source, test=source, output=tmp_path / "o", settings=settings)
    report, lines = results(output)
    truth, predictions = ([line[key] for line in lines] for key in ("label", "prediction"))
    assert report["test"]["spearman"] == pytest.approx(stats.spearmanr(truth, predictions).statistic)
    assert report["test"]["pearson"] == pytest.approx(stats.pearsonr(truth, predictions).statistic)
    assert report["test"]["mse"] == pytest.approx(sklearn_metrics.mean_squared_error(truth, predictions))
    assert report["test"]["spearman"] > 0.8
    peer_of(output, "SequenceClassification")
    assert report["test"]["mse"] < 0.5 * np.var(truth)  # labels may have any mean and scale
    assert predicted(output, source, "label") == pytest.approx(predictions, rel=1e-6)
    task = Classify(settings.resolve("classify", 32), Tokenizer.load(output))
    task.label_mean, task.label_deviation = 200.0, 4.0
    bias, saved = (open_network(output, task, settings).classifier.bias.item(), load_file(output / "model.safetensors"))
    assert bias * 4.0 + 200.0 == pytest.approx(saved["classifier.bias"].item(), rel=1e-6)


def test_tags_are_learned_in_sentences_longer_than_the_positions(toy_model: Path, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", tagged_sentences(120, 1))
    validation = write_rows(tmp_path / "validation.jsonl", tagged_sentences(30, 2))
    settings = Settings(**FAST, epochs=5)
    call = {"train": train, "validation": validation, "output": tmp_path / "o", "device": "cpu"}
    output = finetune("tag", toy_model, **call, settings=settings)
    report, lines = results(output)
    truth, predictions = ([line[key] for line in lines] for key in ("tags", "prediction"))
    assert [len(tags) for tags in predictions] == [len(tags) for tags in truth]
    assert max(map(len, truth)) > 32
    assert report["validation"]["f1"] == pytest.approx(f1_score(truth, predictions))
    assert report["validation"]["f1"] > 0.95
    peer_of(output, "TokenClassification")
    assert predicted(output, validation, "predicted_tags") == predictions


def test_answers_and_missing_answers_are_predicted_in_long_contexts(toy_model, tmp_path, capsys) -> None:
    train = write_rows(tmp_path / "train.jsonl", questions(200, 1))
    test = write_rows(tmp_path / "test.jsonl", questions(40, 2))
    settings = Settings(**FAST, epochs=4, max_answer_length=30)
    call = {"train": train, "test": test, "output": tmp_path / "o", "device": "cpu"}
    output = finetune("answer", toy_model, **call, settings=settings)
    assert "split into overlapping windows" in capsys.readouterr().out
    report, lines = results(output)
    assert report["test"]["f1"] > 0.9
    assert report["test"]["no_answer_f1"] > 0.8
    exact = np.mean([line["prediction"] in (line["answers"] or [""]) for line in lines])
    assert report["test"]["exact_match"] == pytest.approx(exact)
    peer_of(output, "QuestionAnswering")
    assert predicted(output, test, "answer") == [line["prediction"] for line in lines]


@pytest.mark.parametrize(("max_length", "expected", "trained"), [(None, 20, 20), (28, 28, 28)])
def test_windows_have_at_most_the_trained_length_by_default(
    toy_model: Path, tmp_path: Path, capsys, max_length: int | None, expected: int, trained: int
) -> None:
    folder = shutil.copytree(toy_model, tmp_path / "model")
    (folder / "checksums.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pretraining": {"max_seq_length": 20}}))
    train, output = write_rows(tmp_path / "a.jsonl", questions(20, seed=1)), tmp_path / "out"
    finetune("answer", folder, train=train, output=output, settings=Settings(max_length=max_length, epochs=1))
    shown = capsys.readouterr()
    assert shown.out.count("maximum length: 20 tokens") == (max_length is None)
    assert shown.err.count("--max-length is 28, but the model is trained for 20") == (max_length == 28)
    assert json.loads((output / "config.json").read_text())["pretraining"]["max_seq_length"] == trained
    assert transformers.AutoTokenizer.from_pretrained(output).model_max_length == trained
    predict(output, train, tmp_path / "p.jsonl", config=TrainConfig(device="cpu"))
    shown = capsys.readouterr()
    assert f"longer than {expected} tokens" in shown.out
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
    subprocess.run([*command, str(tmp_path / "uninterrupted")], check=True)
    process = subprocess.Popen([*command, str(tmp_path / "killed")])
    state = tmp_path / "killed" / ".trials" / stage / STATE
    wait_until(state.exists, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "config.json").exists()
    killed = tmp_path / "killed"
    done = subprocess.run([*command, str(killed)], check=True, capture_output=True, text=True)
    assert "continues after epoch " in done.stdout
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "uninterrupted", killed))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert results(tmp_path / "uninterrupted")[1] == results(killed)[1]
    texts = [(folder / "metrics.json").read_text().splitlines() for folder in (tmp_path / "uninterrupted", killed)]
    first, second = ([line for line in text if "seconds" not in line] for text in texts)
    assert first == second
    assert not (tmp_path / "killed" / ".trials").exists()


def test_unknown_words_are_reported(toy_model: Path, tmp_path: Path, capsys) -> None:
    rows = [{"text": draw * 51, "label": label} for draw in ("AC", "GT", "CA", "TG") for label in "ab"]
    train, output = write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out"
    finetune("classify", toy_model, train=train, output=output, settings=Settings(epochs=1))
    message = capsys.readouterr().err
    assert "8 of 8 tokens are [UNK]: 'ACACAC" in message
    assert "a word of more than 100 characters is always [UNK]" in message
    predicted(output, train, "predicted_label")
    assert "8 of 8 tokens are [UNK]: 'ACACAC" in capsys.readouterr().err
