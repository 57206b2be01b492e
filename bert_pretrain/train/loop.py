"""The training loop: one `fit`, which says when to step, log, evaluate and save, and stops cleanly when told to."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tqdm import tqdm

from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import Interrupted
from bert_pretrain.progress import progress_bar
from bert_pretrain.train import metrics
from bert_pretrain.train.batches import Prefetcher, TrainingData
from bert_pretrain.train.metrics import MetricsFile
from bert_pretrain.train.schedule import learning_rate
from bert_pretrain.train.state import IntervalCounts, TrainState
from bert_pretrain.train.step import train_step


@dataclass(frozen=True)
class Plan:
    """What stays the same throughout a run."""

    config: TrainConfig
    steps: int
    device: torch.device
    dtype: torch.dtype
    peak_flops: float | None
    """Of the device in this precision; None where unknown."""


def fit(
    state: TrainState,
    data: TrainingData,
    plan: Plan,
    log: MetricsFile,
    *,
    evaluate: Callable[[], dict[str, float]] | None,
    save: Callable[[], Path],
) -> None:
    """Train from the state's step to the plan's last.

    Args:
        state: changed in place.
        data: where the batches come from.
        plan: of this run.
        log: receives a line each interval and each evaluation.
        evaluate: returns the held-out figures; None where nothing is held out.
        save: writes a checkpoint of the state and returns its path.

    Raises:
        Interrupted: after SIGINT or SIGTERM, once the checkpoint is written.
        DataError: when a shard is damaged.
    """
    progress, config = state.progress, plan.config
    state.model.train()
    with (
        _reading(data, progress.step, plan) as batches,
        _stop_signal() as stop,
        _private_random(plan),
        _bar(plan, progress.step) as bar,
    ):
        if log.last_validation is None:
            _evaluate(state, plan, log, evaluate)  # the figures before the first step
        while progress.step < plan.steps:
            begin = time.perf_counter()
            batch = batches.next()
            rate = learning_rate(config, progress.step, plan.steps)
            train_step(
                state.model, state.optimizers, batch, state.sums, seed=config.seed, step=progress.step,
                learning_rate=rate, max_grad_norm=config.max_grad_norm, dtype=plan.dtype, loss_scale=state.loss_scale,
            )  # fmt: skip
            state.count(batch, batches.last_wait_seconds)
            is_last = progress.step == plan.steps
            log_due, eval_due, save_due = (
                is_last or progress.step % every == 0
                for every in (config.log_every, config.eval_every, config.save_every)
            )
            if log_due or eval_due or save_due:
                _wait_for(plan.device)  # so that evaluating and saving are not timed as training
            state.count_seconds(time.perf_counter() - begin)
            bar.update()
            if log_due:
                _log(state, plan, log, bar, rate, data)
            if eval_due:
                _evaluate(state, plan, log, evaluate)
            if save_due or stop.signal_number:
                checkpoint = save()
                if stop.signal_number and not is_last:
                    raise _interrupted(stop.signal_number, checkpoint)


def _interrupted(signal_number: int, checkpoint: Path) -> Interrupted:
    name = signal.Signals(signal_number).name
    # 128 + the number is what a shell reports of a process that a signal has ended.
    return Interrupted(128 + signal_number, f"stopped by {name} at {checkpoint}; the same command continues from there")


def _log(state: TrainState, plan: Plan, log: MetricsFile, bar: Any, rate: float, data: TrainingData) -> None:
    """Write the line of the interval that ends here, and begin the next."""
    line = metrics.training_line(state, rate=rate, epoch=data.epoch(state.progress.step), peak=plan.peak_flops)
    log.write(line)
    bar.write(metrics.console_line(line, plan.steps))
    bar.set_postfix_str(metrics.bar_text(line), refresh=False)
    state.sums.zero_()
    state.interval = IntervalCounts()


def _evaluate(state: TrainState, plan: Plan, log: MetricsFile, evaluate: Callable[[], dict[str, float]] | None) -> None:
    if evaluate is None:
        return
    figures = evaluate()
    names = ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")
    line = {"step": state.progress.step, **{f"validation_{name}": figures.get(name) for name in names}}
    log.write(line)
    tqdm.write(metrics.console_line(line, plan.steps))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _reading(data: TrainingData, first_step: int, plan: Plan) -> Iterator[Prefetcher]:
    batches = Prefetcher(data, first_step, plan.steps, plan.device)
    try:
        yield batches
    finally:
        batches.close()


def _private_random(plan: Plan) -> Any:
    """Return a context in which dropout may seed torch's generators; they are restored after it."""
    return torch.random.fork_rng(devices=[plan.device] if plan.device.type == "cuda" else [])


def _bar(plan: Plan, first_step: int) -> Any:
    """Return the progress bar of the whole run."""
    return progress_bar(total=plan.steps, initial=first_step, desc="train", unit="step")


@dataclass
class _Stop:
    signal_number: int = 0
    """The signal that asked to stop, or 0."""


@contextlib.contextmanager
def _stop_signal() -> Iterator[_Stop]:
    """Note SIGINT and SIGTERM instead of dying of them; a second one has its usual effect."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may handle signals
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        stop.signal_number = number
        restore()
        # Straight to the descriptor: a handler may find the streams in the middle of a write.
        name = signal.Signals(number).name
        os.write(2, f"\n{name}: saving a checkpoint after this step; once more stops at once\n".encode())

    for number in previous:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()
