"""The faults: each a function that plants one, repeats the command, and returns a verdict or raises `Defect`."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence

from chaos_commands import files_of
from chaos_damage import damage_finished, damage_input, damage_unfinished
from chaos_process import Action, Child, at_file_event, closed_pipe, jumping_clock, limits
from chaos_trial import (
    LOST,
    MESSAGE,
    NOT_READ_BACK,
    SAME,
    SILENT,
    UNCHECKED,
    Defect,
    Trial,
    may_mount,
    small_disk,
)

Fault = Callable[[Trial], str]

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
START_SECONDS = 1.2
"""Within which a real start of the interpreter is struck; the import of torch is a part of it."""
FINETUNE_WORK = "tuned.partial"
METRICS, FIGURES_LOST = "run/metrics.jsonl", "the figures before this step are lost"


def _codes(number: int) -> tuple[int, ...]:
    """Return the exit codes that a signal may lead to.

    The command may have finished before it; before Python has installed its handlers it has its default action.
    """
    return (0, -number, 128 + number)


def _judge_struck(trial: Trial, child: Child, number: int) -> None:
    """Check how a process has ended that got a signal; a rank may have got SIGTERM after the end of another, too."""
    if trial.command.ranks == 1:
        trial.judge(child, _codes(number))
    elif number != signal.SIGKILL:
        trial.judge(child, (*_codes(number), *_codes(signal.SIGTERM)))


def signal_at_event(trial: Trial) -> str:
    """A signal at the n-th file event of the process itself."""
    number, event = trial.draw.choice(SIGNALS), trial.event()
    rank = trial.draw.randrange(trial.command.ranks)
    trial.reset()
    plant = at_file_event(trial.now, event, lambda: os.kill(os.getpid(), number))
    children = trial.start(plant, rank=rank)
    trial.wait(children)
    _judge_struck(trial, children[rank], number)
    return trial.repeat()


def signal_at_time(trial: Trial) -> str:
    """A signal from outside, at a random moment."""
    number = trial.draw.choice(SIGNALS)
    rank = trial.draw.randrange(trial.command.ranks)
    delay = trial.draw.uniform(0, 1.1) * trial.reference.seconds
    trial.reset()
    children = trial.start()
    children[rank].wait(delay)
    children[rank].send(number)
    trial.wait(children)
    _judge_struck(trial, children[rank], number)
    return trial.repeat()


def signal_at_start(trial: Trial) -> str:
    """A signal to a real start of the interpreter, while it imports."""
    number = trial.draw.choice(SIGNALS)
    delay = trial.draw.uniform(0, START_SECONDS)
    trial.reset()
    children = trial.start(execute=True)
    children[0].wait(delay)
    children[0].send(number)
    trial.wait(children)
    if not _is_before_the_package(children[0].stderr()):
        trial.judge(children[0], _codes(number))
    return trial.repeat()


def _is_before_the_package(errors: str) -> bool:
    """Whether the interpreter was interrupted before it had come to the first line of the package."""
    return errors.rstrip().endswith("KeyboardInterrupt") and "bert_pretrain" not in errors


def two_signals(trial: Trial) -> str:
    """SIGINT or SIGTERM, and a second one soon after."""
    first, second = trial.draw.choices(SIGNALS[1:], k=2)
    delay, gap = trial.draw.uniform(0, 1.0) * trial.reference.seconds, trial.draw.uniform(0, 0.3)
    trial.reset()
    children = trial.start()
    for number, seconds in ((first, delay), (second, gap)):
        children[0].wait(seconds)
        children[0].send(number)
    trial.wait(children)
    trial.judge(children[0], (*_codes(first), *_codes(second)))
    return trial.repeat()


def underneath(trial: Trial) -> str:
    """Outputs deleted or changed while the command runs."""
    event, what = trial.event(), trial.draw.choice(("folder", "file", "change"))
    seed = trial.draw.random()
    outputs = [*trial.command.outputs, ".token-store", FINETUNE_WORK]
    struck_file = trial.bench.logs / "struck"
    struck_file.write_text("")

    def act() -> None:
        files = [file for output in outputs for file in files_of(trial.now / output)]
        if not files:
            return
        file = files[int(seed * len(files))]
        struck_file.write_text(file.relative_to(trial.now).as_posix())
        if what == "folder":
            top = trial.now / file.relative_to(trial.now).parts[0]
            shutil.rmtree(top) if top.is_dir() else top.unlink()
        elif what == "file":
            file.unlink()
        else:
            content = file.read_bytes()
            file.write_bytes(content[: int(seed * len(content))])

    trial.reset()
    child = trial.run((0, 1, 2), at_file_event(trial.now, event, act))
    differences = trial.differences(child)
    struck = [struck_file.read_text()]
    missing = [name for name in differences if name != "standard output" and not (trial.now / name).exists()]
    if child.code == 0 and missing and what == "folder":
        raise Defect(SILENT, f"its output was deleted, exit 0: without {', '.join(missing[:3])}")
    is_unread = NOT_READ_BACK.search(struck[0]) or trial.is_unread_checkpoint(struck[0])
    if child.code == 0 and differences == struck and is_unread:
        return UNCHECKED  # as in a finished output
    if what == "folder" or (child.code == 0 and what == "file"):
        return trial.repeat()
    return _after_message(trial)


def _after_message(trial: Trial) -> str:
    """The command said what is wrong; it may succeed now, or is refused until the output is removed."""
    child = trial.run((0, 1, 2))
    if child.code:
        trial.log.append({"then": "outputs removed"})
        for output in (*trial.command.outputs, ".token-store", FINETUNE_WORK):
            path = trial.now / output
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        trial.repeat()
        return MESSAGE
    differences = trial.differences(child)
    if differences == [METRICS] and FIGURES_LOST in child.stdout():
        return MESSAGE  # the run's folder was removed, all but a checkpoint that was being written
    if differences:
        raise Defect(SILENT, f"other bytes: {', '.join(differences[:4])}")
    return SAME


def two_at_once(trial: Trial) -> str:
    """Two equal commands on one output."""
    delay = trial.draw.uniform(0, 0.8) * trial.reference.seconds
    trial.reset()
    first = trial.start()
    first[0].wait(delay)
    trial.log.append({"second after": delay})
    second = trial.start()
    trial.wait([*first, *second])
    for child in (*first, *second):
        trial.judge(child, (0, 2))
    if first[0].code and second[0].code:
        raise Defect(LOST, "both commands were refused")
    return trial.repeat()


def pipe(trial: Trial) -> str:
    """The reader of the standard output leaves, or there is none."""
    after = trial.draw.choice((-1, 0, 0, trial.draw.randint(1, 400)))
    return _survives(trial, closed_pipe(after), (0, 1, 2, 141, -signal.SIGPIPE))


def clock(trial: Trial) -> str:
    """The clock jumps."""
    seconds = trial.draw.choice((-86400.0, -3600.0, -1.0, 1.0, 3600.0, 86400.0 * 400))
    is_monotonic = seconds > 0 and trial.draw.random() < 0.5
    return _survives(trial, jumping_clock(trial.draw.randint(0, 200), seconds, monotonic=is_monotonic), (0,))


def few_descriptors(trial: Trial) -> str:
    """A low limit of open files; with fewer than six, Python itself cannot import a module."""
    return _survives(trial, limits(RLIMIT_NOFILE=trial.draw.randint(6, 40)))


def little_memory(trial: Trial) -> str:
    """A low limit of memory; where C++, Rust or the loader of libraries cannot allocate, they end the process."""
    return _survives(trial, limits(RLIMIT_AS=int(2 ** trial.draw.uniform(20, 28))), (0, 1, 2, 127, -signal.SIGABRT))


def small_files(trial: Trial) -> str:
    """A limit of the size of files, which cuts writes short; what the process says is a file, too, and must fit."""
    return _survives(trial, limits(RLIMIT_FSIZE=int(2 ** trial.draw.uniform(13.5, 17))))


def _survives(trial: Trial, plant: Action, codes: Sequence[int] = (0, 1, 2)) -> str:
    """Run with a fault of the process; its outputs, or those of the repeated command, must be the undisturbed ones."""
    trial.reset()
    child = trial.run(codes, plant)
    if child.code == 0:
        unequal = [name for name in trial.differences(child) if name != "standard output"]
        if unequal:
            raise Defect(SILENT, f"other bytes: {', '.join(unequal[:4])}")
    trial.repeat()
    return MESSAGE if child.code in (1, 2) else SAME


def disk_full(trial: Trial) -> str:
    """A disk that is full before the end."""
    with small_disk(trial.now) as disk:
        trial.reset()
        share = trial.draw.uniform(0, 1.1)
        disk.resize(disk.used_bytes() + 4096 + int(share * trial.reference.num_bytes))
        child = trial.run((0, 2))
        disk.resize(1 << 30)
        trial.repeat()
        return MESSAGE if child.code else SAME


def read_only(trial: Trial) -> str:
    """A file system without permission to write, from the start or over an unfinished output."""
    with small_disk(trial.now) as disk:
        trial.reset()
        if trial.draw.random() < 0.5:
            plant = at_file_event(trial.now, trial.event(), lambda: os.kill(os.getpid(), signal.SIGKILL))
            trial.wait(trial.start(plant))
        disk.set_read_only(True)
        child = trial.run((0, 2))
        disk.set_read_only(False)
        if child.code == 0 and trial.differences(child):
            raise Defect(SILENT, "exit 0 on a file system that cannot be written")
        trial.repeat()
        return MESSAGE if child.code else SAME


def dask(trial: Trial) -> str:
    """A Dask scheduler, a worker or the command itself is struck; then the command is repeated without them."""
    who = trial.draw.choice(("worker", "worker", "scheduler", "command"))
    number = trial.draw.choice(SIGNALS)
    delay = trial.draw.uniform(0, 1.5) * trial.reference.seconds
    trial.reset()
    processes = _cluster(trial)
    address = processes["scheduler"].stdout().strip()
    arguments = (*trial.command.arguments[:-2], "--scheduler", address)
    processes["command"] = trial.bench.launcher.command(arguments, f"{len(trial.log)}-dask")
    try:
        processes["command"].wait(delay)
        processes[who].send(number)
        trial.log.append({"who": who, "signal": int(number)})
        trial.wait([processes["command"]])
    finally:
        for child in processes.values():
            child.end()
    trial.judge(processes["command"], (0, 2, *_codes(number)) if who == "command" else (0, 2))
    return trial.repeat()


def _cluster(trial: Trial) -> dict[str, Child]:
    """Start a scheduler and two workers in forks."""
    launcher = trial.bench.launcher

    def scheduler() -> None:
        import asyncio

        from distributed import Scheduler

        async def serve() -> None:
            async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as running:
                print(running.address, flush=True)
                await running.finished()

        asyncio.run(serve())

    def worker(address: str) -> None:
        import asyncio

        from distributed import Worker

        async def serve() -> None:
            async with Worker(address, nthreads=1, memory_limit=0, dashboard=False) as running:
                await running.finished()

        asyncio.run(serve())

    processes = {"scheduler": launcher.fork(scheduler, "scheduler")}
    deadline = time.monotonic() + 60
    while not (address := processes["scheduler"].stdout().strip()):
        if time.monotonic() > deadline or processes["scheduler"].wait(0.1):
            raise RuntimeError(f"no scheduler: {processes['scheduler'].stderr()}")
    for name in ("worker", "other worker"):
        processes[name] = launcher.fork(lambda: worker(address), name.replace(" ", "-"))
    return processes


_STAGES = ("vocab", "make-data")
FAULTS: dict[str, tuple[Fault, float]] = {
    "signal at a file event": (signal_at_event, 4),
    "signal at a moment": (signal_at_time, 2),
    "signal at the start": (signal_at_start, 0.7),
    "two signals": (two_signals, 0.7),
    "damaged input": (damage_input, 4),
    "damaged, unfinished": (damage_unfinished, 4),
    "damaged, finished": (damage_finished, 3),
    "changed underneath": (underneath, 2),
    "two at once": (two_at_once, 1),
    "pipe closed": (pipe, 0.7),
    "clock jumps": (clock, 1),
    "few descriptors": (few_descriptors, 1),
    "little memory": (little_memory, 1),
    "file size limited": (small_files, 1),
    "disk full": (disk_full, 2),
    "read-only": (read_only, 1),
    "Dask": (dask, 0.7),
}
"""Each with how often it is drawn."""


def applicable(trial_command: str, ranks: int) -> dict[str, float]:
    """Return the faults that a command can meet, and their weights."""
    weights = {name: weight for name, (_, weight) in FAULTS.items()}
    if trial_command not in _STAGES:
        del weights["Dask"]
    if ranks > 1:  # the others are those of one process
        weights = {name: weight for name, weight in weights.items() if name.startswith("signal at a ")}
    if not may_mount():
        del weights["disk full"], weights["read-only"]
    return weights
