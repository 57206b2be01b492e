"""The training loop: one `fit`, which says when to step, log, evaluate and save, and stops cleanly when told to.

Its clock counts the time of the steps and of all of the run, and what a time budget keeps back for after the last step.
"""

import contextlib
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bert_pretrain.errors import ConfigError, Interrupted, UserError
from bert_pretrain.train.checkpoint import CheckpointWriter
from bert_pretrain.train.cuda_graph import StepGraphs
from bert_pretrain.train.distributed import DistContext
from bert_pretrain.train.loader import Prefetcher, TrainingData
from bert_pretrain.train.log import RunLog, training_line
from bert_pretrain.train.packing import GlobalBatch
from bert_pretrain.train.resolved import ResolvedRun
from bert_pretrain.train.signals import STOPS, SignalRequests, write_status
from bert_pretrain.train.state import Progress, TrainState
from bert_pretrain.train.step import DoesNotFit, train_step

TIMED_STEPS, PATIENCE_SECONDS = 4, 60.0
MAX_SKIPPED_IN_A_ROW = 30
"""More than a loss scale of fp16 needs to come down from its start to 1; after that, waiting does not help."""


def fit(
    run: ResolvedRun,
    state: TrainState,
    data: TrainingData,
    log: RunLog,
    measure: Callable[[bool], dict[str, float] | None],
    checkpoints: CheckpointWriter,
    *,
    evaluate_first: bool,
) -> None:
    """Train from the state's step to the end of the run, and put the last checkpoint on disk.

    The state is changed in place. `measure` returns the metrics of the held-out split, or of a part unless it must be
    whole, if there is one. After SIGINT or SIGTERM it raises `Interrupted`, once the checkpoint is written. SIGUSR1
    saves a checkpoint.
    """
    config, progress = run.config.train, state.progress
    graphs = _step_graphs(run, state)
    state.network.train()
    with (
        contextlib.closing(Prefetcher(data.batches(progress.step, run.length.steps), run.device)) as batches,
        contextlib.closing(Clock(progress, run.dist_context)) as clock,
        SignalRequests() as signals,
        _own_random_state(run.device),
    ):
        if evaluate_first:
            _evaluate(run, clock, log, progress.step, measure, whole=False)
        now = clock.boundary(signals.take())
        if progress.step and run.length.is_over(progress.step, now.seconds, now.reserve):
            _evaluate_end(run, clock, log, progress.step, measure)
        while not run.length.is_over(progress.step, now.seconds, now.reserve):
            clock.start_step()
            batch = _next_batch(batches, progress.step, checkpoints)
            rate = run.learning_rate(progress.step, now.seconds, now.reserve)
            try:
                _step(run, state, batch, progress.step, rate, graphs)
            except DoesNotFit as error:
                _make_room(run, data, graphs, error)
                batches.close()
                batches.start(data.batches(progress.step, run.length.steps))
                continue
            state.count(batch)
            before, now = now, clock.boundary(signals.take())
            is_last = run.length.is_over(progress.step, now.seconds, now.reserve)
            log_due, eval_due, save_due = (
                is_last or progress.step % every == 0
                for every in (config.log_every, config.eval_every, config.save_every)
            )
            eval_due |= run.evaluates_by_clock(before.seconds, now.seconds, now.reserve)
            if log_due or eval_due or save_due or clock.is_first_step:
                _wait_for(run.device)  # so that evaluating and saving are not timed as training
            clock.end_step(state, batch, batches.last_wait_seconds)
            log.advance(progress)
            if log_due:
                _log(run, state, log, checkpoints, rate, data.epoch(progress.step))
            if eval_due:
                _evaluate(run, clock, log, progress.step, measure, whole=is_last)
            if save_due or now.signal_number:
                _save(run, clock, checkpoints, now.signal_number, is_last=is_last)
        checkpoints.wait()
        clock.read()


def _next_batch(batches: Prefetcher[GlobalBatch], step: int, checkpoints: CheckpointWriter) -> GlobalBatch:
    try:
        return next(batches)
    except Exception:  # such as a damaged shard: the steps so far are kept
        if step:
            checkpoints.save()
            checkpoints.wait()
        raise


def _step_graphs(run: ResolvedRun, state: TrainState) -> StepGraphs | None:
    # Ranks talk within a step; and a layer that is computed again sets the generator back, which a graph cannot.
    is_possible = run.compiled and run.dist_context.size == 1 and not run.config.train.activation_checkpointing
    return StepGraphs(state.model, state.optimizers, run.precision.dtype) if is_possible else None


def _step(
    run: ResolvedRun, state: TrainState, batch: GlobalBatch, step: int, rate: float, graphs: StepGraphs | None
) -> None:
    train_step(
        state.network, state.optimizers, batch, state.sums, seed=run.config.train.seed, step=step,
        learning_rate=rate, max_grad_norm=run.config.train.max_grad_norm, dtype=run.precision.dtype,
        loss_scale=state.loss_scale, dist_context=run.dist_context, graphs=graphs,
    )  # fmt: skip


def _evaluate(
    run: ResolvedRun,
    clock: "Clock",
    log: RunLog,
    step: int,
    measure: Callable[[bool], dict[str, float] | None],
    *,
    whole: bool,
) -> None:
    begin = time.perf_counter()
    metrics = measure(whole)
    log.validation(step, metrics)
    if metrics is not None:  # the last evaluation is of all examples
        seconds = time.perf_counter() - begin
        clock.reserve("evaluate", seconds * run.data.rows("validation") / metrics["examples"])


def _evaluate_end(
    run: ResolvedRun, clock: "Clock", log: RunLog, step: int, measure: Callable[[bool], dict[str, float] | None]
) -> None:
    """Evaluate the whole split for a run that has no step left, unless its last session has done so."""

    def is_done() -> bool:
        line = log.newest.get("validation", {})
        return (line.get("step"), line.get("validation_examples")) == (step, run.data.rows("validation"))

    if not run.dist_context.run_on_main(is_done):
        _evaluate(run, clock, log, step, measure, whole=True)


def _log(
    run: ResolvedRun, state: TrainState, log: RunLog, checkpoints: CheckpointWriter, rate: float, epoch: float
) -> None:
    """Read what the steps since the last line have measured; raises where gradients stay non-finite."""
    checkpoints.check()
    skipped = state.sums[-1]
    if skipped >= MAX_SKIPPED_IN_A_ROW:  # waits for the device; the same on all ranks
        checkpoint = checkpoints.save()
        run.dist_context.run_on_main(checkpoints.wait)
        # Seed and step fix the batch and the dropout masks, so the checkpoint is all that computes the step again.
        raise UserError(
            f"the gradients of {int(skipped)} steps in a row were not finite; none of them changed the weights",
            where=f"step {state.progress.step}; the state is saved in {checkpoint}",
            remedy="lower train.peak_lr, or look for what is odd in the data; the same command would try again",
        )
    log.training(training_line(state, rate=rate, epoch=epoch, peak=run.peak_flops))
    state.start_interval()


def _save(
    run: ResolvedRun, clock: "Clock", checkpoints: CheckpointWriter, signal_number: int, *, is_last: bool
) -> None:
    """Begin to write a checkpoint; raises where a signal asked to stop, once checkpoint and status are on disk."""
    begin = time.perf_counter()
    checkpoint = checkpoints.save()
    clock.reserve("save", time.perf_counter() - begin)
    # At the end training waits for it, and for the final model, which is smaller.
    clock.reserve("write", 1.5 * checkpoints.write_seconds)
    if signal_number in STOPS and not is_last:
        text = f"stopped by {signal.Signals(signal_number).name} at {checkpoint}; the same command continues from there"
        reason = Interrupted(128 + signal_number, text)  # as a shell reports a process that a signal has ended

        def complete() -> None:
            checkpoints.wait()
            write_status(run.output, reason.exit_code, reason.message)

        run.dist_context.run_on_main(complete)  # all wait: torchrun and Slurm end the others as soon as one has left
        raise reason


def _make_room(run: ResolvedRun, data: TrainingData, graphs: StepGraphs | None, error: DoesNotFit) -> None:
    """Give back the memory of CUDA graphs, or halve the micro-batches; several ranks would have to agree on that."""
    if graphs is not None and graphs.drop():
        torch.cuda.empty_cache()
        return
    if run.dist_context.size > 1 or run.config.train.micro_batch_tokens != "auto":
        raise ConfigError(
            f"micro-batches of {data.micro_batch_tokens:,} tokens do not fit into the memory of the device",
            where="train.micro_batch_tokens",
            remedy=f"set it to {data.micro_batch_tokens // 2}, and run the same command again",
        ) from error
    data.halve_micro_batches()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    print(f"memory does not suffice: micro-batches of {data.micro_batch_tokens:,} tokens from now on")


def time_steps(run: ResolvedRun, state: TrainState, data: TrainingData) -> float:
    """Return the median seconds of a few steps of a state that will be thrown away.

    The first, in which kernels are chosen or compiled, counts only where a minute is over after it.
    """
    times: list[float] = []
    graphs = _step_graphs(run, state)
    state.network.train()
    with _own_random_state(run.device):
        while len(times) < TIMED_STEPS and (run.dist_context.size > 1 or sum(times) < PATIENCE_SECONDS):
            batch = data.global_batch(state.progress.step + len(times)).to(run.device)
            begin = time.perf_counter()
            try:
                _step(run, state, batch, len(times), run.config.train.peak_lr, graphs)
            except DoesNotFit as error:
                _make_room(run, data, graphs, error)
                continue
            _wait_for(run.device)
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:] or times)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _own_random_state(device: torch.device) -> Any:
    """Return a context in which dropout may seed torch's generators; they are restored after it."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


class Boundary(NamedTuple):
    """The state that all ranks agree on between two steps."""

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

    def reserve(self, what: str, seconds: float, fading: float = 1.0) -> None:
        """Keep back the seconds that something will take once more at the end: the longest, perhaps fading."""
        longest = self._progress.longest_seconds
        longest[what] = max(seconds, fading * longest.get(what, 0.0))

    def close(self) -> None:
        """Wait for a message that is still under way."""
        if self._sent is not None:
            self._sent[0].wait()
