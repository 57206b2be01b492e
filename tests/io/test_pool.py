"""The process pool: results in order, errors raised in the parent, no processes left after an interruption."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from bert_pretrain.errors import UserError
from bert_pretrain.io.cores import available_cores
from bert_pretrain.io.pool import LocalPool, progress_bar, run_each
from tests.conftest import REPOSITORY, wait_until
from tests.io.tasks import break_a_pipe, fail_at_1, kill_worker_at_1, square


def run_all(function: Callable[[Any], Any], tasks: Sequence[Any], workers: int | LocalPool) -> list[Any]:
    return list(run_each(function, tasks, workers=workers, description="test", unit="task"))


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_ordered_and_lazy_and_workers_ignore_ctrl_c(tmp_path, workers) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    blocked = before if workers == 1 else {signal.SIGINT, signal.SIGHUP}
    tasks = [tmp_path / str(number) for number in range(12)]
    with LocalPool(workers) as pool:
        assert run_all(square, range(6), pool) == [(number * number, blocked) for number in range(6)]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before
        results = run_each(Path.touch, tasks, workers=pool, description="test", unit="task")
        assert list(tmp_path.iterdir()) == []
        for taken in range(1, 9):
            next(results)
            assert taken <= len(list(tmp_path.iterdir())) <= taken - 1 + (1 if workers == 1 else 4)
        results.close()
    assert len(list(tmp_path.iterdir())) < len(tasks)
    assert multiprocessing.active_children() == []


def test_error_in_one_task_stops_the_others(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no"):
        run_all(fail_at_1, [tmp_path / str(number) for number in range(4)], workers=2)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="killed"):
        run_all(kill_worker_at_1, range(4), workers=2)
    assert multiprocessing.active_children() == []


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
WORK = """
from bert_pretrain.io.pool import run_each
from tests.io.tasks import square, write_id_and_wait
print(len(list(run_each({task}, [1, 2], workers=2, description='test', unit='task'))))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_exit_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "script.py").write_text(WORK.format(task="write_id_and_wait"))
    command = [sys.executable, str(tmp_path / "script.py")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT)
    workers = [int(parent.stdout.readline()) for _ in range(2)]
    parent.send_signal(number)
    parent.communicate(timeout=180)  # waits until the workers close the pipe too
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


@pytest.mark.parametrize("name", ["script.py", "-"])
def test_workers_do_not_run_the_script_again(tmp_path: Path, name: str) -> None:
    """Without `if __name__ == "__main__":`, in a file and in `python - < script`."""
    (tmp_path / "script.py").write_text(WORK.format(task="square"))
    with (tmp_path / "script.py").open() as file:
        done = subprocess.run(
            [sys.executable, name],
            cwd=tmp_path,
            stdin=file,
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_broken_pipe_to_a_worker_is_reported_like_a_dead_worker() -> None:
    with pytest.raises(UserError, match="killed"):
        run_all(break_a_pipe, range(2), workers=2)


def test_available_cores_respects_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_bar_on_terminal_and_in_log_file(capsys, monkeypatch, is_terminal: bool) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    with progress_bar(total=3, desc="work", unit="step") as bar, progress_bar(total=2, desc="inner", leave=False):
        bar.update(1)
        tqdm.write("a line")
        bar.refresh()
        print("another line")
    out, err = capsys.readouterr()
    assert {"a line", "another line"} <= set((out + err).split("\n"))
    if is_terminal:
        assert "\rwork:   0%" in err
    else:
        assert [line[:9] for line in err.split("\n") if line.startswith("work")] == ["work:   0", *["work:  33"] * 2]
        assert not {"\r", "\x1b"} & set(err)


@pytest.mark.parametrize(("content", "cores"), [("max 100000", 3), ("150000 100000", 2), ("1000 100000", 1), ("", 3)])
def test_available_cores_respects_cgroup_quota(tmp_path: Path, monkeypatch, content: str, cores: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    (tmp_path / "cpu.max").write_text(f"{content}\n")
    assert available_cores(tmp_path / "cpu.max") == cores
    assert available_cores(tmp_path / "none") == 3


def test_progress_bar_without_stderr_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # the program was started with a closed stderr
    assert list(progress_bar(range(3), desc="work")) == [0, 1, 2]
