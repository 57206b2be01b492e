"""Tests of the GPU check: its tables, scheduler and profile. A slow test runs all parts in small sizes on CPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_check as check
import gpu_profile
import pytest
import torch

from tests.conftest import REPOSITORY

SCRIPT = str(REPOSITORY / "scripts" / "gpu_check.sh")
FILES = {"results.jsonl", "results.md", "log.txt", "profile.txt", "profile-trace.json.gz"}


@pytest.fixture
def results(tmp_path: Path) -> Any:
    for name in ("out", "work/logs", "work/rows"):
        (tmp_path / name).mkdir(parents=True)
    return check.Results(tmp_path / "out", tmp_path / "work")


def part(name: str, lines: str, **changes: Any) -> Any:
    values = {"title": f"part {name}", "limit": 60.0, "min_seconds": 1.0, "read": lambda: ([], "")}
    return check.Part(name=name, script=lambda seconds: lines, **{**values, **changes})


def run(results: Any, *parts: Any, seconds: float = 60.0) -> dict[str, int]:
    statuses: dict[str, int] = {}
    for each in parts:
        check.run_part(each, time.monotonic() + seconds, results, statuses)
    return statuses


def outcomes(results: Any) -> dict[str, str]:
    return {row["part"]: row["outcome"] for row in results.rows if row["kind"] == "part"}


def test_rows_become_json_lines_and_tables(results: Any) -> None:
    bench = {"size": "L12-H768", "step_seconds": 0.05, "tokens_per_second": 640_000.4, "quartiles": [1.4, None]}
    results.add("machine", "machine", {"device": "NVIDIA H200", "torch": "2.11.0", "command": "scripts/gpu_check.sh"})
    results.add("bench-base", "part", {"title": "Base at 128", "outcome": "done", "seconds": 71.4})
    results.add("bench-base", "result", bench)
    results.add("bench-base", "result", {**bench, "step_seconds": float("nan")})
    results.add("bench-base", "result", {"other": "a|b"})
    text = (results.folder / "results.md").read_text()
    assert text.startswith("device NVIDIA H200, torch 2.11.0; `scripts/gpu_check.sh`\n\n")
    assert "| title | outcome | seconds |\n|---|---|---|\n| Base at 128 | done | 71.4 |" in text
    assert "| L12-H768 | 0.05 | 640,000 | 1.4–– |\n| L12-H768 | – | 640,000 | 1.4–– |" in text
    assert "| other |\n|---|\n| a\\|b |" in text
    lines = [json.loads(line) for line in (results.folder / "results.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["machine", "part", "result", "result", "result"]
    assert (lines[2]["tokens_per_second"], lines[3]["step_seconds"]) == (640_000.4, None)


def test_failed_part_does_not_stop_the_next_one(results, capsys) -> None:
    def unreadable() -> Any:
        raise FileNotFoundError("metrics.jsonl")

    lines = f"touch {results.work}/a; echo words of the error; exit 3"
    failing = part("tests", lines, read=lambda: ([{"count": 7}], "3 passed, 1 failed"))
    next_one = part("auto", f"[ -e {results.work}/a ]; echo second part", read=unreadable)
    assert run(results, failing, next_one) == {"tests": 3, "auto": 0}
    assert outcomes(results) == {
        "tests": "failed with exit code 3; 3 passed, 1 failed",
        "auto": "done; its results cannot be read: FileNotFoundError: metrics.jsonl",
    }
    assert [row["count"] for row in results.rows if row["kind"] == "result"] == [7]
    assert "   | words of the error" in capsys.readouterr().out
    log = (results.folder / "log.txt").read_text()
    assert log.index("words of the error") < log.index("second part")


def test_part_is_stopped_at_its_limit_with_all_its_processes(results, monkeypatch) -> None:
    monkeypatch.setattr(check, "GRACE_SECONDS", 0.3)
    nested = part("a", f"bash -c 'echo $$ >{results.work}/pid; sleep 100; true' & wait", limit=1.0)
    stubborn = part("b", "trap 'echo not yet' TERM; while true; do sleep 0.05; done", limit=1.0)
    assert run(results, nested, stubborn) == {"a": 124, "b": 124}
    assert outcomes(results) == dict.fromkeys("ab", "stopped at its limit of 1 s")
    assert "not yet" in (results.folder / "log.txt").read_text()
    pid = int((results.work / "pid").read_text())
    state, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + 5
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "a process outlived its part"
        time.sleep(0.05)


def test_part_without_time_or_data_is_not_run(results: Any) -> None:
    late = part("a", "true", min_seconds=100.0)
    without_data = part("b", "true", needs=results.work / "data" / "manifest.json")
    assert run(results, late, without_data, part("c", "true")) == {"c": 0}
    assert outcomes(results) == {"a": "not run: no time left", "b": "not run: there are no examples", "c": "done"}
    assert "| part a | not run: no time left | – |" in (results.folder / "results.md").read_text()


def test_profile_sums_kernels_gaps_and_launches() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": duration, "tid": 7}
        for name, begin, duration in [("nvjet_a", 0, 40), ("flash_fwd", 20, 40), ("nvjet_a", 80, 20), ("Memset", 90, 5)]
    ]
    host = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": -50, "dur": 500, "tid": 1}
    rows = gpu_profile.summarize(gpu_profile.events_of({"traceEvents": [host, *events, {"ph": "M"}]}), steps=2)
    assert rows[0] == {
        "profiled_step_seconds": pytest.approx(50e-6),
        "gap_share": pytest.approx(0.2),  # nothing runs from 60 to 80 of 100
        "launches_per_step": 2,
    }
    kinds = {row["kind_of_kernel"]: row["seconds"] for row in rows[1:4]}
    assert kinds == pytest.approx({"matrix products": 30e-6, "attention": 20e-6, "copies and fills of memory": 2.5e-6})
    assert (rows[4]["kernel"], rows[4]["calls_per_step"]) == ("nvjet_a", 1.0)
    assert "20.0% of the time in gaps, 2 launches per step" in gpu_profile.as_text(rows, "title")


ENVIRONMENT = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_all_parts_run_in_small_sizes_on_cpu(tmp_path: Path) -> None:
    command = [SCRIPT, str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--device", "cpu", "--small"]
    command += ["--limit", "1100"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=1200)
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    ended = {row["part"]: row["outcome"] for row in rows if row["kind"] == "part"}
    tests = ended.pop("tests")
    assert done.returncode == (0 if tests.startswith("done") else 1), done.stdout
    assert "skipped" in tests
    assert all(outcome.startswith("done") for outcome in ended.values()), done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    for part, steps in (("bench-base", {"ours", "eager"}), ("bench-modern-1024", {"ours", "bert"})):
        assert {row["step"] for row in rows if row["part"] == part and row["kind"] == "result"} == steps
    assert (tmp_path / "out" / "results.md").read_text() in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_an_error(tmp_path: Path) -> None:
    command = [SCRIPT, str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 2
    assert "no CUDA device found" in done.stderr
