"""A fault campaign: commands are killed, starved and fed damaged files, and repeated; what they write must not differ.

Each fault is drawn from the seed and its number, so that one can be repeated with --only. A tiny corpus and model are
made first, and every command runs once undisturbed. The verdict of a fault is

    same       the repeated command wrote the bytes of the undisturbed run
    message    it was refused with one message, and nothing was lost: with the fault undone, the same command succeeds
    unchecked  a damaged file of the user without a checksum was read as it is, or one that the command does not read
    lost, silent, traceback, hang: defects. Damage accepted with exit code 0 is `silent`.

    python scripts/chaos.py --faults 1000 --seed 1 [--seconds 1800] [--only 17] [--commands train fill-mask]

Prints a table of commands and faults, writes every fault to chaos.jsonl, and exits with 1 when there is a defect.
Linux only; as root it also mounts small file systems in memory, for a full disk and for a folder without permission.
"""

import argparse
import contextlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos_commands import COMMANDS, Command
from chaos_faults import FAULTS, applicable
from chaos_process import import_packages
from chaos_trial import DEFECTS, VERDICTS, Bench, Defect, Trial

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Outcome:
    """What one fault led to."""

    number: int
    seed: int
    command: str
    fault: str
    verdict: str
    detail: str
    processes: list[dict[str, Any]]
    """Exit codes and last lines, and what was done, in order."""
    seconds: float


def main() -> int:
    arguments = parse_arguments()
    names = arguments.commands or [command.name for command in COMMANDS]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background would let commands ignore it
    if set(names) <= {"vocab", "make-data"}:  # without torch
        import_packages(("bert_pretrain.cli", "bert_pretrain.vocab", "bert_pretrain.make_data"), ())
    else:
        import_packages()
    with _work_folder(arguments.folder) as folder:
        began = time.monotonic()
        bench = Bench(folder)
        bench.prepare(names)
        print(f"prepared in {time.monotonic() - began:.0f} s; faults from seed {arguments.seed}", flush=True)
        numbers = arguments.only or range(arguments.faults)
        outcomes = []
        with arguments.output.open("w", encoding="utf-8") as file:
            for outcome in campaign(bench, names, numbers, arguments.seed, arguments.seconds):
                outcomes.append(outcome)
                file.write(json.dumps(asdict(outcome), ensure_ascii=False) + "\n")
                file.flush()
                if outcome.verdict in DEFECTS or arguments.only:
                    _print(outcome, whole=bool(arguments.only))
    print("\n".join(table(outcomes)))
    num_defects = sum(outcome.verdict in DEFECTS for outcome in outcomes)
    print(f"\n{len(outcomes):,} faults in {time.monotonic() - began:,.0f} s, {num_defects} defects: {arguments.output}")
    return int(num_defects > 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--faults", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="the numbers of single faults, to repeat them")
    parser.add_argument("--commands", nargs="+", choices=[command.name for command in COMMANDS], help="all by default")
    parser.add_argument("--folder", type=Path, help="a new folder to work in, which is kept; else a temporary one")
    parser.add_argument("--output", type=Path, default=Path("chaos.jsonl"), help="a line per fault")
    return parser.parse_args()


@contextlib.contextmanager
def _work_folder(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True)
        yield folder.resolve()
        return
    where = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    path = Path(tempfile.mkdtemp(prefix="chaos-", dir=where))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def campaign(
    bench: Bench, names: Sequence[str], numbers: Iterable[int], seed: int, seconds: float
) -> Iterator[Outcome]:
    """Yield the outcome of each fault, until the time is over."""
    end = time.monotonic() + seconds
    commands = [command for command in COMMANDS if command.name in names]
    for number in numbers:
        if time.monotonic() > end:
            return
        yield try_fault(bench, commands, number, seed)


def choose(commands: Sequence[Command], number: int, seed: int) -> tuple[Command, str, random.Random]:
    """Return the command and the fault of a number, and what all further choices are drawn from."""
    draw = random.Random(f"{seed} {number}")
    command = draw.choices(commands, [command.share for command in commands])[0]
    weights = applicable(command.name, command.ranks)
    return command, draw.choices(list(weights), list(weights.values()))[0], draw


def try_fault(bench: Bench, commands: Sequence[Command], number: int, seed: int) -> Outcome:
    """Try the fault of a number, and return its outcome."""
    command, fault, draw = choose(commands, number, seed)
    trial = Trial(bench, command, draw)
    began = time.monotonic()
    try:
        verdict, detail = FAULTS[fault][0](trial), ""
    except Defect as defect:
        verdict, detail = defect.verdict, str(defect)
    return Outcome(number, seed, command.name, fault, verdict, detail, trial.log, time.monotonic() - began)


def _print(outcome: Outcome, *, whole: bool) -> None:
    print(f"{outcome.number}: {outcome.command}, {outcome.fault}: {outcome.verdict}: {outcome.detail}", flush=True)
    for entry in outcome.processes if whole else ():
        print("   ", {key: value for key, value in entry.items() if key != "said"})
        print("\n".join(f"        {line}" for line in entry.get("said", ())))


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of a Markdown table: each command and each fault with the counts of its verdicts."""
    lines = [f"| | {' | '.join(VERDICTS)} |", "|---|" + "---:|" * len(VERDICTS)]
    for field, names in (("command", [command.name for command in COMMANDS]), ("fault", list(FAULTS))):
        for name in names:
            counts = Counter(outcome.verdict for outcome in outcomes if getattr(outcome, field) == name)
            if counts:
                lines.append(f"| {name} | {' | '.join(str(counts[verdict] or '') for verdict in VERDICTS)} |")
    counts = Counter(outcome.verdict for outcome in outcomes)
    return [*lines, f"| all | {' | '.join(str(counts[verdict]) for verdict in VERDICTS)} |"]


if __name__ == "__main__":
    sys.exit(main())
