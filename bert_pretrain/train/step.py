"""One optimizer step: forward and backward pass, gradient clipping, and the update of the weights.

A step does not wait for the device, unless it captures or checks a CUDA graph. The device tests whether gradients are
finite, skips the update if they are not, and sums the metrics. The sums are read only when a log line is due.
"""

import functools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from bert_pretrain import rng
from bert_pretrain.config import TrainConfig
from bert_pretrain.train.cuda_graph import StepGraphs
from bert_pretrain.train.distributed import SINGLE_PROCESS, DistContext, gradient_sync
from bert_pretrain.train.loss import Counts, LossSums, PretrainingLoss
from bert_pretrain.train.optimizers import update
from bert_pretrain.train.packing import Batch, GlobalBatch
from bert_pretrain.train.state import StepSums, TrainState


class MicroBatchTooLarge(Exception):
    """Raised if a micro-batch does not fit into the memory of the device. Weights, state and sums have not changed."""


def train_step(
    state: TrainState,
    batch: GlobalBatch,
    config: TrainConfig,
    *,
    step: int,
    learning_rate: float,
    dtype: torch.dtype,
    dist_context: DistContext = SINGLE_PROCESS,
    graphs: StepGraphs | None = None,
) -> None:
    """Update the weights with one global batch and add its metrics to the sums of the state.

    `batch` is this rank's share. The sums are the same on all ranks. A skipped step only counts as skipped. `step` is
    the number of finished steps. The seed, `step` and the index of a micro-batch over all ranks determine its dropout
    masks. `graphs` runs a step of one micro-batch as a CUDA graph if possible.
    """

    compute = functools.partial(
        _update,
        state,
        config.max_grad_norm,
        len(batch.micro_batches),
        dtype,
        dist_context,
    )
    seeded = functools.partial(
        _seeded,
        batch,
        config.seed,
        step,
        dist_context,
    )
    changed = [state.sums, *(state.loss_scale or ())]
    # A graph has one micro-batch, whose tensors it copies itself, so here `seeded` only seeds the generator.
    if graphs is not None and graphs.run(
        compute,
        batch,
        learning_rate,
        lambda: next(seeded()),
        changed,
    ):
        return
    # `new_full` fills on the device. `torch.tensor` would copy from the host and wait.
    counts = [state.sums.new_full((), number) for number in batch.counts]
    compute(seeded(), torch.stack(counts), learning_rate)
    if graphs is not None:
        graphs.check()


def _update(
    state: TrainState,
    max_grad_norm: float,
    num_micro_batches: int,
    dtype: torch.dtype,
    dist_context: DistContext,
    micro_batches: Iterable[Batch],
    counts: Tensor,
    rate: float | Tensor,
) -> None:
    """Update the weights and add the metrics. `counts` are those of the global batch, (3,)."""
    for optimizer in state.optimizers:
        optimizer.zero_grad(set_to_none=True)
    parts = _add_gradients(
        state,
        micro_batches,
        num_micro_batches,
        Counts(*counts.clamp(min=1.0).float().unbind()),
        dtype,
        dist_context,
    )
    norm = _clip(state, max_grad_norm)
    metrics = _step_metrics(
        state.losses,
        parts,
        counts,
        norm,
        dist_context,
    )
    is_skipped = ~metrics.isfinite().all()
    update(state.optimizers, rate, is_skipped)
    if state.loss_scale is not None:
        state.loss_scale.update(is_skipped)
    _add_metrics(state.sums, metrics, is_skipped)


def _seeded(
    batch: GlobalBatch,
    seed: int,
    step: int,
    dist_context: DistContext,
) -> Iterator[Batch]:
    """Yield the micro-batches, and seed the generator of dropout before each."""
    for number, micro_batch in enumerate(batch.micro_batches):
        index = number * dist_context.size + dist_context.rank
        torch.manual_seed(rng.torch_seed(seed, "dropout", step=step, micro_batch=index))
        yield micro_batch


def _add_gradients(
    state: TrainState,
    micro_batches: Iterable[Batch],
    num_micro_batches: int,
    counts: Counts,
    dtype: torch.dtype,
    dist_context: DistContext,
) -> list[LossSums]:
    """Accumulate gradients over micro-batches. Divide losses by the counts of the global batch."""
    device = counts.predictions.device.type
    # DDP averages gradients over ranks, but the losses of ranks must be summed.
    scale: float | Tensor = dist_context.size
    if state.loss_scale is not None:
        scale = state.loss_scale.scale * scale
    parts: list[LossSums] = []
    # One autocast region covers all micro-batches, so that each weight is cast once per step (per micro-batch if layers
    # are compiled). The inner region disables autocast for the backward pass but keeps the cached casts.
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        for micro_batch in micro_batches:
            with gradient_sync(state.network, is_last=len(parts) == num_micro_batches - 1):
                try:
                    part: LossSums = state.network(micro_batch)
                    loss = state.losses.mean(part, counts) * scale
                    with torch.autocast(device, enabled=False):
                        loss.backward()  # type: ignore[no-untyped-call]
                except torch.OutOfMemoryError as error:
                    raise MicroBatchTooLarge from error
            parts.append(part)
    return parts


def _clip(state: TrainState, max_grad_norm: float) -> Tensor:
    """Undo loss scaling and clip the gradients. Return their unscaled 2-norm before clipping."""
    gradients = [parameter.grad for parameter in state.network.parameters() if parameter.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    if state.loss_scale is not None:
        norm = norm / state.loss_scale.scale
    factor = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 avoids a division by 0
    if state.loss_scale is not None:
        factor = factor / state.loss_scale.scale
    torch._foreach_mul_(gradients, factor)
    return norm


@torch.no_grad()
def _step_metrics(
    losses: PretrainingLoss,
    parts: list[LossSums],
    counts: Tensor,
    norm: Tensor,
    dist_context: DistContext,
) -> Tensor:
    """Return the `StepSums` of a step that is not skipped, (extras + 10,)."""
    values = torch.stack([value.to(counts.dtype) for part in parts for value in (*part.extras, *part[:4])])
    totals = dist_context.all_reduce_sum(values.view(len(parts), -1).sum(dim=0))  # (extras + 4,)
    sums = LossSums(*totals[-4:])._replace(extras=totals[:-4].unbind())
    zero = torch.zeros_like(norm, dtype=counts.dtype)
    loss = losses.mean(sums, Counts(*counts.clamp(min=1.0).unbind()))
    end = torch.stack([zero, loss, norm.to(counts.dtype), zero])
    num_tokens = counts[2:] if losses.extras else counts[:0]
    return torch.cat([num_tokens, totals, counts[:2], end])


@torch.no_grad()
def _add_metrics(sums: Tensor, metrics: Tensor, is_skipped: Tensor) -> None:
    """Add a step's metrics to the sums. If it is skipped, only count it as skipped."""
    sums += torch.where(is_skipped, 0.0, metrics)
    by_name = dict(zip(StepSums._fields, sums[-10:].unbind(), strict=False))
    by_name["skipped"].add_(is_skipped)
    by_name["skipped_in_a_row"].add_(1.0).mul_(is_skipped)
