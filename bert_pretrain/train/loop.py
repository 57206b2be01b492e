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

from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import Interrupted
from bert_pretrain.train import metrics
from bert_pretrain.train.batches import GlobalBatch, Prefetcher, TrainingData
from bert_pretrain.train.distributed import Agreement, Boundary, Team
from bert_pretrain.train.reporter import Reporter
from bert_pretrain.train.schedule import Length, learning_rate, learning_rate_by_clock
from bert_pretrain.train.state import Progress, TrainState
from bert_pretrain.train.step import train_step


@dataclass(frozen=True)
class Plan:
    """What stays the same throughout a run."""

    config: TrainConfig
    length: Length
    device: torch.device
    dtype: torch.dtype
    peak_flops: float | None
    """Of all devices in this precision; None where unknown."""
    team: Team

    def learning_rate(self, step: int, now: Boundary) -> float:
        """Return the learning rate of the update that follows `step` finished ones."""
        if self.length.steps is not None:
            return learning_rate(self.config, step, self.length.steps)
        return learning_rate_by_clock(self.config, step, now.seconds, (self.length.seconds or 0.0) - now.reserve)


@dataclass(frozen=True)
class Hooks:
    """What the loop calls between steps; under FSDP all ranks must, since weights are gathered."""

    evaluate: Callable[[], dict[str, float]] | None
    """Returns the held-out figures; None where nothing is held out."""
    save: Callable[[], Path]
    """Begins to write a checkpoint of the state and returns where it will lie."""
    check: Callable[[], None]
    """Raises what went wrong while writing one."""
    finish_saving: Callable[[], None]
    """Waits until checkpoints are on disk."""
    writing_seconds: Callable[[], float]
    """Returns how long the last one took to be written, while training went on."""
    give_up: Callable[[GlobalBatch], None]
    """Raises if too many steps in a row were skipped, after putting the batch on disk."""


def fit(
    state: TrainState, data: TrainingData, plan: Plan, reporter: Reporter, hooks: Hooks, *, evaluate_first: bool
) -> None:
    """Train from the state's step to the end of the run, and put the last checkpoint on disk.

    Args:
        state: changed in place.
        data: where the batches come from.
        plan: of this run.
        reporter: receives a line each interval and each evaluation.
        hooks: evaluating, saving, giving up.
        evaluate_first: whether to measure the weights before the first step.

    Raises:
        Interrupted: after SIGINT or SIGTERM, once the checkpoint is written.
        UserError: when a shard is damaged, a checkpoint cannot be written, or the gradients stay non-finite.
    """
    progress, config = state.progress, plan.config
    state.network.train()
    with (
        _reading(data, progress.step, plan) as batches,
        _stop_signal() as stop,
        _private_random(plan),
        _agreeing(plan.team) as agreement,
    ):
        clock = _Clock(progress)
        if evaluate_first:
            _evaluate(state, reporter, hooks, clock)
        now = agreement.at_boundary(stop.signal_number, clock.read(), clock.reserve)
        while not plan.length.is_over(progress.step, now.seconds, now.reserve):
            begin = time.perf_counter()
            batch = batches.next()
            rate = plan.learning_rate(progress.step, now)
            train_step(
                state.network, state.optimizers, batch, state.sums, seed=config.seed, step=progress.step,
                learning_rate=rate, max_grad_norm=config.max_grad_norm, dtype=plan.dtype,
                loss_scale=state.loss_scale, team=plan.team,
            )  # fmt: skip
            state.count(batch)
            now = agreement.at_boundary(stop.signal_number, clock.read(), clock.reserve)
            is_last = plan.length.is_over(progress.step, now.seconds, now.reserve)
            log_due, eval_due, save_due = (
                is_last or progress.step % every == 0
                for every in (config.log_every, config.eval_every, config.save_every)
            )
            if log_due or eval_due or save_due or clock.is_first_step:
                _wait_for(plan.device)  # so that evaluating and saving are not timed as training
            clock.count_step(state, batch, time.perf_counter() - begin, batches.last_wait_seconds)
            reporter.advance(progress)
            if log_due:
                hooks.check()
                hooks.give_up(batch)
                reporter.training(
                    metrics.training_line(state, rate=rate, epoch=data.epoch(progress.step), peak=plan.peak_flops)
                )
                state.start_interval()
            if eval_due:
                _evaluate(state, reporter, hooks, clock)
            if save_due or now.signal_number:
                with clock.reserving("save"):
                    checkpoint = hooks.save()
                # At the end training waits for it, and for the final model, which is smaller.
                clock.reserve_for("write", 1.5 * hooks.writing_seconds())
                if now.signal_number and not is_last:
                    hooks.finish_saving()
                    raise _interrupted(now.signal_number, checkpoint)
        hooks.finish_saving()
        clock.read()


class _Clock:
    """Counts the time of steps, of the whole loop, and what must be kept back for after the last step."""

    def __init__(self, progress: Progress) -> None:
        self.is_first_step = True
        self._progress = progress
        self._start = time.perf_counter() - progress.wall_seconds

    @property
    def reserve(self) -> float:
        """The seconds that one more step, the last evaluation and the last checkpoint will take at most."""
        return sum(self._progress.longest_seconds.values())

    def reserve_for(self, what: str, seconds: float) -> None:
        """Keep back the seconds that something will take once more at the end."""
        longest = self._progress.longest_seconds
        longest[what] = max(longest.get(what, 0.0), seconds)

    def read(self) -> float:
        """Return the seconds that the run has taken, and note them in its progress."""
        self._progress.wall_seconds = time.perf_counter() - self._start
        return self._progress.wall_seconds

    def count_step(self, state: TrainState, batch: GlobalBatch, seconds: float, waited_seconds: float) -> None:
        """Note the time of a step."""
        self._progress.elapsed_seconds += seconds
        if not self.is_first_step:
            state.count_time(batch, seconds, waited_seconds)
            # Steps differ: what one took lately is the better guess for the last one than the longest of days.
            self._progress.longest_seconds["step"] = max(seconds, 0.9 * self._progress.longest_seconds.get("step", 0.0))
        self.is_first_step = False

    @contextlib.contextmanager
    def reserving(self, what: str) -> Iterator[None]:
        """Time something that will be done once more at the end."""
        begin = time.perf_counter()
        yield
        self.reserve_for(what, time.perf_counter() - begin)


def _interrupted(signal_number: int, checkpoint: Path) -> Interrupted:
    name = signal.Signals(signal_number).name
    # 128 + the number is what a shell reports of a process that a signal has ended.
    return Interrupted(128 + signal_number, f"stopped by {name} at {checkpoint}; the same command continues from there")


def _evaluate(state: TrainState, reporter: Reporter, hooks: Hooks, clock: _Clock) -> None:
    if hooks.evaluate is None:
        return
    with clock.reserving("evaluate"):
        figures = hooks.evaluate()
    names = ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")
    reporter.validation({"step": state.progress.step, **{f"validation_{name}": figures.get(name) for name in names}})


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _reading(data: TrainingData, first_step: int, plan: Plan) -> Iterator[Prefetcher]:
    batches = Prefetcher(data, first_step, plan.length.steps, plan.device)
    try:
        yield batches
    finally:
        batches.close()


@contextlib.contextmanager
def _agreeing(team: Team) -> Iterator[Agreement]:
    agreement = Agreement(team)
    yield agreement
    agreement.close()


def _private_random(plan: Plan) -> Any:
    """Return a context in which dropout may seed torch's generators; they are restored after it."""
    return torch.random.fork_rng(devices=[plan.device] if plan.device.type == "cuda" else [])


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
