"""Benchmark the data stages against other tools; prints medians of repeated runs.

Every measurement runs in a new process, alternating with the other tool. Corpora have one sentence per line and blank
lines between documents, and may be compressed. `--only scaling` prints the table of docs/scaling.md.

    python scripts/bench_data.py --english en.txt.xz --chinese zh.txt.xz [--only ids vocab …] [--repeats 5]
"""

import argparse
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import measure
import numpy as np

from bert_pretrain.io.files import read_json
from bert_pretrain.io.inputs import open_input
from bert_pretrain.io.manifest import library_versions
from bert_pretrain.text.fast_tokenizer import Encoder
from bert_pretrain.text.tokenizer import Tokenizer

BLOCK_BYTES = 4 << 20  # as in the token store
PEER_SENTENCES = 10_000  # per call of encode_batch_fast
SIZES = {"16 GB": 16e3, "1 TB": 1e6}  # in MB
CORES = (2, 16, 128)


@dataclass
class Row:
    """A row of the table, with repeated measurements of this package and of a peer in the same order."""

    title: str
    peer_name: str
    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        ours, peer = (measure.spread(speeds, unit=" MB/s") for speeds in (self.ours, self.peer))
        ratio = measure.spread(np.divide(self.ours, self.peer).tolist(), unit=" ×")
        return measure.table_line([self.title, ours, f"{peer}: {self.peer_name}", ratio])


@dataclass
class Corpus:
    """A text without compression, its vocabulary, and the command line."""

    language: str
    text: Path
    vocab_size: int
    options: argparse.Namespace

    @property
    def vocab(self) -> Path:
        return self.text.with_name(f"vocab-{self.language}")

    @property
    def megabytes(self) -> float:
        return self.text.stat().st_size / 1e6

    def peer_speed(self, cores: int) -> Any:
        """Return the MB/s of `encode_batch_fast` on a part of the corpus."""
        return run_task(
            "ids_peer",
            self.vocab,
            self.text,
            self.options.slice_mb,
            cores=cores,
        )


def main() -> None:
    options = parse()
    corpora = [prepare("english", options.english, options.vocab_size, options)]
    if options.chinese is not None:
        corpora.append(prepare("chinese", options.chinese, min(21128, options.vocab_size), options))
    for name, value in describe_machine().items():
        print(f"{name + ':':<10}{value}")
    for corpus in corpora:
        print(f"{corpus.language + ':':<10}{corpus.megabytes:.1f} MB; peers on {options.slice_mb:g} MB of it")
    print("\n" + measure.table(["what", "ours", "peer", "ratio"], []), flush=True)
    begin = time.monotonic()
    for name in options.only:
        for row in MEASURES[name](corpora):
            print(row, flush=True)
    print(f"\n{(time.monotonic() - begin) / 60:.1f} minutes")


def parse() -> argparse.Namespace:
    parser = measure.parser_of(__doc__)
    parser.add_argument("--english", type=Path, required=True)
    parser.add_argument("--chinese", type=Path, help="corpus for ids only")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--work", type=Path, default=Path("bench-data"), help="folder for texts and outputs")
    parser.add_argument("--slice-mb", type=float, default=20.0, help="amount of text to time encode_batch_fast on")
    parser.add_argument("--vocab-size", type=int, default=30522, help="for English; at most 21,128 for Chinese")
    parser.add_argument("--shape-mb", type=float, default=300.0, help="size of the text for scaling")
    return parser.parse_args()


def prepare(language: str, source: Path, vocab_size: int, options: argparse.Namespace) -> Corpus:
    """Decompress a corpus into the work folder, and make its vocabulary."""
    options.work.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(language, options.work / f"{language}.txt", vocab_size, options)
    with open_input(str(source)) as packed, corpus.text.open("wb") as plain:
        shutil.copyfileobj(packed, plain)
    run(
        "vocab",
        corpus.text,
        "--output",
        fresh(corpus.vocab),
        "--vocab-size",
        vocab_size,
    )
    return corpus


def measure_ids(corpora: list[Corpus]) -> Iterator[Row]:
    """Measure encoding on one core, with an empty and with a warm cache. The peer encodes a part of the corpus."""
    for corpus in corpora:
        if not run_task("ids_equal", corpus.vocab, corpus.text, corpus.options.slice_mb):
            sys.exit(f"{corpus.text}: the ids differ from those of tokenizers")
        title, peer = f"ids of {corpus.language.title()}, one core", "encode_batch_fast, one core"
        rows = (Row(f"{title}, cold cache", peer), Row(f"{title}, warm cache", peer))
        for _ in range(corpus.options.repeats):
            speeds = run_task("ids_ours", corpus.vocab, corpus.text, cores=1)
            peer_speed = corpus.peer_speed(cores=1)
            for row, speed in zip(rows, speeds, strict=True):
                row.ours.append(speed)
                row.peer.append(peer_speed)
        yield from rows


def measure_make_data(corpora: list[Corpus]) -> Iterator[Row]:
    """Compare the `make-data` process, including packing and masking, with `encode_batch_fast` alone."""
    corpus = corpora[0]
    row = Row("make-data, 5 copies, length 128, two workers", "encode_batch_fast alone, two cores")
    for _ in range(corpus.options.repeats):
        place = fresh(corpus.options.work / "make-data")
        row.ours.append(corpus.megabytes / make_data(corpus.text, corpus.vocab, place, 128).seconds)
        row.peer.append(corpus.peer_speed(cores=2))
        shutil.rmtree(place)
    yield row


def make_data(
    text: Path,
    vocab: Path,
    place: Path,
    length: int,
    *,
    copies: int = 5,
) -> measure.Usage:
    """Run `make-data` with two workers, with its outputs and its token store in the folder `place`."""
    folders = ["--vocab", vocab, "--output", place / f"data-{length}-{copies}", "--store", place / "store"]
    settings = {"data.dupe_factor": copies, "data.max_seq_length": length}
    return run(
        "make-data",
        text,
        *folders,
        "--workers",
        2,
        settings=settings,
    )


def measure_vocab(corpora: list[Corpus]) -> Iterator[Row]:
    """Compare the `vocab` process with the trainer of `tokenizers` on the same file and number of cores."""
    corpus = corpora[0]
    text, size = corpus.text, corpus.vocab_size
    for workers, cores in ((2, "two cores"), (1, "one core")):
        row = Row(f"vocabulary of {size:,}, {cores}", f"BertWordPieceTokenizer.train, {cores}")
        for _ in range(corpus.options.repeats):
            output = fresh(corpus.options.work / "vocab")
            usage = run(
                "vocab",
                text,
                "--output",
                output,
                "--vocab-size",
                size,
                "--workers",
                workers,
            )
            row.ours.append(corpus.megabytes / usage.seconds)
            begin = time.perf_counter()
            run_task("vocab_peer", text, size, cores=workers)
            row.peer.append(corpus.megabytes / (time.perf_counter() - begin))
        yield row


# ── scaling ──


def extrapolate(corpora: list[Corpus]) -> Iterator[str]:
    """Yield a table of time, disk space and memory for 16 GB and 1 TB, extrapolated from `--shape-mb` and half of it.

    Times assume that no core idles. The first `make-data` makes one copy and fills the token store. The second makes
    five copies from the store, and the time of four of them is added to the first. Use at least 100 MB: with less,
    `vocab` has not reached its maximum of distinct words and the extrapolated time is too long.
    """
    corpus = corpora[0]
    half = measure_scaling(corpus, corpus.options.shape_mb / 2)
    whole = measure_scaling(corpus, corpus.options.shape_mb)

    def at_sizes(name: str) -> np.ndarray:
        """Return a measurement for the sizes of `SIZES`."""
        slope = (whole[name] - half[name]) / (whole["MB"] - half["MB"])
        return max(0.0, whole[name] - slope * whole["MB"]) + slope * np.array(list(SIZES.values()))

    def times(title: str, cpu_seconds: np.ndarray) -> list[str]:
        return [title, *(" / ".join(time_text(each / cores) for cores in CORES) for each in cpu_seconds)]

    def amounts(title: str, name: str, form: str, unit: float = 1e9) -> list[str]:
        return [title, *(form.format(amount) for amount in at_sizes(name) / unit)]

    cores = " / ".join(map(str, CORES))
    copy = at_sizes("copy")
    rows = [
        amounts("tokens", "tokens", "{:.1f} billion"),
        times(f"`vocab`, {cores} cores", at_sizes("vocab")),
        times(f"`make-data`, 5 copies, {cores} cores", copy + 0.8 * at_sizes("copies")),
        times("a second length (512) from the store, 5 copies", at_sizes("long copies")),
        times("`make-data`, one copy", copy),
        amounts("token store", "store", "{:,.1f} GB"),
    ]
    for length in (128, 512):
        rows.append(amounts(f"examples, length {length}, 5 copies", f"rows {length}", "{:,.0f} million", 1e6))
        rows.append(amounts(f"shards, length {length}, 5 copies", f"data-{length}-5", "{:,.0f} GB"))
    memory = " / ".join(f"{whole[f'{command} memory'] / 2**30:.2f} GiB" for command in ("vocab", "copy"))
    lines = measure.table([f"from {half['MB']:g} and {whole['MB']:g} MB", *SIZES], rows)
    yield f"\n{lines}\n\nresident memory of a process, `vocab` / `make-data`: {memory}"


def measure_scaling(corpus: Corpus, megabytes: float) -> dict[str, float]:
    """Return processor seconds, memory, rows and bytes on disk of all commands for a text of this size."""
    place = fresh(corpus.options.work / "scaling")
    text = place / "text.txt"
    run_task("make_text", corpus.text, megabytes, text)
    usages = {
        "vocab": run(
            "vocab",
            text,
            "--output",
            place / "vocab",
            "--workers",
            2,
        ),
        "copy": make_data(
            text,
            corpus.vocab,
            place,
            128,
            copies=1,
        ),
        "copies": make_data(text, corpus.vocab, place, 128),
        "long copies": make_data(text, corpus.vocab, place, 512),
    }
    measured = {"MB": megabytes}
    for name, usage in usages.items():
        measured[name] = usage.cpu_seconds
        measured[f"{name} memory"] = usage.peak_bytes
    for name in ("store", "data-128-5", "data-512-5"):
        files = [*(place / name).rglob("*.npy"), *(place / name).rglob("*.parquet")]
        measured[name] = sum(file.stat().st_size for file in files)
    for length in (128, 512):
        manifest = read_json(place / f"data-{length}-5" / "manifest.json")
        measured[f"rows {length}"] = manifest["splits"]["train"]["rows"]
        measured["tokens"] = manifest["corpus"]["tokens"]
    shutil.rmtree(place)
    return measured


def time_text(seconds: float) -> str:
    return f"{seconds / 60:.2g} min" if seconds < 5400 else f"{seconds / 3600:.2g} h"


MEASURES: dict[str, Callable[[list[Corpus]], Iterator[Row | str]]] = {
    "ids": measure_ids,
    "make-data": measure_make_data,
    "vocab": measure_vocab,
    "scaling": extrapolate,
}


# ── processes ──


run = partial(measure.run_package, threads=1)


def run_task(name: str, *words: object, cores: int | None = None) -> Any:
    """Run one of `TASKS` in a new process and return its result."""
    threads = {} if cores is None else {"RAYON_NUM_THREADS": str(cores)}
    threads["TOKENIZERS_PARALLELISM"] = str(cores != 1).lower()
    command = [sys.executable, __file__, "--task", name, *map(str, words)]
    done = subprocess.run(command, env=measure.environment(1) | threads, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def fresh(folder: Path) -> Path:
    """Empty a folder, or create it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def describe_machine() -> dict[str, str]:
    match = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    processor = match.group(1) if match else platform.machine()
    git = ["git", "-C", str(measure.ROOT), "describe", "--always", "--dirty"]
    versions = ", ".join(f"{name} {version}" for name, version in library_versions().items())
    return {
        "machine": f"{processor}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}",
        "versions": f"python {platform.python_version()}, {versions}",
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown",
    }


# ── tasks: their arguments are words of a command line ──


def ids_ours(vocab: str, text: str) -> list[float]:
    """Return the MB/s of the encoder with an empty cache, and of a second pass with all chunks in the cache."""
    tokenizer = Tokenizer.load(Path(vocab))
    blocks = [with_starts(block) for block in blocks_of(Path(text))]
    megabytes = sum(len(block) for block, _ in blocks) / 1e6
    times = [time.perf_counter()]
    encoder = Encoder(tokenizer)
    for _ in range(2):
        for block, starts in blocks:
            encoder.encode(block, starts)
        times.append(time.perf_counter())
    return [megabytes / (end - begin) for begin, end in itertools.pairwise(times)]


def ids_peer(vocab: str, text: str, megabytes: str) -> float:
    """Return MB/s of `encode_batch_fast` on Python strings, without the time to read them."""
    backend = library_tokenizer(Path(vocab))
    content = slice_of(Path(text), float(megabytes))
    sentences = content.decode().split("\n")
    batches = [sentences[first : first + PEER_SENTENCES] for first in range(0, len(sentences), PEER_SENTENCES)]
    begin = time.perf_counter()
    for batch in batches:
        backend.encode_batch_fast(batch, add_special_tokens=False)
    return len(content) / 1e6 / (time.perf_counter() - begin)


def ids_equal(vocab: str, text: str, megabytes: str) -> bool:
    """Return whether the encoder and `tokenizers` give the same ids for every sentence."""
    content = slice_of(Path(text), float(megabytes))
    ids, offsets, *_ = Encoder(Tokenizer.load(Path(vocab))).encode(*with_starts(content))
    sentences = content.decode().split("\n")
    encodings = library_tokenizer(Path(vocab)).encode_batch_fast(sentences, add_special_tokens=False)
    expected = [encoding.ids for encoding in encodings]
    ours = np.split(ids, offsets[1:-1])
    return [sentence.tolist() for sentence in ours] == expected


def vocab_peer(text: str, size: str) -> None:
    from tokenizers import BertWordPieceTokenizer

    BertWordPieceTokenizer().train([text], vocab_size=int(size), show_progress=False)


def library_tokenizer(vocab: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(vocab / "tokenizer.json"))
    backend.encode_special_tokens = True  # encode "[MASK]" in a text as text, as our encoder does
    return backend


def blocks_of(text: Path) -> Iterator[bytes]:
    """Yield the sentences of a corpus in blocks of whole lines, without blank lines."""
    with text.open("rb") as file:
        while lines := file.readlines(BLOCK_BYTES):
            yield b"".join(line for line in lines if line.strip()).removesuffix(b"\n")


def slice_of(text: Path, megabytes: float) -> bytes:
    """Return about this amount of sentences, sampled evenly from the corpus."""
    with text.open("rb") as file:
        lines = [line for line in file if line.strip()]
    step = max(1, round(sum(map(len, lines)) / (1e6 * megabytes)))
    return b"".join(lines[::step]).removesuffix(b"\n")


def with_starts(block: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs of the encoder: the bytes of a text, and the offset of each sentence."""
    text = np.frombuffer(block, dtype=np.uint8)
    return text, np.concatenate([[0], np.flatnonzero(text == ord("\n")) + 1])


def make_text(text: str, megabytes: str, target: str) -> None:
    """Write a corpus of random sentences of a text, in documents of about 7 kB."""
    sentences = [line for line in Path(text).read_text(encoding="utf-8").splitlines() if line]
    draw = np.random.default_rng(4)
    mean_length = 7000 / (sum(map(len, sentences)) / len(sentences) + 1)  # sentences per document
    with Path(target).open("w", encoding="utf-8") as file:
        for _ in range(round(float(megabytes) * 1e6 / 7000)):
            chosen = draw.integers(0, len(sentences), max(2, draw.poisson(mean_length)))
            file.write("\n".join(sentences[place] for place in chosen) + "\n\n")


TASKS: dict[str, Callable[..., Any]] = {
    task.__name__: task for task in (ids_ours, ids_peer, ids_equal, vocab_peer, make_text)
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--task"]:
        print(json.dumps(TASKS[sys.argv[2]](*sys.argv[3:])))
    else:
        main()
