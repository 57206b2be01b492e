"""Outputs by URL: the bytes of local ones, found done, gone on with after a kill, checked, and refused like those.

The store is `bucketfs.py`, a stand-in that any process of a test reaches; no real S3 or GCS was there to try.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, unquote

import fsspec
import pytest
from typer.testing import CliRunner

from bert_pretrain.cli import app
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import OutputError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.make_data.run import make_data
from bert_pretrain.storage.paths import RemotePath, parse_path
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.run import make_vocab

from .bucketfs import BucketFileSystem

SETTINGS = ["data.max_seq_length=32", "data.dupe_factor=4", "data.examples_per_shard=256"]
DATA = RemotePath("bucket://b/data")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder behind `bucket://`, which this process and all that it starts can reach."""
    site, objects = tmp_path / "site", tmp_path / "objects"
    (site / "bucketfs-1.dist-info").mkdir(parents=True)
    objects.mkdir()
    shutil.copy(Path(__file__).with_name("bucketfs.py"), site)
    (site / "bucketfs-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: bucketfs\nVersion: 1\n")
    (site / "bucketfs-1.dist-info" / "entry_points.txt").write_text(
        "[fsspec.specs]\nbucket = bucketfs:BucketFileSystem\n"
    )
    monkeypatch.setenv("BUCKET_FOLDER", str(objects))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(Path(__file__).parents[2])]))
    monkeypatch.syspath_prepend(site)
    fsspec.register_implementation("bucket", BucketFileSystem, clobber=True)
    return objects


def objects_below(bucket: Path, folder: str) -> dict[str, str]:
    """The objects below a folder of the store, and a hash of each."""
    found = {unquote(path.name): path for path in bucket.iterdir() if not path.name.startswith(".")}
    return {
        name.removeprefix(f"{folder}/"): hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in sorted(found.items())
        if name.startswith(f"{folder}/")
    }


def files_below(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, english_text: Path, vocab_folder: Path) -> Path:
    """The same data, made into a local folder."""
    folder = tmp_path_factory.mktemp("local")
    return make_data(load_config(settings=SETTINGS), [str(english_text)], vocab_folder, folder / "data", workers=1)


def test_a_vocabulary_and_data_in_a_store_are_those_of_a_local_folder(
    bucket: Path,
    tmp_path: Path,
    english_text: Path,
    vocab_folder: Path,
    local: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    inputs = [str(english_text)]
    small = load_config(settings=["vocab.size=3000"])
    vocab = RemotePath("bucket://b/vocab")
    for _ in range(2):
        assert make_vocab(small, inputs, vocab, workers=1) == vocab
    assert "up to date: bucket://b/vocab" in capsys.readouterr().out
    assert objects_below(bucket, "b/vocab") == files_below(vocab_folder)
    assert Tokenizer.load(vocab).hash == Tokenizer.load(vocab_folder).hash
    config, store = load_config(settings=SETTINGS), tmp_path / "store"
    make_data(config, inputs, vocab, DATA, workers=2, store=store)
    assert objects_below(bucket, "b/data") == files_below(local)
    assert DataFolder.open(DATA).manifest == DataFolder.open(local).manifest
    capsys.readouterr()
    make_data(config, inputs, vocab, DATA, workers=1, store=store, verify=True)
    assert "up to date, every shard as it was written: bucket://b/data" in capsys.readouterr().out
    # The lines of docs/data.md.
    filesystem, path = fsspec.core.url_to_fs(str(DATA))
    filesystem.get(path, str(tmp_path / "copy"), recursive=True)
    assert files_below(tmp_path / "copy") == files_below(local)


def test_damage_in_a_store_is_mended_alone(
    bucket: Path, tmp_path: Path, english_text: Path, vocab_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make() -> None:
        config = load_config(settings=SETTINGS)
        make_data(config, [str(english_text)], vocab_folder, DATA, workers=1, store=tmp_path / "store", verify=True)

    make()
    before = objects_below(bucket, "b/data")
    damaged, missing = (bucket / quote(f"b/data/train/0000{number}.parquet", safe="") for number in (1, 2))
    damaged.write_bytes(damaged.read_bytes()[::-1])
    missing.unlink()
    written = {path: path.stat().st_mtime_ns for path in bucket.iterdir()}
    make()
    said = capsys.readouterr().out
    assert "train/00001.parquet is damaged" in said
    assert "train/00002.parquet is missing" in said
    assert objects_below(bucket, "b/data") == before
    changed = {path for path in bucket.iterdir() if path.stat().st_mtime_ns != written.get(path)}
    assert changed == {damaged, missing}


def test_another_configuration_is_refused_and_overwrite_moves_aside(
    bucket: Path, english_text: Path, vocab_folder: Path
) -> None:
    vocab, inputs = RemotePath("bucket://b/vocab"), [str(english_text)]
    make_vocab(load_config(settings=["vocab.size=400"]), inputs, vocab, workers=1)
    before = objects_below(bucket, "b/vocab")
    other = load_config(settings=["vocab.size=500"])
    with pytest.raises(OutputError, match="size: 400 -> 500"):
        make_vocab(other, inputs, vocab, workers=1)
    assert objects_below(bucket, "b/vocab") == before
    make_vocab(other, inputs, vocab, workers=1, overwrite=True)
    assert Tokenizer.load(vocab).vocab_size == 500
    (aside,) = {name.split("/")[0] for name in objects_below(bucket, "b") if name.startswith("vocab.old-")}
    assert objects_below(bucket, f"b/{aside}") == before


def test_a_killed_run_leaves_whole_objects_and_goes_on(
    bucket: Path, tmp_path: Path, english_text: Path, vocab_folder: Path, local: Path
) -> None:
    command = [sys.executable, "-m", "bert_pretrain", "make-data", str(english_text), "--vocab", str(vocab_folder)]
    command += ["--output", str(DATA), "--store", str(tmp_path / "store"), "--workers", "1"]
    command += [word for setting in SETTINGS for word in ("--set", setting)]
    expected = files_below(local)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len([name for name in objects_below(bucket, "b/data") if name.startswith("train/")]) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
    process.kill()
    process.wait()
    shards = {name: digest for name, digest in objects_below(bucket, "b/data").items() if name.startswith("train/")}
    assert 3 <= len(shards) < len([name for name in expected if name.startswith("train/")])
    assert all(expected[name] == digest for name, digest in shards.items())
    assert not RemotePath(f"{DATA}/manifest.json").exists()
    noted = {
        f"train/{name.removeprefix('.records/train-').removesuffix('.json')}.parquet"
        for name in objects_below(bucket, "b/data")
        if name.startswith(".records/train-")
    }
    times = {name: (bucket / quote(f"b/data/{name}", safe="")).stat().st_mtime_ns for name in noted}
    subprocess.run(command, check=True, capture_output=True)
    assert objects_below(bucket, "b/data") == expected
    assert {name: (bucket / quote(f"b/data/{name}", safe="")).stat().st_mtime_ns for name in noted} == times
    assert noted


REFUSED = {
    "no store named": ("make-data {text} --vocab {vocab} --output bucket://b/data", "--store"),
    "no such vocabulary": ("make-data {text} --vocab bucket://b/nothing --output {here}/d", "--vocab"),
    "training from a URL": ("train --data bucket://b/data --output {here}/run", "--data"),
    "training to a URL": ("train --data {here} --output bucket://b/run", "--output"),
    "all stages to a URL": ("run tiny --output bucket://b/run", "--output"),
    "an unknown store": ("vocab {text} --output nosuch://b/vocab", "nosuch://b/vocab"),
}


@pytest.mark.parametrize(("command", "where"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_remote_is_refused_in_three_parts(
    bucket: Path, tmp_path: Path, english_text: Path, vocab_folder: Path, command: str, where: str
) -> None:
    words = command.format(text=english_text, vocab=vocab_folder, here=tmp_path).split()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    message = result.stderr[result.stderr.index("error: ") :]
    assert where in message.split("\n  where: ")[1].split("\n  hint: ")[0]
    assert not objects_below(bucket, "b")


def test_a_store_that_refuses_is_one_message_and_the_same_command_goes_on(bucket: Path, english_text: Path) -> None:
    words = ["vocab", str(english_text), "--output", "bucket://b/vocab", "--vocab-size", "400", "--workers", "1"]
    (bucket / ".full").touch()
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert "the bucket takes no more" in refused.stderr
    (bucket / ".full").unlink()
    assert CliRunner().invoke(app, words).exit_code == 0


def test_memory_is_a_place_within_one_process_and_a_file_url_is_a_path(
    tmp_path: Path, english_text: Path, vocab_folder: Path, local: Path
) -> None:
    assert parse_path(f"file://{tmp_path}/x") == tmp_path / "x"
    output = parse_path("memory://folder/data/")
    make: Callable[[], object] = lambda: make_data(  # noqa: E731
        load_config(settings=SETTINGS), [str(english_text)], vocab_folder, output, workers=1, store=tmp_path / "store"
    )
    make()
    found = fsspec.filesystem("memory").find("/folder/data")
    assert {name.removeprefix("/folder/data/") for name in found} == set(files_below(local))
