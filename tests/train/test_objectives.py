"""Training under each objective: what the data folder says is done, and masks that no step has a say in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForPreTraining

from bert_pretrain.config import Config
from bert_pretrain.errors import DataError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.model.huggingface import load_model
from bert_pretrain.train.evaluation import evaluate
from bert_pretrain.train.loader import TrainingData
from bert_pretrain.train.run import train
from tests.train.conftest import FIRST_WORD, Fit, make_data_folder, metrics, rows_of

Tiny = Callable[..., Config]
NewData = Callable[..., Path]


def masked_examples(folder: Path, steps: range, batch: int = 60, tokens: int = 512, seed: int = 1) -> list[Any]:
    data = TrainingData(DataFolder.open(folder), seed=seed, global_batch_size=batch, micro_batch_tokens=tokens)
    return rows_of(micro for step in steps for micro in data.global_batch(step).micro_batches)


def test_masks_depend_on_seed_epoch_and_example_alone(new_data_folder: NewData) -> None:
    dynamic = new_data_folder(masking="dynamic")  # 360 examples: an epoch is 6 steps of 60, 12 of 30 or 45 of 8
    epochs = [sorted(masked_examples(dynamic, range(begin, begin + 6))) for begin in (0, 6)]
    for batch, tokens in ((30, 512), (8, 40)):
        steps = 360 // batch
        for epoch in (1, 0):  # the second first: nothing depends on what was read before
            again = masked_examples(dynamic, range(steps * epoch, steps * (epoch + 1)), batch, tokens)
            assert sorted(again) == epochs[epoch]
    straight = masked_examples(dynamic, range(12), 50)
    assert masked_examples(dynamic, range(9, 12), 50) == straight[450:]
    assert sorted(masked_examples(dynamic, range(6), seed=2)) != epochs[0]


def test_words_told_by_the_data_are_masked_whole(new_data_folder: NewData) -> None:
    def starts_word(ids: np.ndarray) -> np.ndarray:
        """Words of three: the stored column says where they begin, the pieces do not."""
        return (ids >= FIRST_WORD) & (ids % 3 == 0)

    data = new_data_folder(
        masking="dynamic", whole_word_mask=True, word_segmenter="jieba", masked_lm_prob=0.3, starts_word=starts_word
    )
    whole = 0
    for ids, _, labels in map(np.array, masked_examples(data, range(6))):
        is_masked = labels >= 0
        original = np.where(is_masked, labels, ids)
        words = np.cumsum(starts_word(original) | (original < FIRST_WORD) | (np.roll(original, 1) < FIRST_WORD))
        if is_masked.sum() == 1:
            continue  # where no word fits, one token is masked
        for word in np.unique(words[original >= FIRST_WORD]):
            members = is_masked[words == word]
            assert members.all() or not members.any()
            whole += members.all() and len(members) == 3
    assert whole > 100


@pytest.fixture(scope="module")
def without_pairs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Data of full sentences with masks drawn in training, and a run on it."""
    folder = tmp_path_factory.mktemp("none")
    data = make_data_folder(folder / "data", next_sentence="none", masking="dynamic")
    train(tiny(), data, folder / "run")
    return data, folder / "run"


def test_without_pairs_the_loss_is_that_of_masked_tokens_and_the_heads_of_pairs_stay_as_drawn(
    without_pairs: tuple[Path, Path], tiny: Tiny
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


def test_objectives_follow_one_another_with_one_optimizer(
    fit: Fit, without_pairs: tuple[Path, Path], data_folder: Path
) -> None:
    data, _ = without_pairs
    origin: dict[str, object] = {}
    heads = []
    for number, folder in enumerate((data, data_folder, data), start=1):
        run = fit(f"run{number}", data=folder, **origin, max_steps=4 * number, optimizer="muon")
        origin = {"init_from": run / "checkpoints" / f"step-{4 * number:08d}", "carry_optimizer": True}
        heads.append(load_file(run / "model" / "model.safetensors")["cls.seq_relationship.weight"])
        assert (metrics(run)[-2]["nsp_loss"] is None) == (folder is data)
    assert not torch.equal(heads[0], heads[1])
    assert torch.equal(heads[1], heads[2])
