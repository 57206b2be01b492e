"""The folders that commands write: their locks and manifests.

A command claims its folder with an identity: the inputs and settings with which its output may be resumed or reused.
While it runs, the identity is in `manifest.partial.json`. At the end, `manifest.json` replaces that file. The same
command can therefore resume, or find that its output is complete. If the identity differs, the command fails with a
list of the differences.
"""

import contextlib
import fcntl
import functools
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import IO, Any

from bert_pretrain import __version__
from bert_pretrain.errors import DataError, OutputError, UserError
from bert_pretrain.io.files import LOCK, did_you_mean, is_bookkeeping, read_json, write_checked_json

MANIFEST = "manifest.json"
PARTIAL = "manifest.partial.json"
FORMAT_VERSION = 1  # of the manifest of every kind of output
KINDS = ("vocab", "data", "run", "finetune")
# For each kind that another command reads: the command that writes it, and where `bert-pretrain run` puts it.
_WRITERS = {
    "vocab": ("vocab", ("vocab",)),
    "data": ("make-data", ("data", "data/*")),
    "run": ("train", ("train", "train/*")),
}
_OVERWRITE = "add --overwrite (the old folder is moved aside)"


class OutputState(Enum):
    """How far earlier runs of the same command came in an output folder."""

    NEW = "new"
    INCOMPLETE = "incomplete"
    COMPLETE = "complete"


@functools.cache
def library_versions() -> dict[str, str]:
    """Return the versions of this package and of the libraries that can change a vocabulary or examples."""
    names = ("pyarrow", "numpy", "tokenizers", "sentencex")
    return {"bert-pretrain": __version__, **{name: importlib.metadata.version(name) for name in names}}


class Output:
    """The folder that a command writes: locked, claimed by an identity, and published by its manifest.

    `identity` has JSON values: the inputs and settings with which the folder may be resumed or reused. `--overwrite`
    is refused if one of the `inputs` is in the folder.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        identity: Mapping[str, Any],
        inputs: Iterable[str | Path | None] = (),
    ) -> None:
        self.folder = folder
        self.kind = kind
        self.identity = dict(identity)
        self._inputs = [Path(path) for path in inputs if path is not None]
        self._claim = {"kind": kind, "format_version": FORMAT_VERSION, "identity": self.identity}

    @contextlib.contextmanager
    def open(self, *, overwrite: bool = False) -> Iterator[OutputState]:
        """Lock and claim the folder, and yield its state after earlier runs of the same command.

        With `overwrite`, the old content is moved aside, unless the same command was restarted. Raises OutputError if
        the folder has another identity or other files, or if `overwrite` would move one of the inputs.
        """
        with exclusive(self.folder):
            if overwrite:
                self._set_aside_once()
            state = self.state()
            if state is OutputState.NEW:
                write_checked_json(self.folder / PARTIAL, self._claim)
            elif state is OutputState.COMPLETE:
                (self.folder / PARTIAL).unlink(missing_ok=True)  # left by a command that was killed at its end
            yield state

    def state(self) -> OutputState:
        """Return the state of the folder. Raise OutputError if another command wrote it, or if it has other files."""
        check_output(self.folder, overwrite=False)
        names = _content(self.folder)
        if not names or (names == [PARTIAL] and read_json(self.folder / PARTIAL) != self._claim):
            return OutputState.NEW  # empty, or claimed by a command that failed before it wrote any output
        record = read_record(self.folder)
        changes = _differences({key: record.get(key) for key in self._claim}, self._claim)
        if changes:
            if len(changes) > 20:
                changes[20:] = [f"… and {len(changes) - 20:,} more"]
            raise OutputError(
                "\n    ".join([f"{self.folder} was written by another command or configuration:", *changes]),
                where=str(self.folder / (MANIFEST if MANIFEST in names else PARTIAL)),
                remedy=f"use another --output, undo the change, or {_OVERWRITE}",
            )
        return OutputState.COMPLETE if MANIFEST in names else OutputState.INCOMPLETE

    def would_be(self, *, overwrite: bool) -> OutputState:
        """Return the state that `open` would yield, without writing anything."""
        check_writable(self.folder)
        return OutputState.NEW if overwrite else self.state()

    def add(self, body: Mapping[str, Any]) -> None:
        """Add values to the manifest of the unfinished output."""
        write_checked_json(self.folder / PARTIAL, {**read_json(self.folder / PARTIAL), **body})

    def reopen(self) -> None:
        """Mark the complete output as incomplete, to extend a run or to replace damaged files."""
        write_checked_json(self.folder / PARTIAL, self._claim)
        (self.folder / MANIFEST).unlink()

    def publish(self, body: Mapping[str, Any]) -> None:
        """Write `manifest.json`, the last file of a finished output, and remove the partial manifest."""
        record = {**self._claim, "versions": library_versions(), **body, "identity": self.identity}
        write_checked_json(self.folder / MANIFEST, record)
        (self.folder / PARTIAL).unlink(missing_ok=True)

    def _set_aside_once(self) -> None:
        """Move the content of the folder aside. After a restart, keep the output of the same command."""
        if is_restarted():
            with contextlib.suppress(UserError):
                if self.state() is not OutputState.NEW:
                    print("restarted: resuming, --overwrite is ignored")
                    return
        target = self.folder.resolve()
        for path in self._inputs:
            if path.resolve().is_relative_to(target):
                raise OutputError(
                    f"the input {path} is in the output folder, which would be moved aside",
                    where="--overwrite",
                    remedy="name another --output, or move the input",
                )
        set_aside(self.folder)


def set_aside(folder: Path) -> None:
    """Move the content of a folder, if any, except its lock, to a new folder next to it."""
    if not _content(folder):
        return
    folder = folder.resolve()  # the name of `.` is empty
    if os.path.ismount(folder):
        raise OutputError(
            "the folder is a mount point, so its content cannot be moved aside",
            where=str(folder),
            remedy="name a folder inside it",
        )
    aside = folder.with_name(f"{folder.name}.old-{datetime.now():%Y%m%d-%H%M%S-%f}")
    aside.mkdir()
    # Manifests first, so that a partly moved folder does not look like a finished output.
    for path in sorted(folder.iterdir(), key=lambda path: (not path.name.startswith("manifest"), path.name)):
        if path.name != LOCK:
            path.rename(aside / path.name)
    print(f"moved the old content to {aside}")


def is_restarted() -> bool:
    """Return whether torchrun or Slurm has restarted this process."""
    return any(int(os.environ.get(name) or 0) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def check_output(folder: Path, *, overwrite: bool) -> None:
    """Raise OutputError if a folder is not writable or has files that are not an output of this package."""
    check_writable(folder)
    names = _content(folder)
    if names and not overwrite and not {MANIFEST, PARTIAL} & set(names):
        raise OutputError(
            f"{folder} has other files: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}",
            where="--output",
            remedy=f"use another folder, or {_OVERWRITE}",
        )


def _content(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not is_bookkeeping(path)) if folder.exists() else []


def read_record(folder: Path) -> dict[str, Any]:
    """Return the manifest of an output, partial if the output is unfinished, or an empty dictionary if it has none."""
    for name in (MANIFEST, PARTIAL):
        if (folder / name).exists():
            record = read_json(folder / name)
            return record if isinstance(record, dict) else {}
    return {}


def is_output(folder: Path) -> bool:
    """Return whether a folder is a finished or unfinished output of a stage."""
    try:
        record = read_record(folder)
    except DataError:
        return False
    return record.get("kind") in KINDS and "identity" in record


def is_output_or_empty(folder: Path) -> bool:
    """Return whether a folder is an output, empty or missing."""
    return not folder.exists() or (folder.is_dir() and (not _content(folder) or is_output(folder)))


def read_manifest(folder: Path, kind: str, flag: str) -> dict[str, Any]:
    """Return the manifest of a finished `vocab`, `data` or `run` output, or raise DataError."""
    command, subfolders = _WRITERS[kind]
    remedy = did_you_mean(folder, subfolders, MANIFEST) or f"name a folder that 'bert-pretrain {command}' wrote"
    record = read_record(folder)
    found = record.get("kind"), record.get("format_version")
    if not record:
        what = f"{folder} has no {MANIFEST}" if folder.is_dir() else f"there is no folder '{folder}'"
    elif not (folder / MANIFEST).exists():
        what, remedy = f"{folder} is unfinished", "run the command that writes it; it continues where it stopped"
    elif found != (kind, FORMAT_VERSION):
        what = f"{folder} has kind and format {found}, but {(kind, FORMAT_VERSION)} is needed"
    else:
        return record
    raise DataError(what, where=flag, remedy=remedy)


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    """List the differences between two JSON values, one line per leaf, such as `data.seed: 1 -> 2`."""
    if isinstance(old, list) and isinstance(new, list):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if not isinstance(old, dict) or not isinstance(new, dict):
        line = f"{path.removeprefix('.identity')[1:]}: {repr(old)[:100]} -> {repr(new)[:100]}"
        return [line] if old != new else []
    lines: list[str] = []
    for key in {**old, **new}:
        lines += _differences(old.get(key), new.get(key), f"{path}.{key}")
    return lines


@contextlib.contextmanager
def exclusive(folder: Path, *, waits: bool = False) -> Iterator[None]:
    """Lock a folder against other processes in this context, and create it if needed. A kill also ends the lock.

    If another process has the lock, wait if `waits` is True, otherwise raise OutputError. Raise OutputError as well if
    the folder was moved or removed meanwhile.
    """
    is_new = not folder.exists()
    lock = folder / LOCK
    with _lock(folder, waits=waits) as file:
        try:
            yield
            if not is_in_place(file, lock):
                raise moved_while_writing(folder)
        except Exception as error:
            if is_in_place(file, lock) or isinstance(error, OutputError):
                raise
            raise moved_while_writing(folder) from error
        finally:
            if is_in_place(file, lock):
                lock.unlink()
                if is_new:  # fails if something was written
                    with contextlib.suppress(OSError):
                        folder.rmdir()


def _lock(folder: Path, *, waits: bool) -> IO[str]:
    """Lock a folder by a file that names this process, and return the open file."""
    check_writable(folder)
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = (folder / LOCK).open("a+")
        except FileNotFoundError:  # the previous process removed the folder because it wrote nothing
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            other = f"another process ({file.read().strip() or 'just started'})"
            if not waits:
                raise OutputError(
                    f"{other} is writing this folder",
                    where=str(folder),
                    remedy="wait for it, or stop it",
                ) from error
            print(f"waiting for {other}, which is writing {folder}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise OutputError(
                f"the folder cannot be locked: {error.strerror}",
                where=str(folder),
                remedy="name a folder on another file system, or mount this one with locks (-o flock)",
            ) from error
        if is_in_place(file, folder / LOCK):
            file.truncate(0)
            file.write(f"{os.getpid()} on {platform.node()}")
            file.flush()
            return file
        file.close()  # the previous process removed the file after we opened it


def is_in_place(file: IO[Any], path: Path) -> bool:
    """Return whether an open file is still the file at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def moved_while_writing(folder: Path) -> OutputError:
    """Return the error for an output folder that was moved away from a running command."""
    return OutputError(
        "the folder was moved or removed during the command",
        where=str(folder),
        remedy="move it back or remove its remains, and run the same command again",
    )


def check_writable(folder: Path, flag: str = "--output") -> None:
    """Raise OutputError if `exclusive` could not create its lock in a folder. Does not create anything."""
    if os.path.lexists(folder) and not folder.is_dir():  # also true for a broken link
        raise OutputError(f"'{folder}' is a file", where=flag, remedy="name a folder")
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise OutputError(
            f"cannot write there: {nearest} is {'not writable' if nearest.is_dir() else 'a file'}",
            where=str(folder),
            remedy="name a folder that you may write to",
        )
