"""How a command ends: a mistake is one message and exit code 2, an interruption 130 or 143, a bug its traceback."""

import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from bert_pretrain.errors import Interrupted, UserError

_HOW_TO_GO_ON = "the same command, without --overwrite, goes on where it stopped"
_HOW_TO_BEGIN_AGAIN = "its output was not written; the same command begins again"
_BEGINS_AGAIN = ("inspect", "evaluate", "fill_mask", "embed", "report")
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)


def reports_mistakes(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a user's mistake and an interruption of `command` into a message and an exit code."""

    how_to_go_on = _HOW_TO_BEGIN_AGAIN if command.__name__ in _BEGINS_AGAIN else _HOW_TO_GO_ON

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except UserError as error:
            _leave(f"error: {error}", 2)
        except Interrupted as interruption:
            _leave(interruption.message, interruption.exit_code)
        except KeyboardInterrupt:
            _leave(f"interrupted; {how_to_go_on}", 130)
        except Terminated:
            _leave(f"terminated; {how_to_go_on}", 143)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                what, remedy = "the disk is full", f"free some space; {how_to_go_on}"
            elif error.errno in _DENIED and error.filename is not None:
                what, remedy = f"cannot use that path: {error.strerror}", "check the path and its permissions"
            else:
                raise
            _leave(f"error: {UserError(what, where=str(error.filename or 'the output'), remedy=remedy)}", 2)

    return wrapped


class Terminated(BaseException):
    """SIGTERM, raised where the program stands so that everything is closed on the way out."""


def terminate(_signal: int, _frame: object) -> NoReturn:
    """Handle SIGTERM."""
    raise Terminated


def _leave(message: str, code: int) -> NoReturn:
    sys.stdout.flush()
    rank = os.environ.get("RANK", "0")
    print(message if rank == "0" else f"[rank {rank}] {message}", file=sys.stderr)
    raise typer.Exit(code)
