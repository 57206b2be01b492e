"""Exit codes and messages of user errors, system errors, signals and bugs."""

import errno
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from bert_pretrain.cli.exits import reports_errors
from bert_pretrain.errors import DataError, Interrupted
from bert_pretrain.io import manifest
from tests.conftest import call


def os_error(number: int, *path: str) -> OSError:
    return OSError(number, os.strerror(number), *path)


def fail(error: Exception, output: str = "some/folder") -> None:
    """Raise an error inside a command with an output."""

    @reports_errors
    def embed(output: str) -> None:
        raise error

    embed(output=output)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (os_error(errno.ENOSPC, "data/x"), "No space left"),
        (os_error(errno.ENOSPC), "where: some/folder"),  # a write to an open file gives no path
        (os_error(errno.EFBIG), "File too large"),
        (os_error(errno.ESTALE, "data/x"), "Stale file handle"),
        (os_error(errno.EMFILE, "data/x"), "Too many open files"),
        (os_error(errno.ENOMEM), "memory"),
        (MemoryError(), "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), "memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "memory"),
        (RuntimeError("could not create a primitive"), "memory"),
        (RuntimeError("can't start new thread"), "memory"),
        (ImportError("a.so: failed to map segment from shared object"), "memory"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"), "Input/output error"),
        (RuntimeError("basic_ios::clear: iostream error"), "Input/output error\n  where: some/folder"),
        (Exception("Error while serializing: I/O error: No space left on device (os error 28)"), "No space left"),
        (os_error(errno.ENOENT, "data/x"), "No such file"),
        (os_error(errno.EACCES, "data/x"), "Permission denied"),
    ],
)
def test_system_error_becomes_one_message(error: Exception, expected: str, capsys) -> None:
    with pytest.raises(typer.Exit) as exit_error:
        fail(error)
    assert exit_error.value.exit_code == 2
    message = capsys.readouterr().err
    assert expected in message
    assert message.count("error: ") == 1
    assert "where: data/x" in message or getattr(error, "filename", None) is None


@pytest.mark.parametrize("error", [RuntimeError("a bug"), os_error(errno.EINVAL), ValueError("a bug")])
def test_bug_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        fail(error)


def test_unwritable_stdout_is_one_message_and_closed_stdout_is_none(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        done = _version(stdout=file, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)))
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write")
    assert "ignored" not in done.stderr
    reading, writing = os.pipe()
    os.close(reading)  # the reader is gone
    with os.fdopen(writing, "w") as pipe:
        done = _version(stdout=pipe)
    assert (done.returncode, done.stderr) == (1, "")
    done = _version(preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


def test_errors_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(DataError("what", where="a.yaml:3", remedy="correct it")))
    assert type(error) is DataError
    assert (error.what, error.where, error.remedy) == ("what", "a.yaml:3", "correct it")
    stopped = pickle.loads(pickle.dumps(Interrupted(130, "run it again")))
    assert (stopped.exit_code, stopped.message) == (130, "run it again")


def test_training_status_reports_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    for name in ("run", "other"):
        call("train", "--data", "missing", "--output", tmp_path / name, code=2)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["status"], status["step"]) == ("wrong_input", 0)
    assert "missing" in status["message"]
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["letter.txt"]
    (tmp_path / "run" / "status.json").unlink()
    with manifest.exclusive(tmp_path / "run"):  # another session is running
        call("train", "--data", "missing", "--output", tmp_path / "run", code=2)
    assert not (tmp_path / "run" / "status.json").exists()


def _version(**streams: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bert_pretrain", "--version"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    streams = {"stdout": subprocess.DEVNULL, "env": environment, **streams}
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, **streams)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    ("number", "at_start", "code"),
    [
        (signal.SIGTERM, "SIG_DFL", -signal.SIGTERM),
        (signal.SIGINT, "default_int_handler", -signal.SIGINT),
        (signal.SIGHUP, "SIG_DFL", -signal.SIGHUP),
        (signal.SIGHUP, "SIG_IGN", 0),  # as under `nohup`
    ],
)
def test_signal_during_shutdown_prints_no_traceback(number: int, at_start: str, code: int) -> None:
    program = f"""
import atexit, os, signal, sys
atexit.register(os.kill, os.getpid(), {int(number)})
signal.signal({int(number)}, signal.{at_start})
sys.argv = ["bert-pretrain", "--version"]
from bert_pretrain.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, "")


def test_terminal_encoding_without_some_characters_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bert_pretrain", "run", "tiny", "nosuch.txt", "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "latin-1"}, check=False)
    assert done.returncode == 2
    assert b"vocabulary" in done.stdout
    assert done.stderr.startswith(b"error: ")
