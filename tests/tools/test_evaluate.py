"""`evaluate`: metrics as a table and as JSON."""

import json
from pathlib import Path

from bert_pretrain.config_file import load_config
from bert_pretrain.train.evaluation import evaluate
from tests.conftest import call


def test_metrics_are_printed_and_written(make_bert, data_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the one\n" + "the " * 70)
    (tmp_path / "p.jsonl").write_text('{"sentence_good": "the one", "sentence_bad": "one the", "UID": "order"}\n')
    model = make_bert(max_position_embeddings=64)
    command, to_file = ("evaluate", model, "--device", "cpu"), ("--json", tmp_path / "data.json")
    shown = call(*command, "--data", data_folder, *to_file, "--precision", "fp32").output
    metrics = json.loads((tmp_path / "data.json").read_text())
    config = load_config(settings=["train.device=cpu", "train.precision=fp32"]).train
    assert metrics == evaluate(model, data_folder, config=config)
    for name in ("mlm_loss", "mlm_accuracy", "mlm_perplexity", "nsp_loss", "nsp_accuracy"):
        assert f"{metrics[name]:,.4f}" in next(line for line in shown.splitlines() if line.startswith(f"{name} "))
    for flag, file in (("--text", "a.txt"), ("--pairs", "p.jsonl")):
        files = ("--json", tmp_path / f"{file}.json", "--output", tmp_path / f"{file}.jsonl")
        shown = call(*command, flag, tmp_path / file, *files).output
        assert ("1 texts longer than 64 tokens" in shown) == (flag == "--text")
    refused = call("evaluate", model, "--pairs", tmp_path / "p.jsonl", "--text-field", "body", code=2)
    assert "--text-field has no effect with --pairs" in refused.output
    wrong = call("evaluate", model, "--text", tmp_path / "a.txt", "--output", tmp_path / "a.csv", code=2)
    assert "use a name that ends in .jsonl" in wrong.output
    assert json.loads((tmp_path / "a.txt.json").read_text())["texts"] == 2
    assert set(json.loads((tmp_path / "p.jsonl.json").read_text())["groups"]) == {"order"}
    assert len((tmp_path / "a.txt.jsonl").read_text().splitlines()) == 2
