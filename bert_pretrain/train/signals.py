"""Signals that stop training or save a checkpoint, and `status.json`, which reports how the last session ended.

SIGINT, SIGTERM and SIGHUP (the terminal was closed) save a checkpoint after the current step and stop. SIGUSR1 saves
one and continues. Scripts need `status.json` because torchrun exits with code 1 after every failure. The first rank
writes the file at the end of a session. It is missing while a session runs and after SIGKILL.
"""

import contextlib
import datetime
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from bert_pretrain.errors import OutputError
from bert_pretrain.io import manifest
from bert_pretrain.io.files import STATUS, write_json

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Ignore repetitions within this time, because a cluster signals torchrun and its ranks, and torchrun forwards signals.
REPEAT_SECONDS = 5.0


class SignalRequests:
    """A context that records signals, which are then handled between steps. Outside the main thread it does nothing.

    A second stop signal, after `REPEAT_SECONDS`, goes to the previous handler. SIGHUP remains ignored under `nohup`.
    """

    _stop = 0  # number of the first stop signal
    _stop_time = 0.0
    _save = 0

    def __enter__(self) -> "SignalRequests":
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (*STOPS, signal.SIGUSR1) if is_main else ()
        self._previous = {
            number: signal.signal(number, self._record)
            for number in numbers
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def take(self) -> int:
        """Return the stop signal if there was one, else SIGUSR1 if it arrived since the last call, else 0."""
        save, self._save = self._save, 0
        return self._stop or save

    def _record(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._save = number
        elif not self._stop:
            self._stop = number
            self._stop_time = time.monotonic()
            # `print` could fail: the handler may interrupt a write to the stream.
            text = f"saving a checkpoint after this step; repeat after {REPEAT_SECONDS:.0f} seconds to stop immediately"
            with contextlib.suppress(OSError):  # in `train | tee log`, Ctrl-C has ended `tee`
                os.write(2, f"\n{signal.Signals(number).name}: {text}\n".encode())
        elif time.monotonic() - self._stop_time > REPEAT_SECONDS:
            self.__exit__()
            signal.raise_signal(number)


def checkpoint_paths(folder: Path) -> list[Path]:
    """Return the paths of all checkpoints in a folder, broken ones included, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.name[5:].isdigit() and path.is_dir())


def newest_step(run: Path) -> int:
    """Return the step of a run's newest checkpoint, or 0 if there is none."""
    paths = checkpoint_paths(run / "checkpoints")
    return int(paths[-1].name[5:]) if paths else 0


def write_last_status(run: Path, exit_code: int, message: str) -> None:
    """Write the status of a command, unless another command uses the folder."""
    with contextlib.suppress(OutputError), manifest.exclusive(run):
        write_status(run, exit_code, message)


def write_status(run: Path, exit_code: int, message: str = "") -> None:
    """Write `status.json`, unless the folder is not an output of this package."""
    if manifest.is_output_or_empty(run):
        run.mkdir(parents=True, exist_ok=True)
        outcome = "stopped" if exit_code - 128 in STOPS else {0: "done", 2: "wrong_input"}.get(exit_code, "failed")
        now = datetime.datetime.now().astimezone()
        status = {"status": outcome, "step": newest_step(run), "time": now.isoformat("T", "seconds")}
        write_json(run / STATUS, {**status, "message": message})


def remove_status(run: Path) -> None:
    """Remove the status of the previous session."""
    if manifest.is_output_or_empty(run):
        (run / STATUS).unlink(missing_ok=True)
