"""The fault campaign in short: a few faults of the stages that need no torch, and programs with planted defects."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chaos
import chaos_process
import chaos_trial
import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the campaign needs /proc and pidfd_open")
SEED = 4
SCRIPTS = REPOSITORY / "scripts"
Campaign = Callable[..., tuple[int, list[dict[str, Any]], str]]


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    """Run a campaign over `vocab`, after some lines of Python: a defect planted in the program."""

    def run(*arguments: object, before: str = "") -> tuple[int, list[dict[str, Any]], str]:
        output = tmp_path / "chaos.jsonl"
        words = ["chaos.py", "--commands", "vocab", "--output", str(output), *map(str, arguments)]
        program = f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nsys.argv = {words!r}\n{before}\n"
        program += "import chaos\nsys.exit(chaos.main())\n"
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        found = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment
        )
        lines = output.read_text().splitlines() if output.exists() else []
        return found.returncode, [json.loads(line) for line in lines], found.stdout + found.stderr

    return run


def test_faults_of_vocab_lose_nothing(campaign: Campaign) -> None:
    code, outcomes, said = campaign("--faults", 8, "--seed", SEED)
    assert len(outcomes) == 8, said
    assert [outcome for outcome in outcomes if outcome["verdict"] not in ("same", "message", "unchecked")] == []
    assert code == 0
    assert len({outcome["fault"] for outcome in outcomes}) > 4
    assert "| all |" in said


def test_a_planted_defect_is_found(campaign: Campaign) -> None:
    commands = [command for command in chaos_trial.COMMANDS if command.name == "vocab"]
    faults = ((number, chaos.choose(commands, number, SEED)[1]) for number in range(1000))
    numbers = [number for number, fault in faults if fault == "damaged, finished"]
    defect = "import bert_pretrain.vocab.run as run; run._is_intact = lambda output: True"
    code, outcomes, said = campaign("--seed", SEED, "--only", *numbers[:2], before=defect)
    assert "silent" in {outcome["verdict"] for outcome in outcomes}, said
    assert code == 1


def test_the_same_number_is_the_same_fault() -> None:
    commands = chaos_trial.COMMANDS
    first, again = ([chaos.choose(commands, number, 7)[:2] for number in range(300)] for _ in range(2))
    assert first == again
    assert {fault for _, fault in first} == set(chaos.FAULTS)
    assert {command.name for command, _ in first} == {command.name for command in commands}


@pytest.fixture
def trial(tmp_path: Path) -> Any:
    return chaos_trial.Trial(chaos_trial.Bench(tmp_path / "bench"), chaos_trial.COMMANDS[0], random.Random(1))


def ended(trial: Any, code: int, errors: str) -> Any:
    child = chaos_process.Child(0, trial.bench.logs / "out", trial.bench.logs / "err", code=code)
    child.output.write_text("")
    child.errors.write_text(errors)
    return child


def test_how_a_process_may_end(trial: Any) -> None:
    trial.judge(ended(trial, 2, "error: one\n  where: here\n"), (0, 2))
    traceback = "Traceback (most recent call last):\nValueError: x\n"
    for code, errors in ((1, traceback), (0, traceback), (-11, ""), (2, ""), (2, "error: one\nerror: two\n")):
        with pytest.raises(chaos_trial.Defect) as found:
            trial.judge(ended(trial, code, errors), (0, 2))
        assert found.value.verdict == "traceback"


def test_a_process_without_an_end_is_found_and_killed(trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_trial, "HANG_SECONDS", 0.1)
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    child = ended(trial, 0, "")
    child.pid, child.code = process.pid, None
    with pytest.raises(chaos_trial.Defect, match="no end") as found:
        trial.wait([child])
    assert found.value.verdict == "hang"
    assert child.code == -9
    process.returncode = -9  # reaped by the child
