"""Damaged inputs of every reader of outside data are read, or refused with a `UserError`.

The inputs are random changes of valid ones. A long campaign: `pytest tests/hostile --hypothesis-profile=long`.
"""

import contextlib
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_pretrain.errors import UserError
from tests.hostile.targets import Outputs, Target, targets

# Values that readers have stumbled over elsewhere: extremes, other types, text that is no text.
_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 2**31, 2**63, 10**30, -(10**9), 1e308, float("nan"), float("inf"), "", "a", "\ud800",
    "\x00", "../a", "/etc/passwd", "1e999", "é" * 100, [], {}, [[]], [None], {"": None}, {"a": {"a": 1}},
)  # fmt: skip
_ODD_BYTES = (
    b"\x00", b"\xff", b"\n", b"\r\n", b'"', b",", b"\t", b"{", b"}", b"[", b"]", b":", b"&a", b"*a", b"\xef\xbb\xbf"
    b"\xff\xfe", b"1e999", b"-1", b"99999999999", b"\\ud800", "\u2028".encode(),
)  # fmt: skip
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

    @settings(max_examples=settings().max_examples // 2)
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


def mutated(data: bytes, draw: random.Random, *, is_json: bool) -> bytes:
    """Return an input with one to eight random changes: of its JSON values if it has some, or of its bytes."""
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        changed = _with_other_value(data, draw) if is_json and draw.random() < 0.6 else None
        data = _with_other_bytes(data, draw) if changed is None else changed
    return data


def _with_other_value(data: bytes, draw: random.Random) -> bytes | None:
    """Change, remove or add a value of a JSON text, or of a line of it; None where there is no JSON."""
    lines = data.split(b"\n")
    number = draw.randrange(len(lines))
    whole = len(lines) > 2 and lines[0].strip() in (b"{", b"[")
    try:
        tree = [json.loads(data if whole else lines[number])]
    except (ValueError, RecursionError):
        return None
    places: list[tuple[Any, Any]] = [(tree, 0)]  # of values: what holds each, and its key there
    for holder, key in places:  # grows
        value = holder[key]
        if isinstance(value, dict | list) and len(places) < 2000:
            places += [(value, each) for each in (value if isinstance(value, dict) else range(len(value)))]
    holder, key = draw.choice(places)
    kind = draw.randrange(8)
    if kind == 0 and len(places) > 1 and holder is not tree:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[str(draw.choice(_ODD))] = holder.pop(key)
    elif kind == 2:
        other, place = draw.choice(places)
        holder[key] = json.loads(json.dumps(other[place]))
    elif kind == 3:
        holder[key] = [holder[key]]
    else:
        holder[key] = draw.choice(_ODD)
    text = json.dumps(tree[0]).encode()
    return text if whole else b"\n".join([*lines[:number], text, *lines[number + 1 :]])


def _with_other_bytes(data: bytes, draw: random.Random) -> bytes:
    begin = draw.randint(0, len(data))
    end = min(len(data), begin + draw.choice((0, 1, 1, 2, 8, 64)))
    kind = draw.randrange(7)
    if kind == 0 and data:  # flip a bit
        at = min(begin, len(data) - 1)
        return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
    if kind == 1:  # truncate
        return data[:begin]
    if kind == 2:  # repeat
        return data[:end] + data[begin:end] * draw.choice((1, 2, 100)) + data[end:]
    if kind == 3:  # copy from elsewhere
        source = draw.randint(0, len(data))
        return data[:begin] + data[source : source + end - begin] + data[end:]
    if kind == 4:  # remove
        return data[:begin] + data[end:]
    new = draw.choice(_ODD_BYTES) if kind == 5 else draw.randbytes(end - begin)
    return data[:begin] + new + data[end:]
