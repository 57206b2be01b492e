"""Rates by scale, Muon inside the encoder, trials on validation rows, and the baselines beside a model."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bert_pretrain.finetune.baselines import is_clearly_better, most_frequent_tags, predict_from_words
from bert_pretrain.finetune.optimizer import make_optimizer
from bert_pretrain.finetune.run import METRICS, finetune
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.model.scale import INITIAL_RMS, base_rate, rms
from bert_pretrain.storage.files import read_json


@pytest.fixture
def network(toy_model: Path) -> Any:
    transformers.set_seed(0)
    return transformers.AutoModelForSequenceClassification.from_pretrained(toy_model)


def rates_of(network: Any, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    names = {id(weight): name for name, weight in network.named_parameters()}
    return {names[id(weight)]: group["lr"] for group in optimizer.param_groups for weight in group["params"]}


def test_a_rate_follows_the_scale_of_its_matrix(network: Any) -> None:
    query = network.bert.encoder.layer[0].attention.self.query.weight
    with torch.no_grad():
        query.mul_(10 * INITIAL_RMS / rms(query))
    rates, base = rates_of(network, make_optimizer(network, None, 0.01, muon=False)), base_rate(32)
    assert rates["bert.encoder.layer.0.attention.self.query.weight"] == pytest.approx(10 * base)
    assert rates["bert.encoder.layer.0.attention.self.query.bias"] == base
    assert rates["classifier.weight"] == base  # drawn, not pretrained
    assert rates.keys() == {name for name, _ in network.named_parameters()}
    assert set(rates_of(network, make_optimizer(network, 1e-4, 0.01, muon=False)).values()) == {1e-4}


def test_the_automatic_rate_is_the_papers_at_the_width_of_base() -> None:
    assert base_rate(128) == base_rate(256) == 3e-4
    assert base_rate(768) * 0.04 / INITIAL_RMS == pytest.approx(5e-5, rel=0.02)


def test_muon_takes_the_matrices_inside_the_encoder_and_its_state_comes_back(network: Any) -> None:
    def step(network: Any, optimizer: torch.optim.Optimizer) -> None:
        network(input_ids=torch.arange(8)[None], labels=torch.tensor([1])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    network.eval()
    optimizer = make_optimizer(network, None, 0.01, muon=True)
    muon, _ = optimizer.optimizers  # type: ignore[attr-defined]
    assert len(muon.param_groups[0]["params"]) == 6 * network.config.num_hidden_layers
    step(network, optimizer)
    other = copy.deepcopy(network)
    resumed = make_optimizer(other, None, 0.01, muon=True)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert str(resumed.state_dict()) == str(optimizer.state_dict())
    resumed.param_groups[0]["lr"] = 0.5  # as a schedule does
    before = other.bert.encoder.layer[0].output.dense.weight.clone()
    step(other, resumed)
    assert (other.bert.encoder.layer[0].output.dense.weight - before).abs().max() > 0.1


def test_what_is_not_given_is_tried_in_twice_the_time() -> None:
    assert [(trial.dropout, trial.epochs) for trial in Settings().trials(320_000)] == [(0.1, 3), (0.0, 3)]
    assert [trial.epochs for trial in Settings(dropout=0.1).trials(320)] == [10]
    rates = Settings(learning_rate=(1e-4, 3e-4), epochs=2).trials(320)
    assert [(trial.learning_rate, trial.dropout) for trial in rates] == [((1e-4,), 0.1), ((3e-4,), 0.1)]


def test_the_best_of_several_rates_is_kept_beside_baselines(
    toy_model: Path, tmp_path: Path, reviews, as_jsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = as_jsonl(tmp_path / "rows.jsonl", reviews(200, 1))
    settings = Settings(learning_rate=(1e-6, 3e-3), batch_size=16, epochs=3, baselines=True)
    finetune("classify", toy_model, train=rows, output=tmp_path / "o", settings=settings, device="cpu")
    printed, report = capsys.readouterr().out, read_json(tmp_path / "o" / METRICS)
    assert "learning rate 0.003, dropout 0.1" in printed
    scores = [trial["score"] for trial in report["trials"]]
    assert scores[1] > scores[0]
    assert report["validation"]["accuracy"] == pytest.approx(scores[1])
    assert report["baselines"]["words alone"] == 1.0
    assert 0.0 < report["baselines"]["the same network untrained"] <= 1.0
    assert "words alone: 100.0 %" in printed
    assert not (tmp_path / "o.partial").exists()


def test_words_alone_separate_chinese_by_characters() -> None:
    good, bad = [["这家店很好"], ["味道不错"]] * 5, [["这家店很差"], ["味道糟糕"]] * 5
    found = predict_from_words(good + bad, ["1"] * 10 + ["0"] * 10, [["很差"], ["不错"]], ["0", "1"])
    assert [row.argmax() for row in found] == [0, 1]
    assert predict_from_words([["a"], ["b b"]] * 9, [1.0, 2.0] * 9, [["b"], ["a"]], [])[0] > 1.5


def test_a_class_that_was_held_out_whole_gets_no_share() -> None:
    found = predict_from_words([["a"], ["b b"]] * 5, ["10", "9"] * 5, [["b"]], ["8", "9", "10"])
    assert found.argmax() == 1
    assert found[0, 0] == 0.0
    assert predict_from_words([["a"]] * 3, ["9"] * 3, [["b"]], ["8", "9"]).tolist() == [[0.0, 1.0]]


def test_words_have_their_most_frequent_tag() -> None:
    train = [(["Paris", "is"], ["B-LOC", "O"]), (["Paris"], ["B-PER"]), (["Paris"], ["B-LOC"])]
    assert most_frequent_tags(train, [["Paris", "sleeps"]], "O") == [["B-LOC", "O"]]


def test_two_standard_errors_are_clear() -> None:
    assert not is_clearly_better(0.92, 0.916, 2000)
    assert is_clearly_better(0.93, 0.916, 2000)


def test_a_model_that_muon_pretrained_is_fine_tuned_by_it() -> None:
    assert Settings().resolve("classify", 128, "muon").optimizer == "muon"
    assert Settings(learning_rate=(1e-4,)).resolve("classify", 128, "muon").optimizer == "adamw"
    assert Settings().resolve("classify", 128).optimizer == "adamw"
