"""The parts of `gpu_check.py`: for each its command, its limits, and how its results are read."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Found = tuple[list[Row], str]
"""Rows, and a remark on the outcome or nothing."""
REPOSITORY = Path(__file__).resolve().parents[1]
PART_NAMES = ("examples", "tests", "bench", "auto", "profile")
ROWS_OF_BERT, PYDOC_VOCABULARY = 30522, 8192
AUTO_SECONDS, LEAST_AUTO_SECONDS, AROUND_AUTO_SECONDS = 240, 60, 20
SMALL_FACTOR = 4.0
"""What limits are multiplied by in small, where they end nothing but what hangs."""


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


def make_parts(options: Options) -> list[Part]:
    """Return the parts in their order: the examples that others need, then what is new, the most valuable first."""
    return [
        _examples(options),
        _tests(options),
        _bench(options, "bench-base", "12x768", 128, 256),
        _bench(options, "bench-large", "24x1024", 512, 32),
        _bench(options, "bench-small", "4x256", 128, 256),
        _auto(options),
        _profile(options),
    ]


def _limits(options: Options, limit: float, least: float) -> tuple[float, float]:
    """Return limit and least time of a part for this kind of check."""
    return (SMALL_FACTOR * limit, 5.0) if options.is_small else (limit, least)


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
    command = _python(
        "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "--durations=5", "-p", "no:cacheprovider", *marked
    )
    log = options.work / "logs" / "tests.txt"
    return Part("tests", "tests marked gpu", lambda _: command, *_limits(options, 120, 30), lambda: _read_tests(log))


def _read_tests(log: Path) -> Found:
    """Return no rows, and how many tests passed and which did not."""
    found: dict[str, list[str]] = {}
    for name, outcome in re.findall(
        r"^(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR)\b", log.read_text("utf-8"), re.MULTILINE
    ):
        found.setdefault(outcome.lower(), []).append(name.rpartition("::")[2])
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
    return Part(
        "examples", title, lambda _: "\n".join(lines), *_limits(options, 150, 20), lambda: _read_examples(options)
    )


def _read_examples(options: Options) -> Found:
    rows = []
    for length in (128, 512):
        splits = json.loads((options.data(length) / "manifest.json").read_text("utf-8"))["splits"]
        shards = splits["train"]["shards"]
        counts = {name: sum(shard[name] for shard in shards) for name in ("rows", "tokens")}
        rows.append({"max_seq_length": length, **counts})
    return rows, ", ".join(f"{row['rows']:,} of {row['max_seq_length']}" for row in rows)


# ── speed ──


def _shape(options: Options, examples: int) -> list[object]:
    """Return the arguments that say what is measured, by the scripts' common names."""
    if options.is_small:
        return ["--examples", 8, "--device", options.device]
    return ["--examples", examples, "--device", options.device, "--vocab-size", ROWS_OF_BERT]


def _bench(options: Options, name: str, size: str, length: int, examples: int) -> Part:
    shown = "1x64" if options.is_small else size
    pairs = 2 if options.is_small else 7
    command = _python(
        REPOSITORY / "scripts" / "bench_train.py", options.data(length), "--sizes", shown, "--pairs", pairs,
        "--dropout", 0, "--json", options.rows(name), *_shape(options, examples),
        *([] if options.old is None else ["--old", options.old, "--peers", "compiled"]),
    )  # fmt: skip
    title = f"step of L{shown.replace('x', '-H')} at {length}"
    needs = options.data(length) / "manifest.json"
    return Part(name, title, lambda _: command, *_limits(options, 140, 40), lambda: _read_rows(options, name), needs)


def _read_rows(options: Options, name: str) -> Found:
    return read_rows(options.rows(name)), ""


def _profile(options: Options) -> Part:
    size = "1x64" if options.is_small else "12x768"
    command = _python(
        REPOSITORY / "scripts" / "gpu_profile.py", options.data(128), "--output", options.output,
        "--size", size, "--json", options.rows("profile"), *_shape(options, 256),
    )  # fmt: skip
    title = f"profile of L{size.replace('x', '-H')} at 128"
    needs = options.data(128) / "manifest.json"
    return Part(
        "profile", title, lambda _: command, *_limits(options, 80, 30), lambda: _read_rows(options, "profile"), needs
    )


def _auto(options: Options) -> Part:
    corpus, lines = (options.corpus, []) if options.corpus is not None else _pydoc(options)
    run, log = options.work / "auto", options.work / "logs" / "auto.txt"
    wanted, around = (150.0, 5.0) if options.is_small else (float(AUTO_SECONDS), float(AROUND_AUTO_SECONDS))

    def script(seconds: float) -> str:
        time = f"{max(min(wanted, seconds - around), 1.0):.0f}s"
        command = _package("run", "auto", corpus, "--time", time, "--output", run, "--device", options.device)
        return "\n".join([*lines, shlex.join(["rm", "-rf", str(run)]), command])

    def read() -> Found:
        forecast = re.findall(r"^forecast: (.*)", log.read_text("utf-8"), re.MULTILINE)
        return [{**_read_run("run auto", run / "train"), "forecast": forecast[-1] if forecast else None}], ""

    least = around + (5.0 if options.is_small else LEAST_AUTO_SECONDS)
    limit = wanted + around * (SMALL_FACTOR if options.is_small else 1.0)
    return Part("auto", f"run auto for {wanted:.0f} s", script, limit, least, read)


def _read_run(name: str, run: Path) -> Row:
    """Return a row of a run's figures, before and after; of a run that was stopped, those so far."""
    lines = read_rows(run / "metrics.jsonl")
    evaluations = [line for line in lines if "validation_mlm_loss" in line]
    steps = [line for line in lines if "loss" in line]
    row: Row = {"run": name}
    if evaluations:
        for key in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"):
            row[f"{key}_before"] = evaluations[0][f"validation_{key}"]
            row[f"{key}_after"] = evaluations[-1][f"validation_{key}"]
    if steps:
        last = steps[-1]
        row |= {key: last[key] for key in ("epoch", "examples", "examples_per_second", "mfu", "data_wait_share")}
        row |= {"steps": last["step"], "elapsed_seconds": last["elapsed_seconds"]}
    manifest = run / "manifest.json"
    if manifest.is_file():
        row["wall_seconds"] = json.loads(manifest.read_text("utf-8"))["progress"]["wall_seconds"]
    return row
