"""Kills and signals, full disks, few file descriptors, damaged files: `make-data` gives the same bytes."""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import DataError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.shards import read_shard
from bert_pretrain.make_data.run import make_data
from bert_pretrain.text import documents
from tests.conftest import REPOSITORY, digests

from .conftest import SMALL
from .test_pairs import documents_of

SETTINGS = ["data.max_seq_length=32", "data.dupe_factor=4", "data.examples_per_shard=256"]


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def start(*arguments: object) -> "subprocess.Popen[str]":
    """Start a command in a new session. Its pipes stay open as long as one of its workers lives."""
    command, pipe = [sys.executable, "-m", "bert_pretrain", *map(str, arguments)], subprocess.PIPE
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def num_shards(output: Path) -> int:
    return len(list(output.glob("train/[0-9]*.parquet")))


def wait_for_shards(process: "subprocess.Popen[str]", output: Path, number: int) -> None:
    while num_shards(output) < number and process.poll() is None:
        time.sleep(0.005)


def kill(process: "subprocess.Popen[str]") -> None:
    """Kill the parent, and wait until its workers have ended too."""
    process.kill()
    process.communicate(timeout=60)


def finish(process: "subprocess.Popen[str]", code: int = 0) -> str:
    """Wait for a command, check its exit code, and return its stderr."""
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == code, stdout + stderr
    assert "Traceback" not in stderr
    return stderr


def peak_anonymous_bytes(process: "subprocess.Popen[str]") -> int:
    """Wait for the command, and return the peak anonymous memory of one of its processes."""
    peak = 0
    while process.poll() is None:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(stat.read_text().rpartition(")")[2].split()[3]) == process.pid:  # its session
                    status = stat.with_name("status").read_text()
                    peak = max([peak, *(int(found) << 10 for found in re.findall(r"RssAnon:\s+(\d+)", status))])
        time.sleep(0.05)
    return peak


def make_data_command(texts: Path, vocab: Path, output: Path, workers: int) -> list[object]:
    settings = [f"--set={setting}" for setting in SETTINGS]
    return ["make-data", texts, "--vocab", vocab, "--output", output, "--workers", workers, *settings]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, english_text: Path) -> Path:
    """English text in several files, which are several parts to tokenize."""
    folder = tmp_path_factory.mktemp("texts")
    documents = english_text.read_text().split("\n\n")
    for number in range(6):
        (folder / f"{number}.txt").write_text("\n\n".join(documents[number::6]))
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, texts: Path, vocab_folder: Path) -> dict[str, str]:
    """The digests of the data folder of an undisturbed run."""
    output = tmp_path_factory.mktemp("reference") / "data"
    return digests(make_data(load_config(settings=SETTINGS), [str(texts)], vocab_folder, output, workers=1))


def finish_and_check(texts: Path, vocab: Path, output: Path, reference: dict[str, str]) -> None:
    """Make the data, and check that its bytes are those of an undisturbed run and no temporary files are left."""
    make_data(load_config(settings=SETTINGS), [str(texts)], vocab, output, workers=1)
    assert digests(output) == reference
    assert [path for path in (output.parent / ".token-store").rglob("*") if path.name.startswith(".")] == []


@pytest.mark.slow
def test_make_data_killed_at_random_times_resumes_bit_equal(tmp_path, texts, vocab_folder, reference) -> None:
    draw, output = random.Random(20), tmp_path / "data"
    for _ in range(20):
        run = start(*make_data_command(texts, vocab_folder, output, draw.choice([1, 2, 7])))
        if draw.random() < 0.6:
            wait_for_shards(run, output, num_shards(output) + draw.randint(1, 15))
        else:
            time.sleep(draw.uniform(0.2, 2))
        kill(run)
        if (output / "manifest.json").exists():
            # A command killed after the manifest may leave its lock and records. The next command removes them.
            finish_and_check(texts, vocab_folder, output, reference)
            shutil.rmtree(output)
            if draw.random() < 0.5:
                shutil.rmtree(tmp_path / ".token-store")
    finish_and_check(texts, vocab_folder, output, reference)


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 143, "terminated by SIGTERM", marks=pytest.mark.slow),
        (signal.SIGHUP, 129, "terminated by SIGHUP"),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_a_stopped_run_resumes_and_rebuilds_a_damaged_shard(
    tmp_path: Path, texts: Path, vocab_folder: Path, reference: Path, number: int, code: int, word: str, capsys
) -> None:
    output = tmp_path / "data"
    while num_shards(output) < 5 or (output / "manifest.json").exists():  # a fast command may end before the signal
        shutil.rmtree(output, ignore_errors=True)
        run = start(*make_data_command(texts, vocab_folder, output, 2))
        wait_for_shards(run, output, 5)
        run.send_signal(number)
        run.wait(timeout=180)
    assert word in finish(run, code)
    damaged = sorted(output.glob("train/[0-9]*.parquet"))[0]  # the last shards may not be recorded yet
    flip_a_byte(damaged)
    finish_and_check(texts, vocab_folder, output, reference)
    stdout = capsys.readouterr().out
    assert f"train/{damaged.name} is damaged" in stdout
    assert stdout.count("; rebuilt") == 1


@pytest.mark.slow
def test_vocab_killed_at_random_times_resumes_bit_equal(tmp_path, english_text, vocab_folder) -> None:
    draw, output = random.Random(5), tmp_path / "vocab"
    arguments = ("vocab", english_text, "--output", output, "--vocab-size", 3000, "--workers")
    for _ in range(20):
        run = start(*arguments, draw.choice([1, 2, 7]))
        time.sleep(draw.uniform(0.3, 2.0))
        kill(run)
    finish(start(*arguments, 2))
    assert digests(output) == digests(vocab_folder)


# Runs in a separate mount namespace, so that nothing stays mounted.
ON_A_SMALL_DISK = """
import hashlib, json, pathlib, subprocess, sys
disk, size, *command = sys.argv[1:]
mount = ["mount", "-t", "tmpfs", "-o"]
subprocess.run([*mount, f"size={size}", "none", disk], check=True)
first = subprocess.run(command, capture_output=True, text=True)
left = [str(path) for path in pathlib.Path(disk).rglob("manifest.json")]
subprocess.run([*mount, "remount,size=256m", "none", disk], check=True)
again = subprocess.run(command, capture_output=True, text=True)
data = pathlib.Path(disk) / "data"
files = {str(path.relative_to(data)): hashlib.sha256(path.read_bytes()).hexdigest()
         for path in data.rglob("*") if path.is_file()}
print(json.dumps([first.returncode, first.stderr, left, again.returncode, again.stderr, files]))
"""


@pytest.mark.parametrize(
    ("size", "workers"), [pytest.param("150k", 1, marks=pytest.mark.slow), ("1500k", 2)], ids=["tokenizing", "building"]
)
def test_a_full_disk_is_one_error_and_the_run_resumes_with_more_space(
    tmp_path: Path, texts: Path, vocab_folder: Path, reference: Path, size: str, workers: int
) -> None:
    alone = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*alone, "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")
    command = [sys.executable, "-c", ON_A_SMALL_DISK, tmp_path, size, sys.executable, "-m", "bert_pretrain"]
    command += make_data_command(texts, vocab_folder, tmp_path / "data", workers)
    done = subprocess.run([*alone, *map(str, command)], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    code, stderr, finished, code_again, stderr_again, files = json.loads(done.stdout)
    assert code == 2, stderr
    assert stderr.count("error: No space left on device") == 1
    assert "Traceback" not in stderr
    assert finished == []
    assert code_again == 0, stderr_again
    assert files == reference


def test_the_number_of_open_files_does_not_grow_with_the_parts(
    english_text: Path, vocab_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy.txt"
    copy.write_text(english_text.read_text(encoding="utf-8")[:20000], encoding="utf-8")  # duplicates
    monkeypatch.setattr(documents, "PART_BYTES", 2048)
    inputs, before = [str(english_text), str(copy)], os.listdir("/dev/fd")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(before) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        config = load_config(settings=[*SETTINGS, "data.dupe_factor=1"])
        make_data(config, inputs, vocab_folder, tmp_path / "data", workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/dev/fd")) <= len(before)
    assert len(list(tmp_path.glob(".token-store/*/part-*"))) > limit


def write_odd_documents(folder: Path, words: int, english: str) -> int:
    """Write a very long line, a text without sentence ends, a large record, one-word documents and ordinary text."""
    folder.mkdir()
    line = " ".join(english.replace("\\", "").replace('"', "").split()) + " "
    repeats = 200_000_000 // len(line) + 1
    endless = "".join(character if character.isalnum() else " " for character in line)
    with (folder / "line.txt").open("w") as one_line, (folder / "endless.txt").open("w") as no_sentence_end:
        for _ in range(repeats):
            one_line.write(line)
            no_sentence_end.write(endless)
    # A record is parsed as one string, which takes several times its size.
    (folder / "record.jsonl").write_text('{"text": "' + line * (repeats // 4 + 1) + '"}\n')
    (folder / "ordinary.txt").write_text(english)
    (folder / "words.txt").write_text("\n\n".join(f"word{number % 977}" for number in range(words)))
    return 3 + len(english.strip().split("\n\n")) + words


@pytest.mark.slow
def test_extreme_documents_need_little_memory_and_are_all_counted(tmp_path, vocab_folder, english_text) -> None:
    words = 1_000_000
    texts, ordinary = tmp_path / "texts", english_text.read_text().strip().split("\n\n")
    number = write_odd_documents(texts, words, english_text.read_text())
    boundary, one_copy = "--set=data.document_boundary=blank_line", "--set=data.dupe_factor=1"
    for command in (
        ("vocab", texts, "--output", tmp_path / "vocab", "--vocab-size", 3000, "--workers", 2, boundary),
        ("make-data", texts, "--vocab", vocab_folder, "--output", tmp_path / "data", one_copy, boundary),
    ):
        run = start(*command)
        assert peak_anonymous_bytes(run) < 1 << 30
        finish(run)
    manifest = DataFolder.open(tmp_path / "data").manifest
    assert manifest["corpus"]["documents"] == number
    duplicates = words - 977 + len(ordinary) - len(set(ordinary))
    assert manifest["corpus"]["left_out"] == {"duplicate_documents": duplicates}
    drops = (split["statistics"]["drops"]["single_sentence_spans"] for split in manifest["splits"].values())
    assert sum(drops) == 977
    assert json.loads((tmp_path / "vocab" / "manifest.json").read_text())["metrics"]["documents"] == number


def test_repairs_and_drops_are_counted_by_reason(tmp_path, vocab_folder, english_text) -> None:
    (tmp_path / "a.txt").write_bytes(b"Caf\xe9.\nTwo.\n\n\x01\n\x02\n\n" + english_text.read_bytes())
    (tmp_path / "b.jsonl").write_text(
        '{"text": "One. Two."}\n{"text": null}\n{"text": " "}\n{"text": "\\ud800 x. Y."}\n'
    )
    (tmp_path / "c.csv").write_text('text\n"One. Two."\n" "\n""\n')
    config = load_config(settings=["data.document_boundary=blank_line"])
    inputs = [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.csv")]
    data = DataFolder.open(make_data(config, inputs, vocab_folder, tmp_path / "data", workers=1))
    assert data.manifest["corpus"]["documents"] == 4 + len(english_text.read_text().strip().split("\n\n"))
    assert data.manifest["corpus"]["repairs_and_drops"] == {
        "documents_with_lone_surrogates": 1,
        "empty_documents": 5,
        "invalid_utf8_characters": 1,
        "sentences_without_tokens": 2,
    }


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("ids.npy", flip_a_byte),
        ("document_offsets.npy", cut_short),
        ("summary.json", Path.unlink),
        ("checksums.json", flip_a_byte),
        ("train/00000.parquet", Path.unlink),
        ("train/00001.parquet", cut_short),
        ("train/00002.parquet", flip_a_byte),
        ("tokenizer/vocab.txt", cut_short),
    ],
)
def test_a_damaged_file_is_named_and_rebuilt(numbered, capsys, name: str, damage) -> None:
    few = numbered(documents_of(30, 60, (2, 20), (3, 15)))
    data = few.make(*SMALL)
    (shard,) = (few.folder / ".token-store").glob("*/part-00000")
    before, stored, records = digests(data), digests(shard), DataFolder.open(data).shards("train")
    is_stored = "/" not in name
    damage((shard if is_stored else data) / name)
    if name.startswith("train"):
        with pytest.raises(DataError, match=name) as caught:
            [read_shard(data, record) for record in records]
        assert "make-data" in caught.value.remedy
    capsys.readouterr()
    again = few.make(*SMALL, name="second" if is_stored else "data", verify=True)
    in_data = rf"\b{name.split('/')[0]}.*; rebuilding the data"
    said = f"damaged store shard {shard}: .*{name}" if is_stored else in_data
    assert len(re.findall(said, capsys.readouterr().out)) == 1
    assert (digests(again), digests(shard)) == (before, stored)
