"""How much of a run is over: `RunClock` has its steps, its time, and the time that its end needs."""

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bert_pretrain.config import DEFAULT_EVAL_EVERY, TrainConfig
from bert_pretrain.train import schedule
from bert_pretrain.train.distributed import DistContext
from bert_pretrain.train.schedule import Length
from bert_pretrain.train.signals import STOPS
from bert_pretrain.train.state import Progress


class Reading(NamedTuple):
    """Values that all ranks agree on between two steps."""

    signal_number: int  # a stop signal, SIGUSR1 to save, or 0
    seconds: float  # since the start of the run
    reserve: float  # seconds for one more step, the last evaluation and the last checkpoint


@dataclass
class RunClock:
    """Tells whether a run is over, its learning rate, and what is due after a step.

    The answers follow from the last `advance`, so all ranks have the same ones.
    """

    config: TrainConfig
    length: Length
    progress: Progress  # changed in place
    dist_context: DistContext
    is_start: bool  # False for a run that resumes
    slow_steps_left: int  # steps at the start, which compile or capture and are left out of rates

    def __post_init__(self) -> None:
        self.now = Reading(0, self.progress.wall_seconds, 0.0)
        self._before = self.now
        self._start = time.perf_counter() - self.progress.wall_seconds
        self._sent: tuple[Any, Tensor] | None = None

    def read(self) -> float:
        """Return the seconds since the start of the run, and store them in its progress."""
        self.progress.wall_seconds = time.perf_counter() - self._start
        return self.progress.wall_seconds

    def advance(self, signal_number: int) -> None:
        """Agree with all ranks on the signal number and the time. The largest values apply."""
        self._before = self.now
        seconds = self.read()
        longest = self.progress.longest_seconds
        reserve = sum(longest.values())
        if self.dist_context.size == 1:
            self.now = Reading(signal_number, seconds, reserve)
        else:
            # The result is one step old.
            self.now = self._maximum(Reading(signal_number, seconds, reserve + longest.get("step", 0.0)))
        if self.is_start and self.slow_steps_left:
            self.progress.warmup_start = self.now.seconds

    def _maximum(self, own: Reading) -> Reading:
        """Send the values of this rank, and return the maximum of those that ranks sent in the previous call.

        They have already arrived, so no rank waits. The first call returns the maximum of its own values.
        """
        values = torch.tensor(own, dtype=torch.float64)
        sending = dist.all_reduce(values, dist.ReduceOp.MAX, async_op=True), values
        work, agreed = self._sent or sending
        work.wait()
        self._sent = sending
        return Reading(int(agreed[0]), float(agreed[1]), float(agreed[2]))

    @property
    def is_over(self) -> bool:
        return self.length.is_over(self.progress.step, self.now.seconds, self.now.reserve)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop signal has arrived."""
        return self.now.signal_number in STOPS

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        step = self.progress.step
        if self.length.steps is not None:
            return schedule.learning_rate(self.config, step, self.length.steps)
        start = self.progress.warmup_start
        end = (self.length.seconds or 0.0) - self.now.reserve
        return schedule.learning_rate_by_clock(self.config, step, self.now.seconds - start, end - start)

    def due(self) -> list[str]:
        """Return what is due after a step, in this order: "log", "evaluate", "save"."""
        due = []
        if self._is_due(self.config.log_every):
            due.append("log")
        if (self._is_due(self.config.eval_every) or self._ends_an_eighth()) and not self.is_stopped:
            due.append("evaluate")
        if self._is_due(self.config.save_every) or self.now.signal_number:
            due.append("save")
        return due

    def _is_due(self, every: int) -> bool:
        return self.is_over or self.progress.step % every == 0

    def _ends_an_eighth(self) -> bool:
        """Return whether an eighth of the time budget ended in the last step.

        False if `eval_every` is configured, or if the end of the run needs more than 2 % of the budget.
        """
        budget = self.length.seconds
        if budget is None or self.config.eval_every != DEFAULT_EVAL_EVERY or self.now.reserve > 0.02 * budget:
            return False
        return int(8 * self._before.seconds / budget) < int(8 * self.now.seconds / budget)

    def add_step(self, seconds: float) -> None:
        """Add the time of a step."""
        self.progress.elapsed_seconds += seconds
        if self.slow_steps_left:
            self.slow_steps_left -= 1
        else:
            # With decay, because recent steps predict the last step better than the slowest step of the run.
            self.reserve("step", seconds, decay=0.9)

    def reserve(self, activity: str, seconds: float, decay: float = 1.0) -> None:
        """Update the time to reserve for an activity: `seconds` or, if larger, the decayed earlier maximum."""
        longest = self.progress.longest_seconds
        longest[activity] = max(seconds, decay * longest.get(activity, 0.0))

    def close(self) -> None:
        if self._sent is not None:
            self._sent[0].wait()
