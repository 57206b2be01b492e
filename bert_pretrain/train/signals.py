"""Signals during training: SIGINT and SIGTERM save and stop after the step under way, SIGUSR1 saves and continues."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from bert_pretrain.errors import Interrupted

STOPS = (signal.SIGINT, signal.SIGTERM)
REPEAT_SECONDS = 5.0
"""Within this time the same request may come twice: a cluster signals torchrun and its ranks, and torchrun forwards."""


@dataclass
class Requests:
    """What signals have asked for."""

    stop: int = 0  # the signal that asked to stop, or 0
    saves: bool = False

    def take(self) -> int:
        """Return the signal to obey after this step, or 0; SIGUSR1 only once."""
        if self.stop or not self.saves:
            return self.stop
        self.saves = False
        return signal.SIGUSR1


@contextlib.contextmanager
def noting_signals() -> Iterator[Requests]:
    """Note signals instead of ending at once; another stop signal after some seconds has its usual effect."""
    requests, since = Requests(), 0.0
    if threading.current_thread() is not threading.main_thread():
        yield requests  # only the main thread may handle signals
        return
    previous = {number: signal.getsignal(number) for number in (*STOPS, signal.SIGUSR1)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal since
        if number == signal.SIGUSR1:
            requests.saves = True
        elif not requests.stop:
            requests.stop, since = number, time.monotonic()
            # Straight to the descriptor: a handler may find the streams in the middle of a write.
            text = f"saving a checkpoint after this step; once more after {REPEAT_SECONDS:.0f} seconds stops at once"
            os.write(2, f"\n{signal.Signals(number).name}: {text}\n".encode())
        elif time.monotonic() - since > REPEAT_SECONDS:
            restore()
            signal.raise_signal(number)

    for number in previous:
        signal.signal(number, note)
    try:
        yield requests
    finally:
        restore()


def interrupted(number: int, checkpoint: Path) -> Interrupted:
    """Return the exception that ends a run after a signal, when its checkpoint is on disk."""
    name = signal.Signals(number).name
    # 128 + the number is what a shell reports of a process that a signal has ended.
    return Interrupted(128 + number, f"stopped by {name} at {checkpoint}; the same command continues from there")
