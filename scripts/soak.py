"""Soak test: train for an hour with frequent checkpoints and evaluations, and look for leaks.

Samples the memory and file descriptors of `bert-pretrain train` from /proc, and prints a table and a verdict.
Exit code 1: memory at the end is above 1.05 times that at step 500, or there are more descriptors.
Exit code 2: training failed or was too short for a verdict. Linux only.

    python scripts/soak.py DATA_FOLDER --minutes 60 [--size 2x128] [--output soak] [--set train.save_every=100]
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MAX_MEMORY_RATIO = 1.05
NUM_ROWS = 10  # of the table
MB = 10**6


class Sample(NamedTuple):
    """The resources of the process at one moment, and the last step and speed in its metrics."""

    seconds: float
    step: int
    rss_bytes: int
    anonymous_bytes: int
    descriptors: int
    tokens_per_second: float


class TooShort(Exception):
    """Raised when a run is too short for a verdict."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("data", type=Path, help="data folder, written by make-data")
    parser.add_argument("--minutes", type=float, default=60.0, help="time budget of the training")
    parser.add_argument("--size", default="2x128", help="layers x hidden size")
    parser.add_argument("--output", type=Path, default=Path("soak"), help="new folder for the run and the samples")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--from-step", type=int, default=500, help="step after which memory should not grow")
    parser.add_argument("--set", action="append", default=[], help="section.key=value for the training")
    arguments = parser.parse_args()
    try:
        arguments.output.mkdir(parents=True)
    except FileExistsError:
        parser.error(f"{arguments.output} exists: remove it, or pass another folder as --output")
    log = arguments.output / "train.log"
    with log.open("wb") as file, (arguments.output / "samples.jsonl").open("w", encoding="utf-8") as samples_file:
        process = subprocess.Popen(train_command(arguments), stdout=file, stderr=file)
        samples = []
        try:
            for sample in watch(process, arguments.output / "run" / "metrics.jsonl", arguments.every):
                samples.append(sample)
                print(json.dumps(sample._asdict()), file=samples_file, flush=True)
        except KeyboardInterrupt:  # stop the training, and print the table so far
            process.send_signal(signal.SIGINT)
        status = process.wait()
    training = until_last_step(samples)
    print("\n".join(table(training)))
    if status not in (0, 128 + signal.SIGINT):
        print(f"\ntraining failed with exit status {status}: see {log}", file=sys.stderr)
        return 2
    try:
        verdict, is_passed = judge(training, arguments.from_step)
    except TooShort as error:
        print(f"\nno verdict: {error}", file=sys.stderr)
        return 2
    print(f"\n{verdict}: {'passed' if is_passed else 'FAILED'}")
    return 0 if is_passed else 1


def train_command(arguments: argparse.Namespace) -> list[str]:
    layers, hidden = map(int, arguments.size.split("x"))
    settings = [f"model.num_hidden_layers={layers}", f"model.hidden_size={hidden}"]
    settings += [f"model.num_attention_heads={max(1, hidden // 64)}", f"model.intermediate_size={4 * hidden}"]
    settings += [f"train.time_budget={60 * arguments.minutes:g}", "train.global_batch_size=64"]
    settings += ["train.save_every=200", "train.eval_every=200", "train.keep_checkpoints=2", *arguments.set]
    folders = ["--data", str(arguments.data), "--output", str(arguments.output / "run")]
    words = [word for setting in settings for word in ("--set", setting)]
    return [sys.executable, "-m", "bert_pretrain", "train", *folders, *words]


def watch(process: "subprocess.Popen[bytes]", metrics: Path, every: float) -> Iterator[Sample]:
    """Yield a sample every few seconds, from the first line of metrics to the end of the process."""
    while process.poll() is None:
        written = metrics.read_text(encoding="utf-8").rpartition("\n")[0] if metrics.exists() else ""
        lines = [line for line in map(json.loads, written.splitlines()) if line.get("tokens_per_second") is not None]
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, KeyError):  # the process is exiting
            folder = Path(f"/proc/{process.pid}")
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            rss, anonymous = (int(status[key].split()[0]) * 1024 for key in ("VmRSS", "RssAnon"))
            descriptors = len(os.listdir(folder / "fd"))
            if lines:
                newest = lines[-1]
                yield Sample(time.monotonic(), newest["step"], rss, anonymous, descriptors, newest["tokens_per_second"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(every)


def until_last_step(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples up to the last step, without the model export at the end of the process."""
    steps = [sample.step for sample in samples]
    return list(samples[: steps.index(steps[-1]) + 1]) if steps else []


def between(samples: Sequence[Sample], first: float, last: float) -> list[Sample]:
    """Return the samples between two moments, given as fractions of the total time."""
    begin, span = samples[0].seconds, samples[-1].seconds - samples[0].seconds
    return [sample for sample in samples if first * span <= sample.seconds - begin <= last * span]


def table(training: Sequence[Sample]) -> list[str]:
    """Return a Markdown table with the medians of each tenth of the training."""
    lines = ["| tenth | last step | RSS, MB | anonymous, MB | descriptors | tokens/s |", f"|{'---:|' * 6}"]
    for number in range(NUM_ROWS if training else 0):
        if row := between(training, number / NUM_ROWS, (number + 1) / NUM_ROWS):
            rss, anonymous = (median(row, name) / MB for name in ("rss_bytes", "anonymous_bytes"))
            cells = (rss, anonymous, median(row, "descriptors"), median(row, "tokens_per_second"))
            lines.append(f"| {number + 1} | {row[-1].step:,} | {' | '.join(f'{cell:,.0f}' for cell in cells)} |")
    return lines


def judge(training: Sequence[Sample], from_step: int) -> tuple[str, bool]:
    """Compare the last tenth of the training with the tenth that starts at `from_step`; return a text and the verdict.

    Medians ignore the short peak of a checkpoint being written. Raises `TooShort` if the two tenths overlap.
    """
    settled = [sample for sample in training if sample.step >= from_step]
    if not settled:
        raise TooShort(f"the run ended at step {training[-1].step if training else 0}, before step {from_step}")
    tenth = (training[-1].seconds - training[0].seconds) / NUM_ROWS
    first = [sample for sample in settled if sample.seconds <= settled[0].seconds + tenth]
    last = between(training, 1 - 1 / NUM_ROWS, 1)
    if first[-1].seconds >= last[0].seconds:
        raise TooShort(f"step {from_step} was reached in the last two tenths of the run")
    memory = median(last, "rss_bytes") / median(first, "rss_bytes")
    before, after = (round(median(each, "descriptors")) for each in (first, last))
    verdict = f"memory at the end {memory:.3f} x that at step {from_step:,}, descriptors {before} -> {after}"
    return verdict, memory <= MAX_MEMORY_RATIO and after <= before


def median(samples: Sequence[Sample], name: str) -> float:
    return float(statistics.median(getattr(sample, name) for sample in samples))


if __name__ == "__main__":
    sys.exit(main())
