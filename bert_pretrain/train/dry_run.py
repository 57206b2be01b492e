"""`train --dry-run`: what a run would do, need and take, from a few timed steps; nothing is written.

Steps are real ones, on the first batches, until a few are timed or a minute is over; a step that takes longer than that
is estimated from its first micro-batches.
"""

import time
from dataclasses import replace

import torch

from bert_pretrain.parallel.progress import progress_bar
from bert_pretrain.train.batches import GlobalBatch
from bert_pretrain.train.device.flops import peak_flops
from bert_pretrain.train.device.memory import estimate_memory
from bert_pretrain.train.loader import TrainingData
from bert_pretrain.train.metrics import peak_memory_bytes
from bert_pretrain.train.optim.schedule import duration
from bert_pretrain.train.resolved import ResolvedRun
from bert_pretrain.train.state import TrainState
from bert_pretrain.train.step import train_step

TIMED_STEPS = 5
PATIENCE_SECONDS = 60.0
GIB = 2**30


def dry_run(run: ResolvedRun, state: TrainState, data: TrainingData, *, num_shards: int = 1) -> str:
    """Train a few steps of a state that will be thrown away, and return, for users, what the run would take."""
    batch = data.global_batch(state.progress.step)
    parts = len(batch.micro_batches)
    seconds, share = _time_steps(run, state, data)
    flops = state.flops(batch)
    memory = estimate_memory(
        run.config.train, state.model, run.data.max_seq_length, data.micro_batch_tokens,
        dtype=run.precision.dtype, num_shards=num_shards,
        teacher=state.teacher,
    )  # fmt: skip
    peak = peak_flops(run.device, run.precision.dtype)
    rate = flops / seconds
    utilisation = f", {rate / peak / run.dist_context.size:.1%} of the peak" if peak else ""
    how = "timed" if share == 1.0 else f"estimated from {share:.0%} of one"
    lines = [
        f"a step     {batch.num_sequences:,} examples, {batch.num_tokens:,} tokens, {parts} micro-batches, "
        f"{flops / 1e12:.3g} TFLOP",
        f"memory     about {memory.total / GIB:.1f} GiB: state {memory.state / GIB:.1f}, activations "
        f"{memory.activations / GIB:.1f}, logits {memory.logits / GIB:.1f}; "
        f"measured {peak_memory_bytes(run.device) / GIB:.1f}",
        f"speed      {seconds:.3g} s a step ({how}), {batch.num_sequences / seconds:,.0f} examples/s, "
        f"{batch.num_tokens / seconds:,.0f} tokens/s, {rate / 1e12:.3g} TFLOP/s{utilisation}",
    ]
    if run.length.steps is not None:
        left = run.length.steps - state.progress.step
        lines.append(f"time       {duration(left * seconds)} for {left:,} steps, without evaluations and checkpoints")
    else:
        fitting = int((run.length.seconds or 0.0) / seconds)
        epochs = fitting * batch.num_sequences / run.data.rows("train")
        lines.append(f"time       {run.length}: about {fitting:,} steps, {epochs:.2f} epochs")
    lines.append("nothing was written (--dry-run)")
    return "\n".join(lines)


def _time_steps(run: ResolvedRun, state: TrainState, data: TrainingData) -> tuple[float, float]:
    """Return the median seconds of a step, and the share of a step that was computed to know it."""
    first = data.global_batch(state.progress.step).to(run.device)
    begin = time.perf_counter()
    probe = replace(first, micro_batches=first.micro_batches[:1])
    _step(run, state, probe, 0)  # kernels are chosen or compiled here
    _step(run, state, probe, 0)
    expected = (time.perf_counter() - begin) / 2 * len(first.micro_batches)
    if expected > PATIENCE_SECONDS / 2 and run.dist_context.size == 1 and len(first.micro_batches) > 1:
        begin = time.perf_counter()
        _step(run, state, probe, 0)
        return (time.perf_counter() - begin) * len(first.micro_batches), 1 / len(first.micro_batches)
    times: list[float] = []
    with progress_bar(total=TIMED_STEPS, desc="time", unit="step", disable=not run.dist_context.is_main) as bar:
        while len(times) < TIMED_STEPS and (run.dist_context.size > 1 or sum(times) <= PATIENCE_SECONDS):
            batch = data.global_batch(state.progress.step + len(times)).to(run.device)
            begin = time.perf_counter()
            _step(run, state, batch, len(times))
            times.append(time.perf_counter() - begin)
            bar.update()
    return sorted(times)[len(times) // 2], 1.0


def _step(run: ResolvedRun, state: TrainState, batch: GlobalBatch, number: int) -> None:
    train_step(
        state.network.train(), state.optimizers, batch, state.sums, seed=run.config.train.seed, step=number,
        learning_rate=run.config.train.peak_lr, max_grad_norm=run.config.train.max_grad_norm, dtype=run.precision.dtype,
        loss_scale=state.loss_scale, dist_context=run.dist_context,
    )  # fmt: skip
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
