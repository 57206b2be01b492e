"""One fault: a command in a fresh folder, what is done to it, and the verdict after the command is repeated."""

import contextlib
import ctypes
import functools
import os
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_commands import COMMANDS, Command, copy, digest, files_of, without_times, write_inputs
from chaos_process import Action, Child, Launcher, at_file_event

SAME, MESSAGE, UNCHECKED = "same", "message", "unchecked"
LOST, SILENT, TRACEBACK, HANG = "lost", "silent", "traceback", "hang"
VERDICTS = (SAME, MESSAGE, UNCHECKED, LOST, SILENT, TRACEBACK, HANG)
DEFECTS = (LOST, SILENT, TRACEBACK, HANG)
HANG_SECONDS = 150.0
RANKS_SECONDS = 20.0
"""Other ranks get this long to end after a SIGTERM; torchrun kills them then, too."""
UNCHECKED_INPUTS = ("text", "tiny.yaml", "lines.txt", "pairs.jsonl", "rows.jsonl", "tags.jsonl", "squad.json")
"""Files of the user, without a checksum: what is damaged there, but can be read, cannot be told from what was meant."""
NOT_READ_BACK = re.compile(r"\.(png|md|html|log|yaml)$|(^|/)\.")
"""For readers, and caches; of a finished run, the same command does not read the checkpoints either."""
_MS_RDONLY, _MS_REMOUNT, _MNT_DETACH = 1, 32, 2
_libc = ctypes.CDLL(None, use_errno=True)


class Defect(Exception):
    """What a fault has brought to light."""

    def __init__(self, verdict: str, detail: str) -> None:
        super().__init__(detail)
        self.verdict = verdict


@dataclass(frozen=True)
class Reference:
    """An undisturbed run of a command."""

    digest: dict[str, str]
    stdout: str
    seconds: float
    num_events: int
    num_bytes: int
    """Of its output."""


@dataclass
class Bench:
    """The prepared inputs, the references, and the folder in which all commands run."""

    folder: Path
    references: dict[str, Reference] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now, self.base, self.logs = (self.folder / name for name in ("now", "base", "logs"))
        for folder in (self.now, self.base, self.logs):
            folder.mkdir(parents=True)
        self.launcher = Launcher(self.now, self.logs)

    def prepare(self, names: Sequence[str]) -> None:
        """Write the inputs, run every command undisturbed, and keep what others need."""
        child = self.launcher.fork(lambda: write_inputs(self.base), "inputs")
        child.wait(HANG_SECONDS)
        if child.code:
            raise RuntimeError(child.stderr())
        for command in _in_order(names):
            self._refer(command, keep_only=command.name not in names)

    def _refer(self, command: Command, *, keep_only: bool) -> None:
        trial = Trial(self, command, random.Random(0))
        trial.reset()
        count = self.logs / "events"
        children = trial.start(plant=at_file_event(self.now, -1, lambda: None, log=count))
        trial.wait(children)
        if any(child.code for child in children):
            raise RuntimeError(f"{command.name} fails undisturbed:\n{children[0].stderr()}")
        made = sum(file.stat().st_size for file in trial.written())
        stdout = without_times(children[0].stdout())
        seconds = trial.seconds
        self.references[command.name] = Reference(
            digest(self.now, command.outputs), stdout, seconds, int(count.read_text()), made
        )
        shutil.copytree(self.now, self.finished(command), symlinks=True)
        for output in command.outputs:
            if not (self.base / output).exists():
                copy(self.now / output, self.base / output)
                if output == "run":
                    copy(self.now / "run" / "model", self.base / "model")

    def finished(self, command: Command) -> Path:
        """The folder after an undisturbed run."""
        return self.folder / "finished" / command.name.replace(" ", "_")


def _in_order(names: Sequence[str]) -> list[Command]:
    """Return commands and those that write what they need, so that each finds its inputs."""
    writers = {"vocab": "vocab", "data": "make-data", "run": "train", "model": "train", "tuned": "finetune classify"}
    by_name = {command.name: command for command in COMMANDS}
    found: dict[str, Command] = {}

    def add(name: str) -> None:
        if name not in found:
            for need in by_name[name].needs:
                if need in writers:
                    add(writers[need])
            found[name] = by_name[name]

    for name in names:
        add(name)
    return list(found.values())


@dataclass
class Trial:
    """A command under a fault; every random choice comes from `draw`."""

    bench: Bench
    command: Command
    draw: random.Random
    log: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    checks: bool = False
    """Whether the command is to check a finished output whole."""

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.command.arguments + (self.command.checks if self.checks else ())

    @property
    def now(self) -> Path:
        return self.bench.now

    @property
    def reference(self) -> Reference:
        return self.bench.references[self.command.name]

    def reset(self, *, finished: bool = False) -> None:
        """Empty the folder and put the inputs there, or what an undisturbed run has left."""
        empty(self.now)
        if finished:
            shutil.copytree(self.bench.finished(self.command), self.now, symlinks=True, dirs_exist_ok=True)
            return
        for name in self.command.needs:
            copy(self.bench.base / name, self.now / name)

    def written(self) -> list[Path]:
        """Return the files that are no inputs."""
        inputs = {self.now / name for name in self.command.needs}
        return [file for file in files_of(self.now) if not inputs & {file, *file.parents} and file.name != ".lock"]

    def event(self) -> int:
        """Draw the number of a file event of the command."""
        return self.draw.randint(1, self.reference.num_events)

    def start(self, plant: Action | None = None, *, rank: int = 0, execute: bool = False) -> list[Child]:
        """Start the command, or its ranks, of which one gets the fault."""
        name = f"{len(self.log)}"
        if execute:
            return [self.bench.launcher.execute(self.arguments, name)]
        port = str(_free_port())
        return [
            self.bench.launcher.command(
                self.arguments,
                f"{name}-{number}",
                plant=plant if number == rank else None,
                environment=_environment(number, self.command.ranks, port),
            )
            for number in range(self.command.ranks)
        ]

    def wait(self, children: Sequence[Child]) -> None:
        """Wait for all processes; when one of several ranks fails, end the others as torchrun does."""
        end = time.monotonic() + HANG_SECONDS
        running, is_stopping = list(children), False
        while running and time.monotonic() < end:
            one = running.pop(0)
            if not one.wait(0.1 if running else end - time.monotonic()):
                running.append(one)
            elif one.code and self.command.ranks > 1 and not is_stopping:
                is_stopping, end = True, time.monotonic() + RANKS_SECONDS
                for other in running:
                    other.send(signal.SIGTERM)
        if is_stopping:
            for child in running:
                child.end()
        self.seconds = max(child.age() for child in children)
        for child in children:
            is_hanging = child.code is None
            self.log.append({"code": "hang" if is_hanging else child.code, "said": last_lines(child)})
            child.end()
            if is_hanging:
                raise Defect(HANG, f"no end after {HANG_SECONDS:g} s")

    def judge(self, child: Child, codes: Sequence[int]) -> None:
        """Check how a process has ended: with one of the exit codes, and with one message if it is 1 or 2."""
        errors, code = child.stderr(), child.code
        said = errors + child.stdout()
        if "Traceback (most recent call last)" in said or "Exception ignored" in said:
            raise Defect(TRACEBACK, _last_line(errors))
        if code not in codes:
            raise Defect(TRACEBACK if code and code not in (1, 2) else LOST, f"exit {code}: {_last_line(errors)}")
        num_messages = len(re.findall(r"(?:^|\]\s*)error: ", errors, re.MULTILINE))  # perhaps behind a progress bar
        if code == 2 and num_messages != 1:
            raise Defect(TRACEBACK, f"{num_messages} messages: {_last_line(errors)}")

    def run(self, codes: Sequence[int] = (0,), plant: Action | None = None) -> Child:
        """Run the command to its end and judge it; of several ranks return the first."""
        children = self.start(plant)
        self.wait(children)
        self.judge(children[0], codes)
        return children[0]

    def differences(self, child: Child) -> list[str]:
        """Return which outputs are other than those of the undisturbed run."""
        found, expected = digest(self.now, self.command.outputs), self.reference.digest
        names = [name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]
        if self.command.prints_result and without_times(child.stdout()) != self.reference.stdout:
            names.append("standard output")
        return names

    def is_unread_checkpoint(self, name: str) -> bool:
        """Whether a file of a finished run is in a checkpoint: what reads it later checks it then."""
        return "/checkpoints/" in name and (self.now / name).parents[2].joinpath("manifest.json").exists()

    def repeat(self) -> str:
        """Run the command undisturbed; its outputs must be those of the undisturbed run."""
        children = self.start()
        self.wait(children)
        child = children[0]
        self.judge(child, (0, 1, 2))
        if child.code:
            raise Defect(LOST, f"the same command is refused: {_message(child)}")
        if differences := self.differences(child):
            raise Defect(SILENT, f"other bytes after the repeat: {', '.join(differences[:4])}")
        return SAME


def _environment(rank: int, size: int, port: str) -> Mapping[str, str]:
    if size == 1:
        return {}
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def last_lines(child: Child, count: int = 12) -> list[str]:
    """Return the end of what a process has said."""
    return [*child.stdout().splitlines()[-3:], *child.stderr().splitlines()[-count:]]


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "nothing was said"


def _message(child: Child) -> str:
    lines = child.stderr().splitlines()
    return next((line for line in lines if line.startswith("error:")), _last_line(child.stderr()))[:300]


def empty(folder: Path) -> None:
    """Remove everything in a folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@functools.cache
def may_mount() -> bool:
    """Whether this process may mount file systems."""
    return os.geteuid() == 0 and shutil.which("mount") is not None and _mount_works()


def _mount_works() -> bool:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        if _libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=64k"):
            return False
        _libc.umount2(folder.encode(), _MNT_DETACH)
    return True


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator["Disk"]:
    """Mount a file system in memory over an empty folder."""
    disk = Disk(folder)
    disk.mount(0, "size=1g")
    try:
        yield disk
    finally:
        _libc.umount2(str(folder).encode(), _MNT_DETACH)


@dataclass(frozen=True)
class Disk:
    """A file system in memory whose size and permissions can be changed."""

    folder: Path

    def mount(self, flags: int, options: str) -> None:
        if _libc.mount(b"tmpfs", str(self.folder).encode(), b"tmpfs", flags, options.encode()):
            raise OSError(ctypes.get_errno(), "mount")

    def used_bytes(self) -> int:
        found = os.statvfs(self.folder)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def resize(self, num_bytes: int) -> None:
        self.mount(_MS_REMOUNT, f"size={num_bytes}")

    def set_read_only(self, is_read_only: bool) -> None:
        self.mount(_MS_REMOUNT | (_MS_RDONLY if is_read_only else 0), "size=1g")
