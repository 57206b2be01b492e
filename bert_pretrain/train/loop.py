"""The training loop: step, log, evaluate and save until the run ends or a signal stops it."""

import contextlib
import signal
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch

from bert_pretrain.config import duration
from bert_pretrain.errors import ConfigError, Interrupted, UserError
from bert_pretrain.model.folder import PRETRAINING
from bert_pretrain.train.checkpoint import CheckpointWriter
from bert_pretrain.train.cuda_graph import StepGraphs
from bert_pretrain.train.evaluation import evaluate_batches
from bert_pretrain.train.loader import Prefetcher, TrainingData, evaluation_batches
from bert_pretrain.train.log import RunLog, training_line
from bert_pretrain.train.model_card import model_card
from bert_pretrain.train.packing import GlobalBatch
from bert_pretrain.train.resolved import ResolvedRun
from bert_pretrain.train.schedule import RunClock
from bert_pretrain.train.signals import SignalRequests, write_status
from bert_pretrain.train.state import TrainState
from bert_pretrain.train.step import MicroBatchTooLarge, train_step

MAX_SKIPPED_IN_A_ROW = 30  # the loss scale of fp16 needs 16 skipped steps to fall to 1


@dataclass
class Loop:
    """The objects of a training loop, and its actions."""

    run: ResolvedRun
    state: TrainState  # changed in place
    data: TrainingData
    log: RunLog
    is_start: bool  # False for a run that resumes
    rate: float = 0.0  # learning rate of the last step

    def __post_init__(self) -> None:
        self.graphs = self._make_graphs()
        self.clock = RunClock(
            self.run.config.train,
            self.run.length,
            self.state.progress,
            self.run.dist_context,
            self.is_start,
            # The first step may compile. The second step may capture a CUDA graph.
            slow_steps_left=1 if self.graphs is None else 2,
        )
        self.checkpoints = CheckpointWriter(
            self.run.output / "checkpoints",
            self.state,
            self.run.tokenizer,
            self.run.config.train.keep_checkpoints,
            None if self.log.is_silent else self.describe,
        )
        self.signals = SignalRequests()
        self.batches = self._prefetcher()

    def _make_graphs(self) -> StepGraphs | None:
        # CUDA graphs cannot communicate with other ranks, nor reset the random generator as activation checkpointing.
        is_possible = self.run.dist_context.size == 1 and not self.run.config.train.activation_checkpointing
        return StepGraphs(self.state.model, self.state.optimizers) if self.run.compiled and is_possible else None

    def time_steps(self) -> float:
        """Run up to four steps, which change the state, and return their median duration in seconds.

        The first step chooses or compiles kernels, so it counts only if it is the only step. A single process starts no
        step after a minute; several ranks always run four steps, because they must agree on the number.
        """
        self.state.network.train()
        times: list[float] = []
        with contextlib.closing(self), contextlib.suppress(StopIteration), _fork_rng(self.run.device):
            while len(times) < 4 and (self.run.dist_context.size > 1 or sum(times) < 60.0):
                _, begin = self._compute()
                _synchronize(self.run.device)
                times.append(time.perf_counter() - begin)
        return statistics.median(times[1:] or times)

    def fit(self) -> None:
        """Train from the state's step to the end of the run and save the last checkpoint.

        SIGUSR1 saves a checkpoint. Stop signals save one, without a due evaluation, and raise `Interrupted`.
        """
        self.state.network.train()
        with contextlib.closing(self), self.signals, _fork_rng(self.run.device):
            self.begin()
            while not self.clock.is_over:
                self.step()
                due = self.clock.due()
                if "log" in due:
                    self.log_metrics()
                if "evaluate" in due:
                    self.evaluate()
                if "save" in due:
                    self.save()
            self.end()

    @property
    def num_steps(self) -> int:
        """Number of finished steps."""
        return self.state.progress.step

    def _prefetcher(self) -> Prefetcher[GlobalBatch]:
        return Prefetcher(self.data.batches(self.num_steps, self.run.length.steps), self.run.device)

    def begin(self) -> None:
        """Run evaluations that are missing, and check that there is time for a step."""
        if self.is_start or self.num_steps % self.run.config.train.eval_every == 0:
            self.evaluate()  # a stop signal may have skipped this one
        self.clock.advance(0)
        if self.clock.is_over and self.num_steps:
            self.evaluate()
        elif self.clock.is_over:
            _report_no_time(self.run, self.clock)

    def step(self) -> None:
        """Take one step, and count it."""
        self.rate = self.clock.learning_rate()
        batch, begin = self._compute()
        self.state.count(batch)
        self.clock.advance(self.signals.take())
        if self.clock.due() or self.clock.slow_steps_left:
            _synchronize(self.run.device)  # so that the time of evaluating and saving does not include training
        seconds = time.perf_counter() - begin
        if not self.clock.slow_steps_left:
            self.state.count_time(batch, seconds, self.batches.last_wait_seconds)
        self.clock.add_step(seconds)
        self.log.advance(self.state.progress)

    def _compute(self) -> tuple[GlobalBatch, float]:
        """Update the weights with the next batch. Return the batch and the time at which this began.

        If memory runs out, try again with smaller micro-batches.
        """
        while True:
            begin = time.perf_counter()
            batch = self._next_batch()
            try:
                train_step(
                    self.state,
                    batch,
                    self.run.config.train,
                    step=self.num_steps,
                    learning_rate=self.rate,
                    dtype=self.run.precision.dtype,
                    dist_context=self.run.dist_context,
                    graphs=self.graphs,
                )
                return batch, begin
            except MicroBatchTooLarge as error:
                self._free_memory(error)
                self.batches.close()
                self.batches = self._prefetcher()

    def _free_memory(self, error: MicroBatchTooLarge) -> None:
        """Drop the CUDA graphs. If there are none, halve the micro-batches.

        Raises ConfigError if the size of micro-batches is configured, or if there are several ranks.
        """
        if self.graphs is None or not self.graphs.drop():
            tokens = self.data.micro_batch_tokens
            if self.run.dist_context.size > 1 or self.run.config.train.micro_batch_tokens != "auto":
                raise ConfigError(
                    f"micro-batches of {tokens:,} tokens do not fit into the memory of the device",
                    where="train.micro_batch_tokens",
                    remedy=f"set it to {tokens // 2}, and run the same command again",
                ) from error
            self.data.halve_micro_batches()
            print(f"out of memory: micro-batches have at most {self.data.micro_batch_tokens:,} tokens from now on")
        if self.run.device.type == "cuda":
            torch.cuda.empty_cache()

    def _next_batch(self) -> GlobalBatch:
        """Return the next batch. Before raising an error, such as that of a damaged shard, save a checkpoint."""
        try:
            return next(self.batches)
        except Exception:
            if self.num_steps:
                self.checkpoints.save()
                self.checkpoints.wait()
            raise

    def log_metrics(self) -> None:
        """Log the metrics since the last line. Raise `UserError` if the gradients stay non-finite."""
        self.checkpoints.check()
        skipped = self.state.sums[-1]  # `StepSums.skipped_in_a_row`, the same on all ranks
        if skipped >= MAX_SKIPPED_IN_A_ROW:  # waits for the device
            checkpoint = self.checkpoints.save()
            self.run.dist_context.run_on_main(self.checkpoints.wait)
            # The checkpoint is enough to reproduce the step: seed and step determine the batch and the dropout masks.
            raise UserError(
                f"the gradients of {int(skipped)} steps in a row were not finite; none of them changed the weights",
                where=f"step {self.num_steps}; the state is saved in {checkpoint}",
                remedy="lower train.peak_lr, or check the data; the same command retries from that checkpoint",
            )
        epoch = self.data.epoch(self.num_steps)
        self.log.training(training_line(self.state, rate=self.rate, epoch=epoch, peak=self.run.peak_flops))
        self.state.start_interval()

    def evaluate(self) -> None:
        """Evaluate all held-out examples at the end of the run, else a part, unless the last line has this result."""
        begin = time.perf_counter()
        run = self.run
        num_examples = run.data.rows("validation")
        line = self.log.newest.get("validation", {})  # empty on all ranks but the first
        is_complete = line.get("validation_examples") == num_examples or not self.clock.is_over
        is_done = line.get("step") == self.num_steps and is_complete
        if num_examples == 0 or run.dist_context.run_on_main(lambda: is_done):
            return
        batches = evaluation_batches(
            run.data,
            "validation",
            self.data.micro_batch_tokens,
            None if self.clock.is_over else run.config.train.eval_examples,
            static_shapes=run.compiled,
            dist_context=run.dist_context,
            with_pairs=run.config.model.has_pair_heads,
            with_draws=run.config.model.is_electra,
        )
        metrics = evaluate_batches(
            self.state.losses,
            batches,
            run.device,
            run.precision.dtype,
            run.dist_context,
        )
        self.log.validation(self.num_steps, metrics)
        # The last evaluation uses all examples. With decay, because the first one on a GPU loads kernels.
        seconds = (time.perf_counter() - begin) * num_examples / metrics["examples"]
        self.clock.reserve("evaluate", seconds, decay=0.5)

    def save(self) -> None:
        """Start writing a checkpoint. After a stop signal, stop the run."""
        begin = time.perf_counter()
        self.clock.read()  # to include the evaluation at this step
        self.checkpoints.save()
        self.clock.reserve("save", time.perf_counter() - begin)
        # The end of the run waits for the last checkpoint and for the final model, which is smaller.
        self.clock.reserve("write", 1.5 * self.checkpoints.write_seconds)
        if self.clock.is_stopped:
            self._stop()

    def describe(self) -> tuple[dict[str, Any], str]:
        """Return what a checkpoint records besides the state, and its model card."""
        run = self.run
        record = {
            "length": asdict(run.length),
            "micro_batch_tokens": self.data.micro_batch_tokens,
            "threads": torch.get_num_threads(),
            "ranks": run.dist_context.size,
            "device": run.device.type,
            "torch": torch.__version__,
            "precision": run.precision.name,
            "data": run.data.content_hash,
            PRETRAINING: run.pretraining(self.state.progress.tokens),
            "metrics": self.log.position,
        }
        return record, model_card(run, self.state, self.log.newest.get("validation"))

    def end(self) -> None:
        """Wait for the last checkpoint. Stop if a signal arrived during the last evaluation or save."""
        self.checkpoints.wait()
        self.clock.advance(self.signals.take())
        if self.clock.is_stopped:
            self._stop()

    def _stop(self) -> NoReturn:
        """Wait for the checkpoint, write the status and raise `Interrupted`."""
        number = self.clock.signal_number
        name = signal.Signals(number).name
        text = f"stopped by {name} at {self.checkpoints.path}; the same command continues from there"
        reason = Interrupted(128 + number, text)  # the exit code that a shell reports for this signal

        def complete() -> None:
            self.checkpoints.wait()
            write_status(self.run.output, reason.exit_code, reason.message)

        self.run.dist_context.run_on_main(complete)  # no rank exits earlier: torchrun and Slurm would kill the others
        raise reason

    def close(self) -> None:
        self.batches.close()


def _report_no_time(run: ResolvedRun, clock: RunClock) -> None:
    """Raise `ConfigError` if the time budget ends before the first step, or warn if the run has trained weights."""
    what = (
        f"the start took {duration(clock.seconds)}, and the last evaluation, of all held-out examples, may take "
        f"{duration(clock.reserve_seconds)}; so no time is left for a step"
    )
    if run.init_from is None:
        raise ConfigError(what, where="train.time_budget", remedy="allow more time, or hold out less text")
    print(f"warning: {what}; the weights are those of {run.init_from}")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fork_rng(device: torch.device) -> Any:
    """Return a context that restores PyTorch's generators, which dropout seeds, on exit."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
