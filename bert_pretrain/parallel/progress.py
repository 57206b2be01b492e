"""Progress bars with rate and remaining time, on standard error; in a log file, a line every ten seconds."""

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

_MOVE_UP = "\x1b[A"


class _Lines:
    """A file that is no terminal: every state of a bar is a line of its own, so that nothing else is on it."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> None:
        if line := text.replace(_MOVE_UP, "").strip():
            self._file.write(f"{line}\n")


class _Bar(tqdm):  # type: ignore[type-arg]
    @staticmethod
    def format_meter(n: float, total: float, *arguments: Any, **options: Any) -> str:
        """Return the state of a bar; sums of fractions end a little above the total, of which tqdm would warn."""
        is_above = bool(total) and total < n < total + 0.5
        return str(tqdm.format_meter(total if is_above else n, total, *arguments, **options))


def progress_bar(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """Return a tqdm bar with the given options, perhaps over items."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    file = sys.stderr if is_terminal or sys.stderr is None else _Lines(sys.stderr)
    return _Bar(items, dynamic_ncols=True, mininterval=0.2 if is_terminal else 10.0, file=file, **options)
