"""The time of a run: of its steps, of all of it, and what a time budget must keep back for after the last step."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bert_pretrain.train.batches import GlobalBatch
from bert_pretrain.train.distributed import DistContext
from bert_pretrain.train.state import Progress, TrainState


@dataclass(frozen=True)
class Boundary:
    """What all ranks agree on between two steps."""

    signal_number: int  # the signal to obey, or 0: one to stop, or SIGUSR1 to save
    seconds: float  # that the run has taken
    reserve: float  # seconds that one more step, the last evaluation and the last checkpoint will take at most


class Clock:
    """Counts the time of a run; the largest of all ranks' values decides, and nobody waits for it."""

    def __init__(self, progress: Progress, dist_context: DistContext) -> None:
        self.is_first_step = True
        self._progress, self._dist_context = progress, dist_context
        self._start = time.perf_counter() - progress.wall_seconds
        self._step_start = self._start
        self._sent: tuple[Any, Tensor] | None = None

    def read(self) -> float:
        """Return the seconds that the run has taken, and note them in its progress."""
        self._progress.wall_seconds = time.perf_counter() - self._start
        return self._progress.wall_seconds

    def boundary(self, signal_number: int) -> Boundary:
        """Send what this rank knows, and return what all of them knew: the largest of each.

        Beyond the first, with several ranks, it is what was sent at the boundary before, which has arrived meanwhile.
        """
        own = (signal_number, self.read(), sum(self._progress.longest_seconds.values()))
        if self._dist_context.size == 1:
            return Boundary(*own)
        values = torch.tensor(own, dtype=torch.float64)
        now = dist.all_reduce(values, dist.ReduceOp.MAX, async_op=True), values
        work, agreed = self._sent or now
        work.wait()
        self._sent = now
        return Boundary(int(agreed[0]), float(agreed[1]), float(agreed[2]))

    def start_step(self) -> None:
        """Note that a step begins, its wait for data included."""
        self._step_start = time.perf_counter()

    def end_step(self, state: TrainState, batch: GlobalBatch, waited_seconds: float) -> None:
        """Count the time of a step; of the first one, in which kernels are chosen or compiled, for the total only."""
        seconds = time.perf_counter() - self._step_start
        self._progress.elapsed_seconds += seconds
        if not self.is_first_step:
            state.count_time(batch, seconds, waited_seconds)
            # Steps differ: what one took lately is the better guess for the last one than the longest of days.
            self.reserve("step", seconds, fading=0.9)
        self.is_first_step = False

    @contextlib.contextmanager
    def reserving(self, what: str, times: float = 1.0) -> Iterator[None]:
        """Time something that is done once more at the end, where it takes so many times as long."""
        begin = time.perf_counter()
        yield
        self.reserve(what, times * (time.perf_counter() - begin))

    def reserve(self, what: str, seconds: float, fading: float = 1.0) -> None:
        """Keep back the seconds that something will take once more at the end: the longest, perhaps fading."""
        longest = self._progress.longest_seconds
        longest[what] = max(seconds, fading * longest.get(what, 0.0))

    def close(self) -> None:
        """Wait for a message that is still under way."""
        if self._sent is not None:
            self._sent[0].wait()
