"""How long a run is, and its learning rate at every step: pure functions of configuration, step and clock."""

import math
from dataclasses import dataclass

from bert_pretrain.config import TrainConfig

WSD_DECAY_SHARE = 0.1
"""Share of the run in which `wsd` decays; MiniCPM (Hu et al., 2024, section 4) found a tenth to be enough."""


@dataclass(frozen=True)
class Length:
    """Where a run ends: at a step, or when its time is up. One of the two is None."""

    steps: int | None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.steps:,} steps" if self.steps is not None else duration(self.seconds or 0.0)

    def is_over(self, step: int, seconds: float, reserve: float = 0.0) -> bool:
        """Whether a run ends after this number of steps and seconds.

        `reserve` is the time that what comes after the last step will take.
        """
        if self.steps is not None:
            return step >= self.steps
        return self.seconds is not None and seconds + reserve >= self.seconds


def own_length(config: TrainConfig, num_rows: int) -> Length:
    """Return the length of a run over `num_rows` examples, or of one of several phases, which share one schedule."""
    if config.time_budget is not None:
        return Length(None, config.time_budget)
    if config.max_epochs is not None:
        return Length(max(1, math.ceil(config.max_epochs * num_rows / config.global_batch_size)))
    return Length(config.planned_steps)


def spanned_steps(config: TrainConfig, steps: int) -> int:
    """Return the steps that the schedule of a run of `steps` spans: more than its own where phases share one."""
    return max(steps, config.schedule_steps or 0)


def warmup_steps(config: TrainConfig, steps: int) -> int:
    """Return the steps of warm-up under a schedule that spans `steps`."""
    return config.warmup_steps if config.warmup_steps is not None else round(config.warmup_ratio * steps)


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Return the learning rate of the update that follows `step` finished ones, in a run of `steps`.

    The warm-up ends at `peak_lr`; `linear` and `cosine` fall from there to 0 at `steps`; `wsd` stays and then falls
    linearly. The first update already moves: it has 1/warm-up of the peak, not 0.
    """
    steps = spanned_steps(config, steps)
    warmup = warmup_steps(config, steps)
    if step < warmup:
        return config.peak_lr * (step + 1) / warmup
    return config.peak_lr * _decay(
        config.schedule, steps - step, steps - warmup, max(1, round(WSD_DECAY_SHARE * steps))
    )


def learning_rate_by_clock(config: TrainConfig, step: int, seconds: float, end: float) -> float:
    """Return the learning rate of the update after `step` others, `seconds` into a run whose last step ends at `end`.

    The same shapes as by steps, with the same share of warm-up.
    """
    warmup = config.warmup_ratio * end
    # A mean step further, as the first update by steps has 1/warm-up; nothing is known before the first.
    mean_step = seconds / step if step else warmup / 100
    risen = min(1.0, (seconds + mean_step) / warmup) if warmup else 1.0
    left = max(end - max(seconds, warmup), 0.0)
    return config.peak_lr * risen * _decay(config.schedule, left, max(end - warmup, 1e-9), WSD_DECAY_SHARE * end)


def _decay(schedule: str, left: float, total: float, wsd_decay: float) -> float:
    """Return the share of the peak with `left` of `total` to go after the warm-up, in steps or in seconds."""
    remaining = left / total  # 1 at the end of the warm-up, 0 at the end of the run
    if schedule == "linear":
        return remaining
    if schedule == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * remaining))
    return min(1.0, left / wsd_decay)


def duration(seconds: float) -> str:
    """Return a time in words: `2d 3h`, `1h 05m`, `2m 03s`, `4.5s`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"


def too_long(seconds: float) -> str:
    """Return a warning of a training of more than a day, "" for a shorter one."""
    if seconds <= 86400:
        return ""
    return f"warning: this takes {duration(seconds)}\n  hint: --time limits it; 'run auto' plans a model for a time"
