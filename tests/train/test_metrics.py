"""Figures: FLOPs by the formula, cards by their names, lines cut back to a step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_pretrain.config import ModelConfig
from bert_pretrain.train.batches import cut
from bert_pretrain.train.flops import batch_flops, peak_flops
from bert_pretrain.train.metrics import MetricsFile, bar_text, console_line


def test_flops_are_those_of_real_tokens(examples: Callable[..., Any]) -> None:
    table = examples(9)
    config = ModelConfig(hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=20)
    weights = 3 * (4 * 8 * 8 + 2 * 8 * 20)
    expected = (
        6 * weights * len(table.input_ids)
        + 12 * 3 * 8 * (table.lengths**2).sum()
        + 6 * (8 * 8 + 8 * 150) * len(table.masks.positions)
        + 6 * (8 * 8 + 16) * 9
    )
    for budget in (10_000, 60):
        assert batch_flops(cut(table, budget), config, 150) == expected


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA RTX A6000", 154.8e12),
        ("NVIDIA RTX A4000", None),
        ("Tesla T4", 65e12),
        ("A card of the future", None),
    ],
)
def test_the_peak_of_a_card_is_known_by_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), torch.float16) == peak
    assert peak_flops(torch.device("cuda"), torch.float32) is None
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_metrics_are_cut_back_to_a_step_and_a_torn_line_goes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (5, 10, 15)) + '{"step": 7, "l')
    log = MetricsFile(path, keep_until_step=10)
    assert log.last_training == {"step": 10, "loss": 1.0}
    assert log.last_validation is None
    log.write({"step": 12, "validation_mlm_loss": 2.0})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [5, 10, 12]
    MetricsFile(path, keep_until_step=None).close()
    assert path.read_text() == ""


def test_an_interval_of_skipped_steps_has_no_losses_and_a_line_all_the_same() -> None:
    line = {"step": 5, "loss": None, "skipped_steps": 5}
    assert "all 5 steps skipped" in console_line(line, 100)


def test_a_line_of_an_evaluation_shows_the_perplexity() -> None:
    line = {"step": 5, "validation_mlm_loss": 2.0, "validation_mlm_accuracy": 0.5, "validation_nsp_loss": None}
    assert console_line(line, None).endswith("mlm  2.0000 nats 50.00%  perplexity 7.4")


def test_rates_are_left_out_where_only_the_first_step_was_done() -> None:
    line = {"loss": 1.0, "learning_rate": 1e-3, "tokens_per_second": None, "examples_per_second": None, "mfu": None}
    assert bar_text(line) == "loss 1.000, lr 1.0e-03"
