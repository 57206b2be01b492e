"""Training under each objective: what the data folder says is done, and masks that no step has a say in."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bert_pretrain.config import Config
from bert_pretrain.errors import DataError
from bert_pretrain.examples.masking import mask_examples, masking_rule
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.io.files import read_json, write_checked_json
from bert_pretrain.model.huggingface import load_model
from bert_pretrain.rng import stream
from bert_pretrain.train.evaluation import evaluate
from bert_pretrain.train.loader import TrainingData
from bert_pretrain.train.run import train

from .conftest import FIRST_WORD
from .test_resume import assert_same_run, interrupted_copy, metrics

Tiny = Callable[..., Config]
NewData = Callable[..., Path]
Masked = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def masked_examples(folder: Path, steps: range, *, batch: int, tokens: int, seed: int = 1) -> list[Masked]:
    """The examples of some steps: ids as the model sees them, masked positions, original ids there; in any order."""
    data = TrainingData(DataFolder.open(folder), seed=seed, global_batch_size=batch, micro_batch_tokens=tokens)
    found = []
    for step in steps:
        for micro in data.global_batch(step).micro_batches:
            masked = micro.masked_positions[: micro.num_predictions]  # without the dummy tail, here and below
            for begin, end in itertools.pairwise(micro.cu_seqlens[: micro.num_sequences + 1].tolist()):
                inside = (masked >= begin) & (masked < end)
                positions = (masked[inside] - begin).tolist()
                labels = micro.masked_labels[inside].tolist()
                found.append((tuple(micro.input_ids[begin:end].tolist()), tuple(positions), tuple(labels)))
    return found


@pytest.fixture
def dynamic(new_data_folder: NewData) -> Path:
    return new_data_folder("dynamic", masking="dynamic")


def test_masks_depend_on_seed_epoch_and_example_alone(dynamic: Path) -> None:
    """360 examples: an epoch is 6 steps of 60, 12 of 30 or 45 of 8."""
    epochs = [
        sorted(masked_examples(dynamic, range(6 * epoch, 6 * epoch + 6), batch=60, tokens=512)) for epoch in range(2)
    ]
    for batch, tokens in ((30, 512), (8, 40), (8, 4096)):
        steps = 360 // batch
        for epoch in (1, 0):  # the second first: nothing depends on what was read before
            again = masked_examples(dynamic, range(steps * epoch, steps * (epoch + 1)), batch=batch, tokens=tokens)
            assert sorted(again) == epochs[epoch]
    straight = masked_examples(dynamic, range(12), batch=50, tokens=512)
    assert masked_examples(dynamic, range(9, 12), batch=50, tokens=512) == straight[450:]
    assert sorted(masked_examples(dynamic, range(6), batch=60, tokens=512, seed=2)) != epochs[0]


def test_every_epoch_masks_the_same_examples_anew_by_the_rule_of_the_data(dynamic: Path) -> None:
    folder = DataFolder.open(dynamic)
    rule = masking_rule(folder.tokenizer(), folder.config)
    stored = [read_shard(dynamic, record) for record in folder.shards("train")]
    for epoch in range(2):
        expected = []
        for shard, examples in enumerate(stored):
            masked = mask_examples(examples, rule, stream(1, "mask", epoch=epoch, shard=shard))
            for row in range(len(masked)):
                one = masked.take(np.array([row]))
                assert one.masks is not None
                columns = (one.input_ids, one.masks.positions, one.masks.original_ids)
                expected.append(tuple(tuple(column.tolist()) for column in columns))
        found = masked_examples(dynamic, range(6 * epoch, 6 * epoch + 6), batch=60, tokens=512)
        assert sorted(found) == sorted(expected)
    first, second = (masked_examples(dynamic, range(6 * e, 6 * e + 6), batch=60, tokens=512) for e in range(2))
    assert len({positions for _, positions, _ in first} & {positions for _, positions, _ in second}) < 300
    assert len(set(first) & set(second)) < 20


def test_words_told_by_the_data_are_masked_whole(new_data_folder: NewData) -> None:
    """Words of three: the stored column says where they begin, the pieces do not."""

    def starts_word(ids: np.ndarray) -> np.ndarray:
        return (ids >= FIRST_WORD) & (ids % 3 == 0)

    data = new_data_folder(
        masking="dynamic", whole_word_mask=True, word_segmenter="jieba", masked_lm_prob=0.3, starts_word=starts_word
    )
    whole = 0
    for ids, positions, labels in masked_examples(data, range(6), batch=60, tokens=512):
        original = np.array(ids)
        original[list(positions)] = labels
        words = np.cumsum(starts_word(original) | (original < FIRST_WORD) | (np.roll(original, 1) < FIRST_WORD))
        is_masked = np.isin(np.arange(len(ids)), positions)
        if len(positions) == 1:
            continue  # where no word fits, one token is masked
        for word in np.unique(words[original >= FIRST_WORD]):
            members = is_masked[words == word]
            assert members.all() or not members.any()
            whole += members.all() and len(members) == 3
    assert whole > 100


def test_an_interrupted_run_with_masks_of_its_own_continues_bit_for_bit(
    dynamic: Path, tiny: Tiny, tmp_path: Path
) -> None:
    config = tiny(max_steps=40, save_every=10, global_batch_size=32)  # an epoch is 11 steps and a part
    train(config, dynamic, tmp_path / "straight")
    run = interrupted_copy(tmp_path / "straight", tmp_path / "again")
    for name in ("step-00000030", "step-00000040"):
        shutil.rmtree(run / "checkpoints" / name)
    train(config, dynamic, run)
    assert_same_run(tmp_path / "straight", run)


@pytest.fixture(scope="module")
def without_pairs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Data of full sentences with masks drawn in training, and a run on it."""
    from .conftest import make_data_folder

    folder = tmp_path_factory.mktemp("none")
    data = make_data_folder(folder / "data", next_sentence="none", masking="dynamic")
    train(tiny(), data, folder / "run")
    return data, folder / "run"


def test_without_pairs_the_loss_is_that_of_masked_words(
    without_pairs: tuple[Path, Path], tiny: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data, run = without_pairs
    lines = metrics(run)
    for line in lines:
        figures = {name: value for name, value in line.items() if "nsp" in name}
        assert list(figures.values()) == [None, None]
        if "loss" in line:
            assert line["loss"] == pytest.approx(line["mlm_loss"], rel=0.05)
    figures = evaluate(run / "model", data, config=tiny().train)
    assert not [name for name in figures if "nsp" in name]
    assert figures["mlm_loss"] == pytest.approx(lines[-1]["validation_mlm_loss"], rel=1e-6)
    train(tiny(max_steps=2), data, tmp_path / "run")
    out = capsys.readouterr().out
    assert "objective  masked tokens alone" in out
    assert "drawn anew in every epoch" in out
    assert not [line for line in out.splitlines() if line.startswith("step") and "nsp" in line]


def test_without_pairs_the_heads_of_pairs_stay_as_drawn_and_the_model_opens_whole(
    without_pairs: tuple[Path, Path], tiny: Tiny, tmp_path: Path
) -> None:
    from transformers import AutoModelForPreTraining

    _, run = without_pairs
    _, info = AutoModelForPreTraining.from_pretrained(run / "model", output_loading_info=True)
    assert not info["missing_keys"]
    ours = load_model(run / "model").model
    fresh = load_model(run / "model").model
    fresh.initialize(tiny().train.seed)
    untrained = {name for name, weight in ours.named_parameters() if torch.equal(weight, fresh.get_parameter(name))}
    assert untrained == {name for name, _ in ours.named_parameters() if name.startswith(("pooler", "nsp_head"))}


def test_the_training_split_without_masks_cannot_be_evaluated(without_pairs: tuple[Path, Path], tiny: Tiny) -> None:
    data, run = without_pairs
    with pytest.raises(DataError, match="hold no masks"):
        evaluate(run / "model", data, config=tiny().train, split="train")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_objectives_follow_one_another_with_one_optimizer(
    without_pairs: tuple[Path, Path], data_folder: Path, tiny: Tiny, tmp_path: Path, optimizer: str
) -> None:
    """Full sentences, then pairs, then full sentences: the heads of pairs learn when there are pairs."""
    data, _ = without_pairs
    origin: dict[str, object] = {}
    heads = []
    for number, folder in enumerate((data, data_folder, data), start=1):
        run = tmp_path / f"run{number}"
        train(tiny(max_steps=4 * number, optimizer=optimizer), folder, run, **origin)
        origin = {"init_from": run / "checkpoints" / f"step-{4 * number:08d}", "carry_optimizer": True}
        heads.append(load_file(run / "model" / "model.safetensors")["cls.seq_relationship.weight"])
        last = metrics(run)[-2]
        assert (last["nsp_loss"] is None) == (folder is data)
    assert not torch.equal(heads[0], heads[1])
    assert torch.equal(heads[1], heads[2])


def test_data_made_with_keys_unknown_here_is_refused(new_data_folder: NewData, tiny: Tiny, tmp_path: Path) -> None:
    data = new_data_folder()
    manifest = read_json(data / "manifest.json")
    manifest["config"]["data"]["next_sentence"] = "next_paragraph"
    write_checked_json(data / "manifest.json", manifest)
    with pytest.raises(DataError, match="next_sentence"):
        train(tiny(), data, tmp_path / "run")
