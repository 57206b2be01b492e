"""What goes wrong on real machines: kills at any moment, full disks, damaged files, inputs that change. Same bytes."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import DataError, InputError
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.make_data.run import make_data

from ..conftest import REPOSITORY
from .conftest import Numbered

SETTINGS = ["data.max_seq_length=32", "data.dupe_factor=4", "data.examples_per_shard=256"]


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file in a folder, hidden ones included."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@dataclass(frozen=True)
class Run:
    """A command in a process of its own, whose workers can be told by its session."""

    process: "subprocess.Popen[str]"

    def members(self) -> list[int]:
        """The processes of the command that are alive."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(session) == self.process.pid and state != "Z":
                found.append(int(stat.parent.name))
        return found

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition() and self.process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def kill(self) -> None:
        """Kill the parent, and see that its workers leave with it."""
        self.process.kill()
        self.process.communicate()
        deadline = time.monotonic() + 10
        while self.members():
            assert time.monotonic() < deadline, "a worker outlives its parent"
            time.sleep(0.02)

    def finish(self, code: int = 0) -> tuple[str, str]:
        stdout, stderr = self.process.communicate(timeout=600)
        assert self.process.returncode == code, stdout + stderr
        assert "Traceback" not in stderr
        return stdout, stderr

    def peak_anonymous_bytes(self) -> int:
        """Watch until the command ends; return the most anonymous memory that one of its processes had."""
        peak = 0
        while self.process.poll() is None:
            for member in self.members():
                try:
                    status = Path(f"/proc/{member}/status").read_text()
                except OSError:
                    continue
                lines = [line.split() for line in status.splitlines() if line.startswith("RssAnon:")]
                peak = max(peak, *(int(kilobytes) << 10 for _, kilobytes, _ in lines), 0)
            time.sleep(0.05)
        return peak


def start(*arguments: object) -> Run:
    command = [sys.executable, "-m", "bert_pretrain", *map(str, arguments)]
    pipe = subprocess.PIPE
    return Run(subprocess.Popen(command, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True, start_new_session=True))


def start_make_data(texts: Path, vocab: Path, output: Path, workers: int, *more: str) -> Run:
    settings = [item for setting in SETTINGS for item in ("--set", setting)]
    return start("make-data", texts, "--vocab", vocab, "--output", output, "--workers", workers, *settings, *more)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, english_text: Path) -> Path:
    """English in several files, so that there are several parts to tokenise."""
    folder = tmp_path_factory.mktemp("texts")
    documents = english_text.read_text().split("\n\n")
    for number in range(6):
        (folder / f"{number}.txt").write_text("\n\n".join(documents[number::6]))
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, texts: Path, vocab_folder: Path) -> Path:
    """The data folder of a run that nothing disturbed."""
    output = tmp_path_factory.mktemp("reference") / "data"
    return make_data(load_config(settings=SETTINGS), [str(texts)], vocab_folder, output, workers=1)


def shards(output: Path) -> list[Path]:
    return sorted(output.glob("train/[0-9]*.parquet"))


def kill_at_a_random_moment(run: Run, output: Path, draw: random.Random) -> None:
    if draw.random() < 0.6:
        wanted = len(shards(output)) + draw.randint(1, 15)
        run.wait_for(lambda: len(shards(output)) >= wanted)
    else:
        time.sleep(draw.uniform(0.2, 2))
    run.kill()


def check_nothing_is_left(output: Path, reference: Path) -> None:
    assert digests(output) == digests(reference)
    store = output.parent / ".token-store"
    assert [path for path in store.rglob("*") if path.name.startswith(".")] == []


def test_a_run_killed_at_random_moments_makes_the_same_bytes(
    tmp_path: Path, texts: Path, vocab_folder: Path, reference: Path
) -> None:
    draw, output = random.Random(3), tmp_path / "data"
    for workers in (7, 1, 2):
        kill_at_a_random_moment(start_make_data(texts, vocab_folder, output, workers), output, draw)
    is_unfinished = False
    while not is_unfinished:
        run = start_make_data(texts, vocab_folder, output, 2)
        run.wait_for(lambda: len(shards(output)) >= 20)
        run.kill()
        is_unfinished = not (output / "manifest.json").exists()
        if not is_unfinished:  # a fast machine is done before it is killed, but for what the next command removes
            start_make_data(texts, vocab_folder, output, 1).finish()
            check_nothing_is_left(output, reference)
            shutil.rmtree(output)
    damaged = shards(output)[4]
    flip_a_byte(damaged)
    stdout, _ = start_make_data(texts, vocab_folder, output, 2).finish()
    assert f"train/{damaged.name} is damaged: its SHA-256 is not the one" in stdout
    assert stdout.count("; rebuilt") == 1
    check_nothing_is_left(output, reference)


@pytest.mark.slow
def test_a_run_killed_twenty_times_makes_the_same_bytes(
    tmp_path: Path, texts: Path, vocab_folder: Path, reference: Path
) -> None:
    draw, output = random.Random(4), tmp_path / "data"
    for _ in range(20):
        run = start_make_data(texts, vocab_folder, output, draw.choice([1, 2, 7]))
        kill_at_a_random_moment(run, output, draw)
        if (output / "manifest.json").exists():
            # Killed after the manifest, it may leave its lock and records, which the next command removes.
            start_make_data(texts, vocab_folder, output, 1).finish()
            check_nothing_is_left(output, reference)
            shutil.rmtree(output)
            if draw.random() < 0.5:
                shutil.rmtree(tmp_path / ".token-store")
    start_make_data(texts, vocab_folder, output, 2).finish()
    check_nothing_is_left(output, reference)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_vocabulary_killed_at_random_moments_has_the_same_bytes(
    tmp_path: Path, english_text: Path, vocab_folder: Path, kills: int
) -> None:
    draw, output = random.Random(5), tmp_path / "vocab"
    arguments = ("vocab", english_text, "--output", output, "--vocab-size", 3000, "--workers")
    for _ in range(kills):
        run = start(*arguments, draw.choice([1, 2, 7]))
        time.sleep(draw.uniform(0.3, 2.0))
        run.kill()
    start(*arguments, 2).finish()
    assert digests(output) == digests(vocab_folder)


# Runs in a mount namespace of its own, so that nothing stays mounted whatever happens to it.
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


@pytest.mark.parametrize(("size", "workers"), [("150k", 1), ("1500k", 2)], ids=["tokenising", "building"])
def test_a_full_disk_is_one_message_and_the_work_goes_on_once_there_is_room(
    tmp_path: Path, texts: Path, vocab_folder: Path, reference: Path, size: str, workers: int
) -> None:
    alone = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*alone, "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    command = [sys.executable, "-m", "bert_pretrain", "make-data", str(texts), "--vocab", str(vocab_folder)]
    command += ["--output", str(tmp_path / "data"), "--workers", str(workers)]
    command += [item for setting in SETTINGS for item in ("--set", setting)]
    done = subprocess.run(
        [*alone, sys.executable, "-c", ON_A_SMALL_DISK, str(tmp_path), size, *command],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    code, stderr, finished, code_again, stderr_again, files = json.loads(done.stdout)
    assert code == 2, stderr
    assert stderr.count("error: the disk is full") == 1
    assert "Traceback" not in stderr
    assert finished == []
    assert code_again == 0, stderr_again
    assert files == digests(reference)


def write_odd_documents(folder: Path, megabytes: int, words: int, english: str) -> int:
    """Write documents on one line, one without any sentence end, and many of one word, beside ordinary ones."""
    folder.mkdir()
    line = " ".join(english.replace("\\", "").replace('"', "").split()) + " "
    repeats = megabytes * 1_000_000 // len(line) + 1
    endless = "".join(character if character.isalnum() else " " for character in line)
    with (folder / "line.txt").open("w") as one_line, (folder / "endless.txt").open("w") as no_sentence_end:
        for _ in range(repeats):
            one_line.write(line)
            no_sentence_end.write(endless)
    # A record is parsed whole, so it takes several times its size.
    (folder / "record.jsonl").write_text('{"text": "' + line * (repeats // 4 + 1) + '"}\n')
    (folder / "ordinary.txt").write_text(english)
    (folder / "words.txt").write_text("\n\n".join(f"word{number % 977}" for number in range(words)))
    return 3 + len(english.strip().split("\n\n")) + words


@pytest.mark.parametrize(
    ("megabytes", "words"), [(5, 50_000), pytest.param(200, 1_000_000, marks=pytest.mark.slow)], ids=["small", "large"]
)
def test_odd_documents_take_little_memory_and_none_is_lost(
    tmp_path: Path, vocab_folder: Path, english_text: Path, megabytes: int, words: int
) -> None:
    """Vocabulary and data of huge and of tiny documents, in less than 1 GiB of anonymous memory a process."""
    documents = write_odd_documents(tmp_path / "texts", megabytes, words, english_text.read_text())
    boundary = ("--set", "data.document_boundary=blank_line")
    one_copy = ("--set", "data.dupe_factor=1", *boundary)
    commands = [
        ("vocab", tmp_path / "texts", "--output", tmp_path / "vocab", "--vocab-size", 3000, "--workers", 2, *boundary),
        ("make-data", tmp_path / "texts", "--vocab", vocab_folder, "--output", tmp_path / "data", *one_copy),
    ]
    for command in commands:
        run = start(*command)
        assert run.peak_anonymous_bytes() < 1 << 30
        run.finish()
    manifest = DataFolder.open(tmp_path / "data").manifest
    assert manifest["corpus"]["documents"] == documents
    # What is left out, and what gives no pair, is counted.
    drops = [split["statistics"]["drops"]["single_sentence_spans"] for split in manifest["splits"].values()]
    ordinary = english_text.read_text().strip().split("\n\n")
    duplicates = words - 977 + len(ordinary) - len(set(ordinary))
    assert manifest["corpus"]["left_out"] == {"duplicate_documents": duplicates}
    assert sum(drops) == 977
    assert json.loads((tmp_path / "vocab" / "manifest.json").read_text())["figures"]["documents"] == documents


def test_every_dropped_line_and_document_is_counted_by_reason(
    tmp_path: Path, vocab_folder: Path, english_text: Path
) -> None:
    ordinary = english_text.read_text()
    (tmp_path / "a.txt").write_bytes(b"Caf\xe9.\nTwo.\n\n\x01\n\x02\n\n" + ordinary.encode())
    records = ['{"text": "One. Two."}', '{"text": ""}', '{"text": null}', '{"text": " "}', '{"text": "\\ud800 x. Y."}']
    (tmp_path / "b.jsonl").write_text("\n".join(records) + "\n")
    (tmp_path / "c.csv").write_text('text\n"One. Two."\n" "\n""\n')
    config = load_config(settings=["data.document_boundary=blank_line"])
    inputs = [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.csv")]
    manifest = DataFolder.open(make_data(config, inputs, vocab_folder, tmp_path / "data", workers=1)).manifest
    kept = len(ordinary.strip().split("\n\n")) + 4
    assert manifest["corpus"]["documents"] == kept
    assert manifest["corpus"]["repairs_and_drops"] == {
        "documents_with_lone_surrogates": 1,
        "empty_documents": 6,
        "invalid_utf8_characters": 1,
        "sentences_without_tokens": 2,
    }


SMALL = ("data.max_seq_length=32", "data.dupe_factor=2", "data.examples_per_shard=64", "data.validation_fraction=0.1")


@pytest.fixture
def small(numbered: Callable[..., Numbered]) -> Numbered:
    draw = random.Random(30)
    return numbered([[draw.randint(3, 15) for _ in range(draw.randint(2, 20))] for _ in range(60)])


def delete(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("name", ["ids.npy", "document_offsets.npy", "summary.json", "checksums.json"])
@pytest.mark.parametrize("damage", [flip_a_byte, cut_short, delete])
def test_a_damaged_store_shard_is_named_and_tokenised_again(
    small: Numbered, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], None]
) -> None:
    first = small.make(*SMALL, name="first")
    (shard,) = (small.folder / ".token-store").glob("*/part-00000")
    before = digests(shard)
    damage(shard / name)
    capsys.readouterr()
    second = small.make(*SMALL, name="second")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "the token store was damaged" in line]
    assert str(shard) in line
    assert name in line
    assert digests(shard) == before
    assert digests(second) == digests(first)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train/00000.parquet", delete),
        ("train/00001.parquet", cut_short),
        ("train/00002.parquet", flip_a_byte),
        ("tokenizer/vocab.txt", delete),
        ("tokenizer/vocab.txt", cut_short),
    ],
)
def test_a_damaged_file_is_named_and_the_data_is_built_again(
    small: Numbered, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], None]
) -> None:
    data = small.make(*SMALL)
    before = digests(data)
    records = DataFolder.open(data).shards("train")
    damage(data / name)
    if name.startswith("train"):
        with pytest.raises(DataError) as caught:
            [read_shard(data, record) for record in records]
        assert name in caught.value.what
        assert "make-data" in caught.value.remedy
    capsys.readouterr()
    small.make(*SMALL, verify=True)
    assert len(re.findall(rf"\b{name.split('/')[0]}.*; the data is built again", capsys.readouterr().out)) == 1
    assert digests(data) == before
    small.make(*SMALL, verify=True)
    assert "every shard as it was written" in capsys.readouterr().out


def test_a_saved_dataset_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, english_documents: list[list[str]]
) -> None:
    import datasets

    from bert_pretrain.text.sources import resolve

    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": [" ".join(document) for document in english_documents[:20]]}).save_to_disk(
        folder
    )
    (source,) = resolve([str(folder)], load_config().data)
    source.check_unchanged()
    os.utime(folder / "dataset_info.json", ns=(5, 5))
    with pytest.raises(InputError, match="changed while it was read"):
        source.check_unchanged()
    shutil.rmtree(folder)
    with pytest.raises(InputError, match="changed while it was read"):
        source.check_unchanged()
