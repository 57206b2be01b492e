"""A soak: train for an hour with frequent checkpoints and evaluations, and watch what the process holds.

Starts a real `bert-pretrain train`, reads its memory, descriptors, threads and maps from /proc every few seconds, its
steps and speed from `metrics.jsonl`, and prints a table of ten rows and a verdict. It fails (exit 1) when memory at the
end is above 1.05 times that at step 500, or when descriptors have grown. Linux only.

    python scripts/soak.py DATA_FOLDER --minutes 60 [--size 2x128] [--threads 1] [--output soak]
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAX_MEMORY_RATIO = 1.05
NUM_ROWS = 10
MB = 10**6
PASSED, FAILED, NO_VERDICT = 0, 1, 2
"""Exit statuses; there is no verdict where training failed or was too short."""


@dataclass(frozen=True)
class Sample:
    """What the process held at one moment."""

    seconds: float
    step: int
    """Of the newest line of `metrics.jsonl`; 0 before the first."""
    rss_bytes: int
    anonymous_bytes: int
    descriptors: int
    threads: int
    maps: int
    tokens_per_second: float | None
    """Of the newest line that has a rate."""


@dataclass(frozen=True)
class Verdict:
    """The beginning, a tenth of the run from `from_step` on, against the last tenth."""

    from_step: int
    memory_ratio: float
    descriptors: tuple[int, int]
    speed_ratio: float

    @property
    def is_passed(self) -> bool:
        return self.memory_ratio <= MAX_MEMORY_RATIO and self.descriptors[1] <= self.descriptors[0]

    def __str__(self) -> str:
        return (
            f"memory at the end {self.memory_ratio:.3f} x that at step {self.from_step:,} (at most "
            f"{MAX_MEMORY_RATIO:g}), descriptors {self.descriptors[0]} -> {self.descriptors[1]}, speed of the last "
            f"tenth {self.speed_ratio:.3f} x that of the first: {'passed' if self.is_passed else 'FAILED'}"
        )


class TooShort(Exception):
    """A run that allows no verdict."""


def main() -> int:
    arguments = parse_arguments()
    output: Path = arguments.output
    if output.exists() and any(output.iterdir()):
        print(f"{output} is not empty: remove it, or name another folder with --output", file=sys.stderr)
        return NO_VERDICT
    output.mkdir(parents=True, exist_ok=True)
    status, samples = watch(arguments)
    print("\n".join(table(samples)))
    if status not in (0, -signal.SIGINT, 128 + signal.SIGINT):
        print(f"\ntraining failed with exit status {status}: see {output / 'train.log'}", file=sys.stderr)
        return NO_VERDICT
    try:
        verdict = judge(samples, arguments.from_step)
    except TooShort as error:
        print(f"\nno verdict: {error}", file=sys.stderr)
        return NO_VERDICT
    print(f"\n{verdict}")
    return PASSED if verdict.is_passed else FAILED


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("data", type=Path, help="a data folder of make-data")
    parser.add_argument("--minutes", type=float, default=60.0, help="time budget of the training")
    parser.add_argument("--size", default="2x128", help="layers x hidden size")
    parser.add_argument("--output", type=Path, default=Path("soak"), help="folder of the run and of samples")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the training")
    parser.add_argument("--batch", type=int, default=64, help="examples per step")
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints, of which 2 are kept")
    parser.add_argument("--eval-every", type=int, default=200, help="steps between evaluations")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--from-step", type=int, default=500, help="step at which memory and descriptors are settled")
    parser.add_argument("--set", action="append", default=[], help="further section.key=value for the training")
    return parser.parse_args()


def train_command(arguments: argparse.Namespace) -> list[str]:
    """Return the command that trains."""
    layers, hidden = map(int, arguments.size.split("x"))
    model = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": max(1, hidden // 64)}
    train = {
        "time_budget": f"{60 * arguments.minutes:g}",
        "global_batch_size": arguments.batch,
        "save_every": arguments.save_every,
        "eval_every": arguments.eval_every,
        "keep_checkpoints": 2,
    }
    settings = [f"model.{key}={value}" for key, value in {**model, "intermediate_size": 4 * hidden}.items()]
    settings += [f"train.{key}={value}" for key, value in train.items()]
    command = [sys.executable, "-m", "bert_pretrain", "train", "--data", str(arguments.data)]
    command += ["--output", str(arguments.output / "run")]
    return command + [word for setting in [*settings, *arguments.set] for word in ("--set", setting)]


def watch(arguments: argparse.Namespace) -> tuple[int, list[Sample]]:
    """Train, and write a sample every few seconds; returns the exit status of the training, and the samples."""
    output: Path = arguments.output
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    samples = []
    with (output / "train.log").open("wb") as log, (output / "samples.jsonl").open("w", encoding="utf-8") as file:
        process = subprocess.Popen(train_command(arguments), env=environment, stdout=log, stderr=log)
        print(f"process {process.pid} trains for {arguments.minutes:g} minutes; its log is {output / 'train.log'}\n")
        try:
            for sample in samples_of(process, output / "run" / "metrics.jsonl", arguments.every):
                samples.append(sample)
                file.write(json.dumps(asdict(sample)) + "\n")
                file.flush()
        except KeyboardInterrupt:  # the table shows how far it came
            process.send_signal(signal.SIGINT)
        finally:
            if process.poll() is None:
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
    return process.wait(), samples


def samples_of(process: "subprocess.Popen[bytes]", metrics: Path, every: float) -> Iterator[Sample]:
    """Yield what a process holds at equal distances in time, until it ends."""
    begin = time.monotonic()
    last_line = follow(metrics)
    newest: dict[str, Any] = {}
    number = 0
    while process.poll() is None:
        newest |= {key: value for key, value in last_line().items() if value is not None}
        try:
            held = read_process(process.pid)
        except (FileNotFoundError, ProcessLookupError):  # it ended, or is about to
            return
        rate = newest.get("tokens_per_second")
        yield Sample(time.monotonic() - begin, newest.get("step", 0), *held, rate)
        number += 1
        try:
            process.wait(max(0.0, begin + number * every - time.monotonic()))
        except subprocess.TimeoutExpired:
            continue


def read_process(pid: int) -> tuple[int, int, int, int, int]:
    """Return the resident and the anonymous bytes of a process, and its descriptors, threads and maps.

    A process that is ending has closed its descriptors or given back its memory: `ProcessLookupError`.
    """
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    descriptors = len(os.listdir(folder / "fd"))
    maps = (folder / "maps").read_bytes().count(b"\n")
    if "VmRSS" not in status or not descriptors or not maps:
        raise ProcessLookupError(f"process {pid} is ending")
    rss, anonymous = (int(status[key].split()[0]) * 1024 for key in ("VmRSS", "RssAnon"))
    return rss, anonymous, descriptors, int(status["Threads"]), maps


def follow(path: Path) -> Callable[[], dict[str, Any]]:
    """Return a function that returns what the lines written to a file of JSON since its last call say, joined."""
    position = 0

    def read() -> dict[str, Any]:
        nonlocal position
        if not path.exists():
            return {}
        with path.open("rb") as file:
            file.seek(position)
            complete = file.read()
        complete = complete[: complete.rfind(b"\n") + 1]
        position += len(complete)
        found: dict[str, Any] = {}
        for line in complete.splitlines():
            found |= json.loads(line)
        return found

    return read


def of_training(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples from the first step to the last one, without start and end of the process."""
    if not samples:
        return []
    last = samples[-1].step
    first_of_last = next(place for place, sample in enumerate(samples) if sample.step == last)
    return [sample for sample in samples[: first_of_last + 1] if sample.step and sample.tokens_per_second is not None]


def between(samples: Sequence[Sample], first: float, last: float) -> list[Sample]:
    """Return the samples between two moments, in shares of the time of all."""
    begin, span = samples[0].seconds, samples[-1].seconds - samples[0].seconds
    return [sample for sample in samples if first * span <= sample.seconds - begin <= last * span]


def table(samples: Sequence[Sample]) -> list[str]:
    """Return the lines of a Markdown table: medians of each tenth of the training."""
    lines = [
        "| tenth | last step | RSS, MB | anonymous, MB | descriptors | threads | maps | tokens/s |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    training = of_training(samples)
    for number in range(NUM_ROWS if training else 0):
        row = between(training, number / NUM_ROWS, (number + 1) / NUM_ROWS)
        if not row:
            continue
        memory = (f"{median(row, name) / MB:,.0f}" for name in ("rss_bytes", "anonymous_bytes"))
        counts = (f"{median(row, name):,.0f}" for name in ("descriptors", "threads", "maps", "tokens_per_second"))
        lines.append(f"| {number + 1} | {row[-1].step:,} | {' | '.join(memory)} | {' | '.join(counts)} |")
    return lines


def judge(samples: Sequence[Sample], from_step: int) -> Verdict:
    """Compare the last tenth of the training with the tenth from `from_step` on; raises `TooShort` if they overlap."""
    training = of_training(samples)
    settled = [sample for sample in training if sample.step >= from_step]
    if not settled:
        raise TooShort(f"the run ended at step {samples[-1].step if samples else 0}, before step {from_step}")
    tenth = (training[-1].seconds - training[0].seconds) / NUM_ROWS
    first = [sample for sample in settled if sample.seconds <= settled[0].seconds + tenth]
    last = between(training, 1 - 1 / NUM_ROWS, 1)
    if first[-1].seconds >= last[0].seconds:
        raise TooShort(f"step {from_step} was reached in the last two tenths of the run")
    return Verdict(
        from_step,
        median(last, "rss_bytes") / median(first, "rss_bytes"),
        (round(median(first, "descriptors")), round(median(last, "descriptors"))),
        median(last, "tokens_per_second") / median(between(training, 0, 1 / NUM_ROWS), "tokens_per_second"),
    )


def median(samples: Sequence[Sample], name: str) -> float:
    """Return the median of a figure; a checkpoint that is being written holds more for a moment."""
    return float(statistics.median(getattr(sample, name) for sample in samples))


if __name__ == "__main__":
    sys.exit(main())
