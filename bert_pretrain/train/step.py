"""One optimizer step: forward and backward pass, gradient clipping, and the update of the weights.

A step does not wait for the device, unless it captures or checks a CUDA graph. The device tests whether gradients are
finite, skips the update if they are not, and sums the metrics. The sums are read only when a log line is due.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from bert_pretrain import rng
from bert_pretrain.train.cuda_graph import StepGraphs
from bert_pretrain.train.distributed import SINGLE_PROCESS, DistContext, gradient_sync
from bert_pretrain.train.loss import LossSums
from bert_pretrain.train.optimizers import Optimizers, update
from bert_pretrain.train.packing import Batch, GlobalBatch

LOSS_SCALE_GROWTH_STEPS = 2000


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16, with the constants of `torch.amp.GradScaler` (Micikevicius et al., 2018)."""

    scale: Tensor  # () float32
    good_steps: Tensor  # () int32, steps without an overflow since the scale last changed

    @staticmethod
    def start(device: torch.device) -> "LossScale":
        return LossScale(torch.tensor(2.0**16, device=device), torch.tensor(0, dtype=torch.int32, device=device))

    def update(self, overflowed: Tensor) -> None:
        """Halve the scale after an overflow. Double it after `LOSS_SCALE_GROWTH_STEPS` steps without an overflow."""
        good_steps = torch.where(overflowed, 0, self.good_steps + 1)
        grows = good_steps >= LOSS_SCALE_GROWTH_STEPS
        growth = torch.where(grows, 2.0, 1.0)
        self.scale.mul_(torch.where(overflowed, 0.5, growth))
        self.good_steps.copy_(torch.where(grows, 0, good_steps))

    def tensors(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good_steps": self.good_steps}


Value = TypeVar("Value", Tensor, float)


class MicroBatchTooLarge(Exception):
    """Raised if a micro-batch does not fit into the memory of the device. Weights, state and sums have not changed."""


class StepSums(NamedTuple, Generic[Value]):
    """Metrics of one step, or their sums since the last log line. On the device they are one tensor, (10,)."""

    mlm_loss: Value
    nsp_loss: Value
    mlm_correct: Value
    nsp_correct: Value
    predictions: Value
    pairs: Value
    skipped: Value
    loss: Value
    grad_norm: Value
    skipped_in_a_row: Value  # up to now; a log line does not reset it

    @staticmethod
    def zeros(device: torch.device) -> Tensor:
        """Return zero sums, (10,), in float64, so that counts are exact."""
        return torch.zeros(len(StepSums._fields), dtype=torch.float64, device=device)

    @staticmethod
    def read(sums: Tensor) -> "StepSums[float]":
        """Copy the sums to the host. Wait for the device."""
        return StepSums(*sums.tolist())


def train_step(
    network: nn.Module,
    optimizers: Optimizers,
    batch: GlobalBatch,
    sums: Tensor,
    *,
    seed: int,
    step: int,
    learning_rate: float,
    max_grad_norm: float,
    dtype: torch.dtype,
    loss_scale: LossScale | None = None,
    dist_context: DistContext = SINGLE_PROCESS,
    graphs: StepGraphs | None = None,
) -> None:
    """Update the weights with one global batch and add its metrics to `sums`, (10,), see `StepSums`.

    `network` is a `PretrainingLoss` wrapped by `distributed.parallelize`; `batch` is this rank's share. The sums are
    the same on all ranks. A skipped step only adds to the two `skipped` sums. `step` is the number of finished steps.
    `seed`, `step` and the index of a micro-batch over all ranks determine its dropout masks. `max_grad_norm` bounds the
    2-norm of the gradients. `graphs` runs a step of one micro-batch as a CUDA graph if possible.
    """

    def compute(micro_batches: Iterable[Batch], counts: Tensor, rate: float | Tensor) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        parts = _add_gradients(
            network,
            micro_batches,
            len(batch.micro_batches),
            counts,
            dtype,
            loss_scale,
            dist_context,
        )
        norm = _clip(network, max_grad_norm, loss_scale)
        metrics = _step_metrics(parts, counts, norm, dist_context)
        is_finite = torch.stack(metrics).isfinite().all()
        update(optimizers, rate, ~is_finite)
        if loss_scale is not None:
            loss_scale.update(~is_finite)
        _add_metrics(sums, metrics, is_finite)

    seeded = functools.partial(_seeded, batch, seed, step, dist_context)
    changed = [sums]
    if loss_scale is not None:
        changed += loss_scale.tensors().values()
    # A graph has one micro-batch, whose tensors it copies itself, so here `seeded` only seeds the generator.
    if graphs is not None and graphs.run(compute, batch, learning_rate, lambda: next(seeded()), changed):
        return
    # `new_full` fills on the device. `torch.tensor` would copy from the host and wait.
    num_predictions = sums.new_full((), batch.num_predictions)
    num_pairs = sums.new_full((), batch.num_pairs)
    compute(seeded(), torch.stack([num_predictions, num_pairs]), learning_rate)
    if graphs is not None:
        graphs.check()


def _seeded(batch: GlobalBatch, seed: int, step: int, dist_context: DistContext) -> Iterator[Batch]:
    """Yield the micro-batches, and seed the generator of dropout before each."""
    for number, micro_batch in enumerate(batch.micro_batches):
        index = number * dist_context.size + dist_context.rank
        torch.manual_seed(rng.torch_seed(seed, "dropout", step=step, micro_batch=index))
        yield micro_batch


def _add_gradients(
    network: nn.Module,
    micro_batches: Iterable[Batch],
    num_micro_batches: int,
    counts: Tensor,
    dtype: torch.dtype,
    loss_scale: LossScale | None,
    dist_context: DistContext,
) -> list[LossSums]:
    """Accumulate gradients over micro-batches. Divide losses by `counts`, (2,), of predictions and pairs."""
    num_predictions, num_pairs = counts.clamp(min=1.0).float().unbind()
    # DDP averages gradients over ranks, but the losses of ranks must be summed.
    scale: float | Tensor = dist_context.size
    if loss_scale is not None:
        scale = loss_scale.scale * scale
    parts: list[LossSums] = []
    # One autocast region covers all micro-batches, so that each weight is cast once per step (per micro-batch if layers
    # are compiled). The inner region disables autocast for the backward pass but keeps the cached casts.
    with torch.autocast(counts.device.type, dtype, enabled=dtype != torch.float32):
        for micro_batch in micro_batches:
            with gradient_sync(network, is_last=len(parts) == num_micro_batches - 1):
                try:
                    part: LossSums = network(micro_batch)
                    loss = part.mean(num_predictions, num_pairs) * scale
                    with torch.autocast(counts.device.type, enabled=False):
                        loss.backward()  # type: ignore[no-untyped-call]
                except torch.OutOfMemoryError as error:
                    raise MicroBatchTooLarge from error
            parts.append(part)
    return parts


def _clip(network: nn.Module, max_grad_norm: float, loss_scale: LossScale | None) -> Tensor:
    """Undo loss scaling and clip the gradients. Return their unscaled 2-norm before clipping."""
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    if loss_scale is not None:
        norm = norm / loss_scale.scale
    factor = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 avoids a division by 0
    if loss_scale is not None:
        factor = factor / loss_scale.scale
    torch._foreach_mul_(gradients, factor)
    return norm


@torch.no_grad()
def _step_metrics(parts: list[LossSums], counts: Tensor, norm: Tensor, dist_context: DistContext) -> StepSums[Tensor]:
    """Return the metrics of a step that is not skipped."""
    values = torch.stack([value.to(counts.dtype) for part in parts for value in part])
    totals = values.view(len(parts), -1).sum(dim=0)
    totals = dist_context.all_reduce_sum(totals)
    mlm_loss, nsp_loss, mlm_correct, nsp_correct = totals.unbind()
    predictions, pairs = counts.unbind()
    mean = mlm_loss / predictions.clamp(min=1.0) + nsp_loss / pairs.clamp(min=1.0)
    zero = torch.zeros_like(mean)
    return StepSums(
        mlm_loss,
        nsp_loss,
        mlm_correct,
        nsp_correct,
        predictions,
        pairs,
        skipped=zero,
        loss=mean,
        grad_norm=norm.to(counts.dtype),
        skipped_in_a_row=zero,
    )


@torch.no_grad()
def _add_metrics(sums: Tensor, metrics: StepSums[Tensor], is_finite: Tensor) -> None:
    """Add a step's metrics to the sums. If they are not finite, only count the step as skipped."""
    zero, one = metrics.skipped, torch.ones_like(metrics.skipped)
    if_skipped = StepSums(*[zero] * len(metrics))._replace(skipped=one, skipped_in_a_row=one)
    sums += torch.where(is_finite, torch.stack(metrics), torch.stack(if_skipped))
    StepSums(*sums.unbind()).skipped_in_a_row.mul_(~is_finite)
