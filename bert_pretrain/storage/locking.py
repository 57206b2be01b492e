"""The lock of an output folder: one process writes it at a time, and notices when the folder goes away meanwhile."""

import contextlib
import errno
import fcntl
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from bert_pretrain.errors import OutputError
from bert_pretrain.storage.files import LOCK


@contextlib.contextmanager
def exclusive(folder: Path, *, waits: bool = False) -> Iterator[None]:
    """Lock a folder, made if needed, against a second process; the lock ends with the process, however it ends.

    Where another process has the lock, this one `waits` until that is done, or is refused.
    """
    is_held = False
    while not is_held:
        with _open_lock(folder) as file:
            _lock(file, folder, waits)
            is_held = is_in_place(file, folder / LOCK)
            if is_held:  # else the previous process removed its lock between our opening and locking it
                yield from _holding(file, folder)


def check_writable(folder: Path) -> None:
    """Refuse a folder in which `exclusive` could not make its lock; nothing is made."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"'{folder}' is a file", where="--output", remedy="name a folder")
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise _not_writable(folder, errno.ENOTDIR)
    if not os.access(nearest, os.W_OK):
        is_read_only = os.statvfs(nearest).f_flag & os.ST_RDONLY
        raise _not_writable(folder, errno.EROFS if is_read_only else errno.EACCES)


def _not_writable(folder: Path, number: int | None) -> OutputError:
    what = f"cannot write there: {os.strerror(number or errno.EIO)}"
    return OutputError(what, where=str(folder), remedy="name a folder that you may write to")


def _open_lock(folder: Path) -> IO[str]:
    check_writable(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / LOCK).open("a+")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _not_writable(folder, error.errno) from error


def _lock(file: IO[str], folder: Path, waits: bool) -> None:
    """Lock an open file and write into it who has the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        other = f"another process ({file.read().strip() or 'just started'})"
        if not waits:
            raise OutputError(
                f"{other} is writing this folder", where=str(folder), remedy="wait for it, or stop it"
            ) from error
        print(f"waiting for {other}, which is writing {folder}", flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    file.truncate(0)
    file.write(f"{os.getpid()} on {platform.node()}")
    file.flush()


def _holding(file: IO[str], folder: Path) -> Iterator[None]:
    lock = folder / LOCK
    try:
        yield
    except Exception as error:
        if is_in_place(file, lock):
            raise
        raise moved_while_writing(folder) from error
    else:
        if not is_in_place(file, lock):
            raise moved_while_writing(folder)
    finally:
        if is_in_place(file, lock):
            lock.unlink()


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
        remedy="run the same command again, after putting the folder back if it was moved: it continues from what is "
        "there",
    )
