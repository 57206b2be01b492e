"""Inject faults into commands: kill them, limit memory or disk space, damage their files. Then repeat the command.

A tiny corpus and model are made, and every command runs once without a fault, as the reference. A fault depends on the
seed and its number only, so `--only` repeats it. The verdict of a fault is one of

    same       the repeated command wrote the same bytes as the reference
    message    the command ended with one error message, and succeeded after the fault was undone
    unchecked  the damaged file is an input of the user without a checksum, or is not read by the command
    lost       defect: the repeated command fails
    silent     defect: the exit code is 0, but outputs differ from the reference or damage was not repaired
    traceback  defect: a traceback, an unexpected exit code, or not exactly one error message
    hang       defect: the command does not end

    python scripts/chaos.py --faults 1000 --seed 1 [--seconds 1800] [--only 17] [--commands train fill-mask]

Prints a table, writes every fault to chaos.jsonl, and exits with 1 if there is a defect. Linux only. The fault "disk
full" needs root, to mount a tmpfs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import chaos_trial
from chaos_process import Action, import_packages, kill_at, limit, may_mount, remount, small_disk
from chaos_trial import COMMANDS, DEFECTS, HANG, LOST, MESSAGE, SAME, SILENT, UNCHECKED, Command, Defect, Trial
from measure import Row, append_rows, parser_of, table

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


# ── signals and limits ──


def signal_at_event(trial: Trial) -> str:
    """Send a signal at a random file event of the process."""
    number = trial.draw.choice(SIGNALS)
    plant = kill_at(trial.folder, trial.draw_event(), number)
    return _run_with_signal(trial, number, plant=plant)


def signal_at_time(trial: Trial) -> str:
    number = trial.draw.choice(SIGNALS)
    return _run_with_signal(trial, number, delay=trial.draw.uniform(0, 1.1) * trial.reference.seconds)


def _run_with_signal(trial: Trial, number: int, *, plant: Action | None = None, delay: float | None = None) -> str:
    """Plant a signal in a rank or send it after a delay. Check the rank's exit code, and repeat the command.

    The process may have ended before the signal. A rank may also get SIGTERM, after the failure of another.
    """
    ranks = trial.command.ranks
    rank = trial.draw.randrange(ranks)
    trial.reset()
    children = trial.start(plant, rank=rank)
    if delay is not None:
        children[rank].wait(delay)
        children[rank].send(number)
    trial.wait(children)
    if ranks == 1:
        trial.judge(children[0], (0, -number, 128 + number))
    elif number != signal.SIGKILL:
        trial.judge(children[rank], (0, -number, 128 + number, -signal.SIGTERM, 128 + signal.SIGTERM))
    return trial.repeat()


def two_at_once(trial: Trial) -> str:
    """Run the command twice at the same time, with the same output."""
    delay = trial.draw.uniform(0, 0.8) * trial.reference.seconds
    trial.reset()
    (first,) = trial.start()
    first.wait(delay)
    trial.log.append({"second after": delay})
    (second,) = trial.start()
    trial.wait([first, second])
    for child in (first, second):
        trial.judge(child, (0, 2))
    if first.code and second.code:
        raise Defect(LOST, "both commands were refused")
    return trial.repeat()


def few_descriptors(trial: Trial) -> str:
    """Limit the number of open files. With fewer than six, Python itself cannot import a module."""
    return _run_limited(trial, limit("RLIMIT_NOFILE", trial.draw.randint(6, 40)))


def little_memory(trial: Trial) -> str:
    """Limit the memory. C++, Rust and the dynamic loader abort the process if they cannot allocate."""
    codes = (0, 1, 2, 127, -signal.SIGABRT)
    return _run_limited(trial, limit("RLIMIT_AS", int(2 ** trial.draw.uniform(20, 28))), codes)


def _run_limited(trial: Trial, plant: Action, codes: Sequence[int] = (0, 1, 2)) -> str:
    """Run the command with a limit, and repeat it without."""
    trial.reset()
    child = trial.run(codes, plant)
    different = [name for name in trial.differences(child) if name != "standard output"]
    if child.code == 0 and different:
        raise Defect(SILENT, f"other bytes: {', '.join(different[:4])}")
    trial.repeat()
    return MESSAGE if child.code in (1, 2) else SAME


def disk_full(trial: Trial) -> str:
    with small_disk(trial.folder):
        trial.reset()
        disk = os.statvfs(trial.folder)
        used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        remount(trial.folder, f"size={used + 4096 + int(trial.draw.uniform(0, 1.1) * trial.reference.num_bytes)}")
        child = trial.run((0, 2))
        remount(trial.folder)
        trial.repeat()
        return MESSAGE if child.code else SAME


# ── damaged files ──


def damage_input(trial: Trial) -> str:
    trial.reset()
    inputs = (trial.folder / name for name in trial.command.inputs)
    return _run_damaged(trial, [file for path in inputs for file in chaos_trial.files_of(path)])


def damage_unfinished(trial: Trial) -> str:
    """Kill the command, and damage a file that it has written."""
    trial.reset()
    trial.wait(trial.start(kill_at(trial.folder, trial.draw_event())))
    return _run_damaged(trial, trial.written())


def damage_finished(trial: Trial) -> str:
    trial.reset(finished=True)
    trial.verifies = True
    return _run_damaged(trial, trial.written())


def damage(path: Path, draw: random.Random) -> str:
    """Damage a file, and return the kind of damage."""
    content = path.read_bytes()
    how = draw.choice(("bit", "bit", "bit", "cut", "cut", "zeros", "empty", "deleted", "longer"))
    place = draw.randrange(max(1, len(content)))
    if how == "deleted":
        path.unlink()
    elif how in ("empty", "cut"):
        path.write_bytes(b"" if how == "empty" else content[:place])
    elif how == "longer":
        path.write_bytes(content + draw.randbytes(draw.randint(1, 64)))
    elif content:
        changed = bytearray(content)
        if how == "bit":
            changed[place] ^= 1 << draw.randrange(8)
        else:
            end = min(len(content), place + 4096)
            changed[place:end] = bytes(end - place)
        path.write_bytes(changed)
    return how


def _run_damaged(trial: Trial, files: Sequence[Path]) -> str:
    """Damage one of the files, run the command, and check that it detects the damage."""
    if not files:
        return trial.repeat()
    file = trial.draw.choice(files)
    name = file.relative_to(trial.folder)
    undamaged = trial.bench.logs / "undamaged"
    shutil.copy2(file, undamaged)
    how = f"{damage(file, trial.draw)} {name}"
    trial.log.append({"damage": how})
    damaged = file.read_bytes() if file.exists() else None
    try:
        child = trial.run((0, 1, 2))
    except Defect as defect:
        if defect.verdict == HANG and name.suffix == ".yaml" and any(trial.folder.rglob("metrics.jsonl")):
            return UNCHECKED  # the damaged configuration is valid, and asks for a longer training
        raise
    if child.code:
        return _repeat_undamaged(trial, file, undamaged, how)
    differences = trial.differences(child)
    if differences and name.parts[0] in chaos_trial.USER_FILES:
        return UNCHECKED
    after = file.read_bytes() if file.exists() else None
    is_unrepaired = after == damaged != undamaged.read_bytes()
    if (
        is_unrepaired
        and (trial.bench.finished(trial.command) / name).exists()
        and name.parts[0] in trial.command.outputs
        and set(differences) <= {str(name)}
    ):
        if chaos_trial.NOT_READ_BACK.search(str(name)) or _is_older_checkpoint(trial, file):
            return UNCHECKED
        if any(line.startswith("warning: ") and file.name in line for line in child.stdout().splitlines()):
            return MESSAGE
        raise Defect(SILENT, f"{how}: not repaired, exit code 0")
    if differences:
        raise Defect(SILENT, f"{how}: accepted, other bytes: {', '.join(differences[:4])}")
    return SAME


def _is_older_checkpoint(trial: Trial, file: Path) -> bool:
    """Return whether a file is in a checkpoint that is not read: a finished run reads none, others the last one."""
    checkpoint = next((path for path in file.parents if path.parent.name == "checkpoints"), None)
    return checkpoint is not None and (trial.verifies or checkpoint != max(checkpoint.parent.glob("step-*")))


def _repeat_undamaged(trial: Trial, file: Path, undamaged: Path, how: str) -> str:
    """Restore a file after an error message, and check that the command succeeds."""
    if file.parent.is_dir():
        shutil.copy2(undamaged, file)  # with its times, which are part of the identity of an input
    try:
        trial.repeat()
    except Defect as defect:
        if file.suffix == ".yaml" and "was written by another command or configuration" in str(defect):
            return UNCHECKED  # the damaged configuration was valid, and the first stages have used it
        raise Defect(defect.verdict, f"{how}; after it is undone: {defect}") from None
    return MESSAGE


# Each function returns a verdict or raises `Defect`. The number is the weight with which it is drawn.
FAULTS: dict[str, tuple[Callable[[Trial], str], float]] = {
    "signal at a file event": (signal_at_event, 4),
    "signal at a moment": (signal_at_time, 2),
    "damaged input": (damage_input, 4),
    "damaged, unfinished": (damage_unfinished, 4),
    "damaged, finished": (damage_finished, 3),
    "two at once": (two_at_once, 1),
    "few descriptors": (few_descriptors, 1),
    "little memory": (little_memory, 1),
    "disk full": (disk_full, 2),
}


# ── the campaign ──


def main() -> int:
    arguments = parse_arguments()
    commands = [command for command in COMMANDS if command.name in arguments.commands]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell runs this in the background
    if {"vocab", "make-data"}.issuperset(arguments.commands):  # without torch
        import_packages(("bert_pretrain.cli", "bert_pretrain.vocab", "bert_pretrain.make_data"), ())
    else:
        import_packages()
    memory = Path("/dev/shm")
    # Not a TemporaryDirectory: a fork would remove it at its exit.
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=memory if memory.is_dir() else None))
    arguments.output.write_bytes(b"")
    outcomes: list[Row] = []
    try:
        bench = chaos_trial.Bench(folder.resolve())
        bench.prepare(arguments.commands)
        end = time.monotonic() + arguments.seconds
        for number in arguments.only or range(arguments.faults):
            if time.monotonic() > end:
                break
            outcome = try_fault(bench, commands, number, arguments.seed)
            outcomes.append(outcome)
            append_rows(arguments.output, [outcome])
            if outcome["verdict"] in DEFECTS or arguments.only:
                _print(outcome, with_output=bool(arguments.only))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(verdicts_table(outcomes))
    num_defects = sum(outcome["verdict"] in DEFECTS for outcome in outcomes)
    print(f"\n{len(outcomes):,} faults, {num_defects} defects, written to {arguments.output}")
    return int(num_defects > 0)


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--faults", type=int, default=1000, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument(
        "--only",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of the faults to repeat",
    )
    names = [command.name for command in COMMANDS]
    parser.add_argument(
        "--commands",
        nargs="+",
        choices=names,
        default=names,
        help="all by default",
    )
    parser.add_argument("--output", type=Path, default=Path("chaos.jsonl"), help="JSON lines, one per fault")
    return parser.parse_args()


def choose(commands: Sequence[Command], number: int, seed: int) -> tuple[Command, str, random.Random]:
    """Return the command and the fault of a number, and the random generator for all further choices."""
    draw = random.Random(f"{seed} {number}")
    command = draw.choices(commands, [command.share for command in commands])[0]
    weights = {name: weight for name, (_, weight) in FAULTS.items()}
    if command.ranks > 1:  # the other faults are for a single process
        weights = {name: weight for name, weight in weights.items() if name.startswith("signal at ")}
    elif not may_mount():
        del weights["disk full"]
    return command, draw.choices(list(weights), list(weights.values()))[0], draw


def try_fault(bench: chaos_trial.Bench, commands: Sequence[Command], number: int, seed: int) -> Row:
    command, fault, draw = choose(commands, number, seed)
    trial, began = Trial(bench, command, draw), time.monotonic()
    try:
        verdict, detail = FAULTS[fault][0](trial), ""
    except Defect as defect:
        verdict, detail = defect.verdict, str(defect)
    return {
        "number": number,
        "seed": seed,
        "command": command.name,
        "fault": fault,
        "verdict": verdict,
        "detail": detail,
        "processes": trial.log,
        "seconds": time.monotonic() - began,
    }


def _print(outcome: Row, *, with_output: bool) -> None:
    print("{number}: {command}, {fault}: {verdict}: {detail}".format(**outcome), flush=True)
    for entry in outcome["processes"] if with_output else ():
        print("    " + json.dumps(entry, ensure_ascii=False, indent=4).replace("\n", "\n    "))


def verdicts_table(outcomes: Sequence[Row]) -> str:
    """Return a Markdown table with the counts of verdicts of each command and each fault."""
    groups = [("command", command.name) for command in COMMANDS] + [("fault", name) for name in FAULTS]
    rows = []
    for key, name in [*groups, ("all", "all")]:
        counts = Counter(outcome["verdict"] for outcome in outcomes if outcome.get(key, "all") == name)
        if counts:
            rows.append([name, *(counts[verdict] or "" for verdict in chaos_trial.VERDICTS)])
    return table(["", *chaos_trial.VERDICTS], rows)


if __name__ == "__main__":
    sys.exit(main())
