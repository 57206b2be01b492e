"""Damaged inputs of every reader are read or refused with a `UserError`; and the fuzzer notices what it looks for."""

import contextlib
import json
import mmap
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fuzz
import pytest
from fuzz import mutated
from fuzz_targets import Outputs, Target, targets
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_pretrain.errors import InputError, UserError

TABLES = (
    *(f"classify.{ending}" for ending in ("csv", "jsonl", "json", "tsv", "parquet")),
    *("answer.json", "answer.jsonl", "tag.jsonl", "tag.conll"),
)
NAMES = (
    *(f"corpus.{ending}" for ending in ("txt", "jsonl", "csv", "parquet")),
    *(f"corpus.{ending}" for ending in ("txt.gz", "csv.bz2", "jsonl.xz", "txt.zst", "parquet.gz")),
    *("pairs.jsonl", "set", "config.yaml", "duration"),
    *(f"vocab/{name}" for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json")),
    *("data/manifest.json", "data/claim", "data/shard", "run/manifest.json", "run/metrics.jsonl"),
    *(f"model/{name}" for name in ("config.json", "model.safetensors", "pytorch_model.bin", "index.json")),
    *(f"state/{name}" for name in ("training_state.json", "training_state.safetensors", "model.safetensors")),
    *("sealed/checksums.json", "used_time.json"),
    *(f"{tool}/{name}" for tool in ("finetune", "predict") for name in TABLES),
)


@pytest.fixture(scope="module")
def every_target(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    outputs = Outputs.make(tmp_path_factory.mktemp("outputs") / "new")
    return targets(tmp_path_factory.mktemp("targets"), outputs)


def test_every_reader_is_a_target(every_target: dict[str, Target]) -> None:
    assert tuple(every_target) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_input_is_read_or_refused(every_target: dict[str, Target], name: str) -> None:
    target = every_target[name]
    target.read(target.seeds[0])  # which is valid: a reader that refuses everything proves nothing

    @settings(max_examples=25)
    @given(
        data=st.builds(
            mutated,
            st.sampled_from(target.seeds),
            st.randoms(use_true_random=False),
            is_json=st.just(target.is_json),
        )
    )
    def read(data: bytes) -> None:
        with contextlib.suppress(UserError):
            target.read(data)

    read()


def test_mutations_are_as_the_seed_says_and_keep_to_json_where_asked() -> None:
    data = json.dumps({"a": [1, {"b": "c"}], "d": None}).encode()
    inputs = [mutated(data, random.Random(number), is_json=True) for number in range(400)]
    assert inputs == [mutated(data, random.Random(number), is_json=True) for number in range(400)]
    assert len(set(inputs)) > 250
    num_valid = 0
    for each in inputs:
        with contextlib.suppress(ValueError):
            json.loads(each)
            num_valid += 1
    assert num_valid > 120


@pytest.fixture
def findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Try inputs on a reader, and return the first lines of what was found."""
    monkeypatch.setattr(fuzz, "SLOW_SECONDS", 0.05)
    monkeypatch.setattr(fuzz, "MEMORY_BYTES", 64 << 20)
    shared = mmap.mmap(-1, fuzz._HEADER.size + fuzz.MAX_INPUT_BYTES)

    def tried(read: Callable[[bytes], object], *inputs: bytes) -> list[str]:
        try_one = fuzz.Trial("a/b", Target(read, list(inputs)), tmp_path, shared)
        for data in inputs:
            try_one(data)
        assert fuzz._HEADER.unpack_from(shared)[0] == len(inputs)
        return sorted(path.read_text().splitlines()[0] for path in tmp_path.glob("*.txt"))

    yield tried
    shared.close()


def _fails(error: BaseException) -> Callable[[bytes], object]:
    def read(data: bytes) -> None:
        if data == b"bad":
            raise error

    return read


def test_any_other_exception_is_a_finding_once_and_its_input_is_kept(findings, tmp_path: Path) -> None:
    assert findings(_fails(InputError("what", where="where", remedy="remedy")), b"good", b"bad") == []
    assert findings(_fails(KeyError("x")), b"good", b"bad", b"bad") == ["a/b: KeyError"]
    (kept,) = tmp_path.glob("*.input")
    assert kept.read_bytes() == b"bad"
    assert "KeyError: 'x'" in kept.with_suffix(".txt").read_text()


def _is_busy(data: bytes) -> None:
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass


def test_what_is_slow_is_a_finding(findings) -> None:
    assert findings(_is_busy, b"a") == ["a/b: slow"]


def test_much_memory_is_a_finding(findings, tmp_path: Path) -> None:
    # In a process of its own, whose peak is at first what it holds; it may free some of that meanwhile.
    process = fuzz.FORK.Process(target=findings, args=(lambda data: bytearray(b"x") * (512 << 20), b"a"))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert "a/b: memory" in [path.read_text().splitlines()[0] for path in tmp_path.glob("*.txt")]


@pytest.mark.parametrize("kind", ["dies", "hangs", "ends"])
def test_the_death_of_a_worker_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "HUNG_SECONDS", 1.0)
    shared = mmap.mmap(-1, fuzz._HEADER.size)

    def worker() -> None:
        fuzz._HEADER.pack_into(shared, 0, 1, 0)
        if kind == "hangs":
            time.sleep(60)
        os._exit(7 if kind == "dies" else 0)

    process = fuzz.FORK.Process(target=worker)
    process.start()
    expected = {"dies": "died with exit status 7", "hangs": "hung", "ends": None}
    assert fuzz._reason_of_end(process, shared) == expected[kind]
