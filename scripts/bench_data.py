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
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bert_pretrain.io.files import read_json
from bert_pretrain.io.inputs import open_input
from bert_pretrain.io.manifest import library_versions
from bert_pretrain.text.fast_tokenizer import Encoder
from bert_pretrain.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
BLOCK_BYTES = 4 << 20  # as in the token store
PEER_SENTENCES = 10_000  # per call of encode_batch_fast
SIZES = {"16 GB": 16e3, "1 TB": 1e6}  # in MB
CORES = (2, 16, 128)


@dataclass
class Row:
    """A row of the table, with repeated measurements of this package and of a peer in the same order."""

    title: str
    peer_name: str = ""
    unit: str = "MB/s"
    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        peer, ratio = "–", "–"
        if self.peer:
            peer = f"{spread(self.peer, self.unit)}: {self.peer_name}"
            ratio = spread([ours / peer for ours, peer in zip(self.ours, self.peer, strict=True)], "×")
        return f"| {self.title} | {spread(self.ours, self.unit)} | {peer} | {ratio} |"


def spread(values: list[float], unit: str) -> str:
    """Return the median, and the minimum and maximum if they differ."""
    median = f"{statistics.median(values):.3g} {unit}"
    return median if len(set(values)) == 1 else f"{median} ({min(values):.3g}–{max(values):.3g})"


@dataclass
class Bench:
    """Holds the corpora, the work folder and the command line."""

    work: Path
    texts: dict[str, Path]
    arguments: argparse.Namespace

    def vocab_size(self, language: str) -> int:
        size: int = self.arguments.vocab_size
        return size if language == "english" else min(21128, size)

    def vocab(self, language: str) -> Path:
        """Return the vocabulary folder of a corpus; make it if it does not exist."""
        folder = self.work / f"vocab-{language}-{self.vocab_size(language)}"
        run_program("vocab", self.texts[language], "--output", folder, "--vocab-size", self.vocab_size(language))
        return folder

    def megabytes(self, language: str) -> float:
        return self.texts[language].stat().st_size / 1e6


def main() -> None:
    arguments = parse()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    packed = {"english": arguments.english, "chinese": arguments.chinese}
    texts = {name: unpack(path, work / f"{name}.txt") for name, path in packed.items() if path is not None}
    bench = Bench(work, texts, arguments)
    for name, value in describe_machine().items():
        print(f"{name + ':':<10}{value}")
    for language in texts:
        print(f"{language + ':':<10}{bench.megabytes(language):.1f} MB; peers on {arguments.slice_mb:g} MB of it")
    print("\n| what | ours | peer | ratio |\n|---|---|---|---|", flush=True)
    begin = time.monotonic()
    for name in arguments.only:
        if name in MEASURES:
            for row in MEASURES[name](bench):
                print(row, flush=True)
    if "scaling" in arguments.only:
        print(f"\n{scaling_table(bench)}")
    print(f"\n{(time.monotonic() - begin) / 60:.1f} minutes")


def parse() -> argparse.Namespace:
    names = [*MEASURES, "scaling"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--english", type=Path, required=True)
    parser.add_argument("--chinese", type=Path, help="corpus for ids only")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ROW", help=", ".join(names))
    parser.add_argument("--work", type=Path, default=Path("bench-data"), help="folder for texts and outputs")
    parser.add_argument("--slice-mb", type=float, default=20.0, help="amount of text to time encode_batch_fast on")
    parser.add_argument("--vocab-size", type=int, default=30522, help="for English; at most 21,128 for Chinese")
    parser.add_argument("--shape-mb", type=float, default=300.0, help="size of the text for scaling")
    return parser.parse_args()


def measure_ids(bench: Bench) -> Iterator[Row]:
    """Measure encoding on one core, with an empty and with a warm cache. The peer encodes a part of the corpus."""
    for language, text in bench.texts.items():
        vocab, slice_bytes = bench.vocab(language), round(bench.arguments.slice_mb * 1e6)
        if not run_task("ids_equal", vocab, text, slice_bytes):
            sys.exit(f"{text}: the ids differ from those of tokenizers")
        title, peer = f"ids of {language.title()}, one core", "encode_batch_fast, one core"
        rows = (Row(f"{title}, cold cache", peer), Row(f"{title}, warm cache", peer))
        for _ in range(bench.arguments.repeats):
            ours = run_task("ids_ours", vocab, text, cores=1)
            peer_speed = run_task("ids_peer", vocab, text, slice_bytes, cores=1)
            for row, value in zip(rows, ours, strict=True):
                row.ours.append(value)
                row.peer.append(peer_speed)
        yield from rows


def measure_make_data(bench: Bench) -> Iterator[Row]:
    """Measure the `make-data` process, and compare it with `encode_batch_fast`, a second length and one worker."""
    vocab, text, megabytes = bench.vocab("english"), bench.texts["english"], bench.megabytes("english")

    def speed(*, length: int = 128, workers: int = 2) -> float:
        return megabytes / run_program(*make_data_words(text, vocab, place, length=length, workers=workers))[0]

    title = "make-data, 5 copies, length 128, two workers"
    encoder = Row(title, "encode_batch_fast alone, two cores")
    second = Row("make-data, length 512, from the cached token store", "the first run")
    workers = Row(title, "one worker")
    for _ in range(bench.arguments.repeats):
        place = fresh(bench.work / "make-data")
        first_speed = speed()
        encoder.ours.append(first_speed)
        encoder.peer.append(run_task("ids_peer", vocab, text, round(bench.arguments.slice_mb * 1e6), cores=2))
        second.ours.append(speed(length=512))
        second.peer.append(first_speed)
        workers.ours.append(first_speed)
        fresh(place)
        workers.peer.append(speed(workers=1))
    shutil.rmtree(place)
    yield from (encoder, second, workers)


def make_data_words(
    text: Path,
    vocab: Path,
    place: Path,
    *,
    length: int = 128,
    workers: int = 2,
    copies: int = 5,
) -> list[object]:
    settings = ["--set", f"data.dupe_factor={copies}", "--set", f"data.max_seq_length={length}"]
    folders = ["--vocab", vocab, "--output", place / f"data-{length}-{copies}", "--store", place / "store"]
    return ["make-data", text, *folders, "--workers", workers, *settings]


def measure_vocab(bench: Bench) -> Iterator[Row]:
    """Compare the `vocab` process with the trainer of `tokenizers` on the same file and number of cores."""
    text, size, megabytes = bench.texts["english"], bench.vocab_size("english"), bench.megabytes("english")
    for workers, cores in ((2, "two cores"), (1, "one core")):
        row = Row(f"vocabulary of {size:,}, {cores}", f"BertWordPieceTokenizer.train, {cores}")
        for _ in range(bench.arguments.repeats):
            place = fresh(bench.work / "vocab")
            words = ("vocab", text, "--output", place, "--vocab-size", size, "--workers", workers)
            row.ours.append(megabytes / run_program(*words)[0])
            begin = time.perf_counter()
            run_task("vocab_peer", text, size, cores=workers)
            row.peer.append(megabytes / (time.perf_counter() - begin))
        yield row


MEASURES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "ids": measure_ids,
    "make-data": measure_make_data,
    "vocab": measure_vocab,
}


def scaling_table(bench: Bench) -> str:
    """Return the time, disk space and memory for 16 GB and 1 TB, extrapolated from `--shape-mb` and half of it.

    Times assume that no core idles. The first `make-data` makes one copy and fills the token store. The second makes
    five copies from the store, and the time of four of them is added to the first. Use at least 100 MB: with less,
    `vocab` has not reached its maximum of distinct words and the extrapolated time is too long.
    """
    vocab = bench.vocab("english")
    place = bench.work / "scaling"
    half = measure_scaling(bench.arguments.shape_mb / 2, vocab, bench.texts["english"], fresh(place))
    whole = measure_scaling(bench.arguments.shape_mb, vocab, bench.texts["english"], fresh(place))
    shutil.rmtree(place)

    def at(name: str, megabytes: float) -> float:
        """Return a measurement for another size of the text."""
        slope = (whole[name] - half[name]) / (whole["MB"] - half["MB"])
        return max(0.0, whole[name] - slope * whole["MB"]) + slope * megabytes

    def times(*terms: tuple[str, float]) -> list[str]:
        """Return the times of a sum of processor times on each number of cores, for each size."""
        cells = []
        for megabytes in SIZES.values():
            cpu_seconds = sum(factor * at(name, megabytes) for name, factor in terms)
            cells.append(" / ".join(time_text(cpu_seconds / cores) for cores in CORES))
        return cells

    def amounts(name: str, unit: float, form: str) -> list[str]:
        return [form.format(at(name, megabytes) / unit) for megabytes in SIZES.values()]

    cores = " / ".join(map(str, CORES))
    rows = [
        (f"from {half['MB']:g} and {whole['MB']:g} MB", SIZES),
        ("---", ["---:"] * len(SIZES)),
        ("tokens", amounts("tokens", 1e9, "{:.1f} billion")),
        (f"`vocab`, {cores} cores", times(("vocab", 1))),
        (f"`make-data`, 5 copies, {cores} cores", times(("copy", 1), ("copies", 0.8))),
        ("a second length (512) from the store, 5 copies", times(("long copies", 1))),
        ("`make-data`, one copy", times(("copy", 1))),
        ("token store", amounts("store", 1e9, "{:,.1f} GB")),
    ]
    for length in (128, 512):
        rows.append((f"examples, length {length}, 5 copies", amounts(f"rows {length}", 1e6, "{:,.0f} million")))
        rows.append((f"shards, length {length}, 5 copies", amounts(f"data-{length}-5", 1e9, "{:,.0f} GB")))
    lines = [f"| {title} | {' | '.join(cells)} |" for title, cells in rows]
    memory = " / ".join(f"{whole[f'{command} memory'] / 2**30:.2f} GiB" for command in ("vocab", "copy"))
    return "\n".join([*lines, "", f"resident memory of a process, `vocab` / `make-data`: {memory}"])


def measure_scaling(megabytes: float, vocab: Path, source: Path, place: Path) -> dict[str, float]:
    """Return processor seconds, memory, rows and bytes on disk of all commands for a text of this size."""
    text = place / "text.txt"
    run_task("make_text", source, megabytes, text)
    commands = {
        "vocab": ["vocab", text, "--output", place / "vocab", "--workers", 2],
        "copy": make_data_words(text, vocab, place, length=128, copies=1),
        "copies": make_data_words(text, vocab, place, length=128, copies=5),
        "long copies": make_data_words(text, vocab, place, length=512, copies=5),
    }
    measured = {"MB": megabytes}
    for name, words in commands.items():
        _, measured[name], measured[f"{name} memory"] = run_program(*words)
    for name in ("store", "data-128-5", "data-512-5"):
        measured[name] = size_of(place / name)
    for length in (128, 512):
        manifest = read_json(place / f"data-{length}-5" / "manifest.json")
        measured[f"rows {length}"] = manifest["splits"]["train"]["rows"]
        measured["tokens"] = manifest["corpus"]["tokens"]
    return measured


def time_text(seconds: float) -> str:
    return f"{seconds / 60:.2g} min" if seconds < 5400 else f"{seconds / 3600:.2g} h"


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.suffix in (".npy", ".parquet"))


def run_task(name: str, *words: object, cores: int | None = None) -> Any:
    """Run one of `TASKS` in a new process and return its result."""
    threads = {} if cores is None else {"RAYON_NUM_THREADS": str(cores)}
    threads["TOKENIZERS_PARALLELISM"] = str(cores != 1).lower()
    command = [sys.executable, __file__, "--task", name, *map(str, words)]
    done = subprocess.run(command, env={**environment(), **threads}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def run_program(*words: object) -> tuple[float, float, float]:
    """Run a command of `bert-pretrain`. Return its seconds, CPU seconds and the peak RSS in bytes of one process."""
    command, begin = [sys.executable, "-m", "bert_pretrain", *map(str, words)], time.perf_counter()
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        errors = process.stderr.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"bert-pretrain {words[0]} failed:\n{errors}")
    return time.perf_counter() - begin, usage.ru_utime + usage.ru_stime, 1024 * usage.ru_maxrss


def environment() -> dict[str, str]:
    """Return the environment of measured processes: this checkout on the path, and one OpenMP thread."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def unpack(source: Path, target: Path) -> Path:
    """Decompress a corpus, unless `target` already has the content of `source`."""
    key_file = target.with_suffix(".source")
    key = f"{source.resolve()} {source.stat().st_size} {source.stat().st_mtime_ns}"
    if not (target.exists() and key_file.exists() and key_file.read_text() == key):
        with open_input(str(source)) as packed, target.open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
        for stale in target.parent.glob(f"vocab-{target.stem}-*"):
            shutil.rmtree(stale)
        key_file.write_text(key)
    return target


def fresh(folder: Path) -> Path:
    """Empty a folder, or create it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def describe_machine() -> dict[str, str]:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    versions = {"python": platform.python_version(), **library_versions()}
    return {
        "machine": f"{models[0].partition(':')[2].strip() if models else platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown",
    }


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


def ids_peer(vocab: str, text: str, slice_bytes: str) -> float:
    """Return MB/s of `encode_batch_fast` on Python strings, without the time to read them."""
    backend = library_tokenizer(Path(vocab))
    content = slice_of(Path(text), int(slice_bytes))
    lines = content.decode().split("\n")
    batches = [lines[first : first + PEER_SENTENCES] for first in range(0, len(lines), PEER_SENTENCES)]
    begin = time.perf_counter()
    for batch in batches:
        backend.encode_batch_fast(batch, add_special_tokens=False)
    return len(content) / 1e6 / (time.perf_counter() - begin)


def ids_equal(vocab: str, text: str, slice_bytes: str) -> bool:
    """Return whether the encoder and `tokenizers` give the same ids for every sentence."""
    content = slice_of(Path(text), int(slice_bytes))
    block, starts = with_starts(content)
    ids, offsets, *_ = Encoder(Tokenizer.load(Path(vocab))).encode(block, starts)
    backend, lines = library_tokenizer(Path(vocab)), content.decode().split("\n")
    for first in range(0, len(lines), PEER_SENTENCES):
        encodings = backend.encode_batch_fast(lines[first : first + PEER_SENTENCES], add_special_tokens=False)
        lengths = [len(encoding.ids) for encoding in encodings]
        flat = np.array([token for encoding in encodings for token in encoding.ids], dtype=ids.dtype)
        span = offsets[first : first + len(encodings) + 1]
        if np.diff(span).tolist() != lengths or not np.array_equal(ids[span[0] : span[-1]], flat):
            return False
    return True


def vocab_peer(text: str, size: str) -> int:
    from tokenizers import BertWordPieceTokenizer

    trained = BertWordPieceTokenizer()
    trained.train([text], vocab_size=int(size), show_progress=False)
    return int(trained.get_vocab_size())


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


def slice_of(text: Path, num_bytes: int) -> bytes:
    """Return about `num_bytes` of sentences, sampled evenly from the corpus."""
    with text.open("rb") as file:
        lines = [line for line in file if line.strip()]
    step = 100 * max(1, round(sum(map(len, lines)) / num_bytes))
    return b"".join(b"".join(lines[first : first + 100]) for first in range(0, len(lines), step)).removesuffix(b"\n")


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
