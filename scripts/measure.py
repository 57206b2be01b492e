"""What the benchmarks and checks share: commands in new processes, rows in JSON lines, tables, and ranges of values.

Imports the standard library only, because `gpu_check.py` imports it before it knows what is installed.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]


class Usage(NamedTuple):
    """What a command has used."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int  # resident memory of one process


def parser_of(documentation: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the docstring of a script as its help."""
    return argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)


def package_command(*words: object, settings: Mapping[str, object] = {}) -> list[str]:
    """Return a command of `bert-pretrain`, with a `--set` for each setting."""
    command = [sys.executable, "-m", "bert_pretrain", *map(str, words)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    return command


def environment(threads: int | None = None, checkout: Path = ROOT) -> dict[str, str]:
    """Return the environment of a measured process: a checkout on the path, and a number of OpenMP threads."""
    path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {**os.environ, "PYTHONPATH": path, **limit}


def run_package(*words: object, settings: Mapping[str, object] = {}, threads: int | None = None) -> Usage:
    """Run a command of `bert-pretrain`. Raises `SystemExit` with its errors if it fails."""
    begin = time.perf_counter()
    with subprocess.Popen(
        package_command(*words, settings=settings),
        env=environment(threads),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"bert-pretrain {words[0]} failed:\n{errors}")
    seconds = time.perf_counter() - begin
    return Usage(seconds, usage.ru_utime + usage.ru_stime, 1024 * usage.ru_maxrss)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a JSON lines file, without a last line that a kill has cut off."""
    with path.open(encoding="utf-8") as file:
        *lines, last = [*file] or [""]
    rows = [json.loads(line) for line in lines]
    with contextlib.suppress(ValueError):
        rows.append(json.loads(last))
    return rows


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [table_line(columns), "|---" * len(columns) + "|"]
    return "\n".join([*lines, *map(table_line, rows)])


def table_line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def spread(
    values: Sequence[float],
    form: str = ".3g",
    unit: str = "",
    middle: Callable[[Sequence[float]], float] = statistics.median,
) -> str:
    """Return the median or another middle, and the minimum and maximum if they differ."""
    text = f"{middle(values):{form}}{unit}"
    low, high = min(values), max(values)
    return text if low == high else f"{text} ({low:{form}}–{high:{form}})"
