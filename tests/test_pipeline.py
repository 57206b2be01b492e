"""`run`: all stages and phases from one configuration, whatever objective each phase has."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bert_pretrain.cli import app
from bert_pretrain.config import Config
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError, OutputError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.pipeline import _show_results, dry_run, run_pipeline, with_one_schedule
from bert_pretrain.train.schedule import too_long


def test_phases_of_unlike_objectives_follow_one_another(
    english_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = {"max_steps": 3, "global_batch_size": 16, "micro_batch_tokens": 1024, "precision": "fp32", "device": "cpu"}
    config = Config.model_validate(
        {
            "inputs": [str(english_text)],
            "vocab": {"size": 1500},
            "data": {"max_seq_length": 32, "dupe_factor": 1, "validation_fraction": 0.05},
            "model": {
                "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
                "max_position_embeddings": 64,
            },
            "train": train,
            "phases": [
                {"name": "words", "data": {"next_sentence": "none", "masking": "dynamic"}},
                {"name": "order", "data": {"next_sentence": "sop", "max_seq_length": 64}},
            ],
        }
    )  # fmt: skip
    model = run_pipeline(config, tmp_path / "out", workers=1)
    assert model == tmp_path / "out" / "train" / "order" / "model"
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("hint: nothing learnt (")
    assert "at most 64 tokens" in out
    assert "at most 64 tokens" in (model / "README.md").read_text()
    table = out[out.index("held out            MLM") :].splitlines()[1:5]
    assert [line.split()[0] for line in table] == ["words", "words", "order", "order"]
    assert [line.split()[-1] == "–" for line in table] == [True, True, False, False]
    lines = [json.loads(line) for line in (model.parent / "metrics.jsonl").read_text().splitlines()]
    assert lines[-2]["step"] == 6
    assert lines[-2]["nsp_loss"] > 0
    shutil.rmtree(model.parent / "checkpoints")  # a finished phase needs none, unless another follows
    assert run_pipeline(config, tmp_path / "out", workers=1) == model
    shutil.rmtree(tmp_path / "out" / "train" / "words" / "checkpoints")
    with pytest.raises(OutputError, match="no checkpoint left, from which the next one continues"):
        run_pipeline(config, tmp_path / "out", workers=1)


def test_curves_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "mlm_loss": 6.0}\n')
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write there"):
        _show_results([tmp_path], tmp_path / "model", tmp_path / "file")


def test_a_warm_up_may_span_phases_but_no_more_than_all_of_them(data_folder: Path) -> None:
    rows = DataFolder.open(data_folder).rows("train")
    first = Config.model_validate({"train": {"max_epochs": 1, "global_batch_size": rows}})
    last = Config.model_validate({"train": {"max_epochs": 2, "global_batch_size": rows, "warmup_steps": 3}})
    shared = [stage.train for stage in with_one_schedule([first, last], [data_folder, data_folder])]
    assert [(train.max_steps, train.schedule_steps) for train in shared] == [(1, 3), (3, 3)]
    longer = last.model_copy(update={"train": last.train.model_copy(update={"warmup_steps": 4})})
    with pytest.raises(ConfigError, match="warmup_steps 4 is longer than the run of 3 steps"):
        with_one_schedule([first, longer], [data_folder, data_folder])


def test_inputs_as_arguments_replace_those_of_the_file(
    english_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.txt").write_bytes(english_text.read_bytes())
    (tmp_path / "second.txt").write_text("One sentence.\nAnother one.\n\nA second document.\nIts end.\n")
    (tmp_path / "mine.yaml").write_text(
        "extends: tiny\ninputs: [nosuch.txt]\nvocab: {size: 1000}\ndata: {max_seq_length: 32, dupe_factor: 1}\n"
        "model: {hidden_size: 16, num_attention_heads: 2, intermediate_size: 32}\ntrain: {precision: fp32}\n"
    )
    flags = "--output out --workers 1 --steps 2 --learning-rate 3e-3 --batch-size 8 --device cpu"
    done = CliRunner().invoke(app, ["run", "mine.yaml", "first.txt", "second.txt", *flags.split()])
    assert done.exit_code == 0, done.output
    manifest = json.loads((tmp_path / "out" / "data" / "manifest.json").read_text())
    assert [one["location"] for one in manifest["inputs"]] == ["first.txt", "second.txt"]
    trained = load_config(tmp_path / "out" / "train" / "config.yaml").train
    assert (trained.max_steps, trained.max_epochs, trained.peak_lr) == (2, None, 3e-3)
    assert (trained.global_batch_size, trained.device, trained.optimizer) == (8, "cpu", "muon")


def test_a_dry_run_of_any_configuration_prints_the_first_screen_of_training(
    english_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    settings = {"vocab": {"size": 30000}, "data": {"max_seq_length": 32, "dupe_factor": 1}}
    train = {"global_batch_size": 8, "device": "cpu", "max_epochs": 1}
    config = Config.model_validate({"inputs": [str(english_text)], **settings, "model": model, "train": train})
    dry_run(config, workers=1)
    out = capsys.readouterr().out
    tokens = int(re.search(r"text +about ([\d,]+) tokens", out)[1].replace(",", ""))
    assert tokens > 50_000
    steps = int(re.search(r"for ([\d,]+) steps", out)[1].replace(",", ""))
    assert 0.8 * tokens / 32 / 8 < steps < 3 * tokens / 32 / 8
    assert "parameters" in out
    assert ("weights for" in out) == (int(re.search(r"([\d,]+) parameters", out)[1].replace(",", "")) > tokens)
    large = config.model_copy(update={"model": config.model.model_copy(update={"hidden_size": 128})})
    dry_run(large, workers=1)
    assert "hint: a smaller model" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_training_of_more_than_a_day_is_said() -> None:
    assert not too_long(86_000)
    assert "1d 1h" in too_long(90_000)
