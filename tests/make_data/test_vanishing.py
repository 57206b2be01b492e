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
from bert_pretrain.io.manifest import exclusive
from bert_pretrain.make_data.run import make_data

SETTINGS = ["data.max_seq_length=64", "data.dupe_factor=1", "data.examples_per_shard=64"]


@pytest.fixture
def text(tmp_path: Path, english_documents: list[list[str]]) -> Path:
    path = tmp_path / "text" / "english.txt"
    path.parent.mkdir()
    path.write_text("\n\n".join("\n".join(sentences) for sentences in english_documents[:30]))
    return path


@contextmanager
def removing(folder: Path, pattern: str) -> Iterator[None]:
    """Remove a folder as soon as a file beside it is there, by another thread."""
    is_over = threading.Event()

    def wait_and_remove() -> None:
        while not any(folder.parent.glob(pattern)) and not is_over.is_set():
            time.sleep(0.0005)
        while folder.exists():
            shutil.rmtree(folder, ignore_errors=True)

    thread = threading.Thread(target=wait_and_remove)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize(
    ("removed", "pattern"),
    [
        ("data", "data/train/*.parquet"),
        (".token-store", ".token-store/*/.part-*/*.npy"),
        ("vocab", "vocab/manifest.partial.json"),
    ],
)
def test_a_folder_that_is_removed_is_one_message_and_then_made(tmp_path, text, vocab_folder, removed, pattern) -> None:
    settings = [f"--set={setting}" for setting in SETTINGS]
    command = ["make-data", str(text), "--vocab", str(vocab_folder), "--output", str(tmp_path / "data"), *settings]
    if removed == "vocab":
        command = ["vocab", str(text), "--output", str(tmp_path / "vocab"), "--vocab-size", "500"]
    with removing(tmp_path / removed, pattern):
        done = CliRunner().invoke(app, [*command, "--workers", "1"])
    assert done.exit_code == 2, done.output
    assert done.stderr.count("error: ") == 1
    assert str(tmp_path / removed) in done.stderr
    shutil.rmtree(tmp_path / removed, ignore_errors=True)  # what was written after that
    assert CliRunner().invoke(app, [*command, "--workers", "1"]).exit_code == 0
    assert list(tmp_path.glob("*/manifest.json"))


def test_a_command_waits_for_another_with_its_token_store_and_shares_it(tmp_path, text, vocab_folder, capsys) -> None:
    config = load_config(settings=SETTINGS)
    make_data(config, [str(text)], vocab_folder, tmp_path / "a", workers=1)
    (store,) = (tmp_path / ".token-store").iterdir()
    written, printed = (store / "part-00000" / "ids.npy").stat().st_mtime_ns, ""
    arguments = (config, [str(text)], vocab_folder, tmp_path / "b")
    capsys.readouterr()
    with exclusive(store):
        other = threading.Thread(target=make_data, args=arguments, kwargs={"workers": 1})
        other.start()
        while "waiting for" not in printed:
            assert other.is_alive()
            printed += capsys.readouterr().out
        assert str(os.getpid()) in printed
        assert str(store) in printed
        assert not (tmp_path / "b" / "train").exists()
    other.join()
    assert (store / "part-00000" / "ids.npy").stat().st_mtime_ns == written
    assert (tmp_path / "b" / "manifest.json").exists()
