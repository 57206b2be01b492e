"""Exits: a user error with a message and exit code 2, an interruption with 130 or 143, a bug with its traceback."""

import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from bert_pretrain.errors import Interrupted, UserError

_CONTINUES = "the same command, without --overwrite, continues where it stopped"
_STARTS_AGAIN = "its output was not written; the same command starts again"
_WITHOUT_RESUME = ("inspect", "evaluate", "fill_mask", "embed", "report")
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
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                what, remedy = "the disk is full", f"free some space; {next_step}"
            elif error.errno in _DENIED and error.filename is not None:
                what, remedy = f"cannot use that path: {error.strerror}", "check the path and its permissions"
            else:
                raise
            _exit(f"error: {UserError(what, where=str(error.filename or 'the output'), remedy=remedy)}", 2)

    return wrapped


class Terminated(BaseException):
    """SIGTERM as an exception, so that everything is closed on the way out."""


def terminate(_signal: int, _frame: object) -> NoReturn:
    """Handle SIGTERM."""
    raise Terminated


def _exit(message: str, code: int) -> NoReturn:
    sys.stdout.flush()
    rank = os.environ.get("RANK", "0")
    print(message if rank == "0" else f"[rank {rank}] {message}", file=sys.stderr)
    raise typer.Exit(code)
