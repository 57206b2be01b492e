"""What users see of a run: lines on the console, the progress bar, `metrics.jsonl`, trackers; on the first rank."""

import datetime
import math
import os
import platform
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from bert_pretrain.parallel.progress import progress_bar
from bert_pretrain.train import metrics
from bert_pretrain.train.metrics import MetricsFile
from bert_pretrain.train.optim.schedule import Length, too_long
from bert_pretrain.train.state import Progress
from bert_pretrain.train.trackers import Tracker, grouped


class RunLog:
    """The log of one run; on ranks that do not write it shows and keeps nothing."""

    def __init__(
        self, length: Length, file: MetricsFile | None, trackers: Sequence[Tracker], start: Progress, pairs: str = "nsp"
    ) -> None:
        """Show a run of a length from its start on; without a file, on ranks that do not write, show nothing.

        `pairs` is the task of the pairs: what their figures are called on the console.
        """
        self._length, self._file, self._trackers, self._pairs = length, file, trackers, pairs
        # A bar of steps, or of seconds where time ends the run: either way it shows the time left.
        options: dict[str, Any] = {"total": length.steps, "unit": "step"}
        if length.steps is None:  # a rate of seconds per second tells nothing
            form = "{l_bar}{bar}| {n_fmt}/{total_fmt} s [{elapsed}<{remaining}{postfix}]"
            options = {"total": round(length.seconds or 0.0), "unit": "s", "bar_format": form}
        options |= {"initial": self._position(start), "disable": file is None}
        self._bar = progress_bar(desc="train", **options)

    def _position(self, progress: Progress) -> int:
        if self._length.steps is not None:
            return progress.step
        return min(round(progress.wall_seconds), round(self._length.seconds or 0.0))

    def advance(self, progress: Progress) -> None:
        """Show that a step is done."""
        self._bar.update(self._position(progress) - self._bar.n)

    def training(self, line: dict[str, Any]) -> None:
        """Pass on the line of an interval."""
        self._bar.set_postfix_str(metrics.bar_text(line), refresh=False)
        if self._file is not None and self._file.last_training is None and self._length.steps is not None:
            per_step = line["examples"] / line["step"] / (line["examples_per_second"] or math.inf)
            if warning := too_long((self._length.steps - line["step"]) * per_step):
                tqdm.write(warning)
        self._pass_on(line)

    def validation(self, step: int, figures: dict[str, float] | None) -> None:
        """Pass on the figures of an evaluation, if there was one."""
        if figures is not None:
            names = ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")
            self._pass_on({"step": step, **{f"validation_{name}": figures.get(name) for name in names}})

    @property
    def last_training(self) -> dict[str, Any] | None:
        """The newest line of an interval of training."""
        return self._file.last_training if self._file is not None else None

    @property
    def last_validation(self) -> dict[str, Any] | None:
        """The newest line of an evaluation."""
        return self._file.last_validation if self._file is not None else None

    @property
    def position(self) -> dict[str, Any] | None:
        """Where `metrics.jsonl` ends now, for a checkpoint."""
        return self._file.position if self._file is not None else None

    def _pass_on(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            now = datetime.datetime.now().astimezone()
            where = {"host": platform.node(), "job": os.environ.get("SLURM_JOB_ID")}
            hints = self._file.write({**line, "time": now.isoformat("T", "seconds"), **where})
            for tracker in self._trackers:
                tracker.log(grouped(line), line["step"])
            shown = metrics.console_line(line, self._length.steps, self._pairs)
            for text in (f"{now:%m-%d %H:%M:%S}  {shown}", *map(str, hints)):
                tqdm.write(text)

    def close(self) -> None:
        """Take the bar down, and let trackers write what is left."""
        self._bar.close()
        for tracker in self._trackers:
            tracker.close()
        if self._file is not None:
            self._file.close()
