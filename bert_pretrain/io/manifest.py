"""The manifest of an output folder, and whether a command may write there.

A stage claims its folder with an identity: everything that changes the bytes it will write. During the work, the
identity is in `manifest.partial.json`; `manifest.json` is written last and replaces it. So the same command again finds
its work complete, or continues it, and another command is refused with the difference.
"""

import contextlib
import errno
import fcntl
import functools
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import IO, Any

from bert_pretrain import __version__
from bert_pretrain.errors import DataError, OutputError, UserError
from bert_pretrain.io.files import LOCK, did_you_mean, is_bookkeeping, move_aside, read_json, write_checked_json

FORMAT_VERSIONS = {"vocab": 1, "data": 1, "run": 1, "finetune": 1}
MANIFEST = "manifest.json"
PARTIAL = "manifest.partial.json"
_INSIDE_A_RUN = {"vocab": ("vocab",), "data": ("data", "data/*"), "run": ("train", "train/*")}
"""Where `run` puts the output of each stage."""
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Environment variables of torchrun and Slurm that count restarts of a process."""
MAX_DIFFERENCES = 20
_ABSENT = object()
"""The value of a key that only the other of two dictionaries has."""


class Progress(Enum):
    """How far a claimed output folder is."""

    NEW = "new"
    INCOMPLETE = "incomplete"
    COMPLETE = "complete"


@functools.cache
def library_versions() -> dict[str, str]:
    """Return the versions of all libraries that can change the bytes of an output."""
    names = ("pyarrow", "numpy", "tokenizers", "sentencex")
    return {"bert-pretrain": __version__, **{name: importlib.metadata.version(name) for name in names}}


def claim(folder: Path, kind: str, identity: Mapping[str, Any], *, overwrite: bool = False) -> Progress:
    """Claim `folder` for a stage's output, and return how far the same command has already come there.

    The caller must hold the folder with `exclusive`. `identity` holds JSON values that, if different, mean different
    output. With `overwrite` the old content is moved aside, manifest first.
    """
    if overwrite:
        set_aside_once(folder, kind, identity)
    progress = _progress(folder, kind, identity)
    if progress is Progress.NEW:
        folder.mkdir(parents=True, exist_ok=True)
        write_checked_json(folder / PARTIAL, _record(kind, identity))
    elif progress is Progress.COMPLETE:
        (folder / PARTIAL).unlink(missing_ok=True)  # left by a command killed at its very end
    return progress


def set_aside_once(folder: Path, kind: str, identity: Mapping[str, Any]) -> None:
    """Move the content of a folder aside for `--overwrite`; after a restart, only what another command wrote."""
    if is_restarted():
        with contextlib.suppress(UserError):
            if _progress(folder, kind, identity) is not Progress.NEW:
                print("restarted: continues, without --overwrite")
                return
    set_aside(folder)


def set_aside(folder: Path) -> None:
    """Move the content of a folder to a new one next to it, if it has any."""
    if _content(folder):
        print(f"moved the old content to {move_aside(folder)}")


def is_restarted() -> bool:
    """Whether torchrun or Slurm has started this process again."""
    return any(int(os.environ.get(name) or 0) for name in RESTARTS)


def would_claim(folder: Path, kind: str, identity: Mapping[str, Any], *, overwrite: bool = False) -> Progress:
    """Return what `claim` would return, for a dry run: nothing is locked or written."""
    check_output(folder, overwrite=overwrite)
    return Progress.NEW if overwrite else _progress(folder, kind, identity)


def _progress(folder: Path, kind: str, identity: Mapping[str, Any]) -> Progress:
    check_output(folder, overwrite=False)
    record, present = _record(kind, identity), _content(folder)
    if not present or (present == [PARTIAL] and read_json(folder / PARTIAL) != record):
        return Progress.NEW  # empty, or only claimed by a command that failed before its first output
    found = read_record(folder)
    if changes := _differences({key: found.get(key) for key in record}, record):
        if (more := len(changes) - MAX_DIFFERENCES) > 0:
            changes[MAX_DIFFERENCES:] = [f"… and {more:,} more"]
        raise OutputError(
            f"{folder} was written by another command or configuration:\n    " + "\n    ".join(changes),
            where=str(folder / (MANIFEST if MANIFEST in present else PARTIAL)),
            remedy="name another --output, undo the change, or add --overwrite (the old folder is moved aside)",
        )
    return Progress.COMPLETE if MANIFEST in present else Progress.INCOMPLETE


def check_output(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder that cannot be written, or that no command of this package has written to."""
    check_writable(folder)
    present = _content(folder)
    if present and not overwrite and not {MANIFEST, PARTIAL} & set(present):
        raise OutputError(
            f"{folder} holds something else: {', '.join(present[:5])}{' …' if len(present) > 5 else ''}",
            where="--output",
            remedy="name another folder, or add --overwrite (the old folder is moved aside)",
        )


def _record(kind: str, identity: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "format_version": FORMAT_VERSIONS[kind], "identity": dict(identity)}


def _content(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not is_bookkeeping(path)) if folder.exists() else []


def note(folder: Path, body: Mapping[str, Any]) -> None:
    """Add to a partial manifest what is known before the output is finished; the identity stays."""
    write_checked_json(folder / PARTIAL, {**read_json(folder / PARTIAL), **body})


def read_record(folder: Path) -> dict[str, Any]:
    """Return the manifest of an output, the partial one of one that is not finished, or nothing where there is none."""
    for name in (MANIFEST, PARTIAL):
        if (folder / name).exists():
            found = read_json(folder / name)
            return found if isinstance(found, dict) else {}
    return {}


def complete(folder: Path, kind: str, identity: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    """Write `manifest.json`, the last file of a finished output, and remove the partial one."""
    record = {"kind": kind, "format_version": FORMAT_VERSIONS[kind], "versions": library_versions()}
    write_checked_json(folder / MANIFEST, {**record, **body, "identity": dict(identity)})
    (folder / PARTIAL).unlink(missing_ok=True)


def reopen(folder: Path) -> None:
    """Mark a complete output as incomplete again: a run that is extended, or damaged files that are written again."""
    found = read_json(folder / MANIFEST)
    write_checked_json(folder / PARTIAL, {key: found[key] for key in ("kind", "format_version", "identity")})
    (folder / MANIFEST).unlink()


def is_output(folder: Path) -> bool:
    """Return whether a stage has written, or is writing, a folder."""
    try:
        found = read_record(folder)
    except DataError:
        return False
    return found.get("kind") in [*FORMAT_VERSIONS] and "identity" in found


def may_hold_status(folder: Path) -> bool:
    """Return whether a folder is ours, or nothing is there yet."""
    return not folder.exists() or (folder.is_dir() and (not _content(folder) or is_output(folder)))


def read_manifest(folder: Path, kind: str, flag: str) -> dict[str, Any]:
    """Return the manifest of a finished output of a kind (see `FORMAT_VERSIONS`); `flag` named it, for messages."""
    stage = {"vocab": "bert-pretrain vocab", "data": "bert-pretrain make-data", "run": "bert-pretrain train"}[kind]
    remedy = did_you_mean(folder, _INSIDE_A_RUN[kind], MANIFEST) or f"name a folder that '{stage}' has written"
    found = read_record(folder)
    if not folder.is_dir():
        what = f"there is no folder '{folder}'"
    elif (folder / PARTIAL).exists() and not (folder / MANIFEST).exists():
        what, remedy = f"{folder} is unfinished", "run the command that writes it again; it continues"
    elif not (folder / MANIFEST).exists():
        what = f"{folder} has no {MANIFEST}"
    elif found.get("kind") != kind:
        what = f"{folder} holds {found.get('kind')!r}, not {kind!r}"
    elif (version := found.get("format_version")) != FORMAT_VERSIONS[kind]:
        what = f"{folder} has format version {version}, bert-pretrain {__version__} reads {FORMAT_VERSIONS[kind]}"
        remedy = f"make it again with '{stage}' of this version"
    else:
        return found
    raise DataError(what, where=flag, remedy=remedy)


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    """List the differences of two JSON values, one line per leaf: `data.seed: 1 -> 2`."""
    if isinstance(old, list) and isinstance(new, list):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        paths = {key: f"{path}.{key}" if path else str(key) for key in (*old, *new)}
        pairs = ((old.get(key, _ABSENT), new.get(key, _ABSENT), at) for key, at in paths.items())
        return [line for was, now, at in pairs for line in _differences(was, now, at)]
    values = ("not given" if value is _ABSENT else repr(value)[:100] for value in (old, new))
    return [] if old == new else [f"{path.removeprefix('identity.')}: {' -> '.join(values)}"]


@contextlib.contextmanager
def exclusive(folder: Path, *, waits: bool = False) -> Iterator[None]:
    """Lock a folder, made if needed, against a second process; the lock ends with the process, however it ends.

    Where another process has the lock, this one `waits` until that is done, or is refused.
    """
    lock, is_new = folder / LOCK, not folder.exists()
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(_locked(folder, waits))
        while not is_in_place(file, lock):  # the previous process removed it between our opening and locking it
            file = opened.enter_context(_locked(folder, waits))
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
                if is_new:  # nothing was written
                    with contextlib.suppress(OSError):
                        folder.rmdir()


def check_writable(folder: Path) -> None:
    """Refuse a folder in which `exclusive` could not make its lock; nothing is made."""
    if os.path.lexists(folder) and not folder.is_dir():  # also a link to nothing
        raise OutputError(f"'{folder}' is a file", where="--output", remedy="name a folder")
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        what = f"{nearest} is read-only, or not yours to write" if nearest.is_dir() else f"{nearest} is a file"
        raise OutputError(
            f"cannot write there: {what}", where=str(folder), remedy="name a folder that you may write to"
        )


def _locked(folder: Path, waits: bool) -> IO[str]:
    """Open the lock of a folder, lock it and write into it who has it."""
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        file = (folder / LOCK).open("a+")
    except FileNotFoundError:  # the previous process removed the folder, in which it had written nothing
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        other = f"another process ({file.read().strip() or 'just started'})"
        if not waits:
            what = f"{other} is writing this folder"
            raise OutputError(what, where=str(folder), remedy="wait for it, or stop it") from error
        print(f"waiting for {other}, which is writing {folder}", flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        what, remedy = "this file system has no locks", "name a folder on another, or mount it with locks (-o flock)"
        raise OutputError(what, where=str(folder), remedy=remedy) from error
    file.truncate(0)
    file.write(f"{os.getpid()} on {platform.node()}")
    file.flush()
    return file


def is_locked(folder: Path) -> bool:
    """Whether another process is writing a folder."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def is_in_place(file: IO[Any], path: Path) -> bool:
    """Whether an open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def moved_while_writing(folder: Path) -> OutputError:
    """Return the error of an output folder that is no longer where the command writes it."""
    return OutputError(
        "the folder was moved or removed while the command was writing it",
        where=str(folder),
        remedy="put it back if it was moved, else remove what is left of it, and run the same command again",
    )
