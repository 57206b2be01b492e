"""Fuzz tests: readers accept a damaged input or raise `UserError`.

Damaged inputs are random changes of valid ones. For a long run: `pytest tests/hostile --hypothesis-profile=long`.
"""

import contextlib
import io
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from bert_pretrain.config import DataConfig
from bert_pretrain.config_file import load_config, preset_paths
from bert_pretrain.config_keys import dump_yaml
from bert_pretrain.errors import UserError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.shards import read_shard
from bert_pretrain.finetune.predict import write_rows
from bert_pretrain.finetune.rows import INPUT, LabelledInput
from bert_pretrain.finetune.run import TASK_CLASSES
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.io.files import CHECKSUMS, damage_of_folder, write_checksums
from bert_pretrain.io.manifest import Output, read_record
from bert_pretrain.make_data.run import make_data
from bert_pretrain.metrics import read_metrics
from bert_pretrain.model.huggingface import load_model
from bert_pretrain.plan.time_limit import TimeLimit
from bert_pretrain.report.diagnosis import diagnose
from bert_pretrain.text import documents
from bert_pretrain.text.sources import resolve
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.score import read_pairs
from bert_pretrain.tools.texts import Texts
from bert_pretrain.train.checkpoint import open_checkpoint
from bert_pretrain.train.run import train
from bert_pretrain.vocab.run import make_vocab
from tests.text.test_documents import COMPRESS, FORMATS
from tests.train.conftest import make_tokenizer

_ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 2**31, 2**63, 10**30, -(10**9), 1e308, float("nan"), float("inf"), "", "a", "\ud800",
    "\x00", "../a", "/etc/passwd", "1e999", "é" * 100, [], {}, [[]], [None], {"": None}, {"a": {"a": 1}},
)  # fmt: skip
_ODD_BYTES = (
    b"\x00", b"\xff", b"\n", b"\r\n", b'"', b",", b"\t", b"{", b"}", b"[", b"]", b":", b"&a", b"*a", b"\xef\xbb\xbf"
    b"\xff\xfe", b"1e999", b"-1", b"99999999999", b"\\ud800", "\u2028".encode(),
)  # fmt: skip
NOUNS, VERBS, PLACES = ("cat", "dog", "naïve 猫"), ("sat", "ran"), ("here", "there")
SENTENCES = [f"The {noun} {verb} {place}." for noun in NOUNS for verb in VERBS for place in PLACES]
ROWS = [{"text": text, "label": str(number % 2)} for number, text in enumerate(SENTENCES[:3])]
SETTINGS = [
    *("vocab.size=150", "data.max_seq_length=32", "data.validation_fraction=0.2", "data.examples_per_shard=64"),
    *("model.hidden_size=8", "model.num_hidden_layers=1", "model.num_attention_heads=2", "model.intermediate_size=8"),
    *("model.max_position_embeddings=32", "train.max_steps=1", "train.global_batch_size=2"),
    *("train.device=cpu", "train.precision=fp32"),
]


class Target(NamedTuple):
    """A file to damage and its reader."""

    path: Path
    read: Callable[[], object]
    seeds: list[bytes]  # valid contents


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all stages on a tiny corpus."""
    folder = tmp_path_factory.mktemp("outputs")
    (folder / "text.txt").write_text(
        "\n\n".join("\n".join(SENTENCES[number:] + SENTENCES[:number]) for number in range(20)) + "\n"
    )
    config = load_config(settings=SETTINGS)
    vocab = make_vocab(config, [str(folder / "text.txt")], folder / "vocab", workers=1)
    data = make_data(config, [str(folder / "text.txt")], vocab, folder / "data", workers=1)
    train(config, data, folder / "run")
    shutil.copytree(folder / "run" / "model", folder / "model")
    shutil.copytree(next((folder / "run" / "checkpoints").glob("step-*")), folder / "state")
    (folder / "model" / CHECKSUMS).unlink()  # otherwise damage is detected before the file is parsed
    return folder


def corpora(folder: Path) -> Iterator[Target]:
    texts = ["\n".join(SENTENCES[:4]), *SENTENCES[4:]]
    contents = {ending: FORMATS[ending](texts) for ending in (".txt", ".jsonl", ".csv", ".parquet")}
    for name in (".txt.gz", ".csv.bz2", ".jsonl.xz", ".txt.zst", ".parquet.gz"):
        ending, dot, compression = name.rpartition(".")
        contents[name] = COMPRESS[dot + compression](contents[ending])

    def read(path: Path) -> None:
        config = DataConfig(strict=path.stat().st_size % 2 == 0)
        (source,) = resolve([str(path)], config)
        for part in documents.cut(source, part_bytes=64):
            for document in documents.read(part, config, Counter()):
                document.text.encode()  # raises for lone surrogates
        list(Texts([str(path)], DataConfig(), make_tokenizer(), skip_empty=True))

    for ending, seed in contents.items():
        path = folder / f"corpus{ending}"
        yield Target(path, partial(read, path), [seed])
    path = folder / "pairs.jsonl"
    pair = {"sentence_good": "a", "sentence_bad": "b", "UID": "c"}
    yield Target(path, lambda: read_pairs([str(path)], "UID", DataConfig(), make_tokenizer()), as_json(pair))


def configurations(folder: Path) -> Iterator[Target]:
    path, settings_path = folder / "config.yaml", folder / "settings.txt"
    lines = ["train.betas=[0.9, 0.98]", "data.input_weights={a: 2}", "data.max_record_bytes=64M", "time=1h"]
    lines += ["train.time_budget=1h30m", "train.time_budget=2.5s"]

    def read_settings() -> None:
        config = load_config(settings=settings_path.read_text(errors="replace").split("\n"))
        path.write_text(dump_yaml(config), encoding="utf-8")
        assert load_config(path) == config

    yield Target(settings_path, read_settings, [line.encode() for line in [*lines, "\n".join(lines[:5])]])
    presets = [preset.read_bytes() for preset in preset_paths().values()]
    yield Target(path, lambda: load_config(path), [*presets, b"extends: short\ndata: &a {seed: 1}\n"])


def stage_outputs(folder: Path) -> Iterator[Target]:
    vocab, data, run = folder / "vocab", folder / "data", folder / "run"

    def existing(path: Path, read: Callable[[], object]) -> Target:
        seeds = [path.read_bytes()]
        if path.suffix == ".json":
            content = json.loads(seeds[0])
            seeds.append(json.dumps({key: content[key] for key in content if key != "content_sha256"}).encode())
        return Target(path, read, seeds)

    def read_vocab() -> None:
        tokenizer = Tokenizer.load(vocab)
        tokenizer.decode(tokenizer.encode_text("The naïve cat."))

    def read_data() -> None:
        opened = DataFolder.open(data)
        opened.tokenizer()
        print(opened.content_hash, opened.max_seq_length, opened.mean_tokens("train"))
        for split in ("train", "validation"):
            for record in opened.shards(split):
                read_shard(data, record)
        Output(data, "data", identity).state()

    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        yield existing(vocab / name, read_vocab)
    identity = read_record(data)["identity"]
    yield existing(data / "manifest.json", read_data)
    for name in ("manifest.json", "metrics.jsonl"):
        yield existing(run / name, lambda: diagnose(read_record(run), read_metrics(run)))
    sealed = folder / "sealed"
    sealed.mkdir()
    (sealed / "a").write_bytes(b"a")
    write_checksums(sealed)
    yield existing(sealed / CHECKSUMS, lambda: damage_of_folder(sealed))
    used = folder / "used.json"
    yield Target(used, lambda: TimeLimit(1.0, used), as_json({"used_seconds": 1.5}))


def models(folder: Path) -> Iterator[Target]:
    model, state = folder / "model", folder / "state"

    def load() -> object:
        return load_model(model)

    for name in ("config.json", "model.safetensors"):
        yield Target(model / name, load, [(model / name).read_bytes()])
    for name in ("training_state.json", "training_state.safetensors", "model.safetensors"):
        yield Target(state / name, lambda: open_checkpoint(state).step, [(state / name).read_bytes()])
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(model / "a.safetensors")
    seed = {"metadata": {"total_size": 1}, "weight_map": {"bert.embeddings.word_embeddings.weight": "a.safetensors"}}
    yield Target(model / "model.safetensors.index.json", load, as_json(seed))
    (model / "model.safetensors.index.json").unlink()
    old = partial(torch.save, tensors, _use_new_zipfile_serialization=False)
    yield Target(model / "pytorch_model.bin", load, [bytes_of(partial(torch.save, tensors)), bytes_of(old)])


def finetuning_tables(folder: Path) -> Iterator[Target]:
    tokenizer = Tokenizer.load(folder / "vocab")
    answers = {"text": ["cat"], "answer_start": [4]}
    question = {"id": "1", "question": "Who?", "context": "The cat sat.", "answers": answers}
    squad_answers = [{"text": "cat", "answer_start": 4}]
    paragraph = {"context": question["context"], "qas": [{**question, "answers": squad_answers}]}
    cmrc_question = {"query_id": "1", "query_text": "Who?", "answers": ["cat", "dog"]}
    cmrc = [{"context_id": "1", "context_text": question["context"], "qas": [cmrc_question]}]
    table = pa.Table.from_pylist(ROWS)
    tables = {
        "classify.csv": [bytes_of(partial(pyarrow.csv.write_csv, table))],
        "classify.jsonl": as_json(*ROWS),
        "classify.json": as_json(ROWS),
        "classify.tsv": [b"text\tlabel\na\tx\nb\ty\n"],
        "classify.parquet": [bytes_of(partial(pq.write_table, table))],
        "answer.json": as_json({"data": [{"paragraphs": [paragraph]}]}, [question], cmrc),
        "answer.jsonl": as_json(question),
        "tag.jsonl": as_json({"tokens": ["Anna", "sings"], "tags": ["B-PER", "O"]}),
        "tag.conll": [b"Anna B-PER\nsings O\n\nOslo\tS-LOC\nBonn I-LOC\n"],
    }

    def read(path: Path) -> None:
        head = TASK_CLASSES[path.name.partition(".")[0]]
        with contextlib.suppress(UserError):
            head(Settings(regression=path.suffix == ".jsonl"), tokenizer).read(LabelledInput(str(path), "--train"))
        task = head(Settings(pair_field="label", max_length=32, stride=8), tokenizer)
        examples = task.read(LabelledInput(str(path), INPUT))
        task.windows_of(examples, "input")
        for ending in (".jsonl", ".csv"):
            write_rows(folder / f"rows{ending}", examples, [{} for _ in examples])

    for name, seeds in tables.items():
        yield Target(folder / name, partial(read, folder / name), seeds)


def bytes_of(write: Callable[[Any], object]) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


def as_json(*values: object) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


@pytest.mark.parametrize("group", [corpora, configurations, stage_outputs, models, finetuning_tables])
def test_damaged_input_is_read_or_raises_user_error(group, outputs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "outputs"
    shutil.copytree(outputs, folder)
    for target in group(folder):
        check(target)


def check(target: Target) -> None:
    path, read, seeds = target
    before = path.read_bytes() if path.exists() else seeds[0]
    path.write_bytes(seeds[0])
    read()  # a valid input must be accepted
    is_json = st.just(".json" in path.name)

    @settings(max_examples=settings().max_examples // 2)
    @given(data=st.builds(mutated, st.sampled_from(seeds), st.randoms(use_true_random=False), is_json=is_json))
    def damage(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(UserError):
            read()

    damage()
    path.write_bytes(before)  # for other targets in the same folder


def mutated(data: bytes, draw: random.Random, *, is_json: bool) -> bytes:
    """Return an input with one to eight random changes of its bytes or its JSON values."""
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        changed = _with_changed_value(data, draw) if is_json and draw.random() < 0.6 else None
        data = _with_changed_bytes(data, draw) if changed is None else changed
    return data


def _with_changed_value(data: bytes, draw: random.Random) -> bytes | None:
    """Change one value in a JSON document or in a line of JSON lines. Returns None if it is not valid JSON."""
    lines = data.split(b"\n")
    number = draw.randrange(len(lines))
    is_document = len(lines) > 2 and lines[0].strip() in (b"{", b"[")
    try:
        tree = [json.loads(data if is_document else lines[number])]
    except (ValueError, RecursionError):
        return None
    places: list[tuple[Any, Any]] = [(tree, 0)]  # containers and keys of all values
    for parent, key in places:  # grows during the loop
        value = parent[key]
        if isinstance(value, dict | list) and len(places) < 2000:
            places += [(value, each) for each in (value if isinstance(value, dict) else range(len(value)))]
    parent, key = draw.choice(places)
    other_parent, other_key = draw.choice(places)
    kind = draw.choice(("remove", "rename", "copy", "wrap", *["odd"] * 4))
    if kind == "remove" and parent is not tree:
        del parent[key]
    elif kind == "rename" and isinstance(parent, dict):
        parent[str(draw.choice(_ODD_VALUES))] = parent.pop(key)
    elif kind == "copy":
        parent[key] = json.loads(json.dumps(other_parent[other_key]))
    else:
        parent[key] = [parent[key]] if kind == "wrap" else draw.choice(_ODD_VALUES)
    text = json.dumps(tree[0]).encode()
    return text if is_document else b"\n".join([*lines[:number], text, *lines[number + 1 :]])


def _with_changed_bytes(data: bytes, draw: random.Random) -> bytes:
    begin = draw.randint(0, len(data))
    end = min(len(data), begin + draw.choice((0, 1, 1, 2, 8, 64)))
    source = draw.randint(0, len(data))
    changes = {
        "flip bits": bytes(byte ^ (1 << draw.randrange(8)) for byte in data[begin:end]),
        "repeat": data[begin:end] * draw.choice((2, 3, 100)),
        "copy from elsewhere": data[source : source + end - begin],
        "remove": b"",
        "odd bytes": draw.choice(_ODD_BYTES),
        "random bytes": draw.randbytes(end - begin),
    }
    kind = draw.choice(["truncate", *changes])
    return data[:begin] if kind == "truncate" else data[:begin] + changes[kind] + data[end:]
