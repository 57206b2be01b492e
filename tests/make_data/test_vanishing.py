"""Folders that are removed, or shared, while a command works: one message, and the same command then ends its work."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bert_pretrain.cli import app
from bert_pretrain.config_file import load_config
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.io.manifest import exclusive
from bert_pretrain.make_data.run import make_data

SETTINGS = ["data.max_seq_length=64", "data.dupe_factor=1", "data.examples_per_shard=64"]


@pytest.fixture
def text(tmp_path: Path, english_documents: list[list[str]]) -> Path:
    path = tmp_path / "text" / "english.txt"
    path.parent.mkdir()
    path.write_text("\n\n".join("\n".join(sentences) for sentences in english_documents[:30]))
    return path


def arguments(text: Path, vocab: Path, output: Path) -> list[str]:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    return ["make-data", str(text), "--vocab", str(vocab), "--output", str(output), "--workers", "1", *settings]


@contextmanager
def removing(folder: Path, sign: Path, pattern: str) -> Iterator[None]:
    """Remove a folder as soon as a file is there, by another thread."""

    def wait_and_remove() -> None:
        deadline = time.monotonic() + 60
        while not any(sign.glob(pattern)) and time.monotonic() < deadline:
            time.sleep(0.0005)
        while folder.exists():
            shutil.rmtree(folder, ignore_errors=True)

    thread = threading.Thread(target=wait_and_remove)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.mark.parametrize(
    ("removed", "pattern"),
    [
        ("data", "data/manifest.partial.json"),
        ("data", "data/train/*.parquet"),
        (".token-store", "data/train/*.parquet"),
    ],
)
def test_data_whose_folder_is_removed_is_one_message_and_then_made(
    tmp_path: Path, text: Path, vocab_folder: Path, removed: str, pattern: str
) -> None:
    command = arguments(text, vocab_folder, tmp_path / "data")
    with removing(tmp_path / removed, tmp_path, pattern):
        done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert str(tmp_path / removed) in done.stderr
    assert "removed" in done.stderr or "is gone" in done.stderr
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0, again.output
    assert DataFolder.open(tmp_path / "data").rows("train") > 100


def test_a_token_store_removed_while_it_is_written_is_not_taken_for_whole(
    tmp_path: Path, text: Path, vocab_folder: Path
) -> None:
    command = arguments(text, vocab_folder, tmp_path / "data")
    with removing(tmp_path / ".token-store", tmp_path, ".token-store/*/.part-*/*.npy"):
        done = CliRunner().invoke(app, command)
    assert done.exit_code == 2, done.output
    assert CliRunner().invoke(app, command).exit_code == 0


def test_a_vocabulary_whose_folder_is_removed_is_one_message_and_then_made(tmp_path: Path, text: Path) -> None:
    command = ["vocab", str(text), "--output", str(tmp_path / "v"), "--vocab-size", "500", "--workers", "1"]
    with removing(tmp_path / "v", tmp_path, "v/manifest.partial.json"):
        done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "moved or removed" in done.stderr
    assert CliRunner().invoke(app, command).exit_code == 0


def test_a_command_waits_for_another_with_its_token_store_and_shares_it(
    tmp_path: Path, text: Path, vocab_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(settings=SETTINGS)
    make_data(config, [str(text)], vocab_folder, tmp_path / "a", workers=1)
    (store,) = (tmp_path / ".token-store").iterdir()
    written = (store / "part-00000" / "ids.npy").stat().st_mtime_ns
    options = {"workers": 1}
    with exclusive(store):
        other = threading.Thread(
            target=make_data, args=(config, [str(text)], vocab_folder, tmp_path / "b"), kwargs=options
        )
        other.start()
        printed = ""
        while "waiting for" not in printed:
            assert other.is_alive()
            time.sleep(0.01)
            printed += capsys.readouterr().out
        assert f"waiting for another process ({os.getpid()} on " in printed
        assert str(store) in printed
        assert not (tmp_path / "b" / "train").exists()
    other.join()
    assert (store / "part-00000" / "ids.npy").stat().st_mtime_ns == written
    assert (tmp_path / "b" / "manifest.json").exists()
