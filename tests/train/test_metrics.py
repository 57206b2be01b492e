"""Lines of figures: cut back to a step, and as they are shown."""

import json
from pathlib import Path

from bert_pretrain.train.metrics import MetricsFile, bar_text, console_line


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
