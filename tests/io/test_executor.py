"""The pool of processes: results in order, errors handed on, and nobody left behind after an interruption."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bert_pretrain.errors import UserError
from bert_pretrain.io.pool import LocalPool, run_each


def run_all(function: Callable[[Any], Any], tasks: Sequence[Any], workers: int | LocalPool) -> list[Any]:
    return list(run_each(function, tasks, workers=workers, description="test", unit="task"))


def square(number: int) -> int:
    time.sleep(0.05 * (3 - number % 3))  # so that they do not end in the order they began
    return number * number


def stumble(path: Path) -> None:
    if path.name == "1":
        raise UserError("no", where="task 1", remedy="none")
    time.sleep(20)
    path.touch()


def die(number: int) -> int:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def blocked_signals(_: int) -> set[int]:
    return signal.pthread_sigmask(signal.SIG_BLOCK, set())


def leave_note(path: Path) -> int:
    path.touch()
    return os.getpid()


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_tasks(workers: int) -> None:
    assert run_all(square, range(6), workers=workers) == [0, 1, 4, 9, 16, 25]


@pytest.mark.parametrize(("workers", "most"), [(1, 1), (2, 4)])
def test_work_keeps_only_a_little_ahead_of_who_takes_the_results(tmp_path: Path, workers: int, most: int) -> None:
    tasks = [tmp_path / str(number) for number in range(12)]
    with LocalPool(workers) as pool:
        results = run_each(leave_note, tasks, workers=pool, description="test", unit="task")
        assert list(tmp_path.iterdir()) == []
        for taken in range(1, 9):
            next(results)
            time.sleep(0.02)  # workers may run ahead meanwhile
            assert taken <= len(list(tmp_path.iterdir())) <= taken - 1 + most
        results.close()
    assert len(list(tmp_path.iterdir())) < len(tasks)
    assert multiprocessing.active_children() == []


def test_a_pool_keeps_its_processes_from_one_stage_to_the_next(tmp_path: Path) -> None:
    tasks = [tmp_path / str(number) for number in range(8)]
    with LocalPool(2) as pool:
        runs = [set(run_all(leave_note, tasks, workers=pool)) for _ in range(2)]
    assert len(runs[0] | runs[1]) <= 2
    assert os.getpid() not in runs[0]


def test_an_error_of_one_task_ends_the_others_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no"):
        run_all(stumble, [tmp_path / str(number) for number in range(4)], workers=2)
    assert list(tmp_path.iterdir()) == []
    assert multiprocessing.active_children() == []


def test_a_worker_killed_from_outside_is_one_message() -> None:
    with pytest.raises(UserError, match="killed from outside"):
        run_all(die, range(4), workers=2)


def test_ctrl_c_never_reaches_a_worker() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    found = run_all(blocked_signals, range(2), workers=2)
    assert found == [{signal.SIGINT}] * 2
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_do_not_outlive_an_interrupted_parent(tmp_path: Path, number: signal.Signals) -> None:
    script = (
        "import os, pathlib, sys, time, signal\n"
        "from bert_pretrain.io.pool import run_each\n"
        "def work(name):\n"
        "    pathlib.Path(name).write_text(str(os.getpid())); time.sleep(120)\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "    list(run_each(work, sys.argv[1:], workers=2, description='test', unit='task'))\n"
    )
    (tmp_path / "script.py").write_text(script)
    notes = [tmp_path / "a", tmp_path / "b"]
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), *map(str, notes)], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 180  # on a machine under load
    while not all(note.exists() and note.read_text() for note in notes):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.send_signal(number)
    parent.wait(timeout=180)
    workers = [int(note.read_text()) for note in notes]
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_that_is_stopped_leaves_no_semaphore(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from tqdm import tqdm\n"
        "from bert_pretrain.io.pool import run_each\n"
        "def work(number):\n"
        "    list(tqdm(range(2), disable=None))\n"  # as in the libraries that a task uses
        "    time.sleep(1)\n"
        "    sys.exit(1 / number)\n"
        "if __name__ == '__main__':\n"
        "    list(run_each(work, [0, 0], workers=2, description='test', unit='task'))\n"
    )
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, check=False)
    assert "ZeroDivisionError" in done.stderr
    assert "leaked" not in done.stderr
