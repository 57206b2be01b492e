"""Output folders: the same command goes on, another one is refused with the difference, nothing is lost."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bert_pretrain.errors import DataError, OutputError
from bert_pretrain.io.manifest import (
    MANIFEST,
    PARTIAL,
    Progress,
    check_writable,
    claim,
    complete,
    exclusive,
    library_versions,
    read_manifest,
    reopen,
)

IDENTITY = {"inputs": [{"name": "a.txt", "size": 5}], "data": {"seed": 1, "max_seq_length": 128}}
OTHER = {"inputs": [{"name": "a.txt", "size": 5}], "data": {"seed": 2, "max_seq_length": 128}}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def half_finished(folder: Path) -> Path:
    claim(folder, "data", IDENTITY)
    (folder / "train").mkdir()
    (folder / "train" / "00000.parquet").write_bytes(b"a shard")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "output"


def test_a_folder_goes_from_new_to_incomplete_to_complete(folder: Path) -> None:
    assert claim(folder, "data", IDENTITY) is Progress.NEW
    assert claim(folder, "data", IDENTITY) is Progress.INCOMPLETE
    complete(folder, "data", IDENTITY, {"splits": {}})
    assert claim(folder, "data", IDENTITY) is Progress.COMPLETE
    assert set(contents(folder)) == {MANIFEST}
    manifest = read_manifest(folder, "data", "--data")
    assert manifest["splits"] == {}
    assert manifest["versions"] == library_versions()


def test_a_reopened_output_is_incomplete_again(folder: Path) -> None:
    claim(folder, "run", IDENTITY)
    complete(folder, "run", IDENTITY, {})
    reopen(folder)
    assert claim(folder, "run", IDENTITY) is Progress.INCOMPLETE


@pytest.mark.parametrize("finished", [False, True])
def test_another_configuration_is_refused_with_the_difference(folder: Path, finished: bool) -> None:
    half_finished(folder)
    if finished:
        complete(folder, "data", IDENTITY, {})
    before = contents(folder)
    with pytest.raises(OutputError) as caught:
        claim(folder, "data", OTHER)
    assert "data.seed: 1 -> 2" in caught.value.what
    assert "max_seq_length" not in caught.value.what
    assert "--overwrite" in caught.value.remedy
    assert contents(folder) == before


def test_other_content_is_told_in_words(folder: Path) -> None:
    claim(folder, "data", {"tokenizer": "ab" * 32})
    (folder / "train").mkdir()
    with pytest.raises(OutputError, match="tokenizer: other content than before") as caught:
        claim(folder, "data", {"tokenizer": "cd" * 32})
    assert "cd" * 32 not in caught.value.what


def test_a_read_only_file_system_is_told_from_a_lack_of_permission(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(OutputError, match="Permission denied"):
        check_writable(folder)
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(OutputError, match="Read-only file system"):
        check_writable(folder)


@pytest.mark.parametrize(
    ("kind", "identity", "line"),
    [
        ("vocab", IDENTITY, "kind: 'data' -> 'vocab'"),
        ("data", {**IDENTITY, "inputs": []}, "inputs.0: {'name': 'a.txt', 'size': 5} -> not given"),
        ("data", {**IDENTITY, "inputs": [{"name": "a.txt", "size": 6}]}, "inputs.0.size: 5 -> 6"),
        ("data", {"inputs": IDENTITY["inputs"]}, "data: {"),
        ("data", {**IDENTITY, "new": 1}, "new: not given -> 1"),
    ],
)
def test_every_kind_of_difference_has_a_line(folder: Path, kind: str, identity: dict[str, Any], line: str) -> None:
    half_finished(folder)
    with pytest.raises(OutputError) as caught:
        claim(folder, kind, identity)
    assert line in caught.value.what


def test_a_claim_without_any_output_does_not_stand_in_the_way(folder: Path) -> None:
    """The command failed at once, for example for a wrong value; the mended one must not need --overwrite."""
    claim(folder, "data", IDENTITY)
    assert claim(folder, "data", OTHER) is Progress.NEW
    assert claim(folder, "data", OTHER) is Progress.INCOMPLETE


def test_what_a_killed_writer_left_is_not_taken_for_something_else(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / f".{PARTIAL}.123.tmp").write_text("{")
    assert claim(folder, "data", IDENTITY) is Progress.NEW


@pytest.mark.parametrize("name", ["thesis.docx", ".hidden", "manifest.json.bak"])
def test_a_folder_with_something_else_is_refused(folder: Path, name: str) -> None:
    folder.mkdir(parents=True)
    (folder / name).write_text("years of work")
    with pytest.raises(OutputError) as caught:
        claim(folder, "data", IDENTITY)
    assert name in caught.value.what
    assert contents(folder) == {name: b"years of work"}


@pytest.mark.parametrize("content", ["[]", "{}", '"text"', '{"kind": "data"}'])
def test_a_foreign_manifest_is_refused(folder: Path, content: str) -> None:
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(content)
    with pytest.raises(OutputError):
        claim(folder, "data", IDENTITY)


@pytest.mark.parametrize("content", ["[]", "{}", "not JSON at all"])
def test_a_broken_partial_manifest_beside_output_is_refused(folder: Path, content: str) -> None:
    half_finished(folder)
    (folder / PARTIAL).write_text(content)
    with pytest.raises((OutputError, DataError)) as caught:
        claim(folder, "data", IDENTITY)
    assert str(folder / PARTIAL) == caught.value.where


def test_overwrite_moves_everything_aside(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half_finished(folder)
    before = contents(folder)
    with exclusive(folder):
        assert claim(folder, "data", OTHER, overwrite=True) is Progress.NEW
        assert claim(folder, "data", OTHER) is Progress.INCOMPLETE
    (aside,) = (path for path in folder.parent.iterdir() if path != folder)
    assert contents(aside) == before
    assert str(aside) in capsys.readouterr().out
