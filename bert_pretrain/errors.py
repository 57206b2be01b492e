"""Errors a user can cause, each in three parts: what is wrong, where it came from, what to do.

The command line prints them without a traceback and exits with code 2. Any other exception is a bug and keeps its
traceback.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class UserError(Exception):
    """A mistake that the user can correct: what is wrong, in which file, key or flag, and what to do about it."""

    def __init__(self, what: str, *, where: str, remedy: str) -> None:
        super().__init__(what, where, remedy)
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}\n  where: {self.where}\n  hint: {self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are pickled between processes, and pickle does not support keyword-only arguments.
        return (partial(type(self), where=self.where, remedy=self.remedy), (self.what,))


class ConfigError(UserError):
    """A key or value of the configuration, a preset's name or a `--set` that does not fit."""


class InputError(UserError):
    """Raw text that cannot be found, opened, decoded or parsed."""


class OutputError(UserError):
    """An output folder with something other than this command would write."""


class DataError(UserError):
    """A tokenizer, data, model or run folder that is broken or does not match the others."""


class Interrupted(Exception):
    """The work was asked to stop and has saved everything; has the exit code, and a message on how to continue."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(exit_code, message)
        self.exit_code = exit_code
        self.message = message


def first_problem(error: "ValidationError") -> str:
    """Return the first of pydantic's complaints, for example `hidden_size is -16; it should be greater than 0`."""
    problem = error.errors()[0]
    key, message = ".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")
    expected = message.removeprefix("Input ")
    return f"{key}: {message}" if expected == message else f"{key} is {repr(problem['input'])[:80]}; it {expected}"


@contextlib.contextmanager
def needs_extra(extra: str, purpose: str, *, where: str, otherwise: str = "") -> Iterator[None]:
    """Import in here what an extra of `bert-pretrain` installs; `purpose` is what needs it, such as "pictures"."""
    try:
        yield
    except ImportError as error:
        what = f"{(error.name or extra).partition('.')[0]} is not installed, and {purpose} need it"
        raise ConfigError(what, where=where, remedy=f"pip install 'bert-pretrain[{extra}]'{otherwise}") from error
