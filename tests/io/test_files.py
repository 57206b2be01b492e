"""Files and folders appear whole or not at all, whatever happens to the writer; locks end with their process."""

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
    write_checked_json,
    write_json,
    write_text,
)
from bert_pretrain.io.manifest import exclusive


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def run_until_ready(code: str, *arguments: object) -> "subprocess.Popen[str]":
    """Start Python on `code`; returns when it has printed `ready`."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failed_writer_leaves_what_was_there_and_nothing_else(tmp_path: Path, failure: type[BaseException]) -> None:
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


def test_what_a_killed_writer_leaves_is_hidden_and_removed(tmp_path: Path) -> None:
    writers = [atomic_path(tmp_path / "file"), atomic_folder(tmp_path / "folder")]
    for writer in writers:  # entered and never left, as by a process that is killed
        path = writer.__enter__()
        (path / "a" if path.is_dir() else path).write_text("half")
    assert len(names(tmp_path)) == 2
    assert all(is_bookkeeping(path) for path in tmp_path.iterdir())
    for name in ("kept.tmp", ".kept", "kept.txt"):
        (tmp_path / name).write_text("")
    remove_temporaries(tmp_path)
    assert names(tmp_path) == {"kept.tmp", ".kept", "kept.txt"}


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
def test_a_kill_while_a_folder_is_replaced_leaves_the_old_one(tmp_path: Path, again: str) -> None:
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


def test_a_lock_refuses_a_second_process_and_dies_with_a_killed_one(tmp_path: Path) -> None:
    folder = tmp_path / "output"
    process = run_until_ready(LOCK, folder)
    with pytest.raises(OutputError, match="another process"), exclusive(folder):
        pytest.fail("two processes hold one folder")
    kill(process)
    with exclusive(folder):
        assert names(folder) == {".lock"}
    assert not names(folder)


def test_the_name_of_a_file_that_is_not_utf8_comes_back(tmp_path: Path) -> None:
    value = {"name": os.fsdecode(b"caf\xe9.txt"), "other": "天"}
    for write in (write_json, write_checked_json):
        write(tmp_path / "a.json", value)
        assert read_json(tmp_path / "a.json") == value
    write_text(tmp_path / "card.md", value["name"])
    assert (tmp_path / "card.md").read_text() == r"caf\udce9.txt"
    with pytest.raises(ConfigError, match="not UTF-8"):  # a YAML file could not hold it
        load_config(None, (), {"inputs": ("INPUT", [value["name"]])})
