"""Between log lines a run never waits for the device; a log line, an evaluation and a snapshot read what they need."""

from pathlib import Path
from typing import Any

import pytest

from tests.cuda.conftest import Pretended

SYNCHRONIZE = "torch.cuda.synchronize"


@pytest.fixture(scope="module")
def traced(pretended: Pretended, small_data: Path) -> Any:
    return pretended("runs.loop_evaluation_snapshot", small_data)


def test_the_loop_waits_at_log_lines_only(traced: Any) -> None:
    # Also after the first step, in which kernels are chosen or compiled, so as not to time it.
    assert {step: waits[0] for step, waits in traced["loop"].items()} == dict.fromkeys(("1", "3", "6"), SYNCHRONIZE)
    # A log line reads the sums, and whether too many steps in a row were skipped.
    assert {step: len(waits) - 1 for step, waits in traced["loop"].items()} == {"1": 0, "3": 2, "6": 2}, traced["loop"]


def test_an_evaluation_reads_its_sums_once(traced: Any) -> None:
    assert traced["evaluated_batches"] > 1
    assert len(traced["evaluation"]) == 1, traced["evaluation"]


def test_a_snapshot_copies_each_tensor_once_without_waiting(traced: Any) -> None:
    assert traced["snapshot_waits"] == []
    assert traced["snapshot_copies"] == traced["tensors"] > 100
    assert traced["data_dependent"] == []
