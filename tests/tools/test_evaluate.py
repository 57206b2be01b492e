"""`evaluate`: one thing to evaluate on at a time, figures as a table and as JSON."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bert_pretrain.cli import app
from bert_pretrain.config_file import load_config
from bert_pretrain.train.evaluation import evaluate as evaluate_data


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["evaluate", *map(str, arguments), "--device", "cpu"])
    return result.exit_code, result.output


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("the one\nanother one\n")
    (tmp_path / "p.jsonl").write_text('{"sentence_good": "the one", "sentence_bad": "one the", "UID": "order"}\n')
    return tmp_path


def test_figures_are_printed_and_written(make_bert, data_folder: Path, place: Path) -> None:
    model = make_bert(max_position_embeddings=64)
    code, shown = run(model, "--data", data_folder, "--json", place / "data.json", "--precision", "fp32")
    assert code == 0, shown
    figures = json.loads((place / "data.json").read_text())
    config = load_config(settings=["train.device=cpu", "train.precision=fp32"]).train
    assert figures == evaluate_data(model, data_folder, config=config)
    for name in ("mlm_loss", "mlm_accuracy", "mlm_perplexity", "nsp_loss", "nsp_accuracy"):
        assert f"{figures[name]:,.4f}" in next(line for line in shown.splitlines() if line.startswith(f"{name} "))
    for flag, file in (("--text", "a.txt"), ("--pairs", "p.jsonl")):
        files = ("--json", place / f"{file}.json", "--output", place / f"{file}.jsonl")
        assert run(model, flag, place / file, *files)[0] == 0
    assert json.loads((place / "a.txt.json").read_text())["texts"] == 2
    assert set(json.loads((place / "p.jsonl.json").read_text())["groups"]) == {"order"}
    assert len((place / "a.txt.jsonl").read_text().splitlines()) == 2


CALLS = {
    "nothing": [],
    "two": ["--text", "a.txt", "--pairs", "p.jsonl"],
    "a metric of data": ["--data", "d", "--metric", "original"],
    "a field of texts": ["--text", "a.txt", "--by", "UID"],
    "empty pairs": ["--pairs", "p.jsonl", "--skip-empty"],
    "tokens without a file": ["--text", "a.txt", "--per-token"],
    "an unknown precision": ["--text", "a.txt", "--precision", "fp8"],
    "tokens of pairs": ["--pairs", "p.jsonl", "--per-token", "--output", "o.jsonl"],
}


@pytest.mark.parametrize("arguments", CALLS.values(), ids=CALLS)
def test_flags_that_do_not_go_together_are_refused(
    bert_folder: Path, place: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    code, shown = run(bert_folder, *arguments)
    assert code == 2
    assert shown.count("\n  where: ") == shown.count("\n  hint: ") == 1
