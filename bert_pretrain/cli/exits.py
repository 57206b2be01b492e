"""Exits: a user error with a message and exit code 2, an interruption with 130 or 143, a bug with its traceback."""

import errno
import functools
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from bert_pretrain.errors import Interrupted, UserError

_CONTINUES = "the same command, without --overwrite, continues where it stopped"
_STARTS_AGAIN = "its output was not written; the same command starts again"
_WITHOUT_RESUME = ("inspect", "evaluate", "fill_mask", "embed", "predict", "report")
_CANNOT_ALLOCATE = re.compile(
    "can't allocate memory|could not create a (primitive|memory)|failed to map segment|can't start new thread"
)
"""In the errors of torch's CPU allocator, of oneDNN, which does not say why, of an import, of a thread."""
_CANNOT_WRITE = re.compile("inline_container|iostream error")
"""In the RuntimeError of `torch.save`, which does not say why."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""In the exceptions of safetensors and tokenizers."""
_SPENT = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("the quota of the disk is used up", "free some space"),
    errno.EFBIG: ("a file would be larger than allowed", "raise the limit of file sizes (ulimit -f)"),
    errno.EMFILE: ("too many files are open", "raise the limit of open files (ulimit -n)"),
    errno.ENFILE: ("the system has too many open files", "close other programs"),
    errno.ENOMEM: ("memory is exhausted", "make room, or take smaller batches or fewer workers"),
}
"""What a process or a machine may run out of, and the remedy."""
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn user errors and interruptions of a command into a message and an exit code."""

    next_step = _STARTS_AGAIN if command.__name__ in _WITHOUT_RESUME else _CONTINUES

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except UserError as error:
            _exit(f"error: {error}", 2)
        except Interrupted as interruption:
            _exit(interruption.message, interruption.exit_code)
        except KeyboardInterrupt:
            _exit(f"interrupted; {next_step}", 130)
        except Terminated:
            _exit(f"terminated; {next_step}", 143)
        except Exception as error:
            explained = _explain(error, next_step)
            if explained is None:
                raise
            _exit(f"error: {explained}", 2)

    return wrapped


def _explain(error: Exception, next_step: str) -> UserError | None:
    """Return what the system refuses as an error of the user's, None for a bug."""
    number, path = getattr(error, "errno", None), getattr(error, "filename", None)
    if isinstance(error, MemoryError) or _CANNOT_ALLOCATE.search(str(error)):
        number = errno.ENOMEM
    elif number is None and (found := _OS_ERROR.search(str(error))):
        number = int(found[1])
    elif _CANNOT_WRITE.search(str(error)):
        what = "a file could not be written to its end"
        return UserError(what, where="the output", remedy=f"check that the disk is not full; {next_step}")
    if number in _SPENT:
        what, remedy = _SPENT[number]
        return UserError(what, where=str(path or "this process"), remedy=f"{remedy}; {next_step}")
    if number == errno.ENOENT and path is not None:
        what = "a file or folder is gone, which was there when the command began"
        return UserError(what, where=str(path), remedy=next_step)
    if number in _DENIED and path is not None:
        what = f"cannot use that path: {os.strerror(number)}"
        return UserError(what, where=str(path), remedy="check the path and its permissions")
    return None


class Terminated(BaseException):
    """SIGTERM as an exception, so that everything is closed on the way out."""


def terminate(_signal: int, _frame: object) -> NoReturn:
    """Handle SIGTERM."""
    raise Terminated


def _exit(message: str, code: int) -> NoReturn:
    flush_output()
    rank = os.environ.get("RANK", "0")
    print(message if rank == "0" else f"[rank {rank}] {message}", file=sys.stderr)
    raise typer.Exit(code)


def flush_output() -> bool:
    """Write what standard output still holds; return whether it could be written.

    What cannot be is dropped, for the interpreter would try again at its end, and report that it failed.
    """
    try:
        if sys.stdout is not None:  # there is none if the descriptor was closed at the start
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:  # a reader that has left, like `head`, has what it wants
            what = f"cannot write to the standard output: {error.strerror}"
            print(f"error: {UserError(what, where='>', remedy='write it elsewhere')}", file=sys.stderr)
        return False
    return True
