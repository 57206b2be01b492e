"""A fault campaign: commands are killed, starved and fed damaged files, and repeated; what they write must not differ.

Each fault is drawn from the seed and its number, so that one can be repeated with --only. A tiny corpus and model are
made first, and every command runs once undisturbed. The verdict of a fault is

    same       the repeated command wrote the bytes of the undisturbed run
    message    it was refused with one message, and nothing was lost: with the fault undone, the same command succeeds
    unchecked  a damaged file of the user without a checksum was read as it is, or one that the command does not read
    lost, silent, traceback, hang: defects. Damage accepted with exit code 0 is `silent`.

    python scripts/chaos.py --faults 1000 --seed 1 [--seconds 1800] [--only 17] [--commands train fill-mask]

Prints a table of commands and faults, writes every fault to chaos.jsonl, and exits with 1 when there is a defect.
Linux only; as root it also mounts small file systems in memory, for a full disk.
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
from typing import Any

import chaos_trial
from chaos_process import Action, Child, import_packages, kill_at, limit, may_mount, remount, small_disk
from chaos_trial import (
    COMMANDS,
    DEFECTS,
    HANG,
    LOST,
    MESSAGE,
    NOT_READ_BACK,
    SAME,
    SILENT,
    UNCHECKED,
    Command,
    Defect,
    Trial,
    files_of,
)

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
ANOTHER_CONFIGURATION = "was written by another command or configuration"


# ── signals and limits ──


def _repeat_after(trial: Trial, child: Child, number: int) -> str:
    """Judge a process that got a signal, and repeat: it may have ended before the signal, or not yet begun.

    A rank may have got SIGTERM after the end of another, too.
    """
    numbers = [number] if trial.command.ranks == 1 else [number, signal.SIGTERM]
    if trial.command.ranks == 1 or number != signal.SIGKILL:
        trial.judge(child, (0, *(code for one in numbers for code in (-one, 128 + one))))
    return trial.repeat()


def signal_at_event(trial: Trial) -> str:
    """A signal at the n-th file event of the process itself."""
    number, event, rank = trial.draw.choice(SIGNALS), trial.event(), trial.draw.randrange(trial.command.ranks)
    trial.reset()
    children = trial.start(kill_at(trial.now, event, number), rank=rank)
    trial.wait(children)
    return _repeat_after(trial, children[rank], number)


def signal_at_time(trial: Trial) -> str:
    """A signal from outside, at a random moment."""
    number, rank = trial.draw.choice(SIGNALS), trial.draw.randrange(trial.command.ranks)
    delay = trial.draw.uniform(0, 1.1) * trial.reference.seconds
    trial.reset()
    children = trial.start()
    children[rank].wait(delay)
    children[rank].send(number)
    trial.wait(children)
    return _repeat_after(trial, children[rank], number)


def two_at_once(trial: Trial) -> str:
    """Two equal commands on one output."""
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
    """A low limit of open files; with fewer than six, Python itself cannot import a module."""
    return _survives(trial, limit("RLIMIT_NOFILE", trial.draw.randint(6, 40)))


def little_memory(trial: Trial) -> str:
    """A low limit of memory; where C++, Rust or the loader of libraries cannot allocate, they end the process."""
    return _survives(trial, limit("RLIMIT_AS", int(2 ** trial.draw.uniform(20, 28))), (0, 1, 2, 127, -signal.SIGABRT))


def _survives(trial: Trial, plant: Action, codes: Sequence[int] = (0, 1, 2)) -> str:
    """Run with a fault of the process; its outputs, or those of the repeated command, must be the undisturbed ones."""
    trial.reset()
    child = trial.run(codes, plant)
    unequal = [name for name in trial.differences(child) if name != "standard output"]
    if child.code == 0 and unequal:
        raise Defect(SILENT, f"other bytes: {', '.join(unequal[:4])}")
    trial.repeat()
    return MESSAGE if child.code in (1, 2) else SAME


# ── disks ──


def disk_full(trial: Trial) -> str:
    """A disk that is full before the end."""
    with small_disk(trial.now):
        trial.reset()
        found = os.statvfs(trial.now)
        used = (found.f_blocks - found.f_bfree) * found.f_frsize
        remount(trial.now, f"size={used + 4096 + int(trial.draw.uniform(0, 1.1) * trial.reference.num_bytes)}")
        child = trial.run((0, 2))
        remount(trial.now)
        trial.repeat()
        return MESSAGE if child.code else SAME


# ── damaged files ──


def damage_input(trial: Trial) -> str:
    """A damaged file among the inputs."""
    trial.reset()
    return _damaged(trial, [file for name in trial.command.needs for file in files_of(trial.now / name)])


def damage_unfinished(trial: Trial) -> str:
    """A killed command, and a damaged file among those it has left."""
    trial.reset()
    trial.wait(trial.start(kill_at(trial.now, trial.event())))
    return _damaged(trial, trial.written())


def damage_finished(trial: Trial) -> str:
    """A damaged file in a finished output, and the same command again."""
    trial.reset(finished=True)
    trial.checks = True
    return _damaged(trial, trial.written())


def damage(path: Path, draw: random.Random) -> str:
    """Damage a file, and return how."""
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


def _damaged(trial: Trial, files: Sequence[Path]) -> str:
    """Damage one of the files, run the command, and judge whether it has noticed."""
    if not files:
        return trial.repeat()
    file = trial.draw.choice(files)
    name = file.relative_to(trial.now)
    original, status = file.read_bytes(), file.stat()
    how = f"{damage(file, trial.draw)} {name}"
    trial.log.append({"damage": how})
    damaged = file.read_bytes() if file.exists() else None
    try:
        child = trial.run((0, 1, 2))
    except Defect as defect:
        if defect.verdict == HANG and name.suffix == ".yaml" and any(trial.now.rglob("metrics.jsonl")):
            return UNCHECKED  # another configuration was read, and its longer training has begun
        raise
    if child.code:
        return _undone(trial, file, original, (status.st_atime_ns, status.st_mtime_ns), how)
    differences = trial.differences(child)
    if differences and name.parts[0] in chaos_trial.USER_FILES:
        return UNCHECKED
    found = file.read_bytes() if file.exists() else None
    is_left = damaged != original and found == damaged and (trial.bench.finished(trial.command) / name).exists()
    if is_left and name.parts[0] in trial.command.outputs and set(differences) <= {str(name)}:
        if NOT_READ_BACK.search(str(name)) or _is_older_checkpoint(trial, file):
            return UNCHECKED
        raise Defect(SILENT, f"{how}: left as it is, exit 0")
    if differences:
        raise Defect(SILENT, f"{how}: accepted, other bytes: {', '.join(differences[:4])}")
    return SAME


def _is_older_checkpoint(trial: Trial, file: Path) -> bool:
    """Whether a file is in a checkpoint that is not read: of a finished run any, else not the last."""
    checkpoint = next((path for path in file.parents if path.parent.name == "checkpoints"), None)
    return checkpoint is not None and (trial.checks or checkpoint != max(checkpoint.parent.glob("step-*")))


def _undone(trial: Trial, file: Path, original: bytes, times: tuple[int, int], how: str) -> str:
    """After a message: with the file as it was, the command must succeed."""
    if file.parent.is_dir():
        file.write_bytes(original)
        os.utime(file, ns=times)  # part of the identity of an input
    try:
        trial.repeat()
    except Defect as defect:
        if file.suffix == ".yaml" and ANOTHER_CONFIGURATION in str(defect):
            return UNCHECKED  # a valid configuration, by which the first stages have written
        raise Defect(defect.verdict, f"{how}; after it is undone: {defect}") from None
    return MESSAGE


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
"""Each returns a verdict or raises `Defect`; the number is how often it is drawn."""


# ── the campaign ──


def main() -> int:
    arguments = parse_arguments()
    commands = [command for command in COMMANDS if command.name in (arguments.commands or command.name)]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background would let commands ignore it
    if {command.name for command in commands} <= {"vocab", "make-data"}:  # without torch
        import_packages(("bert_pretrain.cli", "bert_pretrain.vocab", "bert_pretrain.make_data"), ())
    else:
        import_packages()
    memory = Path("/dev/shm")
    # Not a TemporaryDirectory, which the forks would remove at their exit.
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=memory if memory.is_dir() else None))
    outcomes: list[dict[str, Any]] = []
    try:
        bench = chaos_trial.Bench(folder.resolve())
        bench.prepare([command.name for command in commands])
        end = time.monotonic() + arguments.seconds
        with arguments.output.open("w", encoding="utf-8") as file:
            for number in arguments.only or range(arguments.faults):
                if time.monotonic() > end:
                    break
                outcomes.append(try_fault(bench, commands, number, arguments.seed))
                print(json.dumps(outcomes[-1], ensure_ascii=False), file=file, flush=True)
                if outcomes[-1]["verdict"] in DEFECTS or arguments.only:
                    _print(outcomes[-1], whole=bool(arguments.only))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(table(outcomes)))
    num_defects = sum(outcome["verdict"] in DEFECTS for outcome in outcomes)
    print(f"\n{len(outcomes):,} faults, {num_defects} defects: {arguments.output}")
    return int(num_defects > 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--faults", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="the numbers of single faults, to repeat them")
    parser.add_argument("--commands", nargs="+", choices=[command.name for command in COMMANDS], help="all by default")
    parser.add_argument("--output", type=Path, default=Path("chaos.jsonl"), help="a line per fault")
    return parser.parse_args()


def choose(commands: Sequence[Command], number: int, seed: int) -> tuple[Command, str, random.Random]:
    """Return the command and the fault of a number, and what all further choices are drawn from."""
    draw = random.Random(f"{seed} {number}")
    command = draw.choices(commands, [command.share for command in commands])[0]
    weights = {name: weight for name, (_, weight) in FAULTS.items()}
    if command.ranks > 1:  # the others are those of one process
        weights = {name: weight for name, weight in weights.items() if name.startswith("signal at ")}
    elif not may_mount():
        del weights["disk full"]
    return command, draw.choices(list(weights), list(weights.values()))[0], draw


def try_fault(bench: chaos_trial.Bench, commands: Sequence[Command], number: int, seed: int) -> dict[str, Any]:
    """Try the fault of a number, and return its outcome."""
    command, fault, draw = choose(commands, number, seed)
    trial, began = Trial(bench, command, draw), time.monotonic()
    try:
        verdict, detail = FAULTS[fault][0](trial), ""
    except Defect as defect:
        verdict, detail = defect.verdict, str(defect)
    found = {"number": number, "seed": seed, "command": command.name, "fault": fault, "verdict": verdict}
    return {**found, "detail": detail, "processes": trial.log, "seconds": time.monotonic() - began}


def _print(outcome: dict[str, Any], *, whole: bool) -> None:
    print("{number}: {command}, {fault}: {verdict}: {detail}".format(**outcome), flush=True)
    for entry in outcome["processes"] if whole else ():
        print("   ", {key: value for key, value in entry.items() if key != "said"})
        print("\n".join(f"        {line}" for line in entry.get("said", ())))


def table(outcomes: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table: each command and each fault with the counts of its verdicts."""
    lines = [f"| | {' | '.join(chaos_trial.VERDICTS)} |", "|---|" + "---:|" * len(chaos_trial.VERDICTS)]
    groups = [("command", command.name) for command in COMMANDS] + [("fault", name) for name in FAULTS]
    for key, name in [*groups, (None, "all")]:
        counts = Counter(outcome["verdict"] for outcome in outcomes if key is None or outcome[key] == name)
        if counts:
            lines.append(f"| {name} | {' | '.join(str(counts[verdict] or '') for verdict in chaos_trial.VERDICTS)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
