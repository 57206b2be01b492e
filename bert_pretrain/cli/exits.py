"""Exits: a user error with a message and exit code 2, an interruption with 130 or 143, a bug with its traceback."""

import contextlib
import errno
import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import typer

from bert_pretrain.cli.loading import held_signals
from bert_pretrain.errors import Interrupted, UserError
from bert_pretrain.io.cores import is_first_rank
from bert_pretrain.io.files import is_url

_CONTINUES = "the same command, without --overwrite, continues where it stopped"
_STARTS_AGAIN = "its output was not written; the same command starts again"
_FROM_THE_BEGINNING = "no checkpoint was saved yet; the same command starts from the beginning"
_WITHOUT_RESUME = ("vocab", "inspect", "evaluate", "fill_mask", "embed", "predict", "report")
_CANNOT_ALLOCATE = re.compile(
    "can't allocate memory|CUDA out of memory|could not create a (primitive|memory)|"
    "failed to map segment|can't start new thread"
)
"""Parts of messages about memory: of torch's allocators, oneDNN, an import and a thread."""
_CANNOT_WRITE = re.compile("inline_container|iostream error")
"""Text in the RuntimeError of `torch.save`, which does not say why."""
_LOST_RANK = re.compile(r"gloo|NCCL|Dist(Backend|Network|Store)Error|Connection (closed|reset) by peer")
"""Texts in errors of collective operations whose other ranks have ended."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""Pattern of the error number in exceptions of safetensors and tokenizers."""
_SPENT = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("the quota of the disk is used up", "free some space"),
    errno.EFBIG: ("a file would be larger than allowed", "raise the limit of file sizes (ulimit -f)"),
    errno.EMFILE: ("too many files are open", "raise the limit of open files (ulimit -n)"),
    errno.ENFILE: ("the system has too many open files", "close other programs"),
    errno.ENOMEM: ("memory is exhausted", "make room, or take smaller batches or fewer workers"),
}
"""Limits of a process or a machine, with remedies."""
_DENIED = (
    errno.EACCES,
    errno.EPERM,
    errno.EXDEV,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn user errors and interruptions of a command into a message and an exit code."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        output = str(kwargs.get("output") or "this process")
        writes_run = command.__name__ == "train" and not kwargs["dry_run"] and not is_url(output)
        run = Path(output) if writes_run else None
        try:
            if run is not None and is_first_rank():
                _status().remove_status(run)
            command(*args, **kwargs)
        except (Exception, KeyboardInterrupt, Terminated) as error:
            with held_signals():  # torchrun ends this rank while it tells why, if another has left
                message, code = _ending(_cause(error), _next_step(command.__name__, run), output)
                _write_status(run, code, message or repr(error))
                if message is None:
                    raise
                flush_output()
                print(message if is_first_rank() else f"[rank {os.environ['RANK']}] {message}", file=sys.stderr)
                raise typer.Exit(code) from error
        _write_status(run, 0, "")

    return wrapped


def _write_status(run: Path | None, code: int, message: str) -> None:
    if run is not None and is_first_rank():
        with contextlib.suppress(OSError):  # a full disk, for example, has its own message
            _status().write_last_status(run, code, message)


def _status() -> Any:
    with held_signals():
        from bert_pretrain.train import signals  # which imports the manifests: not for --help
    return signals


def _next_step(command: str, run: Path | None) -> str:
    """Return what the same command would do."""
    if run is not None:
        step = _status().newest_step(run)
        return f"the same command, without --overwrite, continues from step {step}" if step else _FROM_THE_BEGINNING
    return _STARTS_AGAIN if command in _WITHOUT_RESUME else _CONTINUES


def _cause(error: BaseException) -> BaseException:
    """Return what a rank was leaving for when it was told to end."""
    cause: BaseException | None = error
    while isinstance(cause, Terminated | KeyboardInterrupt):
        cause = cause.__context__
    return cause if isinstance(cause, UserError | Interrupted) else error


def _ending(error: BaseException, next_step: str, output: str) -> tuple[str | None, int]:
    """Return the message and the exit code of what ended a command; no message for a bug."""
    if isinstance(error, UserError):
        return f"error: {error}", 2
    if isinstance(error, Interrupted):
        return error.message, error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted; {next_step}", 130
    if isinstance(error, Terminated):
        return f"terminated; {next_step}", 143
    if os.environ.get("WORLD_SIZE", "1") != "1" and _LOST_RANK.search(f"{type(error).__name__} {error}"):
        return f"another rank has ended or cannot be reached; {next_step}", 1
    explained = _explain(error, next_step, output)
    return (None, 1) if explained is None else (f"error: {explained}", 2)


def _explain(error: BaseException, next_step: str, output: str) -> UserError | None:
    """Return what the system refuses as an error of the user's, None for a bug."""
    number, path = getattr(error, "errno", None), getattr(error, "filename", None)
    if isinstance(error, MemoryError) or _CANNOT_ALLOCATE.search(str(error)):
        number = errno.ENOMEM
    elif number is None and (found := _OS_ERROR.search(str(error))):
        number = int(found[1])
    elif _CANNOT_WRITE.search(str(error)):
        what = "a file could not be written to its end"
        return UserError(what, where=output, remedy=f"check that the disk is not full; {next_step}")
    if number in _SPENT:
        what, remedy = _SPENT[number]
        where = path or (output if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "this process")
        return UserError(what, where=str(where), remedy=f"{remedy}; {next_step}")
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
