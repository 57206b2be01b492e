"""All that only a GPU can show, in one command that ends within its limit: the most valuable first.

Each part is a process of its own with a limit of its own; what fails or does not fit says so and stops nothing. Results
are in FOLDER, complete after every part; examples and runs go to a folder of work. The exit code is that of the tests.

    scripts/gpu_check.sh [FOLDER] [--limit SECONDS] [--parts NAME …] [--corpus FILE] [--old FOLDER]
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from gpu_parts import PART_NAMES, Options, Part, Row, make_parts

DEFAULT_LIMIT = 540.0
END_SECONDS = 5.0
"""Kept back of the limit, for what comes after the last part."""
GRACE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL of a part that is over its limit: a training run saves a checkpoint."""
SHOWN_LINES, KEPT_CHARACTERS = 15, 400_000

MACHINE = """
import importlib.metadata, importlib.util, json, os, platform, torch
def version(name):
    return importlib.metadata.version(name) if importlib.util.find_spec(name) else None
cuda = torch.cuda.is_available()
print(json.dumps({
    "cuda": cuda, "device": torch.cuda.get_device_name() if cuda else "CPU", "torch": torch.__version__,
    "transformers": version("transformers"), "python": platform.python_version(),
    "cores": len(os.sched_getaffinity(0)),
}))
"""


# ── results ──


class Results:
    """`results.jsonl` and `results.md` of a folder, both as complete as the rows so far."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.rows: list[Row] = []
        self.folder, self.work = folder, work
        (folder / "results.jsonl").write_text("", encoding="utf-8")

    def add(self, part: str, kind: str, row: Row) -> None:
        """Note a row, on disk at once."""
        row = _plain({"part": part, "kind": kind, **row})
        self.rows.append(row)
        with (self.folder / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n")
        (self.folder / "results.md").write_text(markdown(self.rows), encoding="utf-8")


def _plain(value: Any) -> Any:
    """Return a JSON value without numbers that JSON lacks: they become null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


@dataclass
class Running:
    """A part that has been started."""

    part: Part
    process: subprocess.Popen[bytes]
    log: Path
    begin: float
    allowed: float
    """Seconds."""
    stop_sent: float | None = None


class Stopped(Exception):
    """SIGINT or SIGTERM came; the argument is its number."""


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
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    statuses: dict[str, int] = {}
    try:
        for part in make_parts(options):
            if part.name.partition("-")[0] in chosen:
                run_part(part, begin + limit - END_SECONDS, results, statuses)
    except Stopped as stopped:
        statuses["tests"] = 128 + int(stopped.args[0])
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
    done = subprocess.run([sys.executable, "-c", MACHINE], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{sys.executable} cannot import torch; set PYTHON to one that can")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    row["commit"] = _output_of(["git", "rev-parse", "--short", "HEAD"]) or os.environ.get("GPU_CHECK_COMMIT")
    if row["cuda"]:
        row["driver"] = _output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return row


def _output_of(command: Sequence[str]) -> str | None:
    """Return what a command prints, or None where it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def run_part(part: Part, deadline: float, results: Results, statuses: dict[str, int]) -> None:
    """Run a part, and add how it ended and what it found."""
    allowed = min(part.limit, deadline - time.monotonic())
    reason = None if allowed >= part.least else "not run: no time left"
    if reason is None and part.needs is not None and not part.needs.exists():
        reason = "not run: there are no examples"
    if reason is not None:
        print(f"== {part.title}: {reason}", flush=True)
        results.add(part.name, "part", {"title": part.title, "outcome": reason, "seconds": None})
        return
    running = start(part, allowed, results)
    try:
        while running.process.poll() is None:
            _stop_if_over(running)
            time.sleep(0.05)
    finally:
        outcome = _end(running)
        statuses[part.name] = 124 if running.stop_sent is not None else running.process.returncode
        finish(running, outcome, results)


def start(part: Part, allowed: float, results: Results) -> Running:
    """Start a part as a group of processes of its own."""
    print(f"== {part.title} (at most {allowed:.0f} s)", flush=True)
    log = results.work / "logs" / f"{part.name}.txt"
    with log.open("wb") as file:
        # Not a session of its own: whoever ends this one by force ends the part as well.
        process = subprocess.Popen(
            ["bash", "-ec", part.script(allowed)], stdout=file, stderr=subprocess.STDOUT, process_group=0
        )
    return Running(part, process, log, time.monotonic(), allowed)


def _stop_if_over(one: Running) -> None:
    now = time.monotonic()
    if one.process.poll() is not None or now < one.begin + one.allowed:
        return
    if one.stop_sent is None:
        one.stop_sent = now
        _signal(one, signal.SIGTERM)
    elif now > one.stop_sent + GRACE_SECONDS:
        _signal(one, signal.SIGKILL)


def _end(one: Running) -> str:
    """Return how a part ended, after ending what is left of it: nothing after it shall find the card busy."""
    code = one.process.poll()
    _signal(one, signal.SIGKILL)
    one.process.wait()
    if one.stop_sent is not None:
        return f"stopped at its limit of {one.allowed:.0f} s"
    if code is None:
        return "stopped from outside"
    return "done" if code == 0 else f"failed with exit code {code}"


def _signal(one: Running, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.process.pid, number)


def finish(one: Running, outcome: str, results: Results) -> None:
    """Add what a part has found, keep its output, and show the end of it where it failed."""
    seconds = time.monotonic() - one.begin
    try:
        rows, remark = one.part.read()
    except Exception as error:  # a part that was stopped may leave anything
        rows, remark = [], f"its results cannot be read: {type(error).__name__}: {error}"
    results.add(
        one.part.name,
        "part",
        {"title": one.part.title, "outcome": f"{outcome}{f'; {remark}' if remark else ''}", "seconds": seconds},
    )
    for row in rows:
        results.add(one.part.name, "result", row)
    output = one.log.read_text(encoding="utf-8", errors="replace")
    with (results.folder / "log.txt").open("a", encoding="utf-8") as file:
        file.write(f"== {one.part.title}: {outcome} after {seconds:.0f} s\n{output[-KEPT_CHARACTERS:]}\n")
    print(f"   {one.part.title}: {outcome} after {seconds:.0f} s{f'; {remark}' if remark else ''}", flush=True)
    if outcome != "done":
        print("\n".join("   | " + line[:200] for line in output.splitlines()[-SHOWN_LINES:]), flush=True)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


if __name__ == "__main__":
    sys.exit(main())
