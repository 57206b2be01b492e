"""Run all checks that need a GPU within a time limit, the most valuable ones first.

Each part runs in its own process with its own limit. A part that fails, or for which no time is left, does not stop the
others. Results are written to FOLDER after every part. Exit code: that of the tests (0 if not run), 2 without CUDA.

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

from measure import ROOT, Row, append_rows, package_command, parser_of, read_rows, table

PartResult = tuple[list[Row], str]  # rows, and a remark on the outcome
PART_NAMES = ("examples", "tests", "bench", "auto", "profile", "electra")  # the last one only on request
LENGTHS = (128, 512)
MODERN_LENGTHS = (128, 1024)  # of examples without sentence pairs, for ModernBERT
BERT_VOCAB_SIZE = 30522
PYDOC_VOCAB_SIZE = 8192
AUTO_SECONDS = 240.0
MIN_AUTO_SECONDS = 120.0
AUTO_OVERHEAD_SECONDS = 20.0
DEFAULT_LIMIT = 540.0
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL, for a training run to save a checkpoint
TEST_PROCESSES = 6  # the tests mostly compile: 34 tests take 51 s on an H200 with 16 cores
# Run in a new process, so that this one holds no memory on the GPU.
DESCRIBE_MACHINE = """
import json, os, platform, sys, torch
from importlib import metadata, util
cuda = torch.cuda.is_available()
print(json.dumps({
    "cuda": cuda, "device": torch.cuda.get_device_name() if cuda else "CPU", "torch": torch.__version__,
    "transformers": metadata.version("transformers") if util.find_spec("transformers") else None,
    "python": platform.python_version(), "cores": len(os.sched_getaffinity(0)),
}))
"""


@dataclass(frozen=True)
class Part:
    """One check or measurement."""

    name: str
    title: str
    script: Callable[[float], str]  # returns Bash lines, given the seconds that they may take
    limit: float  # seconds
    min_seconds: float  # seconds that must be left to start the part
    read: Callable[[], PartResult]  # returns the results, also after a failure
    needs: Path | None = None  # a file without which the part cannot run


# ── the parts ──


def make_parts(options: argparse.Namespace) -> list[Part]:
    parts = [
        _examples(options),
        _tests(options),
        _bench(
            options,
            "bench-small",
            "4x256",
            128,
            256,
        ),
        _auto(options),
        _bench(
            options,
            "bench-base",
            "12x768",
            128,
            256,
        ),
        *(_bench_modern(options, length) for length in MODERN_LENGTHS),
        _bench(
            options,
            "bench-large",
            "24x1024",
            512,
            32,
        ),
        _profile(options),
        _electra(options),
    ]
    # A CPU is slower: with --small a limit only stops a part that hangs.
    return [replace(part, limit=4 * part.limit, min_seconds=5.0) for part in parts] if options.small else parts


def _python(*arguments: object) -> str:
    return shlex.join([sys.executable, *map(str, arguments)])


def _package(*arguments: object, **settings: object) -> str:
    data_settings = {f"data.{key}": value for key, value in settings.items()}
    return shlex.join(package_command(*arguments, settings=data_settings))


def _corpus(options: argparse.Namespace) -> tuple[Path, list[str]]:
    """Return the path of the text, and the Bash lines that write it if it is the documentation of Python."""
    if options.corpus is not None:
        return options.corpus, []
    corpus: Path = options.work / "pydoc.jsonl"
    name = shlex.quote(str(corpus))
    write = _python(ROOT / "scripts" / "pydoc_corpus.py", corpus)
    if options.small:
        write += f"; sed -i 120q {name}"
    return corpus, [f"[ -s {name} ] || {{ {write}; }}"]


def _manifest(options: argparse.Namespace, length: int, objective: str = "nsp") -> Path:
    manifest: Path = options.work / f"data-{length}-{objective}" / "manifest.json"
    return manifest


def _log(work: Path, name: str) -> Path:
    return work / "logs" / f"{name}.txt"


# ── tests and examples ──


def _tests(options: argparse.Namespace) -> Part:
    # Only files with tests marked gpu: others import packages that a machine with a GPU may lack.
    gpu_mark = re.compile(r"^pytestmark\b.*\n?.*pytest\.mark\.gpu|^@pytest\.mark\.gpu", re.MULTILINE)
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [path.relative_to(ROOT) for path in paths if gpu_mark.search(path.read_text("utf-8"))]
    parallel = ("-n", TEST_PROCESSES) if importlib.util.find_spec("xdist") else ()
    command = _python(*["-m", "pytest", "-m", "gpu", "-q", "--tb=short", "-p", "no:cacheprovider"], *parallel, *marked)

    def read() -> PartResult:
        last = _log(options.work, "tests").read_text("utf-8").splitlines()[-1:]
        return [], "".join(last).strip("= ")

    return Part(
        "tests",
        "tests marked gpu",
        lambda _: command,
        120,
        30,
        read,
    )


def _examples(options: argparse.Namespace) -> Part:
    corpus, lines = _corpus(options)
    size = PYDOC_VOCAB_SIZE if options.corpus is None else BERT_VOCAB_SIZE
    copies = 5
    if options.small:
        size, copies = 1000, 1
    vocab = options.work / "vocab"
    lines.append(
        _package(
            "vocab",
            corpus,
            "--output",
            vocab,
            "--vocab-size",
            size,
        )
    )
    kinds = [(length, "nsp") for length in LENGTHS] + [(length, "none") for length in MODERN_LENGTHS]
    for length, objective in kinds:
        folders = ("--vocab", vocab, "--output", _manifest(options, length, objective).parent)
        lines.append(
            _package(
                "make-data",
                corpus,
                *folders,
                max_seq_length=length,
                dupe_factor=copies,
                next_sentence=objective,
            )
        )

    def read() -> PartResult:
        rows = []
        for length, objective in kinds:
            shards = json.loads(_manifest(options, length, objective).read_text("utf-8"))["splits"]["train"]["shards"]
            counts = {name: sum(shard[name] for shard in shards) for name in ("rows", "tokens")}
            rows.append({"max_seq_length": length, "next_sentence": objective, **counts})
        return rows, ""

    title = f"examples of 128 to 1,024 tokens from {corpus.name}"
    return Part(
        "examples",
        title,
        lambda _: "\n".join(lines),
        150,
        20,
        read,
    )


# ── speed ──


def _measured(
    options: argparse.Namespace,
    name: str,
    script: str,
    size: str,
    length: int,
    examples: int,
    *more: object,
    objective: str = "nsp",
) -> Part:
    """Return a part that runs `bench_train.py` or `gpu_profile.py`."""
    shape: list[object] = ["--examples", examples, "--vocab-size", BERT_VOCAB_SIZE]
    if options.small:
        size, shape = "1x64", ["--examples", 8]
    needs = _manifest(options, length, objective)
    rows = options.work / "rows" / f"{name}.jsonl"
    shared = ["--size", size, "--device", options.device, "--json", rows, *shape]
    command = _python(ROOT / "scripts" / script, needs.parent, *shared, *more)
    title = f"{name.partition('-')[0]} of L{size.replace('x', '-H')} at {length}"
    return Part(
        name,
        title,
        lambda _: command,
        140,
        40,
        lambda: (read_rows(rows), ""),
        needs,
    )


def _bench(
    options: argparse.Namespace,
    name: str,
    size: str,
    length: int,
    examples: int,
) -> Part:
    old = [] if options.old is None else ["--old", options.old, "--peers", "compiled"]
    pairs = 2 if options.small else 7
    return _measured(
        options,
        name,
        "bench_train.py",
        size,
        length,
        examples,
        "--pairs",
        pairs,
        "--dropout",
        0,
        *old,
    )


def _bench_modern(options: argparse.Namespace, length: int) -> Part:
    """Time ModernBERT next to a BERT-Base of as many weights."""
    return _measured(
        options,
        f"bench-modern-{length}",
        "bench_train.py",
        "12x768",
        length,
        256 * 128 // length,
        "--pairs",
        2 if options.small else 7,
        "--dropout",
        0,
        "--architecture",
        "modernbert",
        objective="none",
    )


def _profile(options: argparse.Namespace) -> Part:
    part = _measured(
        options,
        "profile",
        "gpu_profile.py",
        "12x768",
        128,
        256,
        "--output",
        options.output,
    )
    return replace(part, limit=80, min_seconds=30)


def _auto(options: argparse.Namespace) -> Part:
    corpus, lines = _corpus(options)
    run = options.work / "auto"
    budget, overhead = (150.0, 5.0) if options.small else (AUTO_SECONDS, AUTO_OVERHEAD_SECONDS)

    def script(seconds: float) -> str:
        time = f"{max(min(budget, seconds - overhead), 1.0):.0f}s"
        command = _package(
            "run",
            "auto",
            corpus,
            "--time",
            time,
            "--output",
            run,
            "--device",
            options.device,
        )
        return "\n".join([*lines, shlex.join(["rm", "-rf", str(run)]), command])

    def read() -> PartResult:
        forecast = re.findall(r"^forecast: (.*)", _log(options.work, "auto").read_text("utf-8"), re.MULTILINE)
        return [{**_read_run(run / "train"), "forecast": forecast[-1] if forecast else None}], ""

    title = f"run auto for {budget:.0f} s"
    return Part(
        "auto",
        title,
        script,
        budget + overhead,
        overhead + MIN_AUTO_SECONDS,
        read,
    )


def _electra(options: argparse.Namespace) -> Part:
    """Return a part that trains the network of ELECTRA-Small with both objectives, for equal times."""
    bert = {"train.objective": "mlm", "model.architecture": "bert", "model.embedding_size": "null"}
    runs: dict[str, dict[str, str]] = {"electra": {}, "bert": bert}
    budget, overhead = (20.0, 10.0) if options.small else (AUTO_SECONDS, AUTO_OVERHEAD_SECONDS)
    data = _manifest(options, LENGTHS[0])

    def script(seconds: float) -> str:
        time = max(min(budget, (seconds - overhead) / len(runs)), 1.0)
        lines = []
        for name, changes in runs.items():
            settings = {"train.max_steps": "null", "train.time_budget": f"{time:.0f}s", **changes}
            words = ("train", "--config", "electra-small", "--data", data.parent, "--output", options.work / name)
            lines.append(shlex.join(["rm", "-rf", str(options.work / name)]))
            lines.append(shlex.join(package_command(*words, "--device", options.device, settings=settings)))
        return "\n".join(lines)

    def read() -> PartResult:
        return [{**_read_run(options.work / name), "run": name} for name in runs], ""

    return Part(
        "electra",
        f"ELECTRA-Small and BERT of its size for {budget:.0f} s each",
        script,
        2 * budget + overhead,
        overhead + 2 * budget / 4,
        read,
        data,
    )


def _read_run(run: Path) -> Row:
    """Return the validation metrics of a run before and after training, and its last training metrics."""
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
    """Writes each row to `results.jsonl` and `results.md` as it is added."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.rows: list[Row] = []
        self.folder = folder
        self.work = work
        (folder / "results.jsonl").write_text("", encoding="utf-8")

    def add(self, part: str, kind: str, row: Row) -> None:
        row = {"part": part, "kind": kind, **row}
        row = json.loads(json.dumps(row), parse_constant=lambda _: None)  # NaN and infinity become null
        self.rows.append(row)
        append_rows(self.folder / "results.jsonl", [row])
        (self.folder / "results.md").write_text(markdown(self.rows), encoding="utf-8")

    def add_part(self, part: Part, outcome: str, seconds: float | None = None) -> None:
        print(f"   {part.title}: {outcome}", flush=True)
        self.add(part.name, "part", {"title": part.title, "outcome": outcome, "seconds": seconds})


def markdown(rows: Sequence[Row]) -> str:
    """Return a line about the machine, a table of the parts' outcomes, and a table per part and set of keys."""
    blocks, tables = [], dict[tuple[str, ...], list[Row]]()
    for row in rows:
        shown = {key: value for key, value in row.items() if key not in ("part", "kind")}
        if row["kind"] == "machine":
            command = shown.pop("command", "")
            blocks.append(", ".join(f"{key} {value}" for key, value in shown.items()) + f"; `{command}`")
        else:
            title = "how the parts ended" if row["kind"] == "part" else row["part"]
            tables.setdefault((title, *shown), []).append(shown)
    for (title, *keys), group in tables.items():
        cells = [[_cell(row[key]) for key in keys] for row in group]
        blocks.append(f"**{title}**\n\n{table([key.replace('_', ' ') for key in keys], cells)}")
    return "\n\n".join(blocks) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "–".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return "–" if value is None else str(value).replace("|", "\\|")


# ── the scheduler ──


def main() -> int:
    options = parse_arguments()
    chosen = {"examples", *options.parts}
    begin = time.monotonic()
    results = Results(options.output, options.work)
    machine = machine_row()
    machine["command"] = "scripts/gpu_check.sh " + shlex.join(sys.argv[1:])
    results.add("machine", "machine", machine)
    if options.device == "cuda" and not machine["cuda"]:
        print("no CUDA device found; nothing was checked", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    deadline = begin + options.limit - 5.0  # time to write the results
    statuses: dict[str, int] = {}
    try:
        for part in make_parts(options):
            if part.name.partition("-")[0] in chosen:
                run_part(part, deadline, results, statuses)
    except KeyboardInterrupt:
        statuses["tests"] = 128 + signal.SIGINT
    finally:
        print(f"\n{(options.output / 'results.md').read_text()}\ntook {time.monotonic() - begin:.0f} s", flush=True)
    return statuses.get("tests", 0)


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "output",
        type=Path,
        nargs="?",
        metavar="FOLDER",
        help="for the results; a new one by default",
    )
    default = float(os.environ.get("GPU_CHECK_LIMIT", DEFAULT_LIMIT))
    limit_help = f"seconds in total; default: $GPU_CHECK_LIMIT or {DEFAULT_LIMIT:.0f}"
    parser.add_argument("--limit", type=float, default=default, help=limit_help)
    names = ", ".join(PART_NAMES)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PART_NAMES,
        default=PART_NAMES[:-1],
        metavar="NAME",
        help=names,
    )
    parser.add_argument("--corpus", type=Path, help="text for the examples; default: the documentation of Python")
    parser.add_argument("--work", type=Path, help="folder for examples and runs; existing examples are reused")
    parser.add_argument("--old", type=Path, help="checkout of an older commit, to time next to this one")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)  # to test this script on a CPU
    options = parser.parse_args()
    options.output = options.output or Path(tempfile.mkdtemp(prefix="gpu-check-"))
    options.work = options.work or Path(tempfile.mkdtemp(prefix="gpu-check-work-"))
    for name in ("output", "work", "corpus", "old"):
        path = getattr(options, name)
        setattr(options, name, path and path.resolve())
    for folder in (options.output, options.work / "rows", options.work / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    for stale in (options.work / "rows").glob("*.jsonl"):
        stale.unlink()
    return options


def machine_row() -> Row:
    """Describe the GPU, the software versions and the commit."""
    printed = _output_of([sys.executable, "-c", DESCRIBE_MACHINE])
    if printed is None:
        raise SystemExit(f"{sys.executable} cannot import torch: set PYTHON to an interpreter that can")
    row: Row = json.loads(printed.splitlines()[-1])
    row["commit"] = _output_of(["git", "rev-parse", "--short", "HEAD"]) or os.environ.get("GPU_CHECK_COMMIT")
    if row["cuda"]:
        row["driver"] = _output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return row


def _output_of(command: Sequence[str]) -> str | None:
    """Return the output of a command, or None if it fails or does not exist."""
    try:
        printed = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        return None
    return printed.strip() or None


def run_part(part: Part, deadline: float, results: Results, statuses: dict[str, int]) -> None:
    """Run a part in a new process group, and add its outcome and its rows to the results."""
    allowed = min(part.limit, deadline - time.monotonic())
    if allowed < part.min_seconds:
        results.add_part(part, "not run: no time left")
        return
    if part.needs is not None and not part.needs.exists():
        results.add_part(part, "not run: there are no examples")
        return
    print(f"== {part.title} (at most {allowed:.0f} s)", flush=True)
    begin = time.monotonic()
    outcome = "stopped from outside"
    with _log(results.work, part.name).open("wb") as file:
        # No new session, so that killing the session of this script also ends the part.
        process = subprocess.Popen(
            ["bash", "-ec", part.script(allowed)], stdout=file, stderr=subprocess.STDOUT, process_group=0
        )
    try:
        code = process.wait(allowed)
        statuses[part.name] = code
        outcome = f"failed with exit code {code}" if code else "done"
    except subprocess.TimeoutExpired:
        statuses[part.name] = 124
        outcome = f"stopped at its limit of {allowed:.0f} s"
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    finally:
        _signal(process, signal.SIGKILL)  # remaining processes, so that the GPU is free for the next part
        process.wait()
        finish(part, time.monotonic() - begin, outcome, results)


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def finish(part: Part, seconds: float, outcome: str, results: Results) -> None:
    """Add the results of a part, save its log, and print the end of the log if it failed."""
    try:
        rows, remark = part.read()
    except Exception as error:  # a part that was stopped may leave any file incomplete
        rows, remark = [], f"its results cannot be read: {type(error).__name__}: {error}"
    results.add_part(part, f"{outcome}; {remark}" if remark else outcome, seconds)
    for row in rows:
        results.add(part.name, "result", row)
    output = _log(results.work, part.name).read_text(encoding="utf-8", errors="replace")
    with (results.folder / "log.txt").open("a", encoding="utf-8") as file:
        file.write(f"== {part.title}: {outcome} after {seconds:.0f} s\n{output[-400_000:]}\n")
    if outcome != "done":
        print("\n".join("   | " + line[:200] for line in output.splitlines()[-15:]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
