"""Milestones: the model is kept after so many words, as a plain model folder, whatever happens to the run."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from bert_pretrain.config import Config, TrainConfig
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.make_data.summary import CorpusStatistics
from bert_pretrain.storage.files import read_json, write_checked_json
from bert_pretrain.storage.manifest import MANIFEST
from bert_pretrain.train.milestones import name_of, words_seen
from bert_pretrain.train.run import train
from tests.train.test_resume import metrics, start, wait_for

Tiny = Callable[..., Config]
MILESTONES = ["0.4k", "1k", "1100", "50k"]


@pytest.fixture
def counted(new_data_folder: Callable[..., Path]) -> Path:
    """A data folder whose manifest says that two tokens make a word."""
    folder = new_data_folder()
    manifest = read_json(folder / MANIFEST)
    corpus: CorpusStatistics = {
        "documents": 9, "sentences": 50, "words": 500, "tokens": 1000, "unk_share": 0.0, "repeated_share": 0.0,
        "median_sentences_per_document": 5.0, "repairs_and_drops": {}, "inputs": [], "left_out": {},
    }  # fmt: skip
    write_checked_json(folder / MANIFEST, {**manifest, "corpus": corpus})
    return folder


def names(run: Path) -> set[str]:
    return {path.name for path in (run / "milestones").iterdir()}


@pytest.mark.parametrize(
    ("text", "words", "name"),
    [
        ("1M", 1_000_000, "1M"),
        ("500k", 500_000, "500k"),
        ("1.5G", 1_500_000_000, "1.5G"),
        ("2000k", 2_000_000, "2M"),
        ("1_234_567", 1_234_567, "1234567"),
        ("1e6", 1_000_000, "1M"),
        ("4.35M", 4_350_000, "4.35M"),
        ("999", 999, "999"),
    ],
)
def test_counts_have_units_and_names(text: str, words: int, name: str) -> None:
    (found,) = load_config(None, [f"train.milestones=[{text}]"]).train.milestones
    assert (found, name_of(found)) == (words, name)


@pytest.mark.parametrize("text", ["0", "-1M", "1.5", "1.0005k", "M", "1X", "nank", "1 000"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.milestones contains") as caught:
        load_config(None, [f"train.milestones=['{text}']"])
    assert caught.value.where == "--set train.milestones"


def test_words_are_those_of_the_corpus(counted: Path) -> None:
    data = DataFolder.open(counted)
    assert words_seen(data, 10, 330) == 150  # without [CLS] and two [SEP] per example
    rows, tokens = data.rows("train"), data.mean_tokens("train") * data.rows("train")
    assert words_seen(data, rows, tokens) == pytest.approx((tokens - 3 * rows) / 2)


def test_data_without_a_count_of_words_is_refused_before_anything_is_written(
    tiny: Tiny, data_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="made before make-data counted words"):
        train(tiny(milestones=["1k"]), data_folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_milestones_open_in_transformers_and_stay(
    tiny: Tiny, counted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(tiny(milestones=MILESTONES, save_every=1, keep_checkpoints=1), counted, run)
    assert "milestones 400, 1k, 1.1k, 50k words; the run ends after about " in capsys.readouterr().out
    assert names(run) == {"400", "1k", "1.1k"}
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000012"]
    straight = tmp_path / "straight"
    train(tiny(save_every=1, keep_checkpoints=99), counted, straight)
    data = DataFolder.open(counted)
    for words in (400, 1000, 1100):
        folder = run / "milestones" / name_of(words)
        assert "training_state.json" not in {path.name for path in folder.iterdir()}
        for path in sorted((straight / "checkpoints").iterdir()):  # the first step after which there are so many words
            progress = json.loads((path / "training_state.json").read_text())["progress"]
            if words_seen(data, progress["examples"], progress["tokens"]) >= words:
                break
        ours, theirs = (load_file(each / "model.safetensors") for each in (folder, path))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        model, info = transformers.AutoModelForPreTraining.from_pretrained(str(folder), output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert model.config.hidden_size == 32
        assert transformers.AutoTokenizer.from_pretrained(str(folder)).mask_token == "[MASK]"
        assert f"{progress['step']:,}" in (folder / "README.md").read_text()


def test_a_killed_run_keeps_every_milestone_once_and_the_same(tiny: Tiny, counted: Path, tmp_path: Path) -> None:
    milestones = [str(words) for words in range(500, 4000, 500)]
    config = tiny(max_steps=30, save_every=7, log_every=30, eval_every=30, milestones=milestones, keep_checkpoints=1)
    train(config, counted, tmp_path / "straight")
    run = tmp_path / "killed"
    for step in (7, 14):
        process = start(config, counted, run)
        wait_for(run / "checkpoints" / f"step-{step:08d}", process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        (run / "milestones" / f".500.{step}.tmp").mkdir()  # as a kill within a write leaves it
    train(config, counted, run)
    assert names(run) == names(tmp_path / "straight")
    assert len(names(run)) > 5
    for name in names(run):
        ours, theirs = (
            load_file(each / "milestones" / name / "model.safetensors") for each in (run, run.parent / "straight")
        )
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_milestones_may_change_and_those_passed_are_named(
    tiny: Tiny, counted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(tiny(max_steps=8), counted, run)
    train(tiny(max_steps=16, milestones=["300", "1.5k"]), counted, run)
    assert f"passed already, missing or damaged in {run / 'milestones'}: 300" in capsys.readouterr().out
    assert names(run) == {"1.5k"}
    assert metrics(run)[-1]["step"] == 16


def test_steps_carried_over_count(tiny: Tiny, counted: Path, tmp_path: Path) -> None:
    first = train(tiny(milestones=MILESTONES), counted, tmp_path / "first").parent
    newest = first / "checkpoints" / "step-00000012"
    longer = tiny(max_steps=24, milestones=[*MILESTONES, "2.5k"])
    train(longer, counted, tmp_path / "second", init_from=newest, carry_optimizer=True)
    assert names(tmp_path / "second") == {"2.5k"}


def test_there_are_none_by_default() -> None:
    assert TrainConfig().milestones == ()
