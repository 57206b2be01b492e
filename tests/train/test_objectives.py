"""Training under each objective: what the data folder says is done."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForPreTraining

from bert_pretrain.errors import DataError
from bert_pretrain.model.huggingface import load_model
from bert_pretrain.train.evaluation import evaluate
from bert_pretrain.train.run import train
from tests.train.conftest import make_data_folder, metrics, tiny


@pytest.fixture(scope="module")
def without_pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Data of full sentences with masks drawn in training, and a run on it."""
    folder = tmp_path_factory.mktemp("none")
    data = make_data_folder(folder / "data", next_sentence="none", masking="dynamic")
    train(tiny(), data, folder / "run")
    return data, folder / "run"


def test_without_pairs_the_loss_is_that_of_masked_tokens_and_the_heads_of_pairs_stay_as_drawn(
    without_pairs: tuple[Path, Path],
) -> None:
    data, run = without_pairs
    for line in metrics(run):
        assert [value for name, value in line.items() if "nsp" in name] == [None, None]
    assert all(line["loss"] == pytest.approx(line["mlm_loss"], rel=0.05) for line in metrics(run, "loss"))
    figures = evaluate(run / "model", data, config=tiny().train)
    assert not [name for name in figures if "nsp" in name]
    assert figures["mlm_loss"] == pytest.approx(metrics(run)[-1]["validation_mlm_loss"], rel=1e-6)
    with pytest.raises(DataError, match="no masks"):
        evaluate(run / "model", data, config=tiny().train, split="train")
    _, info = AutoModelForPreTraining.from_pretrained(run / "model", output_loading_info=True)
    assert not info["missing_keys"]
    ours, fresh = (load_model(run / "model").model for _ in range(2))
    fresh.initialize(tiny().train.seed)
    untrained = {name for name, weight in ours.named_parameters() if torch.equal(weight, fresh.get_parameter(name))}
    assert untrained == {name for name, _ in ours.named_parameters() if name.startswith(("pooler", "nsp_head"))}
