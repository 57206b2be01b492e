"""Lines of figures: cut back to a checkpoint, and as they are shown."""

import json
from pathlib import Path

import pytest

from bert_pretrain.errors import DataError
from bert_pretrain.train.metrics import MetricsFile, bar_text, console_line


def test_metrics_are_cut_back_to_a_checkpoint_and_a_torn_line_goes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, kept=None)
    for step in (5, 10):
        first.write({"step": step, "loss": 1.0})
    position = first.position
    first.write({"step": 15, "loss": 1.0})
    first.close()
    path.write_text(path.read_text() + '{"step": 7, "l')
    log = MetricsFile(path, kept=position)
    assert log.position == position
    assert log.last_training == {"step": 10, "loss": 1.0}
    assert log.last_validation is None
    log.write({"step": 12, "validation_mlm_loss": 2.0})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [5, 10, 12]
    MetricsFile(path, kept=None).close()
    assert path.read_text() == ""


@pytest.mark.parametrize("damage", ["another figure", "a lost line"])
def test_metrics_that_were_damaged_are_refused_and_may_be_given_up(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsFile(path, kept=None)
    log.write({"step": 5, "loss": 1.5})
    position = log.position
    log.close()
    path.write_text(path.read_text().replace("1.5", "1.7") if damage == "another figure" else "")
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"metrics\.jsonl is damaged"):
        MetricsFile(path, kept=position)
    assert path.read_bytes() == before
    path.unlink()
    MetricsFile(path, kept=position).close()
    assert "is missing" in capsys.readouterr().out


@pytest.mark.parametrize("change", [b"", b"a", b"a line more\n"])
def test_metrics_that_are_changed_during_the_run_end_it(tmp_path: Path, change: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsFile(path, kept=None)
    log.write({"step": 5, "loss": 1.5})
    path.write_bytes(path.read_bytes() + change if len(change) > 1 else change)
    with pytest.raises(DataError, match=r"metrics\.jsonl is damaged: another program has changed it"):
        log.write({"step": 10, "loss": 1.5})
    with pytest.raises(DataError, match="another program"):
        log.position  # noqa: B018
    log.close()


def test_an_interval_of_skipped_steps_has_no_losses_and_a_line_all_the_same() -> None:
    line = {"step": 5, "loss": None, "skipped_steps": 5}
    assert "all 5 steps skipped" in console_line(line, 100)


def test_rates_are_left_out_where_only_the_first_step_was_done() -> None:
    line = {"loss": 1.0, "learning_rate": 1e-3, "tokens_per_second": None, "examples_per_second": None, "mfu": None}
    assert bar_text(line) == "loss 1.000, lr 1.0e-03"
