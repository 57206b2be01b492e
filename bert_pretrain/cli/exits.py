"""Exit codes and messages: 2 for a user error, 128 and the number of a signal, and a traceback for a bug."""

import contextlib
import errno
import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import typer

from bert_pretrain.errors import Interrupted, UserError
from bert_pretrain.io.cores import is_first_rank, num_ranks
from bert_pretrain.io.files import DISK_FULL, errno_of, local_path

_WITHOUT_RESUME = ("vocab", "inspect", "evaluate", "fill_mask", "embed", "predict", "report")  # always start again
# Errors of collective operations after another rank has ended.
_RANK_LOST = re.compile(r"gloo|NCCL|Dist(Backend|Network|Store)Error|Connection (closed|reset) by peer")
_MESSAGES = {  # other messages of errors without errno
    # torch's allocators, oneDNN, the dynamic linker, threading
    "can't allocate memory|CUDA out of memory|could not create a (primitive|memory)": errno.ENOMEM,
    "failed to map segment|can't start new thread": errno.ENOMEM,
    "inline_container|iostream error": errno.EIO,  # `torch.save`
}
_REMEDIES = {  # errors without a path
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EIO: "check that the disk is not full",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "free some memory, or use smaller batches or fewer workers",
}


class Terminated(BaseException):
    """SIGTERM or SIGHUP as an exception with its number, so that everything is closed on the way out."""


def terminate(number: int, _frame: object) -> NoReturn:
    """Handle SIGTERM, or SIGHUP, which says that the terminal was closed."""
    raise Terminated(number)


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block stop signals; they arrive when the context ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the user errors and interruptions of a command into a message and an exit code.

    The first rank of `train` also writes them to `status.json`.
    """
    name = command.__name__

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        output = str(kwargs.get("output") or "this process")
        next_step = "the same command starts again"
        is_kept = name not in _WITHOUT_RESUME and not kwargs.get("dry_run")
        if is_kept:
            next_step = "the same command, without --overwrite, continues where it stopped"
        run: Path | None = None
        try:
            if name == "train" and is_kept and is_first_rank():
                from bert_pretrain.train.signals import remove_status

                run = local_path(output, "--output")
                remove_status(run)
            command(*args, **kwargs)
            _write_status(run, 0, "")
        except (Exception, KeyboardInterrupt, Terminated) as error:
            with _blocked_signals():  # torchrun may terminate this rank while it reports, if another rank has ended
                message, code = _message_and_code(_cause(error), next_step, output)
                _write_status(run, code, message or repr(error))
                if message is None:
                    raise
                flush_output()
                _print_error(message if is_first_rank() else f"[rank {os.environ['RANK']}] {message}")
                raise typer.Exit(code) from error

    return wrapped


def _write_status(run: Path | None, code: int, message: str) -> None:
    if run is not None:
        from bert_pretrain.train.signals import write_last_status

        with contextlib.suppress(OSError):  # such as a full disk, which the printed message reports
            write_last_status(run, code, message)


def _print_error(message: str) -> None:
    with contextlib.suppress(OSError):  # at Ctrl-C, `tee` in `command 2>&1 | tee log` has ended
        print(message, file=sys.stderr)


def _cause(error: BaseException) -> BaseException:
    """Return the UserError or Interrupted that a rank was handling when a signal interrupted it, else the error itself.

    The error being handled is the context of the signal's exception.
    """
    cause: BaseException | None = error
    while isinstance(cause, Terminated | KeyboardInterrupt):
        cause = cause.__context__
    return cause if isinstance(cause, UserError | Interrupted) else error


def _message_and_code(error: BaseException, next_step: str, output: str) -> tuple[str | None, int]:
    """Return the message and the exit code for an error; a bug has no message."""
    if isinstance(error, UserError):
        return f"error: {error}", 2
    if isinstance(error, Interrupted):
        return error.message, error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted; {next_step}", 130
    if isinstance(error, Terminated):
        number = error.args[0]
        return f"terminated by {signal.Signals(number).name}; {next_step}", 128 + number
    if num_ranks() > 1 and _RANK_LOST.search(f"{type(error).__name__} {error}"):
        reason = str(error).partition("\n")[0]
        return f"another rank has ended or cannot be reached ({reason}); {next_step}", 1
    number = _error_number(error)
    path = getattr(error, "filename", None)
    if number is None or (path is None and number not in _REMEDIES):
        return None, 1
    where = path or (output if number in (*DISK_FULL, errno.EIO) else "this process")
    remedy = f"{_REMEDIES.get(number, 'check the path and its permissions')}; {next_step}"
    return f"error: {UserError(os.strerror(number), where=str(where), remedy=remedy)}", 2


def _error_number(error: BaseException) -> int | None:
    """Return the errno of an error that the system caused, or None for a bug."""
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    for pattern, number in _MESSAGES.items():
        if re.search(pattern, str(error)):
            return number
    return errno_of(error)


def flush_output() -> bool:
    """Flush standard output and return whether that worked.

    After a failure, redirect it to the null device, because the interpreter flushes again at exit.
    """
    try:
        if sys.stdout is not None:  # None if the descriptor was closed at the start
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:  # a reader that closes the pipe early, such as `head`, is no error
            what = f"cannot write to standard output: {error.strerror}"
            _print_error(f"error: {UserError(what, where='>', remedy='redirect it to another place')}")
        return False
    return True
