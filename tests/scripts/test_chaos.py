"""The fault campaign in short: a few faults of the stages that need no torch, and programs with planted defects."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the campaign needs /proc and pidfd_open")
SEED = 5
SCRIPTS = REPOSITORY / "scripts"


@pytest.fixture(scope="module")
def chaos() -> Any:
    """The modules of the campaign; scripts import each other by their names alone."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import chaos as main
        import chaos_commands
        import chaos_damage
        import chaos_process
        import chaos_trial
    finally:
        sys.path.remove(str(SCRIPTS))
    return SimpleNamespace(
        main=main, commands=chaos_commands, damage=chaos_damage, process=chaos_process, trial=chaos_trial
    )


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
    code, outcomes, said = campaign("--faults", 12, "--seed", SEED)
    assert len(outcomes) == 12, said
    assert [outcome for outcome in outcomes if outcome["verdict"] not in ("same", "message", "unchecked")] == []
    assert code == 0
    assert len({outcome["fault"] for outcome in outcomes}) > 5
    assert "| all |" in said


def damage_finished(chaos: Any, count: int) -> list[int]:
    """Return the first numbers whose fault is damage to a finished vocabulary."""
    commands = [command for command in chaos.commands.COMMANDS if command.name == "vocab"]
    chosen = ((number, chaos.main.choose(commands, number, SEED)[1]) for number in range(1000))
    return [number for number, fault in chosen if fault == "damaged, finished"][:count]


def test_a_planted_defect_is_found(chaos: Any, campaign: Campaign) -> None:
    defect = "import bert_pretrain.vocab.run as run; run._is_intact = lambda output: True"
    code, outcomes, said = campaign("--seed", SEED, "--only", *damage_finished(chaos, 3), before=defect)
    assert "silent" in {outcome["verdict"] for outcome in outcomes}, said
    assert code == 1


def test_the_same_number_is_the_same_fault(chaos: Any) -> None:
    commands = chaos.commands.COMMANDS
    first, again = ([chaos.main.choose(commands, number, 7)[:2] for number in range(300)] for _ in range(2))
    assert first == again
    assert {fault for _, fault in first} == set(chaos.main.FAULTS)
    assert {command.name for command, _ in first} == {command.name for command in commands}


@pytest.fixture
def trial(chaos: Any, tmp_path: Path) -> Any:
    return chaos.trial.Trial(chaos.trial.Bench(tmp_path / "bench"), chaos.commands.COMMANDS[0], random.Random(1))


def ended(chaos: Any, trial: Any, code: int, errors: str) -> Any:
    child = chaos.process.Child(0, trial.bench.logs / "out", trial.bench.logs / "err", code=code)
    child.errors.write_text(errors)
    return child


@pytest.mark.parametrize(
    ("code", "errors", "verdict"),
    [
        (1, "Traceback (most recent call last):\nValueError: x\n", "traceback"),
        (0, "Exception ignored in: x\nTraceback (most recent call last):\nValueError: x\n", "traceback"),
        (-11, "", "traceback"),
        (2, "", "traceback"),
        (2, "error: one\nerror: two\n", "traceback"),
    ],
)
def test_how_a_process_must_not_end(chaos: Any, trial: Any, code: int, errors: str, verdict: str) -> None:
    with pytest.raises(chaos.trial.Defect) as found:
        trial.judge(ended(chaos, trial, code, errors), (0, 2))
    assert found.value.verdict == verdict


def test_one_message_is_accepted(chaos: Any, trial: Any) -> None:
    trial.judge(ended(chaos, trial, 2, "error: one\n  where: here\n"), (0, 2))


def test_a_process_without_an_end_is_found_and_killed(chaos: Any, trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos.trial, "HANG_SECONDS", 0.1)
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    child = chaos.process.Child(process.pid, trial.bench.logs / "out", trial.bench.logs / "err")
    with pytest.raises(chaos.trial.Defect, match="no end") as found:
        trial.wait([child])
    assert found.value.verdict == "hang"
    assert child.code == -9
    process.returncode = -9  # reaped by the child


def test_every_kind_of_damage_changes_a_file(chaos: Any, trial: Any) -> None:
    content = bytes(range(1, 200))
    kinds = set()
    for _ in range(60):
        path = trial.now / "file"
        path.write_bytes(content)
        kinds.add(chaos.damage.damage(path, trial).split()[0])
        assert not path.exists() or path.read_bytes() != content
    assert kinds == {"bit", "cut", "zeros", "empty", "deleted", "longer"}


def test_times_are_not_compared_and_all_else_is(chaos: Any, tmp_path: Path) -> None:
    def digest(line: dict[str, float]) -> dict[str, str]:
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        found: dict[str, str] = chaos.commands.digest(tmp_path, ["metrics.jsonl"])
        return found

    first = digest({"loss": 6.0, "elapsed_seconds": 1.0})
    assert digest({"loss": 6.0, "elapsed_seconds": 2.0}) == first
    assert digest({"loss": 6.1, "elapsed_seconds": 1.0}) != first


@pytest.mark.parametrize("time", ["3 s", "1 h 4 min", "2 d 3 h"])
def test_a_text_without_its_times_is_the_same(chaos: Any, time: str) -> None:
    assert chaos.commands.without_times(f"| time in training steps | {time} |") == "| time in training steps |  |"
