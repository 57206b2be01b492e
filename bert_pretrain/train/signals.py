"""Stopping cleanly: SIGINT and SIGTERM are noted, and end a run after the step under way."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from bert_pretrain.errors import Interrupted


@dataclass
class StopSignal:
    """The signal that asked to stop, or 0."""

    number: int = 0


@contextlib.contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Note SIGINT and SIGTERM instead of ending at once; a second one has its usual effect."""
    stop = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may handle signals
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        stop.number = number
        restore()
        # Straight to the descriptor: a handler may find the streams in the middle of a write.
        name = signal.Signals(number).name
        os.write(2, f"\n{name}: saving a checkpoint after this step; once more stops at once\n".encode())

    for number in previous:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()


def interrupted(number: int, checkpoint: Path) -> Interrupted:
    """Return the exception that ends a run after a signal."""
    name = signal.Signals(number).name
    # 128 + the number is what a shell reports of a process that a signal has ended.
    return Interrupted(128 + number, f"stopped by {name} at {checkpoint}; the same command continues from there")
