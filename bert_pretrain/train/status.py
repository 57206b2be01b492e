"""`status.json` in a run folder: how the last session of a run ended, for scripts that submit it again.

Under torchrun every failure has exit code 1. The first rank writes the file last; while a session runs there is none,
and none is left by a process that was killed.
"""

import datetime
from pathlib import Path

from bert_pretrain.io import manifest
from bert_pretrain.io.files import STATUS, write_json

_OUTCOMES = {0: "done", 2: "wrong_input", 130: "stopped", 143: "stopped"}


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint of a run, 0 where there is none."""
    names = (path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*"))
    return max((int(name) for name in names if name.isdigit()), default=0)


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
