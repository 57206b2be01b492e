"""The training loop: step, log, evaluate and save until the run ends or a signal stops it.

`Clock` measures the time of steps and of the run, and the time that a time budget reserves for the end of the run.
"""

import contextlib
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

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
from bert_pretrain.train.schedule import duration
from bert_pretrain.train.signals import STOPS, SignalRequests, write_status
from bert_pretrain.train.state import INITIAL_WEIGHTS, Progress, TrainState
from bert_pretrain.train.step import MicroBatchTooLarge, train_step

# Evaluates the whole validation split if passed True, else a part of it. Returns None if there is no such split.
Evaluate = Callable[[bool], dict[str, float] | None]


def fit(
    run: ResolvedRun,
    state: TrainState,
    data: TrainingData,
    log: RunLog,
    evaluate: Evaluate,
    checkpoints: CheckpointWriter,
    *,
    evaluate_first: bool,
) -> None:
    """Train from the state's step to the end of the run and save the last checkpoint.

    The state is changed in place. SIGUSR1 saves a checkpoint. Stop signals save one, without a due evaluation, and
    raise `Interrupted`.
    """
    config, progress = run.config.train, state.progress
    graphs = _step_graphs(run, state)
    # The first step may compile. The second may capture a CUDA graph; with several ranks, it learns how long the first
    # one took.
    num_slow_steps = 2 if graphs is not None or run.dist_context.size > 1 else 1
    state.network.train()
    start_seconds = progress.longest_seconds.get(INITIAL_WEIGHTS, 0.0)
    with (
        contextlib.closing(Prefetcher(data.batches(progress.step, run.length.steps), run.device)) as batches,
        contextlib.closing(Clock(progress, run.dist_context, num_slow_steps)) as clock,
        SignalRequests() as signals,
        _fork_rng(run.device),
    ):
        if evaluate_first or progress.step % config.eval_every == 0:  # a stop signal may have skipped this one
            _evaluate_if_missing(run, clock, log, progress.step, evaluate, all_examples=False)
        now = clock.status(0)
        if evaluate_first:
            progress.warmup_start = now.seconds
        if run.length.is_over(progress.step, now.seconds, now.reserve):
            if progress.step:
                _evaluate_if_missing(run, clock, log, progress.step, evaluate, all_examples=True)
            else:
                _report_no_time(run, now, start_seconds)
        while not run.length.is_over(progress.step, now.seconds, now.reserve):
            begin = time.perf_counter()
            batch = _next_batch(batches, progress.step, checkpoints)
            rate = run.learning_rate(progress, now.seconds, now.reserve)
            try:
                _step(run, state, batch, progress.step, rate, graphs)
            except MicroBatchTooLarge as error:
                _free_memory(run, data, graphs, error)
                batches.close()
                batches.start(data.batches(progress.step, run.length.steps))
                continue
            state.count(batch)
            before, now = now, clock.status(signals.take())
            if evaluate_first and clock.slow_steps_left:
                progress.warmup_start = now.seconds
            is_last = run.length.is_over(progress.step, now.seconds, now.reserve)
            log_due, eval_due, save_due = (
                is_last or progress.step % every == 0
                for every in (config.log_every, config.eval_every, config.save_every)
            )
            eval_due |= run.evaluates_by_clock(before.seconds, now.seconds, now.reserve - start_seconds)
            if log_due or eval_due or save_due or clock.slow_steps_left:
                _synchronize(run.device)  # so that the time of evaluating and saving does not include training
            clock.add_step(state, batch, time.perf_counter() - begin, batches.last_wait_seconds)
            log.advance(progress)
            if log_due:
                _log(run, state, log, checkpoints, rate, data.epoch(progress.step))
            if eval_due and now.signal_number not in STOPS:
                _evaluate(run, clock, log, progress.step, evaluate, all_examples=is_last)
            if save_due or now.signal_number:
                _save(run, clock, checkpoints, now.signal_number)
        checkpoints.wait()
        clock.read()
        # A stop signal during the last evaluation or save: the last checkpoint is complete.
        last = checkpoints.path
        if run.dist_context.size == 1 and (number := signals.take()) in STOPS and last.exists():
            _stop(run, checkpoints, last, number)


def _report_no_time(run: ResolvedRun, now: "StepStatus", start_seconds: float) -> None:
    """Raise `ConfigError` if the time budget ends before the first step, or warn if the run has trained weights."""
    start, end = duration(now.seconds + start_seconds), duration(now.reserve - start_seconds)
    what = f"the start took {start}, and the last evaluation, of all held-out examples, may take {end}; "
    what += "so no time is left for a step"
    if run.init_from is None:
        raise ConfigError(what, where="train.time_budget", remedy="allow more time, or hold out less text")
    print(f"warning: {what}; the weights are those of {run.init_from}")


def _next_batch(batches: Prefetcher[GlobalBatch], step: int, checkpoints: CheckpointWriter) -> GlobalBatch:
    """Return the next batch. Before raising an error, such as that of a damaged shard, save a checkpoint."""
    try:
        return next(batches)
    except Exception:
        if step:
            checkpoints.save()
            checkpoints.wait()
        raise


def _step_graphs(run: ResolvedRun, state: TrainState) -> StepGraphs | None:
    # CUDA graphs cannot communicate with other ranks, nor reset the random generator as activation checkpointing does.
    is_possible = run.compiled and run.dist_context.size == 1 and not run.config.train.activation_checkpointing
    return StepGraphs(state.model, state.optimizers) if is_possible else None


def _step(
    run: ResolvedRun, state: TrainState, batch: GlobalBatch, step: int, rate: float, graphs: StepGraphs | None
) -> None:
    train_step(
        state.network, state.optimizers, batch, state.sums, seed=run.config.train.seed, step=step,
        learning_rate=rate, max_grad_norm=run.config.train.max_grad_norm, dtype=run.precision.dtype,
        loss_scale=state.loss_scale, dist_context=run.dist_context, graphs=graphs,
    )  # fmt: skip


def _evaluate(
    run: ResolvedRun, clock: "Clock", log: RunLog, step: int, evaluate: Evaluate, *, all_examples: bool
) -> None:
    begin = time.perf_counter()
    metrics = evaluate(all_examples)
    if metrics is not None:
        log.validation(step, metrics)
        seconds = time.perf_counter() - begin  # scaled to all examples, which the last evaluation uses
        # With decay, because the first evaluation on a GPU loads kernels.
        clock.reserve("evaluate", seconds * run.data.rows("validation") / metrics["examples"], decay=0.5)


def _evaluate_if_missing(
    run: ResolvedRun, clock: "Clock", log: RunLog, step: int, evaluate: Evaluate, *, all_examples: bool
) -> None:
    """Evaluate, unless the last validation line of `metrics.jsonl` is of this step, and of all examples if required."""
    line = log.newest.get("validation", {})  # empty on all ranks but the first
    is_done = line.get("step") == step
    is_done &= not all_examples or line.get("validation_examples") == run.data.rows("validation")
    if not run.dist_context.run_on_main(lambda: is_done):
        _evaluate(run, clock, log, step, evaluate, all_examples=all_examples)


def _log(
    run: ResolvedRun, state: TrainState, log: RunLog, checkpoints: CheckpointWriter, rate: float, epoch: float
) -> None:
    """Log the metrics since the last line. Raise `UserError` if the gradients stay non-finite."""
    checkpoints.check()
    skipped = state.sums[-1]  # `StepSums.skipped_in_a_row`, the same on all ranks
    if skipped >= 30:  # waits for the device; the loss scale of fp16 needs 16 skipped steps to fall to 1
        checkpoint = checkpoints.save()
        run.dist_context.run_on_main(checkpoints.wait)
        # The checkpoint is enough to reproduce the step: seed and step determine the batch and the dropout masks.
        raise UserError(
            f"the gradients of {int(skipped)} steps in a row were not finite; none of them changed the weights",
            where=f"step {state.progress.step}; the state is saved in {checkpoint}",
            remedy="lower train.peak_lr, or check the data; the same command retries from that checkpoint",
        )
    log.training(training_line(state, rate=rate, epoch=epoch, peak=run.peak_flops))
    state.start_interval()


def _save(run: ResolvedRun, clock: "Clock", checkpoints: CheckpointWriter, signal_number: int) -> None:
    """Start writing a checkpoint. After a stop signal, stop the run."""
    begin = time.perf_counter()
    clock.read()  # to include the evaluation at this step
    checkpoint = checkpoints.save()
    clock.reserve("save", time.perf_counter() - begin)
    # The end of the run waits for the last checkpoint and for the final model, which is smaller.
    clock.reserve("write", 1.5 * checkpoints.write_seconds)
    if signal_number in STOPS:
        _stop(run, checkpoints, checkpoint, signal_number)


def _stop(run: ResolvedRun, checkpoints: CheckpointWriter, checkpoint: Path, signal_number: int) -> NoReturn:
    """Wait for a checkpoint, write the status and raise `Interrupted`."""
    text = f"stopped by {signal.Signals(signal_number).name} at {checkpoint}; the same command continues from there"
    reason = Interrupted(128 + signal_number, text)  # the exit code that a shell reports for this signal

    def complete() -> None:
        checkpoints.wait()
        write_status(run.output, reason.exit_code, reason.message)

    run.dist_context.run_on_main(complete)  # no rank exits earlier: torchrun and Slurm would kill the others
    raise reason


def _free_memory(run: ResolvedRun, data: TrainingData, graphs: StepGraphs | None, error: MicroBatchTooLarge) -> None:
    """Drop the CUDA graphs. If there are none, halve the micro-batches.

    Raises ConfigError if the size of micro-batches is configured, or if there are several ranks.
    """
    if graphs is None or not graphs.drop():
        if run.dist_context.size > 1 or run.config.train.micro_batch_tokens != "auto":
            raise ConfigError(
                f"micro-batches of {data.micro_batch_tokens:,} tokens do not fit into the memory of the device",
                where="train.micro_batch_tokens",
                remedy=f"set it to {data.micro_batch_tokens // 2}, and run the same command again",
            ) from error
        data.halve_micro_batches()
        print(f"out of memory: micro-batches have at most {data.micro_batch_tokens:,} tokens from now on")
    if run.device.type == "cuda":
        torch.cuda.empty_cache()


def time_steps(run: ResolvedRun, state: TrainState, data: TrainingData) -> float:
    """Run up to four steps, which change the state, and return their median duration in seconds.

    The first step chooses or compiles kernels, so it counts only if it is the only step. A single process starts no
    step after a minute; several ranks always run four steps, because they must agree on the number.
    """
    times: list[float] = []
    graphs = _step_graphs(run, state)
    state.network.train()
    with _fork_rng(run.device):
        while len(times) < 4 and (run.dist_context.size > 1 or sum(times) < 60.0):
            batch = data.global_batch(state.progress.step + len(times)).to(run.device)
            begin = time.perf_counter()
            try:
                _step(run, state, batch, len(times), run.config.train.peak_lr, graphs)
            except MicroBatchTooLarge as error:
                _free_memory(run, data, graphs, error)
                continue
            _synchronize(run.device)
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:] or times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fork_rng(device: torch.device) -> Any:
    """Return a context that restores PyTorch's generators, which dropout seeds, on exit."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


class StepStatus(NamedTuple):
    """The values that all ranks agree on between two steps."""

    signal_number: int  # a stop signal, SIGUSR1 to save, or 0
    seconds: float  # since the start of the run
    reserve: float  # seconds for initial weights, one more step, the last evaluation and the last checkpoint


class Clock:
    """Measures the time of a run. Ranks agree on their maximum without waiting for one another."""

    def __init__(self, progress: Progress, dist_context: DistContext, num_slow_steps: int = 1) -> None:
        self.slow_steps_left = num_slow_steps
        self._progress, self._dist_context = progress, dist_context
        self._start = time.perf_counter() - progress.wall_seconds
        self._sent: tuple[Any, Tensor] | None = None

    def read(self) -> float:
        """Return the seconds since the start of the run, and store them in its progress."""
        self._progress.wall_seconds = time.perf_counter() - self._start
        return self._progress.wall_seconds

    def status(self, signal_number: int) -> StepStatus:
        """Return the maximum over all ranks of the signal number, the seconds and the reserve.

        With several ranks, each call but the first returns the values sent by the previous call. They have already
        arrived, so no rank waits.
        """
        seconds, longest = self.read(), self._progress.longest_seconds
        reserve = sum(longest.values())
        if self._dist_context.size == 1:
            return StepStatus(signal_number, seconds, reserve)
        reserve += longest.get("step", 0.0)  # the result is one step old
        values = torch.tensor((signal_number, seconds, reserve), dtype=torch.float64)
        now = dist.all_reduce(values, dist.ReduceOp.MAX, async_op=True), values
        work, agreed = self._sent or now
        work.wait()
        self._sent = now
        return StepStatus(int(agreed[0]), float(agreed[1]), float(agreed[2]))

    def add_step(self, state: TrainState, batch: GlobalBatch, seconds: float, waited_seconds: float) -> None:
        """Add the time of a step. The slow steps at the start count only for the total."""
        self._progress.elapsed_seconds += seconds
        if not self.slow_steps_left:
            state.count_time(batch, seconds, waited_seconds)
            # With decay, because recent steps predict the last step better than the slowest step of the run.
            self.reserve("step", seconds, decay=0.9)
        self.slow_steps_left = max(0, self.slow_steps_left - 1)

    def reserve(self, activity: str, seconds: float, decay: float = 1.0) -> None:
        """Update the time to reserve for an activity: `seconds` or, if larger, the decayed earlier maximum."""
        longest = self._progress.longest_seconds
        longest[activity] = max(seconds, decay * longest.get(activity, 0.0))

    def close(self) -> None:
        if self._sent is not None:
            self._sent[0].wait()
