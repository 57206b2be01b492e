"""What people see of a run: lines on the console, the progress bar, `metrics.jsonl`, trackers; on the first rank."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from bert_pretrain.progress import progress_bar
from bert_pretrain.train import metrics
from bert_pretrain.train.metrics import MetricsFile
from bert_pretrain.train.schedule import Length
from bert_pretrain.train.state import Progress
from bert_pretrain.train.trackers import Tracker, grouped


class Reporter:
    """Passes the figures of a run on to whoever wants them."""

    def __init__(self, length: Length, file: MetricsFile | None, trackers: Sequence[Tracker], start: Progress) -> None:
        """Show a run of a length from its start on; without a file, on ranks that do not write, show nothing."""
        self._length, self._file, self._trackers = length, file, trackers
        # A bar of steps, or of seconds where time ends the run: either way it tells the time left.
        unit, total = ("step", length.steps) if length.steps is not None else ("s", round(length.seconds or 0.0))
        begin = self._position(start)
        self._bar = progress_bar(total=total, initial=begin, desc="train", unit=unit, disable=file is None)

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
        self._pass_on(line)

    def validation(self, line: dict[str, Any]) -> None:
        """Pass on the line of an evaluation."""
        self._pass_on(line)

    def _pass_on(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(line)
            for tracker in self._trackers:
                tracker.log(grouped(line), line["step"])
            tqdm.write(metrics.console_line(line, self._length.steps))

    def close(self) -> None:
        """Take the bar down, and let trackers write what is left."""
        self._bar.close()
        for tracker in self._trackers:
            tracker.close()


@contextlib.contextmanager
def reporting(
    length: Length, file: MetricsFile | None, trackers: Sequence[Tracker], start: Progress
) -> Iterator[Reporter]:
    """Return a reporter that is closed in the end."""
    reporter = Reporter(length, file, trackers, start)
    try:
        yield reporter
    finally:
        reporter.close()
