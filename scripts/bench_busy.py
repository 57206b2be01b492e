"""The speed of training next to another busy process, relative to training alone.

Runs `bert-pretrain train` on all cores: alone, next to one single-threaded process at nice 10, and next to one at the
same priority, in turn. OpenMP threads wait as the command line sets them, sleep at once, or wait by OpenMP's default.
The table shows the median over rounds of the median tokens per second that each run logged.

    python scripts/bench_busy.py DATA_FOLDER [--rounds 3] [--steps 60]
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

MODEL = ("hidden_size=128", "num_hidden_layers=2", "num_attention_heads=2", "intermediate_size=512")
POLICIES = {
    "as bert-pretrain sets it": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "OpenMP's default": {"OMP_WAIT_POLICY": ""},
}
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
NEIGHBOURS = {"alone": None, "one process at nice 10": 10, "one process at nice 0": 0}
SKIPPED_LINES = 2
"""Log lines at the start, in which kernels are chosen."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    speeds: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.rounds):
        for name, policy in POLICIES.items():
            for neighbour, nice in NEIGHBOURS.items():
                with busy_process(nice) if nice is not None else contextlib.nullcontext():
                    speeds.setdefault((name, neighbour), []).append(speed(arguments.data, arguments.steps, policy))
    print(f"{os.cpu_count()} cores, {arguments.rounds} rounds of {arguments.steps} steps, L2-H128\n")
    print("| OpenMP threads wait | other process | tokens/s | relative to alone (min–max) |\n|---|---|---|---|")
    for name, neighbour in speeds:
        found = speeds[name, neighbour]
        ratios = sorted(own / alone for own, alone in zip(found, speeds[name, "alone"], strict=True))
        shown = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})"
        print(f"| {name} | {neighbour} | {statistics.median(found):,.0f} | {shown} |")


@contextlib.contextmanager
def busy_process(nice: int) -> Iterator[None]:
    """Keep one core busy."""
    process = subprocess.Popen(["nice", "-n", str(nice), sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def speed(data: Path, steps: int, policy: Mapping[str, str]) -> float:
    """Return the median tokens per second of one run."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | dict(policy)
    settings = [f"model.{size}" for size in MODEL]
    settings += [f"train.{value}" for value in (f"max_steps={steps}", "global_batch_size=64", "log_every=5")]
    settings += [f"train.{value}" for value in (f"eval_every={steps}", f"save_every={steps}", "warmup_ratio=0.1")]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "bert_pretrain", "train", "--data", str(data), "--output", str(run)]
        command += [word for setting in settings for word in ("--set", setting)]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    return statistics.median(found[SKIPPED_LINES:] or found)


if __name__ == "__main__":
    main()
