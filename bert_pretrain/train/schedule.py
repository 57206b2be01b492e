"""The length of a run and its learning rate: pure functions of the configuration, the step and the clock."""

import math
from dataclasses import dataclass

from bert_pretrain.config import TrainConfig, duration

WSD_DECAY_SHARE = 0.1  # share of the run in which `wsd` decays, from MiniCPM (Hu et al., 2024, section 4)


@dataclass(frozen=True)
class Length:
    """Length of a run, either in steps or in seconds. The other field is None."""

    steps: int | None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.steps:,} steps" if self.steps is not None else duration(self.seconds or 0.0)

    def is_over(self, step: int, seconds: float, reserve: float = 0.0) -> bool:
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
    """Return the number of warm-up steps of a schedule of `steps` steps."""
    return config.warmup_steps if config.warmup_steps is not None else round(config.warmup_ratio * steps)


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Return the learning rate of the next update, after `step` of `steps` updates.

    The warm-up rises linearly from `peak_lr / warmup` to `peak_lr`. Then `linear` and `cosine` fall to 0 at the end of
    the schedule, which may be after `steps`. `wsd` is constant and then falls linearly to 0.
    """
    end = schedule_steps(config, steps)
    warmup = warmup_steps(config, end)
    if step < warmup:
        return config.peak_lr * (step + 1) / warmup
    wsd_decay = max(1, round(WSD_DECAY_SHARE * end))
    return _decayed(config, end - step, end - warmup, wsd_decay)


def learning_rate_by_clock(config: TrainConfig, step: int, seconds: float, end: float) -> float:
    """Return the learning rate after `step` steps and `seconds`, in a run whose last step ends at `end` seconds.

    Seconds are counted from the start of the warm-up. The schedule has the shape of `learning_rate`, over time instead
    of steps.
    """
    warmup = config.warmup_ratio * end
    if seconds < warmup:
        # Add one mean step, so that the first rates are above 0. The first step is assumed to take 1 % of the warm-up.
        mean_step = seconds / step if step and seconds > 0 else warmup / 100
        return config.peak_lr * min(1.0, (seconds + mean_step) / warmup)
    return _decayed(config, max(end - seconds, 0.0), max(end - warmup, 1e-9), WSD_DECAY_SHARE * end)


def _decayed(config: TrainConfig, left: float, total: float, wsd_decay: float) -> float:
    """Return the learning rate when `left` of the `total` steps or seconds after the warm-up remain."""
    remaining = left / total  # 1 at the end of the warm-up, 0 at the end of the run
    if config.schedule == "linear":
        return config.peak_lr * remaining
    if config.schedule == "cosine":
        return config.peak_lr * (0.5 * (1.0 - math.cos(math.pi * remaining)))
    return config.peak_lr * min(1.0, left / wsd_decay)


def too_long(seconds: float) -> str:
    """Return a warning if training takes more than a day, else ""."""
    if seconds <= 86400:
        return ""
    return (
        f"warning: training takes {duration(seconds)}\n"
        "  hint: limit it with --time, or let 'run auto' choose a model that fits a time limit"
    )
