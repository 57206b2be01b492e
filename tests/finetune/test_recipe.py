"""Automatic learning rate, trials, training on all rows, baselines and warnings."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bert_pretrain.finetune import training
from bert_pretrain.finetune.answer import Answer, Prediction
from bert_pretrain.finetune.baselines import fit_and_predict_tfidf, is_clearly_better, most_frequent_tags
from bert_pretrain.finetune.classify import Classify
from bert_pretrain.finetune.rows import Example, LabelledInput
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tag import Tag
from bert_pretrain.model.huggingface import INITIAL_RMS, fine_tuning_rate
from bert_pretrain.text.tokenizer import Tokenizer
from tests.finetune.conftest import results, reviews


def test_the_automatic_rate_follows_width_and_scale() -> None:
    def rate(width: int, scale: float) -> float:
        encoder = torch.nn.Linear(width, width)
        torch.nn.init.constant_(encoder.weight, scale)
        return fine_tuning_rate(encoder, width)

    assert rate(128, INITIAL_RMS) == rate(256, INITIAL_RMS) == 3e-4
    assert rate(256, 2 * INITIAL_RMS) == 6e-4
    assert rate(768, 0.04) == 5e-5  # the paper's, for BERT-Base


def test_epochs_follow_the_number_of_rows() -> None:
    for given, windows, epochs in ((None, 320_000, 3), (None, 320, 10), (2, 320, 2)):
        assert Settings(epochs=given).with_epochs(windows).epochs == epochs


def test_the_final_model_is_trained_on_the_held_out_rows(tune, capsys) -> None:
    for validation, refit_epochs in ((None, 2), (reviews(10, 2), None)):
        options = {"learning_rate": 1e-6, "epochs": 2, "output": f"{refit_epochs}"}
        report, _ = results(tune("classify", reviews(40, 1), validation=validation, **options))
        assert report["refit_epochs"] == refit_epochs
        # By a model that has not seen the validation rows.
        assert report["validation"]["accuracy"] == pytest.approx(report["score"])
    steps = re.findall(r"100%.*?(\d+)/\d+", capsys.readouterr().err)
    assert steps == ["6", "6", "6"]  # 36, 40 and 40 rows: 2 epochs of 3 steps


def test_the_final_weights_are_the_mean_over_the_second_half(tmp_path: Path) -> None:
    network = torch.nn.Linear(3, 1)
    seen = []
    state = training._State(network, Settings(), rate=0.1, num_steps=5, is_fp16=False)
    for _ in range(5):
        state.update(network(torch.randn(4, 3)).square().sum())
        seen.append(network.weight.detach().clone())
        state.save(tmp_path / "state.pt", {})  # as when a run resumes
        state.restore(tmp_path / "state.pt")
    torch.testing.assert_close(state.mean.module.weight.detach(), torch.stack(seen[2:]).mean(0))


def test_the_best_epoch_is_kept_if_later_epochs_are_worse(tune, monkeypatch, capsys) -> None:
    monkeypatch.setattr(training.FineTuner, "is_overfitted", lambda *_: True)
    report, _ = results(tune("classify", reviews(40, 1), epochs=2))
    assert report["refit_epochs"] is None
    assert "is kept" in capsys.readouterr().out


@pytest.mark.parametrize(("last", "is_overfitted"), [(0.80, False), (0.76, True)])
def test_a_trial_is_overfitted_if_its_last_epoch_is_clearly_worse(last: float, is_overfitted: bool) -> None:
    tuner: Any = SimpleNamespace(task=SimpleNamespace(main_metric="accuracy"), examples={"validation": [None] * 100})
    report = {"score": 0.84, "epochs": [{"eval_accuracy": 0.84}, {"eval_accuracy": last}]}
    assert training.FineTuner.is_overfitted(tuner, report) is is_overfitted


def test_baselines_are_scored(tune, capsys) -> None:
    output = tune("classify", reviews(100, 1), epochs=2, baselines=True)
    baselines = results(output)[0]["baselines"]
    assert baselines["words alone"] == 1.0
    assert 0.0 < baselines["the same network untrained"] <= 1.0
    assert "words alone: 100.0 %" in capsys.readouterr().out
    assert not (output / ".trials").exists()


def test_baselines_with_chinese_text_missing_classes_and_unknown_words() -> None:
    good, bad = [["这家店很好"], ["味道不错"]] * 5, [["这家店很差"], ["味道糟糕"]] * 5
    labels = [["1"]] * 10 + [["0"]] * 10
    probabilities = fit_and_predict_tfidf(good + bad, labels, [["很差"], ["不错"]], ["0", "1", "2"])
    assert [row.argmax() for row in probabilities] == [0, 1]
    assert probabilities[:, 2].tolist() == [0.0, 0.0]
    assert fit_and_predict_tfidf([["a"], ["b b"]] * 9, [1.0, 2.0] * 9, [["b"], ["a"]], [])[0] > 1.5
    assert fit_and_predict_tfidf([["a"]] * 3, [["9"]] * 3, [["b"]], ["8", "9"]).tolist() == [[0.0, 1.0]]
    train = [(["Paris", "is"], ["B-LOC", "O"]), (["Paris"], ["B-PER"]), (["Paris"], ["B-LOC"])]
    assert most_frequent_tags(train, [["Paris", "sleeps"]], "O") == [["B-LOC", "O"]]
    assert [is_clearly_better(accuracy, 0.916, 2000) for accuracy in (0.92, 0.93)] == [False, True]


def test_a_model_no_better_than_a_constant_gets_a_warning(tune, capsys) -> None:
    swapped = [row | {"label": {"pos": "neg", "neg": "pos"}[row["label"]]} for row in reviews(100, 2)]
    warning = results(tune("classify", reviews(100, 1), test=swapped, epochs=2))[0]["warning"]
    assert capsys.readouterr().out.splitlines()[-1] == f"WARNING: {warning}"
    assert warning.startswith("no sign of learning: accuracy 0.")
    assert "on the 100 test rows is no better than always '" in warning
    one_class = [row for row in reviews(50, 2) if row["label"] == "pos"]
    output = tune("classify", reviews(100, 1), test=one_class, epochs=1, output="one class")
    assert " test rows have only one class, so accuracy " in results(output)[0]["warning"]


def test_constant_baselines_have_the_score_of_the_metric(tokenizer: Tokenizer) -> None:
    def examples(inputs: dict[str, Any], *labels: Any) -> list[Example]:
        return [Example(0, "", {}, inputs, label) for label in labels]

    rows = examples({"text": "text"}, *"aab")
    assert Classify(Settings(), tokenizer).constant_baseline(rows) == ("always 'a'", 2 / 3)
    asked = {"question": "who ?", "context": "the anna"}
    for task, rows, constant, metric in (
        (Classify(Settings(regression=True), tokenizer), examples({"text": "text"}, 0.0, 1.0, 2.0), 1.0, "spearman"),
        (Tag(Settings(), tokenizer), examples({"tokens": ["anna", "is"]}, ["B-PER", "O"]), ["O", "O"], "f1"),
        (Answer(Settings(), tokenizer), examples(asked, [("anna", 4)], []), Prediction("", [], 0.0), "f1"),
    ):
        assert task.score(rows, [constant] * len(rows))[metric] == task.constant_baseline(rows)[1]
    assert task.constant_baseline(rows)[1] == 0.5


def test_a_trial_without_its_report_is_trained_again(tune, toy_model: Path, tokenizer, tmp_path: Path, capsys) -> None:
    output = tune("classify", reviews(40, 1), epochs=1, no_baseline=True)
    assert results(output)[0]["baselines"] == {}
    assert "words alone" not in capsys.readouterr().out
    task = Classify(Settings(epochs=1, learning_rate=1e-3).resolve("classify", 32), tokenizer)
    rows = task.read(LabelledInput(f"{tmp_path}/train.jsonl", "--train"))
    task.set_labels(rows, [])
    tuner = training.FineTuner(task, toy_model, {"train": rows, "validation": rows[:10]}, torch.device("cpu"))
    report = tuner.train_once(tmp_path / "0")
    (tmp_path / "0/report.json").write_text(json.dumps(report | {"score": 7}))
    assert tuner.train_once(tmp_path / "0")["score"] == 7
    (tmp_path / "0/report.json").unlink()
    assert tuner.train_once(tmp_path / "0") == report
