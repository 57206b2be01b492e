"""Readers of outside data, each with valid inputs to damage.

A target writes its input to where the reader expects it, among files that are whole, and reads it as a command does.
The only exception that a reader may raise is `UserError`.
"""

import bz2
import contextlib
import dataclasses
import gzip
import io
import json
import lzma
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from bert_pretrain.config import DataConfig
from bert_pretrain.config_file import load_config, preset_paths
from bert_pretrain.config_keys import dump_yaml
from bert_pretrain.examples.shards import DataFolder, ShardRecord, damage_of, read_shard
from bert_pretrain.finetune.answer import Answer
from bert_pretrain.finetune.classify import Classify
from bert_pretrain.finetune.predict import write_rows
from bert_pretrain.finetune.rows import NEW, LabelledInput
from bert_pretrain.finetune.run import HEADS
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tag import Tag
from bert_pretrain.finetune.task import Task
from bert_pretrain.io import manifest
from bert_pretrain.io.files import CHECKSUMS, damage_of_folder, seal_folder, sha256_file
from bert_pretrain.make_data.run import make_data
from bert_pretrain.model.huggingface import load_model
from bert_pretrain.plan.time_limit import TimeLimit
from bert_pretrain.report.curves import read_metrics
from bert_pretrain.report.diagnosis import diagnose
from bert_pretrain.text import documents
from bert_pretrain.text.sources import resolve
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.score import read_pairs
from bert_pretrain.tools.texts import Texts
from bert_pretrain.train.checkpoint import open_checkpoint
from bert_pretrain.train.run import train
from bert_pretrain.vocab.run import make_vocab

SENTENCES = [
    f"The {noun} {verb} {place}."
    for noun in ("cat", "dog", "naïve 猫")
    for verb in ("sat", "ran")
    for place in ("here", "there")
]
ROWS = [{"text": text, "label": str(number % 2)} for number, text in enumerate(SENTENCES[:3])]
SETTINGS = [
    "vocab.size=150",
    "data.max_seq_length=32",
    "data.validation_fraction=0.2",
    "data.examples_per_shard=64",
    "model.hidden_size=8",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "model.intermediate_size=8",
    "model.max_position_embeddings=32",
    "train.max_steps=1",
    "train.global_batch_size=2",
    "train.device=cpu",
    "train.precision=fp32",
]


@dataclass(frozen=True)
class Target:
    """A reader, and valid inputs of it."""

    read: Callable[[bytes], object]
    seeds: list[bytes]
    is_json: bool = False
    """Whether half of the mutations are of JSON values rather than of bytes."""


@dataclass(frozen=True)
class Outputs:
    """Small outputs of all stages."""

    folder: Path

    @property
    def vocab(self) -> Path:
        return self.folder / "vocab"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def checkpoint(self) -> Path:
        return next((self.run / "checkpoints").glob("step-*"))

    @staticmethod
    def make(folder: Path) -> "Outputs":
        """Run the three stages on a few sentences."""
        folder.mkdir(parents=True, exist_ok=True)
        text = folder / "text.txt"
        text.write_text("\n\n".join("\n".join(SENTENCES[number:] + SENTENCES[:number]) for number in range(20)) + "\n")
        config = load_config(settings=SETTINGS)
        vocab = make_vocab(config, [str(text)], folder / "vocab", workers=1)
        data = make_data(config, [str(text)], vocab, folder / "data", workers=1)
        train(config, data, folder / "run")
        return Outputs(folder)


def targets(folder: Path, outputs: Outputs) -> dict[str, Target]:
    """Return all targets by name; they write below `folder` only."""
    return {**_corpora(folder), **_configurations(folder), **_outputs(folder, outputs), **_tables(folder, outputs)}


def _corpora(folder: Path) -> dict[str, Target]:
    table = pa.Table.from_pylist(ROWS)
    plain = {
        "txt": "\n".join([*SENTENCES[:4], "", *SENTENCES[4:]]).encode(),
        "jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in ROWS),
        "csv": _bytes_of(partial(pyarrow.csv.write_csv, table)),
        "parquet": _bytes_of(partial(pq.write_table, table)),
    }
    archives = {
        "txt.gz": gzip.compress(plain["txt"]),
        "csv.bz2": bz2.compress(plain["csv"]),
        "jsonl.xz": lzma.compress(plain["jsonl"]),
        "txt.zst": pa.compress(plain["txt"], "zstd", asbytes=True),
        "parquet.gz": gzip.compress(plain["parquet"]),
    }
    found = {
        f"corpus.{ending}": Target(partial(_read_corpus, folder / f"corpus.{ending}"), [seed], ending == "jsonl")
        for ending, seed in {**plain, **archives}.items()
    }
    pairs = [{"sentence_good": "a", "sentence_bad": "b", "UID": "c"}]
    path = folder / "pairs.jsonl"
    return found | {
        "pairs.jsonl": Target(_file(path, lambda: read_pairs([str(path)], "UID")), _json(*pairs), is_json=True)
    }


def _bytes_of(write: Callable[[Any], object]) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


def _read_corpus(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    config = DataConfig(strict=len(data) % 2 == 0)
    (source,) = resolve([str(path)], config)
    for part in documents.cut(source, part_bytes=64):
        for document in documents.read(part, config, Counter()):
            document.text.encode()  # what follows relies on texts that UTF-8 can hold
    list(Texts([str(path)], "text", skip_empty=True))


def _configurations(folder: Path) -> dict[str, Target]:
    path = folder / "config.yaml"
    settings = ["train.betas=[0.9, 0.98]", "data.input_weights={a: 2}", "data.max_record_bytes=64M", "time=1h"]

    def read_settings(data: bytes) -> None:
        config = load_config(settings=data.decode(errors="replace").split("\n"))
        path.write_text(dump_yaml(config), encoding="utf-8")
        assert load_config(path) == config

    return {
        "set": Target(read_settings, [setting.encode() for setting in [*settings, "\n".join(settings)]]),
        "config.yaml": Target(
            _file(path, lambda: load_config(path)),
            [preset.read_bytes() for preset in preset_paths().values()] + [b"extends: short\ndata: &a {seed: 1}\n"],
        ),
        "duration": Target(
            lambda data: load_config(settings=[f"train.time_budget={data.decode(errors='replace')}"]),
            [b"1h30m", b"1d 2h", b"2.5s", b"90"],
        ),
    }


def _outputs(folder: Path, outputs: Outputs) -> dict[str, Target]:
    """Return the targets whose inputs are files that this package has written, or that look so."""
    vocab, data, run, model, state = (folder / f"of_{name}" for name in ("vocab", "data", "run", "model", "state"))
    shutil.copytree(outputs.vocab, vocab)
    shutil.copytree(outputs.data, data)
    shutil.copytree(outputs.run, run)
    shutil.copytree(outputs.run / "model", model)
    shutil.copytree(outputs.checkpoint, state)
    sealed = folder / "sealed"
    sealed.mkdir()
    (sealed / "a").write_bytes(b"a")
    seal_folder(sealed)
    identity = manifest.read_record(data)["identity"]

    (model / CHECKSUMS).unlink(missing_ok=True)  # they would refuse every change, before it is read

    def in_file(path: Path, read: Callable[[], object]) -> Target:
        is_json = path.suffix in (".json", ".jsonl")
        seeds = [path.read_bytes()]
        if path.suffix == ".json":
            content = json.loads(seeds[0])
            seeds.append(json.dumps({key: content[key] for key in content if key != "content_sha256"}).encode())
        return Target(_file(path, read), seeds, is_json)

    return {
        **{
            f"vocab/{name}": in_file(vocab / name, lambda: _read_vocab(vocab))
            for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json")
        },
        "data/manifest.json": in_file(data / "manifest.json", lambda: _read_data(data)),
        "data/claim": in_file(data / "manifest.json", lambda: manifest.claim(data, "data", identity)),
        "data/shard": _shard(folder, data),
        "run/manifest.json": in_file(run / "manifest.json", lambda: _read_run(run)),
        "run/metrics.jsonl": in_file(run / "metrics.jsonl", lambda: _read_run(run)),
        "model/config.json": in_file(model / "config.json", lambda: load_model(model)),
        "model/model.safetensors": in_file(model / "model.safetensors", lambda: load_model(model)),
        "model/pytorch_model.bin": _pickled(folder, outputs),
        "model/index.json": _index(folder, outputs),
        **{
            f"state/{name}": in_file(state / name, lambda: open_checkpoint(state).step)
            for name in ("training_state.json", "training_state.safetensors", "model.safetensors")
        },
        "sealed/checksums.json": in_file(sealed / "checksums.json", lambda: damage_of_folder(sealed)),
        "used_time.json": Target(
            _file(folder / "used.json", lambda: TimeLimit(1.0, folder / "used.json")),
            _json({"used_seconds": 1.5}),
            True,
        ),
    }


def _read_vocab(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    tokenizer.decode(tokenizer.encode_text("The naïve cat."))


def _read_run(folder: Path) -> None:
    diagnose(manifest.read_record(folder), read_metrics(folder))


def _read_data(folder: Path) -> None:
    found = DataFolder.open(folder)
    found.tokenizer()
    print(found.content_hash, found.max_seq_length, found.mean_tokens("train"))
    for split in ("train", "validation"):
        for record in found.shards(split):
            read_shard(folder, record)


def _shard(folder: Path, data: Path) -> Target:
    """Return the target of a shard with whatever content, whose manifest agrees with it."""
    place = folder / "of_shard"
    shutil.copytree(data, place)
    name = DataFolder.open(data).shards("train")[0].path
    path = place / name

    def read() -> None:
        rows = tokens = 0
        with contextlib.suppress(Exception):  # judged by read_shard
            ids = pq.read_table(path, columns=["input_ids"])["input_ids"].to_pylist()
            rows, tokens = len(ids), sum(map(len, ids))
        record = ShardRecord(name, rows, tokens, path.stat().st_size, sha256_file(path), "")
        damage_of(place, record, whole=False)
        examples = read_shard(place, record)
        examples.take(np.arange(len(examples)))
        print(examples.original_ids)

    table = pq.read_table(path)
    variants = [
        table,
        table.select(["input_ids"]),
        table.slice(0, 2),
        table.rename_columns([name.upper() for name in table.column_names]),
    ]
    return Target(
        _file(path, read), [path.read_bytes(), *(_bytes_of(partial(pq.write_table, each)) for each in variants)]
    )


def _pickled(folder: Path, outputs: Outputs) -> Target:
    place = folder / "of_pickle"
    shutil.copytree(outputs.run / "model", place)
    tensors = load_file(place / "model.safetensors")
    (place / "model.safetensors").unlink()
    (place / CHECKSUMS).unlink(missing_ok=True)
    seeds = [
        _bytes_of(partial(torch.save, tensors)),
        _bytes_of(partial(torch.save, tensors, _use_new_zipfile_serialization=False)),
    ]
    return Target(_file(place / "pytorch_model.bin", lambda: load_model(place)), seeds)


def _index(folder: Path, outputs: Outputs) -> Target:
    place = folder / "of_index"
    shutil.copytree(outputs.run / "model", place)
    (place / "model.safetensors").rename(place / "a.safetensors")
    (place / CHECKSUMS).unlink(missing_ok=True)
    seed = {"metadata": {"total_size": 1}, "weight_map": {"bert.embeddings.word_embeddings.weight": "a.safetensors"}}
    return Target(_file(place / "model.safetensors.index.json", lambda: load_model(place)), _json(seed), True)


def _tables(folder: Path, outputs: Outputs) -> dict[str, Target]:
    """Return the targets of `finetune` and `predict`: texts, questions, tagged words."""
    tokenizer = Tokenizer.load(outputs.vocab)
    settings = Settings(pair_field="label", max_length=32, stride=8)
    answers = {"text": ["cat"], "answer_start": [4]}
    question = {"id": "1", "question": "Who?", "context": "The cat sat.", "answers": answers}
    squad_answers = [{"text": "cat", "answer_start": 4}]
    paragraph = {"context": question["context"], "qas": [{**question, "answers": squad_answers}]}
    asked = {"query_id": "1", "query_text": "Who?", "answers": ["cat", "dog"]}
    cmrc = [{"context_id": "1", "context_text": question["context"], "qas": [asked]}]
    tagged = [{"tokens": ["Anna", "sings"], "tags": ["B-PER", "O"]}]
    tables = pa.Table.from_pylist(ROWS)
    readers: dict[str, tuple[Callable[[LabelledInput], object], list[bytes]]] = {
        "classify.csv": (Classify(Settings(), tokenizer).read, [_bytes_of(partial(pyarrow.csv.write_csv, tables))]),
        "classify.jsonl": (Classify(Settings(regression=True), tokenizer).read, _json(*ROWS)),
        "classify.json": (Classify(Settings(), tokenizer).read, _json(ROWS)),
        "classify.tsv": (Classify(Settings(), tokenizer).read, [b"text\tlabel\na\tx\nb\ty\n"]),
        "classify.parquet": (Classify(Settings(), tokenizer).read, [_bytes_of(partial(pq.write_table, tables))]),
        "answer.json": (
            Answer(Settings(), tokenizer).read,
            _json({"data": [{"paragraphs": [paragraph]}]}, [question], cmrc),
        ),
        "answer.jsonl": (Answer(Settings(), tokenizer).read, _json(question)),
        "tag.jsonl": (Tag(Settings(), tokenizer).read, _json(*tagged)),
        "tag.conll": (Tag(Settings(), tokenizer).read, [b"Anna B-PER\nsings O\n\nOslo\tS-LOC\nBonn I-LOC\n"]),
    }

    def target(name: str, read: Callable[[LabelledInput], object], seeds: list[bytes]) -> Target:
        path = folder / name
        return Target(_file(path, lambda: read(LabelledInput(str(path), "--train"))), seeds, ".json" in name)

    targets = {f"finetune/{name}": target(name, *rest) for name, rest in readers.items()}
    for name, (_, seeds) in readers.items():
        task = HEADS[name.partition(".")[0]](settings, tokenizer)
        read = partial(_rows_to_predict, task, folder)
        targets[f"predict/{name}"] = target(f"predict_{name}", read, seeds)
    return targets


def _rows_to_predict(task: Task, folder: Path, source: LabelledInput) -> None:
    """Read rows as `predict` does, encode them, and write them in every format."""
    examples = task.read(dataclasses.replace(source, flag=NEW))
    task.encode(examples, "input")
    for ending in (".jsonl", ".csv"):
        write_rows(folder / f"rows{ending}", [example.values for example in examples])


def _file(path: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    before = path.read_bytes() if path.exists() else None

    def write_and_read(data: bytes) -> None:
        path.write_bytes(data)
        try:
            read()
        finally:  # other targets may read the same folder
            path.unlink()
            if before is not None:
                path.write_bytes(before)

    return write_and_read


def _json(*values: object) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]
