"""The data stage against its peers: a row a figure, medians of repeated runs with their spread, as text and as JSON.

Everything is measured in a fresh process, ours and the peer's in turn, so that caches, threads and the noise of the
machine meet both alike. Corpora are one sentence a line with blank lines between documents, plain or compressed.

    python scripts/bench_data.py --english en.txt.xz --chinese zh.txt.xz [--only vocab …] [--repeats 5]
"""

import argparse
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bert_pretrain.io.files import read_json, write_json
from bert_pretrain.io.inputs import open_input
from bert_pretrain.io.manifest import library_versions
from bert_pretrain.vocab.counting import MAX_DISTINCT
from bert_pretrain.vocab.run import MAX_TASKS, MERGED_AT_ONCE

ROOT = Path(__file__).resolve().parents[1]
ROWS = ("ids-english", "ids-chinese", "make-data", "second-length", "workers", "vocab", "memory", "busy", "merge")
SHAPES = ("parquet", "save_to_disk", "jsonl", "small files", "mix")
TASKS = Path(__file__).with_name("bench_data_tasks.py")
SAMPLE_SECONDS = 0.02
GIB = 1 << 30

# google-research/bert, create_pretraining_data.py: 5 copies, length 128, 2 MB of English took about 10 s after start-up
# on one of two such slow cores, and it has no way to use the other. Measured earlier, not in this run.
GOOGLE_MB_PER_SECOND = 0.216


@dataclass
class Row:
    """One line of the table: repeated measurements of ours and the peer's, in the same order."""

    row: str
    what: str
    peer_name: str
    aim: float | None
    unit: str = "MB/s"
    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    at_most: bool = False
    """The aim is a bound from above, on the figure or, where there is a peer, on the ratio."""

    @property
    def ratios(self) -> list[float]:
        """Ours over the peer's of the same repeat; empty where there is no peer."""
        return [ours / peer for ours, peer in zip(self.ours, self.peer, strict=False)]

    @property
    def is_met(self) -> bool | None:
        """Whether the aim is met; None where there is none."""
        if self.aim is None:
            return None
        reached = statistics.median(self.ratios or self.ours)
        return reached <= self.aim if self.at_most else reached >= self.aim


@dataclass
class Bench:
    """Where things lie and how often they are measured."""

    work: Path
    texts: dict[str, Path]
    repeats: int
    slice_bytes: int
    vocab_sizes: dict[str, int]
    memory_times: int
    shape_mb: float

    def vocab(self, language: str) -> Path:
        """Return the vocabulary of a corpus, made if needed."""
        size = self.vocab_sizes[language]
        folder = self.work / f"vocab-{language}-{size}"
        run_program("vocab", self.texts[language], "--output", folder, "--vocab-size", size)
        return folder

    def megabytes(self, language: str) -> float:
        """Return the size of a corpus."""
        return self.texts[language].stat().st_size / 1e6


def main() -> None:
    arguments = parse()
    arguments.work.mkdir(parents=True, exist_ok=True)
    texts = {
        language: unpack(path, arguments.work / f"{language}.txt")
        for language, path in (("english", arguments.english), ("chinese", arguments.chinese))
        if path is not None
    }
    bench = Bench(
        arguments.work,
        texts,
        arguments.repeats,
        round(arguments.slice_mb * 1e6),
        {"english": arguments.vocab_size, "chinese": min(21128, arguments.vocab_size)},
        arguments.memory_times,
        arguments.shape_mb,
    )
    machine = describe_machine()
    for name, value in machine.items():
        print(f"{name + ':':<10}{value}")
    for language in texts:
        print(f"{language + ':':<10}{bench.megabytes(language):.1f} MB; peers on {bench.slice_bytes / 1e6:g} MB of it")
    print("\n| what | ours | peer | ratio | aim | met |\n|---|---|---|---|---|---|", flush=True)
    rows = []
    for names, measure in MEASURES:
        language = "chinese" if "ids-chinese" in names else "english"
        if set(names) & set(arguments.only) and language in texts:
            for row in measure(bench, set(names) & set(arguments.only)):
                rows.append(row)
                print(format_row(row), flush=True)
    if arguments.json:
        body = [{**asdict(row), "ratios": row.ratios, "is_met": row.is_met} for row in rows]
        write_json(arguments.json, {"machine": machine, "repeats": bench.repeats, "rows": body})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--english", type=Path)
    parser.add_argument("--chinese", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--work", type=Path, default=Path("bench-data"), help="a folder for texts and outputs")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    parser.add_argument(
        "--slice-mb", type=float, default=20.0, help="how much of a corpus the encoders' peer is timed on"
    )
    parser.add_argument("--vocab-size", type=int, default=30522, help="English; Chinese has 21,128 at most")
    parser.add_argument("--memory-times", type=int, default=1, help="measure memory on so many times the corpus, too")
    parser.add_argument("--shape-mb", type=float, default=300.0, help="the size of each input of the row busy")
    return parser.parse_args()


def measure_ids(bench: Bench, names: set[str]) -> Iterator[Row]:
    """Ids on one core: ours on the whole corpus, first pass and with all chunks known; the peer on a slice."""
    language = next(iter(names)).removeprefix("ids-")
    vocab, text = bench.vocab(language), bench.texts[language]
    if not run_task("ids-equal", vocab, text, bench.slice_bytes):
        sys.exit(f"the ids of {text} are not those of tokenizers: there is nothing to compare")
    title, peer = f"ids of {language.title()}, one core", "encode_batch_fast, one core"
    first = Row(f"ids-{language}", f"{title}, first pass", peer, 10.0 if language == "english" else 15.0)
    known = Row(f"ids-{language}", f"{title}, chunks known", peer, 25.0 if language == "english" else None)
    for _ in range(bench.repeats):
        ours = run_task("ids-ours", vocab, text, cores=1)
        theirs = run_task("ids-peer", vocab, text, bench.slice_bytes, cores=1)
        first.ours.append(ours[0])
        known.ours.append(ours[1])
        first.peer.append(theirs)
        known.peer.append(theirs)
    yield from (first, known)


def measure_make_data(bench: Bench, names: set[str]) -> Iterator[Row]:
    """`make-data` from process start to its end: against the encoder alone, a second length, one worker."""
    vocab, megabytes = bench.vocab("english"), bench.megabytes("english")
    title = "make-data, 5 copies, length 128, two workers"
    encoder = Row("make-data", title, "encode_batch_fast alone, two cores", 2.0)
    google = Row("make-data", title, "google-research/bert, measured earlier", 45.0)
    second = Row("second-length", "make-data, length 512, from the cached token store", "the first run", 2.0)
    workers = Row("workers", title, "one worker", 1.7)
    for _ in range(bench.repeats):
        place = fresh(bench.work / "make-data")
        first_speed = megabytes / make_data(bench, vocab, place, length=128, workers=2)
        if "make-data" in names:
            encoder.ours.append(first_speed)
            encoder.peer.append(run_task("ids-peer", vocab, bench.texts["english"], bench.slice_bytes, cores=2))
            google.ours.append(first_speed)
            google.peer.append(GOOGLE_MB_PER_SECOND)
        if "second-length" in names:
            second.ours.append(megabytes / make_data(bench, vocab, place, length=512, workers=2))
            second.peer.append(first_speed)
        if "workers" in names:
            workers.ours.append(first_speed)
            workers.peer.append(megabytes / make_data(bench, vocab, fresh(place), length=128, workers=1))
        shutil.rmtree(place)
    yield from (row for row in (encoder, google, second, workers) if row.row in names)


def make_data(bench: Bench, vocab: Path, place: Path, *, length: int, workers: int) -> float:
    """Return the seconds of one `make-data`, whose store stays in `place`."""
    return run_program(*make_data_words(bench.texts["english"], vocab, place, length=length, workers=workers))


def make_data_words(text: Path | str, vocab: Path, place: Path, *, length: int = 128, workers: int = 2) -> list[object]:
    settings = ["--set", "data.dupe_factor=5", "--set", f"data.max_seq_length={length}"]
    folders = ["--vocab", vocab, "--output", place / f"data-{length}", "--store", place / "store"]
    return ["make-data", text, *folders, "--workers", workers, *settings]


def measure_vocab(bench: Bench, _names: set[str]) -> Iterator[Row]:
    """`vocab` against the library's own trainer on the same file, from process start to end, with as many cores."""
    text, size, megabytes = bench.texts["english"], bench.vocab_sizes["english"], bench.megabytes("english")
    for workers, aim in ((2, 3.0), (1, None)):
        cores = "two cores" if workers == 2 else "one core"
        row = Row("vocab", f"vocabulary of {size:,}, {cores}", f"BertWordPieceTokenizer.train, {cores}", aim)
        for _ in range(bench.repeats):
            place = fresh(bench.work / "vocab")
            words = ("vocab", text, "--output", place, "--vocab-size", size, "--workers", workers)
            row.ours.append(megabytes / run_program(*words))
            begin = time.perf_counter()
            run_task("vocab-peer", text, size, cores=workers)
            row.peer.append(megabytes / (time.perf_counter() - begin))
        yield row


def measure_memory(bench: Bench, _names: set[str]) -> Iterator[Row]:
    """The largest anonymous memory of any process, on the corpus and on several times as much."""
    sizes = {1: bench.texts["english"]}
    vocab = bench.vocab("english")
    if bench.memory_times > 1:
        sizes[bench.memory_times] = repeat_corpus(bench.texts["english"], bench.memory_times, bench.work)
    for command in ("make-data", "vocab"):
        peaks: dict[int, list[float]] = {}
        for times, text in sizes.items():
            for _ in range(bench.repeats if times == 1 else 1):  # the larger one once: it takes so many times as long
                place = fresh(bench.work / "memory")
                words = make_data_words(text, vocab, place)
                if command == "vocab":
                    words = ["vocab", text, "--output", place / "vocab", "--workers", 2]
                    words += ["--vocab-size", bench.vocab_sizes["english"]]
                peaks.setdefault(times, []).append(peak_memory(words) / GIB)
                shutil.rmtree(place)
            what = f"{command}, peak RssAnon of any process" + (f", {times} × the corpus" if times > 1 else "")
            yield Row("memory", what, "", 1.0, "GiB", peaks[times], at_most=True)
            if times > 1:
                yield Row("memory", what, "the corpus once", 1.1, "GiB", peaks[times], peaks[1], at_most=True)


def measure_busy(bench: Bench, _names: set[str]) -> Iterator[Row]:
    """Both cores' share of the wall-clock time on each shape of input, and how near the dry run was."""
    vocab = bench.vocab("english")
    for kind in SHAPES:
        texts = run_task("shape", bench.texts["english"], kind, bench.shape_mb, bench.work / "shape")
        what = f"{kind}, {bench.shape_mb:g} MB"
        found: dict[str, list[float]] = {}
        for _ in range(bench.repeats):
            place = fresh(bench.work / "busy")
            words = make_data_words(texts[0], vocab, place)
            words[1:2] = texts
            begin = time.perf_counter()
            said = subprocess.run(
                program([*words, "--dry-run"]), env=environment(), capture_output=True, text=True, check=True
            ).stdout
            found.setdefault("dry run", []).append(time.perf_counter() - begin)
            for name, command in (
                ("make-data", words),
                ("vocab", ["vocab", *texts, "--output", place, "--workers", 2]),
            ):
                before, seconds = os.times(), run_program(*command)
                after = os.times()
                cpu = after.children_user + after.children_system - before.children_user - before.children_system
                found.setdefault(name, []).append(cpu / seconds / 2)
                found.setdefault(f"{name}, seconds", []).append(seconds)
                if name == "make-data":
                    made = read_json(place / "data-128" / "manifest.json")["splits"]["train"]
                    estimated = float(re.search(r"training +([\d,]+)", said)[1].replace(",", ""))  # type: ignore[index]
                    found.setdefault("rows", []).append(estimated / made["rows"])
                    amount, unit = re.search(r"time +([\d.]+) (\w+)", said).groups()  # type: ignore[union-attr]
                    factor = {"hours": 3600, "minutes": 60, "seconds": 1}[unit]
                    found.setdefault("time", []).append(float(amount) * factor / (cpu / 2))
                    shutil.rmtree(fresh(place))
        yield Row("busy", f"make-data, {what}: CPU time over wall time and cores", "", 0.85, "", found["make-data"])
        yield Row("busy", f"vocab, {what}: CPU time over wall time and cores", "", 0.85, "", found["vocab"])
        for name in ("make-data", "vocab"):
            yield Row("busy", f"{name}, {what}: whole", "", None, "s", found[f"{name}, seconds"])
        yield Row("busy", f"dry run, {what}", "", 10.0, "s", found["dry run"], at_most=True)
        yield Row("busy", f"dry run, {what}: examples over true ones", "", None, "", found["rows"])
        yield Row("busy", f"dry run, {what}: time over CPU time per core", "", None, "", found["time"])


def measure_merge(bench: Bench, _names: set[str]) -> Iterator[Row]:
    """Merging of counts that nothing else can run beside: one task on each level of the tree, with full tables."""
    slope = [run_task("merge") for _ in range(bench.repeats)]
    for size, tasks in (("16 GB", 250), ("1 TB", MAX_TASKS)):
        levels = math.ceil(math.log(tasks, MERGED_AT_ONCE))
        full = levels * MERGED_AT_ONCE * MAX_DISTINCT / 1e6
        yield Row(
            "merge", f"serial merging of counts, {size}", "", 30.0, "s", [full * each for each in slope], at_most=True
        )


MEASURES: tuple[tuple[tuple[str, ...], Callable[[Bench, set[str]], Iterator[Row]]], ...] = (
    (("ids-english",), measure_ids),
    (("ids-chinese",), measure_ids),
    (("make-data", "second-length", "workers"), measure_make_data),
    (("vocab",), measure_vocab),
    (("memory",), measure_memory),
    (("busy",), measure_busy),
    (("merge",), measure_merge),
)


def run_task(name: str, *words: object, cores: int | None = None) -> Any:
    """Run one of the tasks in a process of its own and return what it prints."""
    threads = {} if cores is None else {"RAYON_NUM_THREADS": str(cores)}
    threads["TOKENIZERS_PARALLELISM"] = str(cores != 1).lower()
    command = [sys.executable, str(TASKS), name, *map(str, words)]
    done = subprocess.run(command, env={**environment(), **threads}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def run_program(*words: object) -> float:
    """Run a command of ours in a process of its own and return its seconds."""
    begin = time.perf_counter()
    done = subprocess.run(program(words), env=environment(), capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"bert-pretrain {words[0]} failed:\n{done.stderr}")
    return seconds


def peak_memory(words: list[object]) -> float:
    """Run a command of ours and return the largest RssAnon, in bytes, seen in any of its processes."""
    process = subprocess.Popen(program(words), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max([peak, *(anonymous_bytes(number) for number in tree_of(process.pid))])
        time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        sys.exit(f"bert-pretrain {words[0]} failed")
    return peak


def tree_of(root: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            content = entry.read_text()
        except OSError:  # it has ended meanwhile
            continue
        parent = int(content.rpartition(")")[2].split()[1])  # the name before may hold anything
        children.setdefault(parent, []).append(int(entry.parent.name))
    found = [root]
    for number in found:
        found += children.get(number, [])
    return found


def anonymous_bytes(process: int) -> int:
    """Return a process's anonymous memory that is in use; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def program(words: Any) -> list[str]:
    return [sys.executable, "-m", "bert_pretrain", *map(str, words)]


def environment() -> dict[str, str]:
    """Return the environment of every process measured: this checkout, and no threads but those asked for."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def unpack(source: Path, target: Path) -> Path:
    """Write a corpus as plain text, unless it lies there already."""
    note = target.with_suffix(".source")
    key = f"{source.resolve()} {source.stat().st_size} {source.stat().st_mtime_ns}"
    if not (target.exists() and note.exists() and note.read_text() == key):
        with open_input(str(source)) as packed, target.open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
        for stale in target.parent.glob(f"vocab-{target.stem}-*"):
            shutil.rmtree(stale)
        note.write_text(key)
    return target


def repeat_corpus(text: Path, times: int, work: Path) -> Path:
    """Write a corpus several times over, each document with a number in front, since exact copies are dropped."""
    target = work / f"{text.stem}-{times}.txt"
    with target.open("wb") as file:
        for number in range(times):
            begins = True
            with text.open("rb") as lines:
                for line in lines:
                    file.write(b"%d %s" % (number, line) if begins and line.strip() else line)
                    begins = not line.strip()
            file.write(b"\n")
    return target


def fresh(folder: Path) -> Path:
    """Return an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def describe_machine() -> dict[str, str]:
    """Return what the figures depend on besides the code, and the code's commit."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    versions = {"python": platform.python_version(), **library_versions()}
    return {
        "machine": f"{models[0].partition(':')[2].strip() if models else platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, load {os.getloadavg()[0]:.1f}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "commit": (commit or "unknown") + (" with changes" if changed else ""),
    }


def format_row(row: Row) -> str:
    """Return a row of the table: medians, and from the least to the most."""
    ratio = spread(row.ratios, "×") if row.ratios else "–"
    peer = f"{spread(row.peer, row.unit)}: {row.peer_name}" if row.peer else "–"
    sign = "≤" if row.at_most else "≥"
    aim = "–" if row.aim is None else f"{sign} {row.aim:g} {'×' if row.peer else row.unit}"
    met = {None: "–", True: "yes", False: "no"}[row.is_met]
    return f"| {row.what} | {spread(row.ours, row.unit)} | {peer} | {ratio} | {aim} | {met} |"


def spread(values: list[float], unit: str) -> str:
    """Return the median with the least and the most, if there are several."""
    middle = f"{statistics.median(values):.3g} {unit}"
    return middle if len(set(values)) == 1 else f"{middle} ({min(values):.3g}–{max(values):.3g})"


if __name__ == "__main__":
    main()
