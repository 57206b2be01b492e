"""Errors that users can cause and fix.

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
    """An error in three parts: what is wrong, where (the file, key or flag), and the remedy, shown as a hint."""

    def __init__(
        self,
        what: str,
        *,
        where: str,
        remedy: str,
    ) -> None:
        super().__init__(what, where, remedy)
        self.what, self.where, self.remedy = what, where, remedy

    def __str__(self) -> str:
        return f"{self.what}\n  where: {self.where}\n  hint: {self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        # Errors are pickled between processes, and by default pickle cannot pass keyword-only arguments.
        return (partial(type(self), where=self.where, remedy=self.remedy), (self.what,))


class ConfigError(UserError):
    """An invalid key, value, preset or flag."""


class InputError(UserError):
    """Raw text that cannot be found, opened, decoded or parsed."""


class OutputError(UserError):
    """An output folder that the command cannot write to or that has other content."""


class DataError(UserError):
    """A tokenizer, data, model or run folder that is damaged or does not match the others."""


class Interrupted(Exception):
    """Raised after a requested stop, when everything is saved; the message says how to continue."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(exit_code, message)
        self.exit_code, self.message = exit_code, message


def first_problem(error: "ValidationError") -> str:
    """Return the first validation error as text, such as `hidden_size is -16; it should be greater than 0`."""
    problem = error.errors()[0]
    key = ".".join(map(str, problem["loc"])) or "the content"
    message = problem["msg"].removeprefix("Value error, ")
    expected = message.removeprefix("Input ")
    return f"{key}: {message}" if expected == message else f"{key} is {repr(problem['input'])[:80]}; it {expected}"


@contextlib.contextmanager
def needs_extra(
    extra: str,
    purpose: str,
    *,
    where: str,
    otherwise: str = "",
) -> Iterator[None]:
    """Raise ConfigError if an import inside this context fails because an extra of `bert-pretrain` is missing.

    `purpose` is the plural noun that needs it, such as "pictures".
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{(error.name or extra).partition('.')[0]} is not installed, and {purpose} need it",
            where=where,
            remedy=f"pip install 'bert-pretrain[{extra}]'{otherwise}",
        ) from error
