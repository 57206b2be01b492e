"""Check that trainings are bit-equal: repeat fresh starts and resumes, and compare the weights and losses.

A reference trains to the last step. Another run is killed by SIGKILL after its checkpoint, and its copies are resumed.
Every training runs in a fork of a process that has imported everything. Linux only.
Exit code 1: a training differs. Exit code 2: a training failed or did not end.

    python scripts/check_bits.py DATA_FOLDER [--repeats 500] [--threads 2] [--set train.precision=fp32] [--output bits]
"""

import argparse
import hashlib
import json
import shutil
import signal
import sys
import time
from pathlib import Path

from chaos_process import Child, command_line, fork, import_packages
from chaos_trial import HANG_SECONDS
from measure import parser_of, read_rows

CHECKPOINT_STEP = 40
STEPS = {"start": 2, "resume": 42}  # last step of each kind of training


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path, help="data folder, written by make-data")
    parser.add_argument("--repeats", type=int, default=500, help="number of starts, and of resumes")
    parser.add_argument("--threads", type=int, default=2, help="threads of each training")
    parser.add_argument("--output", type=Path, default=Path("bits"), help="new folder for the runs")
    parser.add_argument("--set", action="append", default=[], help="section.key=value for the training")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True)
    import_packages(torch_threads=arguments.threads)
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # drawing curves would take longer than the steps
    killed = kill_after_checkpoint(arguments)
    num_different = 0
    for kind, steps in STEPS.items():
        expected = ""
        for number in range(1 + arguments.repeats):
            run = arguments.output / "run"
            if number and kind == "resume":
                shutil.copytree(killed, run)
            child = start(arguments, run, steps)
            if not child.wait(HANG_SECONDS) or child.code:
                child.end()
                print(child.stderr(), file=sys.stderr)
                return 2
            found = digest(run)
            expected = expected or found
            if found != expected:
                num_different += 1
                run.rename(arguments.output / f"different-{kind}-{number}")
                print(f"{kind} {number} differs")
            else:
                shutil.rmtree(run)
        print(f"{kind}: {arguments.repeats} repeats; trainings that differ, in total: {num_different}", flush=True)
    return int(num_different > 0)


def start(arguments: argparse.Namespace, run: Path, steps: int) -> Child:
    settings = ["model.hidden_size=64", "model.num_attention_heads=1", "model.intermediate_size=256"]
    settings += ["train.global_batch_size=32", f"train.save_every={CHECKPOINT_STEP}", "train.log_every=1"]
    settings += ["train.eval_every=1000", *arguments.set]
    words = [word for setting in settings for word in ("--set", setting)]
    command = ["train", "--config", "tiny", "--data", str(arguments.data.resolve()), "--output", str(run.resolve())]
    return fork(command_line([*command, "--steps", str(steps), *words]), Path.cwd(), arguments.output / "log")


def kill_after_checkpoint(arguments: argparse.Namespace) -> Path:
    """Start a training, kill it as soon as its checkpoint is complete, and return its folder."""
    killed = arguments.output / "killed"
    child = start(arguments, killed, STEPS["resume"])
    while not (killed / "checkpoints" / f"step-{CHECKPOINT_STEP:08}").exists():
        if child.wait(0.01):
            raise SystemExit(f"the training ended before its checkpoint: {child.stderr()}")
    child.send(signal.SIGKILL)
    child.end()
    return killed


def digest(run: Path) -> str:
    """Return a checksum of the final weights and of the losses of the last steps."""
    losses = {row["step"]: row["loss"] for row in read_rows(run / "metrics.jsonl") if "loss" in row}
    weights = (run / "model" / "model.safetensors").read_bytes()
    return hashlib.sha256(weights + json.dumps(sorted(losses.items())).encode()).hexdigest()


if __name__ == "__main__":
    began = time.monotonic()
    code = main()
    print(f"{time.monotonic() - began:,.0f} s")
    sys.exit(code)
