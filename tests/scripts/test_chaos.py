"""Tests of the fault injection: a few faults in `vocab`, which needs no torch, and in programs with defects."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chaos
import chaos_trial
import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and pidfd_open")
SEED = 4
SCRIPTS = REPOSITORY / "scripts"
Campaign = Callable[..., tuple[int, list[dict[str, Any]], str]]


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    """Return a function that injects faults into `vocab`, after it has run Python lines that plant a defect."""

    def run(*arguments: object, before: str = "") -> tuple[int, list[dict[str, Any]], str]:
        output = tmp_path / "chaos.jsonl"
        words = ["chaos.py", "--commands", "vocab", "--output", str(output), *map(str, arguments)]
        program = f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nsys.argv = {words!r}\n{before}\n"
        program += "import chaos\nsys.exit(chaos.main())\n"
        # The planted lines import NumPy, and a process that forks must not have NumPy's threads.
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        lines = output.read_text().splitlines() if output.exists() else []
        return done.returncode, [json.loads(line) for line in lines], done.stdout + done.stderr

    return run


def test_vocab_has_no_defects(campaign: Campaign) -> None:
    code, outcomes, printed = campaign("--faults", 8, "--seed", SEED)
    assert len(outcomes) == 8, printed
    assert [outcome for outcome in outcomes if outcome["verdict"] not in ("same", "message", "unchecked")] == []
    assert code == 0
    assert len({outcome["fault"] for outcome in outcomes}) > 4
    assert "| all |" in printed


@pytest.mark.parametrize(
    ("verdict", "defect"),
    [
        ("silent", "run.damage_of_files = lambda *_: None"),
        ("traceback", "run.damage_of_files = lambda *_: 1 / 0"),
        pytest.param(
            "hang",
            "chaos_trial.HANG_SECONDS = 5; run.damage_of_files = lambda *_: time.sleep(60)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_planted_defect_is_detected(campaign: Campaign, verdict: str, defect: str) -> None:
    commands = [command for command in chaos_trial.COMMANDS if command.name == "vocab"]
    faults = ((number, chaos.choose(commands, number, SEED)[1]) for number in range(1000))
    numbers = [number for number, fault in faults if fault == "damaged, finished"]
    before = f"import chaos_trial, time; import bert_pretrain.vocab.run as run; {defect}"
    code, outcomes, printed = campaign("--seed", SEED, "--only", *numbers[:2], before=before)
    assert verdict in {outcome["verdict"] for outcome in outcomes}, printed
    assert code == 1


def test_fault_depends_on_seed_and_number_only() -> None:
    commands = chaos_trial.COMMANDS
    first, again = ([chaos.choose(commands, number, 7)[:2] for number in range(300)] for _ in range(2))
    assert first == again
    assert {fault for _, fault in first} == set(chaos.FAULTS)
    assert {command.name for command, _ in first} == {command.name for command in commands}
