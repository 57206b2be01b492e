"""How much of a run is over, and what follows: its end, its learning rate, and what is due after a step.

`RunClock` has the steps, the time, and the time that the end of the run needs. Everything else is a pure function.
"""

import math
import time
from dataclasses import dataclass

from bert_pretrain.config import DEFAULT_EVAL_EVERY, TrainConfig, duration
from bert_pretrain.train.distributed import DistContext
from bert_pretrain.train.signals import STOPS
from bert_pretrain.train.state import Progress

WSD_DECAY_SHARE = 0.1  # share of the run in which `wsd` decays, from MiniCPM (Hu et al., 2024, section 4)


@dataclass(frozen=True)
class Length:
    """Length of a run, either in steps or in seconds. The other field is None."""

    steps: int | None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.steps:,} steps" if self.steps is not None else duration(self.seconds or 0.0)

    def is_over(
        self,
        step: int,
        seconds: float,
        reserve: float = 0.0,
    ) -> bool:
        """Return whether a run ends now. `reserve` is the time for one more step and the end of the run, in seconds."""
        if self.steps is not None:
            return step >= self.steps
        return self.seconds is not None and seconds + reserve >= self.seconds


def run_length(config: TrainConfig, num_rows: int) -> Length:
    """Return the configured length of a run or phase. An epoch has `num_rows` examples."""
    if config.time_budget is not None:
        return Length(None, config.time_budget)
    if config.max_epochs is not None:
        return Length(max(1, math.ceil(config.max_epochs * num_rows / config.global_batch_size)))
    return Length(config.planned_steps)


def schedule_steps(config: TrainConfig, steps: int) -> int:
    """Return the length of the learning rate schedule. It is longer than `steps` if several phases share it."""
    return max(steps, config.schedule_steps or 0)


def warmup_steps(config: TrainConfig, steps: int) -> int:
    """Return the number of warm-up steps of a run of `steps` steps."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    return round(config.warmup_ratio * schedule_steps(config, steps))


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Return the learning rate of the next update, after `step` of `steps` updates.

    The warm-up rises linearly from `peak_lr / warmup` to `peak_lr`. Then `linear` and `cosine` fall to 0 at the end of
    the schedule, which may be after `steps`. `wsd` is constant and then falls linearly to 0.
    """
    end = schedule_steps(config, steps)
    wsd_decay = max(1, round(WSD_DECAY_SHARE * end))
    return _rate(
        config,
        step,
        1,
        end,
        warmup_steps(config, steps),
        wsd_decay,
    )


def learning_rate_by_clock(
    config: TrainConfig,
    step: int,
    seconds: float,
    end: float,
) -> float:
    """Return the learning rate after `step` steps and `seconds`, in a run whose last step ends at `end` seconds.

    Seconds are counted from the start of the warm-up. The schedule has the shape of `learning_rate`, over time instead
    of steps.
    """
    warmup = config.warmup_ratio * end
    # The first step is assumed to take 1 % of the warm-up.
    mean_step = seconds / step if step and seconds > 0 else warmup / 100
    return _rate(
        config,
        seconds,
        min(mean_step, warmup - seconds),
        end,
        warmup,
        WSD_DECAY_SHARE * end,
    )


def _rate(
    config: TrainConfig,
    done: float,
    next_step: float,
    end: float,
    warmup: float,
    wsd_decay: float,
) -> float:
    """Return the learning rate of the next step. All numbers are steps, or all are seconds."""
    if done < warmup:
        return config.peak_lr * (done + next_step) / warmup
    left = max(end - done, 0)
    if config.schedule == "wsd":
        return config.peak_lr * min(1.0, left / wsd_decay)
    remaining = left / max(end - warmup, 1e-9)  # 1 at the end of the warm-up, 0 at the end of the run
    if config.schedule == "linear":
        return config.peak_lr * remaining
    return config.peak_lr * (0.5 * (1.0 - math.cos(math.pi * remaining)))


def too_long(seconds: float) -> str:
    """Return a warning if training takes more than a day, else ""."""
    if seconds <= 86400:
        return ""
    return (
        f"\nwarning: training takes {duration(seconds)}\n"
        "  hint: limit it with --time, or let 'run auto' choose a model that fits a time limit"
    )


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
    signal_number: int = 0  # a stop signal, SIGUSR1 to save, or 0
    reserve_seconds: float = 0.0  # for one more step, the last evaluation and the last checkpoint

    def __post_init__(self) -> None:
        self.seconds = self.progress.wall_seconds  # since the start of the run
        self._seconds_before = self.seconds
        self._start = time.perf_counter() - self.seconds

    def read(self) -> float:
        """Return the seconds since the start of the run, and store them in its progress."""
        self.progress.wall_seconds = time.perf_counter() - self._start
        return self.progress.wall_seconds

    def advance(self, signal_number: int) -> None:
        """Agree with all ranks on the signal number and the time. The largest values apply."""
        self._seconds_before = self.seconds
        own = [signal_number, self.read(), sum(self.progress.longest_seconds.values())]
        number, self.seconds, self.reserve_seconds = self.dist_context.maximum(own)
        self.signal_number = int(number)
        if self.is_start and self.slow_steps_left:
            self.progress.warmup_start = self.seconds

    @property
    def is_over(self) -> bool:
        return self.length.is_over(self.progress.step, self.seconds, self.reserve_seconds)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop signal has arrived."""
        return self.signal_number in STOPS

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        step = self.progress.step
        if self.length.seconds is None:
            return learning_rate(self.config, step, self.length.steps or 0)
        start = self.progress.warmup_start
        end = self.length.seconds - self.reserve_seconds
        return learning_rate_by_clock(self.config, step, self.seconds - start, end - start)

    def due(self) -> list[str]:
        """Return what is due after a step, in this order: "log", "evaluate", "save"."""
        due = []
        if self._is_due(self.config.log_every):
            due.append("log")
        if (self._is_due(self.config.eval_every) or self._ends_an_eighth()) and not self.is_stopped:
            due.append("evaluate")
        if self._is_due(self.config.save_every) or self.signal_number:
            due.append("save")
        return due

    def _is_due(self, every: int) -> bool:
        return self.is_over or self.progress.step % every == 0

    def _ends_an_eighth(self) -> bool:
        """Return whether an eighth of the time budget ended in the last step.

        False if `eval_every` is configured, or if the end of the run needs more than 2 % of the budget.
        """
        budget = self.length.seconds
        if budget is None or self.config.eval_every != DEFAULT_EVAL_EVERY or self.reserve_seconds > 0.02 * budget:
            return False
        return 8 * self._seconds_before // budget < 8 * self.seconds // budget

    def add_step(self, seconds: float) -> None:
        """Add the time of a step."""
        self.progress.elapsed_seconds += seconds
        if self.slow_steps_left:
            self.slow_steps_left -= 1
        else:
            # With decay, because recent steps predict the last step better than the slowest step of the run.
            self.reserve("step", seconds, decay=0.9)

    def reserve(
        self,
        activity: str,
        seconds: float,
        decay: float = 1.0,
    ) -> None:
        """Update the time to reserve for an activity: `seconds` or, if larger, the decayed earlier maximum."""
        longest = self.progress.longest_seconds
        longest[activity] = max(seconds, decay * longest.get(activity, 0.0))
