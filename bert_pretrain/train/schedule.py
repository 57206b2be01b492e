"""How long a run is, and its learning rate at every step: pure functions of the configuration."""

import math

from bert_pretrain.config import TrainConfig

DEFAULT_MAX_STEPS = 100_000
WSD_DECAY_SHARE = 0.1
"""Share of the steps in which `wsd` decays; MiniCPM (Hu et al., 2024, section 4) found a tenth to be enough."""


def total_steps(config: TrainConfig, num_rows: int) -> int:
    """Return the optimizer steps of a run over a training split of `num_rows` examples."""
    if config.max_steps is not None:
        return config.max_steps
    if config.max_epochs is not None:
        return max(1, math.ceil(config.max_epochs * num_rows / config.global_batch_size))
    return DEFAULT_MAX_STEPS


def spanned_steps(config: TrainConfig, steps: int) -> int:
    """Return the steps that the schedule of a run of `steps` spans: more than its own where phases share one."""
    return max(steps, config.schedule_steps or 0)


def warmup_steps(config: TrainConfig, steps: int) -> int:
    """Return the steps of warm-up in a run of `steps`, never more than there are."""
    wanted = config.warmup_steps if config.warmup_steps is not None else round(config.warmup_ratio * steps)
    return min(wanted, steps)


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Return the learning rate of the update that follows `step` finished ones, in a run of `steps`.

    The warm-up ends at `peak_lr`; `linear` and `cosine` fall from there to 0 at `steps`; `wsd` stays and then falls
    linearly. The first update already moves: it has 1/warm-up of the peak, not 0.
    """
    steps = spanned_steps(config, steps)
    warmup = warmup_steps(config, steps)
    if step < warmup:
        return config.peak_lr * (step + 1) / warmup
    remaining = (steps - step) / (steps - warmup)  # 1 at the end of the warm-up, 0 at the end of the run
    if config.schedule == "linear":
        return config.peak_lr * remaining
    if config.schedule == "cosine":
        return config.peak_lr * 0.5 * (1.0 - math.cos(math.pi * remaining))
    decay_steps = max(1, round(WSD_DECAY_SHARE * steps))
    return config.peak_lr * min(1.0, (steps - step) / decay_steps)
