"""Output folders: the same command continues, another command is refused with the differences, nothing is lost."""

import os
from pathlib import Path

import pytest

from bert_pretrain.errors import DataError, OutputError
from bert_pretrain.io.manifest import (
    MANIFEST,
    PARTIAL,
    Output,
    OutputState,
    check_writable,
    exclusive,
    library_versions,
    read_manifest,
    read_record,
)
from tests.conftest import digests

IDENTITY = {"inputs": [{"name": "a.txt", "size": 5}], "data": {"seed": 1, "max_seq_length": 128}}
OTHER = {"inputs": [{"name": "a.txt", "size": 5}], "data": {"seed": 2, "max_seq_length": 128}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "output"


def claim(folder: Path, kind: str, identity: dict, *, overwrite: bool = False, inputs: tuple = ()) -> OutputState:
    with Output(folder, kind, identity, inputs).open(overwrite=overwrite) as state:
        return state


@pytest.fixture
def unfinished(folder: Path) -> Path:
    claim(folder, "data", IDENTITY)
    (folder / "train").mkdir()
    (folder / "train" / "00000.parquet").write_bytes(b"a shard")
    return folder


def test_progress_is_new_then_incomplete_then_complete(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / f".{PARTIAL}.123.tmp").write_text("{")  # of a killed writer
    # A claim without output does not block another command.
    for identity in (OTHER, IDENTITY):
        assert claim(folder, "data", identity) is OutputState.NEW
        assert claim(folder, "data", identity) is OutputState.INCOMPLETE
    output = Output(folder, "data", IDENTITY)
    output.add({"length": 1})
    output.add({"length": 2})  # when the command is resumed
    assert read_record(folder)["length"] == 2
    output.publish({"splits": {}})
    assert claim(folder, "data", IDENTITY) is OutputState.COMPLETE
    manifest = read_manifest(folder, "data", "--data")
    assert (manifest["splits"], manifest["versions"]) == ({}, library_versions())
    output.reopen()
    assert claim(folder, "data", IDENTITY) is OutputState.INCOMPLETE


def test_broken_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nothing")
    with pytest.raises(OutputError, match="is a file"):
        check_writable(tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "identity", "line"),
    [
        ("data", OTHER, "data.seed: 1 -> 2"),
        ("vocab", IDENTITY, "kind: 'data' -> 'vocab'"),
        ("data", {**IDENTITY, "inputs": []}, "inputs.0: {'name': 'a.txt', 'size': 5} -> None"),
        ("data", {**IDENTITY, "inputs": [{"name": "a.txt", "size": 6}]}, "inputs.0.size: 5 -> 6"),
        ("data", {**IDENTITY, "data": "ab" * 32}, "data: "),
    ],
)
def test_different_identity_is_refused_with_its_key(unfinished, kind, identity, line) -> None:
    if kind == "data":  # also for finished outputs
        Output(unfinished, "data", IDENTITY).publish({})
    before = digests(unfinished)
    with pytest.raises(OutputError) as caught:
        claim(unfinished, kind, identity)
    assert line in caught.value.what
    assert "--overwrite" in caught.value.remedy
    assert digests(unfinished) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_folder_without_write_permission_is_refused(folder: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="cannot write there"):
        check_writable(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, "years of work") for name in ("thesis.docx", ".hidden", "manifest.json.bak")),
        *((name, content) for name in (MANIFEST, PARTIAL) for content in ("[]", "{}", "not JSON at all")),
        (MANIFEST, '{"kind": "data"}'),
    ],
)
def test_folder_with_other_content_is_refused(folder: Path, name: str, content: str) -> None:
    (folder / "train").mkdir(parents=True)
    (folder / name).write_text(content)
    with pytest.raises((OutputError, DataError)):
        claim(folder, "data", IDENTITY)
    assert (folder / name).read_text() == content


def test_overwrite_refuses_to_move_an_input(unfinished: Path) -> None:
    before, shard = digests(unfinished), unfinished / "train" / "00000.parquet"
    for path in (shard, str(shard), unfinished):
        with pytest.raises(OutputError, match="is in the output folder"):
            claim(unfinished, "data", OTHER, overwrite=True, inputs=(None, path))
    assert digests(unfinished) == before


def test_overwrite_moves_old_content_aside(unfinished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = digests(unfinished)
    for identity in (OTHER, IDENTITY):
        with Output(unfinished, "data", identity).open(overwrite=True) as state:
            assert state is OutputState.NEW
            (unfinished / "a").write_text(str(identity))
            with pytest.raises(OutputError), exclusive(unfinished):
                pytest.fail("the lock was lost")
    first, second = sorted(path for path in unfinished.parent.iterdir() if path != unfinished)
    assert digests(first) == before
    assert (second / "a").read_text() == str(OTHER)
    assert str(first) in capsys.readouterr().out
