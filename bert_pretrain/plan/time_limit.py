"""The wall-clock time of a whole `run`, counted from the start of the command and across interruptions."""

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Self

from bert_pretrain.errors import DataError
from bert_pretrain.io.files import checked_json_text, read_json, write_text

SECONDS_BETWEEN_WRITES = 1.0  # a kill loses at most this much of the count


class TimeLimit:
    """Counts the time that a run uses, and stores it in a file, so that the command continues the count after a kill.

    Time in which no command runs does not count.
    """

    def __init__(
        self,
        seconds: float,
        file: Path,
        *,
        used_before_open: float = 0.0,
    ) -> None:
        """Continue the count in `file`; this command has already run for `used_before_open` seconds."""
        self.seconds = seconds
        self._file = file
        self._start = time.monotonic() - used_before_open - _used_before(file)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="time limit", daemon=True)

    @property
    def used(self) -> float:
        """Seconds used so far."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Seconds left; negative once the time is over."""
        return self.seconds - self.used

    def __enter__(self) -> Self:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._file, self._content())
        # Overwritten in place from now on: a new file would wait for the disk twice.
        self._descriptor = os.open(self._file, os.O_WRONLY)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._closed.set()
        self._thread.join()
        os.close(self._descriptor)
        write_text(self._file, self._content())

    def _keep_writing(self) -> None:
        while not self._closed.wait(SECONDS_BETWEEN_WRITES):
            with contextlib.suppress(OSError):  # the stages report a broken disk
                os.pwrite(self._descriptor, self._content().encode(), 0)

    def _content(self) -> str:
        text = checked_json_text({"used_seconds": round(self.used, 3)})
        return text.ljust(256)  # a fixed size, so that a shorter number overwrites a longer one completely


def _used_before(file: Path) -> float:
    if not file.exists():
        return 0.0
    remedy = "remove it to count from zero again"
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if 0.0 <= (used := float(read_json(file, remedy)["used_seconds"])) < float("inf"):
            return used
    raise DataError("the file has no valid time for 'used_seconds'", where=str(file), remedy=remedy)
