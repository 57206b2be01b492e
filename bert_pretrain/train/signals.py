"""How a session of training ends: the signals that ask for it, and `status.json`, which tells scripts how it ended.

SIGINT and SIGTERM save and stop after the step under way, SIGUSR1 saves and continues. Under torchrun every failure has
exit code 1, so the first rank writes `status.json` last; while a session runs there is none, nor after a kill.
"""

import datetime
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from bert_pretrain.io import manifest
from bert_pretrain.io.files import STATUS, write_json

STOPS = (signal.SIGINT, signal.SIGTERM)
REPEAT_SECONDS = 5.0
"""Within this time the same request may come twice: a cluster signals torchrun and its ranks, and torchrun forwards."""
_OUTCOMES = {0: "done", 2: "wrong_input", 130: "stopped", 143: "stopped"}


class SignalRequests:
    """Notes signals instead of ending at once, in a `with` block of the main thread, which alone may handle signals.

    Another stop signal after some seconds has its usual effect.
    """

    _stop, _since, _saves = 0, 0.0, False

    def __enter__(self) -> "SignalRequests":
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (*STOPS, signal.SIGUSR1) if is_main else ()
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def take(self) -> int:
        """Return the signal to obey after this step, or 0; SIGUSR1 only once."""
        saves, self._saves = self._saves, False
        return self._stop or (signal.SIGUSR1 if saves else 0)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._saves = True
        elif not self._stop:
            self._stop, self._since = number, time.monotonic()
            # Straight to the descriptor: a handler may find the streams in the middle of a write.
            text = f"saving a checkpoint after this step; once more after {REPEAT_SECONDS:.0f} seconds stops at once"
            os.write(2, f"\n{signal.Signals(number).name}: {text}\n".encode())
        elif time.monotonic() - self._since > REPEAT_SECONDS:
            self.__exit__()
            signal.raise_signal(number)


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint of a run, 0 where there is none."""
    names = (path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*"))
    return max((int(name) for name in names if name.isdigit()), default=0)


def write_last_status(run: Path, exit_code: int, message: str) -> None:
    """Note how a command ended, unless the session of another one goes on there."""
    if not manifest.is_locked(run):
        write_status(run, exit_code, message)


def write_status(run: Path, exit_code: int, message: str = "") -> None:
    """Note how a session ended; not in a folder that this package has not written."""
    if manifest.may_hold_status(run):
        run.mkdir(parents=True, exist_ok=True)
        outcome, now = _OUTCOMES.get(exit_code, "failed"), datetime.datetime.now().astimezone()
        status = {"status": outcome, "step": newest_step(run), "time": now.isoformat("T", "seconds")}
        write_json(run / STATUS, {**status, "message": message})


def remove_status(run: Path) -> None:
    """Remove what the session before has left."""
    if manifest.may_hold_status(run):
        (run / STATUS).unlink(missing_ok=True)
