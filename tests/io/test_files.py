"""Files appear whole or not at all, whatever happens to the writer."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bert_pretrain.errors import DataError, OutputError
from bert_pretrain.io.files import (
    atomic_folder,
    atomic_path,
    is_bookkeeping,
    move_aside,
    read_json,
    remove_temporaries,
    write_text,
)
from bert_pretrain.io.manifest import exclusive


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def in_another_process(code: str) -> "subprocess.Popen[str]":
    """Start Python on `code`; returns when it has printed `ready`."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failed_writer_leaves_the_old_file_and_nothing_else(tmp_path: Path, failure: type[BaseException]) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "old")

    def fail() -> None:
        with atomic_path(path) as temporary:
            temporary.write_text("half of the n")
            raise failure

    with pytest.raises(failure):
        fail()
    assert path.read_text() == "old"
    assert names(tmp_path) == {"file.txt"}


def test_a_failed_writer_leaves_the_old_folder_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with atomic_folder(path) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "old.txt").write_text("old")

    def fail() -> None:
        with atomic_folder(path) as temporary:
            (temporary / "new.txt").write_text("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (path / "sub" / "old.txt").read_text() == "old"
    assert names(tmp_path) == {"folder"}


def test_a_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    for name in ("old.txt", "new.txt"):
        with atomic_folder(tmp_path / "deep" / "folder") as temporary:
            (temporary / name).write_text(name)
    assert names(tmp_path / "deep" / "folder") == {"new.txt"}


@pytest.mark.parametrize("kind", ["atomic_path", "atomic_folder"])
def test_a_killed_writer_leaves_nothing_that_can_be_seen(tmp_path: Path, kind: str) -> None:
    write = "temporary.write_text('half')" if kind == "atomic_path" else "(temporary / 'a').write_text('half')"
    process = in_another_process(f"""
import pathlib, time
from bert_pretrain.io.files import {kind}
with {kind}(pathlib.Path({str(tmp_path / "out")!r})) as temporary:
    {write}
    print("ready", flush=True)
    time.sleep(60)
""")
    kill(process)
    assert not (tmp_path / "out").exists()
    leftovers = list(tmp_path.iterdir())
    assert len(leftovers) == 1
    assert all(is_bookkeeping(path) for path in leftovers)
    remove_temporaries(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("again", ["remove_temporaries", "atomic_folder"])
def test_a_kill_while_a_folder_is_replaced_leaves_the_old_one(tmp_path: Path, again: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "a").write_text("old")
    process = in_another_process(f"""
import os, pathlib, time
from bert_pretrain.io import files
replace = os.replace
def stop(source, target):
    if str(target) == {str(out)!r}:
        print("ready", flush=True)
        time.sleep(60)
    replace(source, target)
os.replace = stop
with files.atomic_folder(pathlib.Path({str(out)!r})) as temporary:
    (temporary / "a").write_text("new")
""")
    kill(process)
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


def test_only_temporaries_of_ours_are_removed(tmp_path: Path) -> None:
    for name in ("kept.tmp", ".kept", ".gone.txt.1.tmp", "kept.txt"):
        (tmp_path / name).write_text("")
    remove_temporaries(tmp_path)
    assert names(tmp_path) == {"kept.tmp", ".kept", "kept.txt"}


def test_a_lock_refuses_a_second_process_and_dies_with_a_killed_one(tmp_path: Path) -> None:
    folder = tmp_path / "output"
    process = in_another_process(f"""
import pathlib, time
from bert_pretrain.io.manifest import exclusive
with exclusive(pathlib.Path({str(folder)!r})):
    print("ready", flush=True)
    time.sleep(60)
""")
    with pytest.raises(OutputError, match="another process"), exclusive(folder):
        pytest.fail("two processes hold one folder")
    kill(process)
    with exclusive(folder):
        assert names(folder) == {".lock"}
    assert not names(folder)


def test_a_file_in_the_place_of_the_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="is a file"), exclusive(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_moving_aside_keeps_everything_but_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "output"
    asides = []
    for content in ("first", "second"):
        with exclusive(folder):
            (folder / "train").mkdir()
            (folder / "train" / "a").write_text(content)
            asides.append(move_aside(folder))
            with pytest.raises(OutputError), exclusive(folder):
                pytest.fail("moving aside let go of the lock")
    assert [(aside / "train" / "a").read_text() for aside in asides] == ["first", "second"]
    assert not names(folder)


@pytest.mark.parametrize("content", [None, b"{", b"\xff\xfe"])
def test_json_that_is_missing_or_broken_names_the_file(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_json(tmp_path / "a.json")
    assert caught.value.where == str(tmp_path / "a.json")


def test_written_files_are_complete_when_seen(tmp_path: Path) -> None:
    """A reader that polls while a writer replaces a file a hundred times sees only whole contents."""
    path = tmp_path / "file.json"
    process = in_another_process(f"""
import pathlib
from bert_pretrain.io.files import write_json
print("ready", flush=True)
for number in range(100):
    write_json(pathlib.Path({str(path)!r}), [number] * 5000)
""")
    seen: set[int] = set()
    while process.poll() is None:
        if path.exists():
            value = read_json(path)
            assert value == [value[0]] * 5000
            seen.add(value[0])
        time.sleep(0.001)
    assert process.stdout is not None
    process.stdout.close()
    assert read_json(path) == [99] * 5000
    assert os.listdir(tmp_path) == ["file.json"]
    assert seen
