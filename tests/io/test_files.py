"""Atomic writes and locks survive failed and killed processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError, OutputError
from bert_pretrain.io.files import (
    atomic_folder,
    atomic_path,
    is_bookkeeping,
    read_json,
    remove_temporaries,
    temporaries_of,
    write_checked_json,
    write_json,
    write_text,
)
from bert_pretrain.io.manifest import exclusive


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def run_until_ready(code: str, *arguments: object) -> "subprocess.Popen[str]":
    """Start Python with `code` and wait until it prints `ready`."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_failed_write_keeps_old_content(tmp_path: Path, failure: type[BaseException]) -> None:
    write_text(tmp_path / "file", "old")
    for name in ("old", "new"):
        with atomic_folder(tmp_path / "folder") as temporary:
            write_text(temporary / name, name)
    assert names(tmp_path / "folder") == {"new"}

    def fail(writer) -> None:
        with writer as temporary:
            write_text(temporary if temporary.suffix == ".tmp" and not temporary.is_dir() else temporary / "a", "half")
            raise failure

    for writer in (atomic_path(tmp_path / "file"), atomic_folder(tmp_path / "folder")):
        with pytest.raises(failure):
            fail(writer)
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path / "folder") == {"new"}
    assert names(tmp_path) == {"file", "folder"}


def test_temporaries_of_a_path_are_not_those_of_another(tmp_path: Path) -> None:
    own, other = tmp_path / f".clf.{'0a' * 8}.tmp", tmp_path / f".clf.v2.{'0a' * 8}.tmp"
    own.mkdir()
    other.mkdir()
    assert temporaries_of(tmp_path / "clf") == [own]
    assert temporaries_of(tmp_path / "clf.v2") == [other]


def test_temporaries_of_killed_writer_are_removed(tmp_path: Path) -> None:
    writers = [atomic_path(tmp_path / "file"), atomic_folder(tmp_path / "folder")]
    for writer in writers:  # never exited, as in a killed process
        path = writer.__enter__()
        (path / "a" if path.is_dir() else path).write_text("half")
    assert len(names(tmp_path)) == 2
    assert all(is_bookkeeping(path) for path in tmp_path.iterdir())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f".folder.{'0' * 16}.tmp").symlink_to(tmp_path / "elsewhere")
    for name in ("kept.tmp", ".kept", "kept.txt"):
        (tmp_path / name).write_text("")
    remove_temporaries(tmp_path)
    assert names(tmp_path) == {"kept.tmp", ".kept", "kept.txt", "elsewhere"}


REPLACE = """
import os, pathlib, sys, time
from bert_pretrain.io import files
replace = os.replace
def stop(source, target):
    if str(target) == sys.argv[1]:
        print("ready", flush=True)
        time.sleep(60)
    replace(source, target)
os.replace = stop
with files.atomic_folder(pathlib.Path(sys.argv[1])) as temporary:
    (temporary / "a").write_text("new")
"""


@pytest.mark.parametrize("again", ["remove_temporaries", "atomic_folder"])
def test_kill_during_replacement_keeps_old_folder(tmp_path: Path, again: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "a").write_text("old")
    kill(run_until_ready(REPLACE, out))
    assert not out.exists()
    assert all(is_bookkeeping(path) for path in tmp_path.iterdir())
    if again == "remove_temporaries":
        remove_temporaries(tmp_path)
        assert (names(tmp_path), (out / "a").read_text()) == ({"out"}, "old")
        return
    with atomic_folder(out) as temporary:
        assert (out / "a").read_text() == "old"
        (temporary / "a").write_text("newer")
    assert (out / "a").read_text() == "newer"


LOCK = """
import pathlib, sys, time
from bert_pretrain.io.manifest import exclusive
with exclusive(pathlib.Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_lock_excludes_other_processes_and_ends_with_its_process(tmp_path: Path) -> None:
    folder = tmp_path / "output"
    process = run_until_ready(LOCK, folder)
    with pytest.raises(OutputError, match="another process"), exclusive(folder):
        pytest.fail("two processes have the lock")
    kill(process)
    with exclusive(folder):
        assert names(folder) == {".lock"}
    assert not names(folder)


def test_file_name_that_is_not_utf8_round_trips(tmp_path: Path) -> None:
    value = {"name": os.fsdecode(b"caf\xe9.txt"), "other": "天"}
    for write in (write_json, write_checked_json):
        write(tmp_path / "a.json", value)
        assert read_json(tmp_path / "a.json") == value
    write_text(tmp_path / "card.md", value["name"])
    assert (tmp_path / "card.md").read_text() == r"caf\udce9.txt"
    with pytest.raises(ConfigError, match="not UTF-8"):  # YAML cannot represent it
        load_config(None, (), {"inputs": ("INPUT", [value["name"]])})
