"""All that only a GPU can show, in one command that ends within its limit: the most valuable first.

Each part is a process of its own with a limit of its own; what fails or does not fit says so and stops nothing. Results
are in FOLDER, complete after every part; examples and runs go to a folder of work. The exit code is that of the tests.

    scripts/gpu_check.sh [FOLDER] [--limit SECONDS] [--parts NAME …] [--corpus FILE] [--old FOLDER]
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Found = tuple[list[Row], str]
"""Rows, and a remark on the outcome or nothing."""
REPOSITORY = Path(__file__).resolve().parents[1]
PART_NAMES = ("examples", "tests", "bench", "auto", "profile")
ROWS_OF_BERT, PYDOC_VOCABULARY = 30522, 8192
AUTO_SECONDS, LEAST_AUTO_SECONDS, AROUND_AUTO_SECONDS = 240.0, 120.0, 20.0
SMALL_FACTOR = 4.0
"""What limits are multiplied by in small, where they end nothing but what hangs."""
DEFAULT_LIMIT = 540.0
END_SECONDS = 5.0
"""Kept back of the limit, for what comes after the last part."""
GRACE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL of a part that is over its limit: a training run saves a checkpoint."""
TEST_PROCESSES = 6
"""Processes for tests, which mostly compile: 34 tests took 51 s on an H200 with 16 cores."""
SHOWN_LINES, KEPT_CHARACTERS = 15, 400_000
MACHINE = """
import json, os, platform, sys, torch
from importlib import metadata, util
cuda = torch.cuda.is_available()
print(json.dumps({
    "cuda": cuda, "device": torch.cuda.get_device_name() if cuda else "CPU", "torch": torch.__version__,
    "transformers": metadata.version("transformers") if util.find_spec("transformers") else None,
    "python": platform.python_version(), "cores": len(os.sched_getaffinity(0)),
}))
"""
"""A process of its own, so that this one holds nothing on the card."""


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    output: Path
    work: Path
    corpus: Path | None = None
    device: str = "cuda"
    is_small: bool = False
    """Tiny sizes, to try all of it on a CPU."""
    old: Path | None = None
    """A checkout of an older commit, whose step is timed too."""

    def rows(self, name: str) -> Path:
        """Return the file to which a part appends its rows."""
        return self.work / "rows" / f"{name}.jsonl"

    def data(self, length: int) -> Path:
        """Return the data folder of a length."""
        return self.work / f"data-{length}"


@dataclass(frozen=True)
class Part:
    """One thing that is run and measured."""

    name: str
    title: str
    script: Callable[[float], str]
    """Returns lines for bash, given the seconds that they may take."""
    limit: float
    least: float
    """Seconds that must be left to start it."""
    read: Callable[[], Found]
    """Returns what it has found, however it ended."""
    needs: Path | None = None
    """A file without which it cannot run."""


# ── the parts ──


def make_parts(options: Options) -> list[Part]:
    """Return the parts in their order: the examples that others need, then what is new, the most valuable first."""
    parts = [
        _examples(options),
        _tests(options),
        _bench(options, "bench-small", "4x256", 128, 256),
        _auto(options),
        _bench(options, "bench-base", "12x768", 128, 256),
        _bench(options, "bench-large", "24x1024", 512, 32),
        _profile(options),
    ]
    return [replace(one, limit=SMALL_FACTOR * one.limit, least=5.0) for one in parts] if options.is_small else parts


def read_rows(path: Path) -> list[Row]:
    """Return the whole lines of a file of JSON lines; one that a kill has torn is left out, as is a missing file."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _python(*arguments: object) -> str:
    return shlex.join([sys.executable, *map(str, arguments)])


def _package(*arguments: object) -> str:
    return _python("-m", "bert_pretrain", *arguments)


def _pydoc(options: Options) -> tuple[Path, list[str]]:
    """Return the corpus of Python's documentation, and the lines that make it."""
    corpus = options.work / "pydoc.jsonl"
    lines = [_python(REPOSITORY / "scripts" / "pydoc_corpus.py", corpus)]
    if options.is_small:
        lines.append(f"sed -i 120q {shlex.quote(str(corpus))}")
    return corpus, [f"[ -s {shlex.quote(str(corpus))} ] || {{ {'; '.join(lines)}; }}"]


# ── tests and examples ──


def _tests(options: Options) -> Part:
    marked = [
        path.relative_to(REPOSITORY)
        for path in sorted((REPOSITORY / "tests").rglob("test_*.py"))
        if re.search(
            r"^pytestmark\b.*\n?.*pytest\.mark\.gpu|^@pytest\.mark\.gpu", path.read_text("utf-8"), re.MULTILINE
        )
    ]  # only these: other tests import what a machine with a card may lack
    parallel = ("-n", TEST_PROCESSES) if importlib.util.find_spec("xdist") else ()
    command = _python(
        "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "--durations=5", "-p", "no:cacheprovider", *parallel, *marked
    )
    log = options.work / "logs" / "tests.txt"
    return Part("tests", "tests marked gpu", lambda _: command, 120, 30, lambda: _read_tests(log))


def _read_tests(log: Path) -> Found:
    """Return no rows, and how many tests passed and which did not."""
    outcomes: dict[str, str] = {}
    for line in log.read_text("utf-8").splitlines():
        # "test.py::test_a PASSED [ 1%]"; with several processes "[gw0] [ 1%] PASSED test.py::test_a"
        name, outcome = re.search(r"::(test_\S+)", line), re.search(r"\b(PASSED|FAILED|SKIPPED|ERROR)\b", line)
        if name and outcome:
            outcomes[name[1]] = outcome[0].lower()
    found: dict[str, list[str]] = {}
    for test, ended in outcomes.items():
        found.setdefault(ended, []).append(test)
    counts = [f"{len(names)} {outcome}" for outcome, names in sorted(found.items())]
    wrong = [*found.get("failed", []), *found.get("error", [])]
    return [], ", ".join(counts) + (f" ({', '.join(wrong)})" if wrong else "")


def _examples(options: Options) -> Part:
    corpus, lines = _pydoc(options)
    size = 1000 if options.is_small else PYDOC_VOCABULARY
    if options.corpus is not None:
        corpus, lines, size = options.corpus, [], 1000 if options.is_small else ROWS_OF_BERT
    vocab = options.work / "vocab"
    lines.append(_package("vocab", corpus, "--output", vocab, "--vocab-size", size))
    for length in (128, 512):
        keys = (f"data.max_seq_length={length}", f"data.dupe_factor={1 if options.is_small else 5}")
        settings = [part for key in keys for part in ("--set", key)]
        lines.append(_package("make-data", corpus, "--vocab", vocab, "--output", options.data(length), *settings))
    source = "the documentation of Python" if options.corpus is None else corpus.name
    title = f"examples of 128 and 512 tokens from {source}"
    return Part("examples", title, lambda _: "\n".join(lines), 150, 20, lambda: _read_examples(options))


def _read_examples(options: Options) -> Found:
    rows = []
    for length in (128, 512):
        splits = json.loads((options.data(length) / "manifest.json").read_text("utf-8"))["splits"]
        shards = splits["train"]["shards"]
        counts = {name: sum(shard[name] for shard in shards) for name in ("rows", "tokens")}
        rows.append({"max_seq_length": length, **counts})
    return rows, ", ".join(f"{row['rows']:,} of {row['max_seq_length']}" for row in rows)


# ── speed ──


def _measured(options: Options, name: str, script: str, size: str, length: int, examples: int, *more: object) -> Part:
    """Return a part that runs one of the scripts that measure a training step and append rows of JSON."""
    size = "1x64" if options.is_small else size
    shape = ["--examples", 8] if options.is_small else ["--examples", examples, "--vocab-size", ROWS_OF_BERT]
    command = _python(
        REPOSITORY / "scripts" / script, options.data(length), "--size", size, "--device", options.device,
        "--json", options.rows(name), *shape, *more,
    )  # fmt: skip
    title = f"{name.partition('-')[0]} of L{size.replace('x', '-H')} at {length}"
    needs = options.data(length) / "manifest.json"
    return Part(name, title, lambda _: command, 140, 40, lambda: (read_rows(options.rows(name)), ""), needs)


def _bench(options: Options, name: str, size: str, length: int, examples: int) -> Part:
    old = [] if options.old is None else ["--old", options.old, "--peers", "compiled"]
    pairs = 2 if options.is_small else 7
    return _measured(options, name, "bench_train.py", size, length, examples, "--pairs", pairs, "--dropout", 0, *old)


def _profile(options: Options) -> Part:
    part = _measured(options, "profile", "gpu_profile.py", "12x768", 128, 256, "--output", options.output)
    return replace(part, limit=80, least=30)


def _auto(options: Options) -> Part:
    corpus, lines = (options.corpus, []) if options.corpus is not None else _pydoc(options)
    run, log = options.work / "auto", options.work / "logs" / "auto.txt"
    wanted, around = (150.0, 5.0) if options.is_small else (AUTO_SECONDS, AROUND_AUTO_SECONDS)

    def script(seconds: float) -> str:
        time = f"{max(min(wanted, seconds - around), 1.0):.0f}s"
        command = _package("run", "auto", corpus, "--time", time, "--output", run, "--device", options.device)
        return "\n".join([*lines, shlex.join(["rm", "-rf", str(run)]), command])

    def read() -> Found:
        forecast = re.findall(r"^forecast: (.*)", log.read_text("utf-8"), re.MULTILINE)
        return [{**_read_run(run / "train"), "forecast": forecast[-1] if forecast else None}], ""

    return Part("auto", f"run auto for {wanted:.0f} s", script, wanted + around, around + LEAST_AUTO_SECONDS, read)


def _read_run(run: Path) -> Row:
    """Return a row of a run's metrics, before and after; of a run that was stopped, those so far."""
    lines = read_rows(run / "metrics.jsonl")
    evaluations = [line for line in lines if "validation_mlm_loss" in line]
    steps = [line for line in lines if "loss" in line]
    row: Row = {"run": "run auto"}
    for key in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy") if evaluations else ():
        row[f"{key}_before"] = evaluations[0][f"validation_{key}"]
        row[f"{key}_after"] = evaluations[-1][f"validation_{key}"]
    if steps:
        keys = ("step", "elapsed_seconds", "epoch", "examples", "examples_per_second", "mfu", "data_wait_share")
        row |= {key: steps[-1][key] for key in keys}
    return row


# ── results ──


class Results:
    """`results.jsonl` and `results.md` of a folder, both as complete as the rows so far."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.rows: list[Row] = []
        self.folder, self.work = folder, work
        (folder / "results.jsonl").write_text("", encoding="utf-8")

    def add(self, part: str, kind: str, row: Row) -> None:
        """Note a row, on disk at once."""
        row = {"part": part, "kind": kind, **row}
        row = json.loads(json.dumps(row), parse_constant=lambda _: None)  # JSON lacks NaN and infinity
        self.rows.append(row)
        with (self.folder / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        (self.folder / "results.md").write_text(markdown(self.rows), encoding="utf-8")


def markdown(rows: Sequence[Row]) -> str:
    """Return a line of the machine, and tables: of how the parts ended, and of what each found, by equal keys."""
    blocks, tables = [], dict[tuple[str, ...], list[Row]]()
    for row in rows:
        shown = {key: value for key, value in row.items() if key not in ("part", "kind")}
        if row["kind"] == "machine":
            command = shown.pop("command", "")
            blocks.append(", ".join(f"{key} {value}" for key, value in shown.items()) + f"; `{command}`")
        else:
            title = "how the parts ended" if row["kind"] == "part" else row["part"]
            tables.setdefault((title, *shown), []).append(shown)
    blocks += [f"**{title}**\n\n{_table(keys, found)}" for (title, *keys), found in tables.items()]
    return "\n\n".join(blocks) + "\n"


def _table(keys: Sequence[str], rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(key.replace("_", " ") for key in keys) + " |", "|---" * len(keys) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(_shown(row[key]) for key in keys) + " |" for row in rows)])


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "–".join(map(_shown, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return "–" if value is None else str(value).replace("|", "\\|")


# ── the scheduler ──


def main() -> int:
    options, limit, chosen = parse_arguments()
    begin = time.monotonic()
    results = Results(options.output, options.work)
    machine = machine_row()
    machine["command"] = "scripts/gpu_check.sh " + shlex.join(sys.argv[1:])
    results.add("machine", "machine", machine)
    if options.device == "cuda" and not machine["cuda"]:
        print("there is no CUDA device here; nothing was checked", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    statuses: dict[str, int] = {}
    try:
        for part in make_parts(options):
            if part.name.partition("-")[0] in chosen:
                run_part(part, begin + limit - END_SECONDS, results, statuses)
    except KeyboardInterrupt:
        statuses["tests"] = 128 + signal.SIGINT
    finally:
        print(f"\n{(options.output / 'results.md').read_text()}\ntook {time.monotonic() - begin:.0f} s", flush=True)
    return statuses.get("tests", 0)


def parse_arguments() -> tuple[Options, float, set[str]]:
    """Return the options, the limit in seconds, and the names of the parts to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", metavar="FOLDER", help="of the results; a new one by default")
    parser.add_argument("--limit", type=float, help=f"seconds for all; $GPU_CHECK_LIMIT, else {DEFAULT_LIMIT:.0f}")
    parser.add_argument(
        "--parts", nargs="+", choices=PART_NAMES, default=PART_NAMES, metavar="NAME", help="of them all"
    )
    parser.add_argument("--corpus", type=Path, help="text for the examples; else the documentation inside Python")
    parser.add_argument("--work", type=Path, help="folder of examples and runs, used again where it has some")
    parser.add_argument("--old", type=Path, help="checkout of an older commit, whose step is timed next to this one's")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    output = given.output or Path(tempfile.mkdtemp(prefix="gpu-check-"))
    work = given.work or Path(tempfile.mkdtemp(prefix="gpu-check-work-"))
    for folder in (output, work / "rows", work / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    for stale in (work / "rows").glob("*.jsonl"):
        stale.unlink()
    options = Options(
        output.resolve(), work.resolve(), given.corpus and given.corpus.resolve(), given.device,
        is_small=given.small, old=given.old and given.old.resolve(),
    )  # fmt: skip
    default = float(os.environ.get("GPU_CHECK_LIMIT", DEFAULT_LIMIT))
    return options, default if given.limit is None else given.limit, {"examples", *given.parts}


def machine_row() -> Row:
    """Return what the results were measured on."""
    found = _output_of([sys.executable, "-c", MACHINE])
    if found is None:
        raise SystemExit(f"{sys.executable} cannot import torch; set PYTHON to one that can")
    row: Row = json.loads(found.splitlines()[-1])
    row["commit"] = _output_of(["git", "rev-parse", "--short", "HEAD"]) or os.environ.get("GPU_CHECK_COMMIT")
    if row["cuda"]:
        row["driver"] = _output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return row


def _output_of(command: Sequence[str]) -> str | None:
    """Return what a command prints, or None where it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def run_part(part: Part, deadline: float, results: Results, statuses: dict[str, int]) -> None:
    """Run a part as a group of processes of its own, and add how it ended and what it found."""
    allowed = min(part.limit, deadline - time.monotonic())
    reason = None if allowed >= part.least else "not run: no time left"
    if reason is None and part.needs is not None and not part.needs.exists():
        reason = "not run: there are no examples"
    if reason is not None:
        print(f"== {part.title}: {reason}", flush=True)
        results.add(part.name, "part", {"title": part.title, "outcome": reason, "seconds": None})
        return
    print(f"== {part.title} (at most {allowed:.0f} s)", flush=True)
    log, begin, outcome = results.work / "logs" / f"{part.name}.txt", time.monotonic(), "stopped from outside"
    with log.open("wb") as file:
        # Not a session of its own: whoever ends this one by force ends the part as well.
        process = subprocess.Popen(
            ["bash", "-ec", part.script(allowed)], stdout=file, stderr=subprocess.STDOUT, process_group=0
        )
    try:
        code = process.wait(allowed)
        statuses[part.name], outcome = code, f"failed with exit code {code}" if code else "done"
    except subprocess.TimeoutExpired:
        statuses[part.name], outcome = 124, f"stopped at its limit of {allowed:.0f} s"
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    finally:
        _signal(process, signal.SIGKILL)  # what is left of it: the next part must not find the card busy
        process.wait()
        finish(part, log, time.monotonic() - begin, outcome, results)


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def finish(part: Part, log: Path, seconds: float, outcome: str, results: Results) -> None:
    """Add what a part has found, keep its output, and show the end of it where it failed."""
    try:
        rows, remark = part.read()
    except Exception as error:  # a part that was stopped may leave anything
        rows, remark = [], f"its results cannot be read: {type(error).__name__}: {error}"
    ended = f"{outcome}; {remark}" if remark else outcome
    results.add(part.name, "part", {"title": part.title, "outcome": ended, "seconds": seconds})
    for row in rows:
        results.add(part.name, "result", row)
    output = log.read_text(encoding="utf-8", errors="replace")
    with (results.folder / "log.txt").open("a", encoding="utf-8") as file:
        file.write(f"== {part.title}: {outcome} after {seconds:.0f} s\n{output[-KEPT_CHARACTERS:]}\n")
    print(f"   {part.title}: {ended} after {seconds:.0f} s", flush=True)
    if outcome != "done":
        print("\n".join("   | " + line[:200] for line in output.splitlines()[-SHOWN_LINES:]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
