"""The probe labels texts from hidden states, and leaves training as it is without it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.report.report import write_report
from bert_pretrain.storage import manifest
from bert_pretrain.train.run import train

Tiny = Callable[..., Config]


def write_table(path: Path, *, rows: int = 120, is_learnable: bool = True) -> Path:
    """Write texts of four topics, labelled by topic or by chance."""
    generator = np.random.default_rng(3)
    lines = ["text,label"]
    for number in range(rows):
        words = generator.choice(list("abcdefghijkl"), 8)
        topic, other = "wxyz"[number % 4], "wxyz"[int(generator.integers(4))]
        lines.append(f"{' '.join(topic + word for word in words)},{topic if is_learnable else other}")
    path.write_text("\n".join(lines) + "\n")
    return path


def evaluations(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "validation_mlm_loss" in line]


def assert_same_weights(left: Path, right: Path) -> None:
    first, second = (load_file(run / "model" / "model.safetensors") for run in (left, right))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)


@pytest.fixture(scope="module")
def probed(tiny: Tiny, data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probed")
    train(tiny(probe=str(write_table(folder / "topics.csv"))), data_folder, folder / "run")
    return folder / "run"


def test_every_evaluation_has_the_accuracy_of_the_probe(
    probed: Path, tmp_path: Path, tiny: Tiny, data_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [line["step"] for line in evaluations(probed)] == [0, 6, 12]
    assert all(line["probe_accuracy"] > 0.9 for line in evaluations(probed))  # topics are told apart by their words
    by_chance = write_table(tmp_path / "chance.csv", is_learnable=False)
    train(tiny(probe=str(by_chance), max_steps=2), data_folder, tmp_path / "run")
    assert evaluations(tmp_path / "run")[-1]["probe_accuracy"] < 0.6
    assert "  probe " in capsys.readouterr().out


def test_training_is_the_same_with_and_without_a_probe(probed: Path, finished: Path) -> None:
    assert_same_weights(probed, finished)
    without = [{name: line[name] for name in line if name != "probe_accuracy"} for line in evaluations(probed)]
    assert without == evaluations(finished)


def test_a_resumed_run_ends_with_the_same_bits_and_may_leave_the_probe_out(
    probed: Path, tmp_path: Path, tiny: Tiny, data_folder: Path
) -> None:
    for name, probe in (("with", str(probed.parent / "topics.csv")), ("without", None)):
        run = tmp_path / name
        shutil.copytree(probed, run)
        manifest.reopen(run)
        for step in (8, 12):
            shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
        train(tiny(probe=probe), data_folder, run)
        assert_same_weights(run, probed)
        same = evaluations(run) == evaluations(probed)
        assert same == (probe is not None)


def test_the_report_draws_the_probe(probed: Path, finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sizes = []
    for number, run in enumerate((probed, finished)):
        picture, page = write_report([run], tmp_path / f"{number}.png")
        sizes.append(len(page.read_text()))
        assert picture.stat().st_size
    assert sizes[0] > 1.02 * sizes[1]  # one panel more


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("text,label\n" + "wa wb,x\n" * 20, "20 rows of 1 classes"),
        ("text,label\nwa,x\nwb,y\n", "2 rows of 2 classes"),
        ("text,class\n" + "wa wb,x\n" * 20, "no column 'label'"),
        ("text,label\n" + "wa wb,x\n,y\n" * 20, "'text' is empty"),
    ],
)
def test_a_table_that_makes_no_task_is_refused_before_the_first_step(
    text: str, problem: str, tiny: Tiny, data_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises((ConfigError, InputError), match=problem) as caught:
        train(tiny(probe=str(tmp_path / "table.csv")), data_folder, tmp_path / "run")
    assert "--" not in caught.value.remedy


def test_a_probe_without_file_or_without_evaluations_is_refused(
    tiny: Tiny, data_folder: Path, new_data_folder: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        train(tiny(probe="nowhere.csv"), data_folder, tmp_path / "run")
    table = write_table(tmp_path / "topics.csv")
    with pytest.raises(ConfigError, match="no validation split"):
        train(tiny(probe=str(table)), new_data_folder(validation_rows=0), tmp_path / "other")
