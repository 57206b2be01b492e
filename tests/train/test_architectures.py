"""Every network trains, resumes, runs on two ranks and is fine-tuned as BERT does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.model.bert import make_network
from bert_pretrain.model.folder import read_config
from bert_pretrain.train.electra import ElectraLoss
from bert_pretrain.train.evaluation import evaluate
from bert_pretrain.train.flops import training_flops
from bert_pretrain.train.loader import TrainingData
from bert_pretrain.train.loss import Counts
from bert_pretrain.train.run import train
from tests.conftest import digests
from tests.train.conftest import (
    NO_DROPOUT,
    VOCAB_SIZE,
    NewData,
    assert_same_run,
    final_tensors,
    interrupted_copy,
    make_model,
    metrics,
    tiny,
)
from tests.train.test_distributed import on_two_ranks
from tests.train.test_modern_bert import MODERN

NETWORKS: dict[str, dict[str, Any]] = {
    "modernbert": MODERN,
    "albert": {"architecture": "albert", "embedding_size": 16, "num_hidden_layers": 3, **NO_DROPOUT},
    "electra": {"architecture": "electra", "embedding_size": 16, "generator_size": 0.5, **NO_DROPOUT},
}
OBJECTIVES = {"electra": "electra"}
PAIRS = {"albert": "sop"}


def config_of(network: str, model: dict[str, Any] | None = None, **settings: Any) -> Config:
    objective = OBJECTIVES.get(network, "mlm")
    return tiny(model={**NETWORKS[network], **(model or {})}, objective=objective, **settings)


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def data(network: str, new_data_folder: NewData) -> Path:
    return new_data_folder(network, next_sentence=PAIRS.get(network, "none"))


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lamb"])
def test_an_interrupted_run_is_bit_equal(network: str, optimizer: str, data: Path, tmp_path: Path) -> None:
    config = config_of(network, {"hidden_dropout_prob": 0.1}, optimizer=optimizer)
    train(config, data, tmp_path / "straight")
    interrupted = interrupted_copy(tmp_path / "straight", tmp_path / "interrupted", "step-00000012")
    train(config, data, interrupted)
    assert_same_run(tmp_path / "straight", interrupted)


def test_two_ranks_match_one(network: str, data: Path, tmp_path: Path) -> None:
    config = config_of(network, max_steps=6, log_every=1, global_batch_size=15, micro_batch_tokens=90)
    on_two_ranks(train, config, data, tmp_path / "two")
    train(config, data, tmp_path / "one")
    for one, two in zip(metrics(tmp_path / "one", "loss"), metrics(tmp_path / "two", "loss"), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)
    torch.testing.assert_close(final_tensors(tmp_path / "two"), final_tensors(tmp_path / "one"), atol=1e-5, rtol=1e-4)


def test_an_albert_has_the_weights_of_one_layer_and_the_work_of_all() -> None:
    one, three = (make_model(config_of("albert", {"num_hidden_layers": number})) for number in (1, 3))
    assert one.num_parameters == three.num_parameters
    layers = (training_flops(model.config, 0, 1.0, 8.0, 0.0) - 6 * 32 * 16 for model in (one, three))
    assert 3 * next(layers) == next(layers)


def test_an_albert_continues_from_its_folder_but_no_bert_does(new_data_folder: NewData, tmp_path: Path) -> None:
    data = new_data_folder("albert", next_sentence="sop")
    train(config_of("albert", max_steps=2), data, tmp_path / "first")
    model = tmp_path / "first" / "model"
    longer = Config.model_validate({"model": {"max_position_embeddings": 64}, "train": {"max_steps": 1}})
    train(longer, data, tmp_path / "second", init_from=model)
    expected = config_of("albert", {"max_position_embeddings": 64}).model
    assert read_config(tmp_path / "second" / "model", "MODEL")[0] == expected
    with pytest.raises(ConfigError, match=r"architecture is bert, but the weights in .* have albert"):
        train(tiny(model={"architecture": "bert"}), data, tmp_path / "bert", init_from=model)
    with pytest.raises(ConfigError, match="cannot start with cooccurrences") as caught:
        train(config_of("albert", init="cooccurrences"), data, tmp_path / "counted")
    assert caught.value.where == "train.init"


def test_an_electra_reads_pairs_without_a_loss_and_measures_what_it_finds(
    new_data_folder: NewData, tmp_path: Path
) -> None:
    config = config_of("electra", max_steps=60, peak_lr=5e-3, log_every=30, eval_every=30, softmax_candidates=100)
    data = new_data_folder("pairs")
    train(config, data, tmp_path / "run")
    assert "sentence pairs are read, but have no loss" in (tmp_path / "run" / "model" / "README.md").read_text()
    lines = metrics(tmp_path / "run", "validation_discriminator_loss")
    for name in ("mlm_loss", "discriminator_loss"):
        assert lines[-1][f"validation_{name}"] < lines[0][f"validation_{name}"]
    assert all(line["nsp_loss"] is None for line in metrics(tmp_path / "run", "loss"))
    for line in lines:
        assert 0.0 < line["validation_replaced"] < 0.3
        assert line["validation_replaced"] + line["validation_originals"] == pytest.approx(1.0)
    # The folders continue, in evaluations of the same numbers.
    train(config_of("electra", max_steps=1), data, tmp_path / "next", init_from=tmp_path / "run" / "model")
    again = metrics(tmp_path / "next", "validation_discriminator_loss")[0]
    for name, value in lines[-1].items():
        if name.startswith("validation_") and isinstance(value, float):
            assert again[name] == pytest.approx(value, abs=1e-5), name


def test_a_network_without_a_head_for_pairs_is_evaluated_on_pairs(
    new_data_folder: NewData, data_folder: Path, tmp_path: Path
) -> None:
    train(config_of("modernbert", max_steps=1), new_data_folder("none", next_sentence="none"), tmp_path / "run")
    found = evaluate(tmp_path / "run" / "model", data_folder, config=config_of("modernbert").train)
    assert found["mlm_loss"] > 0.0
    assert "nsp_loss" not in found


def test_an_electra_has_one_objective_and_a_smaller_generator(data_folder: Path, tmp_path: Path) -> None:
    named = Config.model_validate({"train": {"objective": "electra"}})
    assert named.model.architecture == "electra"
    assert (named.model.generator.hidden_size, named.model.generator.num_attention_heads) == (192, 3)
    for model, changes, word in (
        ({"architecture": "bert"}, {"objective": "electra"}, "the objective is electra, but the network is bert"),
        ({"architecture": "electra"}, {}, "the objective is mlm, but the network is electra"),
        ({"embedding_size": 64}, {"objective": "electra"}, "embedding_size 64 is above"),
        ({}, {"objective": "electra", "init": "cooccurrences"}, "cannot start with cooccurrences"),
        ({}, {"objective": "electra", "teacher": "t"}, "no teacher"),
    ):
        with pytest.raises(ConfigError, match=word):
            train(tiny(model=model, **changes), data_folder, tmp_path / "refused")
    with pytest.raises(ValidationError, match="generator_size"):
        tiny(model={"generator_size": 1.5}, objective="electra")


def test_replacements_do_not_depend_on_micro_batches_and_their_tails(data_folder: Path) -> None:
    config = config_of("electra")
    model = make_network(config.model, VOCAB_SIZE, "padded")
    model.initialize(1)
    losses, results = ElectraLoss(model, 50.0), []
    for tokens, is_static in ((10_000, False), (200, False), (200, True)):
        data = TrainingData(
            DataFolder.open(data_folder), seed=1, global_batch_size=32, micro_batch_tokens=tokens,
            static_shapes=is_static, with_pairs=False, with_draws=True,
        )  # fmt: skip
        batch = data.global_batch(3)
        counts = Counts(*(torch.tensor(max(count, 1)) for count in batch.counts))
        model.zero_grad()
        parts = [losses(micro) for micro in batch.micro_batches]
        total = torch.stack([losses.mean(part, counts) for part in parts]).sum()
        total.backward()
        found = torch.stack([torch.stack(part.extras[1:]) for part in parts]).sum(dim=0)
        results.append((total.detach(), found, [parameter.grad.clone() for parameter in model.parameters()]))
    assert len(parts) > 1
    assert batch.num_predictions >= results[0][1][0] > 0
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-5, rtol=1e-4)


def test_a_finished_electra_without_its_generator_writes_it_again(data_folder: Path, tmp_path: Path) -> None:
    config = config_of("electra", max_steps=4)
    train(config, data_folder, tmp_path / "run")
    before = digests(tmp_path / "run" / "generator")
    (tmp_path / "run" / "generator" / "model.safetensors").unlink()
    train(config, data_folder, tmp_path / "run")
    assert digests(tmp_path / "run" / "generator") == before
