"""What the system refuses is one message and exit code 2; a bug keeps its traceback."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from bert_pretrain.cli.exits import reports_errors


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "data/x"), "the disk is full"),
        (OSError(errno.EFBIG, os.strerror(errno.EFBIG)), "larger than allowed"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE), "data/x"), "too many files are open"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "memory is exhausted"),
        (MemoryError(), "memory is exhausted"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), "memory is exhausted"),
        (RuntimeError("could not create a primitive"), "memory is exhausted"),
        (RuntimeError("can't start new thread"), "memory is exhausted"),
        (ImportError("a.so: failed to map segment from shared object"), "memory is exhausted"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"), "could not be written"),
        (RuntimeError("basic_ios::clear: iostream error"), "could not be written"),
        (Exception("Error while serializing: I/O error: No space left on device (os error 28)"), "the disk is full"),
        (OSError(errno.ENOENT, os.strerror(errno.ENOENT), "data/x"), "is gone"),
        (OSError(errno.EACCES, os.strerror(errno.EACCES), "data/x"), "cannot use that path: Permission denied"),
    ],
)
def test_what_the_system_refuses_is_one_message(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @reports_errors
    def embed() -> None:
        raise error

    with pytest.raises(typer.Exit) as leaving:
        embed()
    assert leaving.value.exit_code == 2
    message = capsys.readouterr().err
    assert said in message
    assert message.count("error: ") == 1
    assert "where: data/x" in message or getattr(error, "filename", None) is None


def test_a_full_disk_is_where_the_output_is(capsys: pytest.CaptureFixture[str]) -> None:
    @reports_errors
    def embed(output: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write to an open file says it

    with pytest.raises(typer.Exit):
        embed(output="some/folder")
    assert "where: some/folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), OSError(errno.EIO, "Input/output error"), ValueError("a bug")]
)
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    @reports_errors
    def embed() -> None:
        raise error

    with pytest.raises(type(error)):
        embed()


def test_the_status_of_a_training_tells_a_mistake(tmp_path: Path) -> None:
    def train(run: Path) -> int:
        command = [sys.executable, "-m", "bert_pretrain", "train", "--data", "missing", "--output", str(run)]
        return subprocess.run(command, capture_output=True, timeout=60).returncode

    assert train(tmp_path / "run") == 2
    found = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (found["status"], found["step"]) == ("wrong_input", 0)
    assert "missing" in found["message"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    assert train(tmp_path / "other") == 2
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["letter.txt"]


def _version(**streams: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bert_pretrain", "--version"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    streams = {"stdout": subprocess.DEVNULL, "env": environment, **streams}
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, **streams)  # type: ignore[call-overload, no-any-return]


def test_an_output_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        found = _version(stdout=file, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)))
    assert found.returncode == 1
    assert found.stderr.startswith("error: cannot write to the standard output: File too large")
    assert "ignored" not in found.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_very_end_is_no_traceback(number: int) -> None:
    program = f"""
import atexit, os, sys
atexit.register(os.kill, os.getpid(), {int(number)})
sys.argv = ["bert-pretrain", "--version"]
from bert_pretrain.cli import main
main()
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr) == (-number, "")


def test_a_reader_that_leaves_is_no_message() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        found = _version(stdout=pipe)
    assert (found.returncode, found.stderr) == (1, "")


def test_a_closed_output_is_no_error() -> None:
    found = _version(preexec_fn=lambda: os.close(1))
    assert (found.returncode, found.stderr) == (0, "")
