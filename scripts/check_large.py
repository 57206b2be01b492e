"""A large corpus, 20,000 files or 5,000 shards: do all stages stay within their limits of memory and descriptors?

Writes a corpus of `--gigabytes` in `--files` files from the documents of CORPUS (a sentence a line, blank lines between
documents), each time with another word in every document. Then `vocab`, `make-data` and two steps of `train` run under
`ulimit -n`. Prints time, rate, and the largest anonymous memory and number of open files of any process, and fails if a
process had more than 1 GiB. Linux only; the corpus and the token store take 1.5 to 2 times its size on the disk.

    python scripts/check_large.py CORPUS --work OUT --gigabytes 20                  (a large corpus)
    python scripts/check_large.py CORPUS --work OUT --gigabytes 0.04 --files 20000  (many files)
    python scripts/check_large.py CORPUS --work OUT --gigabytes 0.2 --examples-per-shard 64   (many shards)
    python scripts/check_large.py CORPUS --work OUT --gigabytes 1 --one-document              (a large document)
"""

import argparse
import itertools
import lzma
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench_data import anonymous_bytes, tree_of

MAX_MEMORY = 2**30
SAMPLE_SECONDS = 0.25
GB = 10**9
TRAINING = {
    "model.hidden_size": 32, "model.num_hidden_layers": 1, "model.num_attention_heads": 1,
    "model.intermediate_size": 64, "model.max_position_embeddings": 128, "train.max_steps": 2,
    "train.global_batch_size": 8, "train.eval_every": 2, "train.device": "cpu",
}  # fmt: skip


@dataclass(frozen=True)
class Use:
    """What a command took: the largest figures of any of its processes."""

    seconds: float
    memory: int
    descriptors: int


def main() -> None:
    options = parse_arguments()
    corpus, vocab, data = (options.work / name for name in ("corpus", "vocab", "data"))
    files = 1 if options.one_document else options.files
    size = write_corpus(options.corpus, corpus, options.gigabytes, files)
    if options.one_document:
        join_documents(corpus / "000000.txt", but=100)
    print(f"{size / GB:.2f} GB in {files:,} files, ulimit -n {options.descriptors}", flush=True)
    uses = {"vocab": run(["vocab", corpus, "--output", vocab, "--set", "vocab.size=8192"], options)}
    report("vocab", uses["vocab"], size)
    make_data = ["make-data", corpus, "--vocab", vocab, "--output", data, "--set", "data.masking=dynamic"]
    make_data += ["--set", "data.dupe_factor=1", "--set", f"data.examples_per_shard={options.examples_per_shard}"]
    uses["make-data"] = run(make_data, options)
    report("make-data", uses["make-data"], size)
    print(f"{sum(1 for _ in data.rglob('*.parquet')):,} shards", flush=True)
    settings = [word for key, value in TRAINING.items() for word in ("--set", f"{key}={value}")]
    uses["train"] = run(["train", "--data", data, "--output", options.work / "run", *settings], options)
    report("train, two steps", uses["train"], size)
    if not options.keep:
        shutil.rmtree(options.work)
    most = max(use.memory for name, use in uses.items() if name != "train")
    sys.exit(f"a process had {most / 2**30:.2f} GiB" if most > MAX_MEMORY else 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("corpus", type=Path, help="sentence lines, plain or .xz")
    parser.add_argument("--work", type=Path, required=True, help="a new folder, removed at the end")
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--examples-per-shard", type=int, default=16384)
    parser.add_argument("--descriptors", type=int, default=1024, help="ulimit -n of the commands")
    parser.add_argument("--one-document", action="store_true", help="no blank lines, but for 100 small documents")
    parser.add_argument("--keep", action="store_true", help="do not remove the work folder")
    return parser.parse_args()


def write_corpus(source: Path, folder: Path, gigabytes: float, files: int) -> int:
    """Write the documents of `source` again and again, each with a word of its own; returns the bytes written."""
    folder.mkdir(parents=True)
    opened = lzma.open if source.suffix == ".xz" else open
    with opened(source, "rb") as file:
        documents = file.read().split(b"\n\n")
    numbered = (b"w%d %s\n\n" % (number, documents[number % len(documents)]) for number in itertools.count())
    share, size = int(gigabytes * GB / files), 0
    for number in range(files):
        with (folder / f"{number:06d}.txt").open("wb") as file:
            while file.tell() < share:
                size += file.write(next(numbered))
    return size


def join_documents(path: Path, but: int) -> None:
    """Remove the blank lines of a file but the first so many, so that the rest is one document."""
    temporary = path.with_suffix(".tmp")
    with path.open("rb") as source, temporary.open("wb") as target:
        for line in source:
            but -= not line.strip()
            if but >= 0 or line.strip():
                target.write(line)
    temporary.replace(path)


def run(words: list[object], options: argparse.Namespace) -> Use:
    """Run a command of the package under the limit of descriptors, and watch its processes."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (options.descriptors, options.descriptors))

    command = [sys.executable, "-m", "bert_pretrain", *map(str, words)]
    begin, memory, descriptors = time.perf_counter(), 0, 0
    with (options.work / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=limit)
        while process.poll() is None:
            for number in tree_of(process.pid):
                memory = max(memory, anonymous_bytes(number))
                descriptors = max(descriptors, open_files(number))
            time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        sys.exit(f"failed: {' '.join(command)}\nsee {options.work / 'log'}")
    return Use(time.perf_counter() - begin, memory, descriptors)


def report(name: str, use: Use, size: int) -> None:
    print(
        f"{name}: {use.seconds:.0f} s, {size / 1e6 / use.seconds:.1f} MB/s, {use.memory / 2**30:.3f} GiB and "
        f"{use.descriptors} open files in the largest process",
        flush=True,
    )


def open_files(process: int) -> int:
    try:
        return len(os.listdir(f"/proc/{process}/fd"))
    except OSError:
        return 0


if __name__ == "__main__":
    main()
