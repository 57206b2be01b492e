"""One optimizer step: the only place that touches gradients.

Nothing here waits for the device: whether the gradients are finite is decided there, a step that is not is skipped
there, and all metrics are added to a tensor there, read when a log line is due.
"""

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

LOSS_SCALE_START = 2.0**16
LOSS_SCALE_GROWTH_STEPS = 2000  # both as in Micikevicius et al. (2018) and PyTorch's own scaler


@dataclass
class LossScale:
    """The factor of an fp16 loss, so that small gradients do not vanish; halved when they overflow."""

    scale: Tensor  # () float32
    good_steps: Tensor  # () int32: since it last changed

    @staticmethod
    def start(device: torch.device) -> "LossScale":
        return LossScale(
            torch.tensor(LOSS_SCALE_START, device=device), torch.tensor(0, dtype=torch.int32, device=device)
        )

    def update(self, overflowed: Tensor) -> None:
        """Halve the scale after an overflow, double it after many steps without one."""
        good_steps = torch.where(overflowed, 0, self.good_steps + 1)
        grows = good_steps >= LOSS_SCALE_GROWTH_STEPS
        self.scale.mul_(torch.where(overflowed, 0.5, torch.where(grows, 2.0, 1.0)))
        self.good_steps.copy_(torch.where(grows, 0, good_steps))


Value = TypeVar("Value", Tensor, float)


class DoesNotFit(Exception):
    """A micro-batch needs more memory than the device has; nothing but gradients has changed."""


class StepSums(NamedTuple, Generic[Value]):
    """The metrics of one step, or their sums since the last log line: on the device one tensor, (10,)."""

    mlm_loss: Value
    nsp_loss: Value
    mlm_correct: Value
    nsp_correct: Value
    predictions: Value
    pairs: Value
    skipped: Value
    loss: Value
    grad_norm: Value
    skipped_in_a_row: Value  # up to now, also over intervals

    @staticmethod
    def zeros(device: torch.device) -> Tensor:
        """Return the empty sums, (10,); in float64 counts are exact."""
        return torch.zeros(len(StepSums._fields), dtype=torch.float64, device=device)

    @staticmethod
    def read(sums: Tensor) -> "StepSums[float]":
        """Read the sums, which waits for the device."""
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
    """Update the weights by one global batch, and add its metrics to `sums` (see `StepSums`).

    `network` is what `distributed.parallelize` made of a `PretrainingLoss`, `batch` this rank's share. `sums`, (10,),
    are the same on all ranks; a skipped step adds nothing but itself. `step` counts the finished ones; with `seed` and
    the number of the micro-batch among those of all ranks it fixes every dropout mask. `max_grad_norm` is a 2-norm.
    With `graphs`, a step of one micro-batch is launched at once where it can be.
    """

    def seeded() -> Iterator[Batch]:
        for number, micro_batch in enumerate(batch.micro_batches):
            index = number * dist_context.size + dist_context.rank
            torch.manual_seed(rng.torch_seed(seed, "dropout", step=step, micro_batch=index))
            yield micro_batch

    def compute(micro_batches: Iterable[Batch], counts: Tensor, rate: float | Tensor) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        parts = _add_gradients(
            network, micro_batches, len(batch.micro_batches), counts, dtype, loss_scale, dist_context
        )
        norm = _clip(network, max_grad_norm, loss_scale)
        measured = _measured(parts, counts, norm, dist_context)
        finite = torch.stack(measured).isfinite().all()
        update(optimizers, rate, ~finite)
        if loss_scale is not None:
            loss_scale.update(~finite)
        _add(sums, measured, finite)

    metrics = [sums, *(vars(loss_scale).values() if loss_scale is not None else ())]
    if graphs is not None and graphs.run(compute, batch, learning_rate, lambda: next(seeded()), metrics):
        return
    # Filled in on the device; `torch.tensor` would copy there, and wait.
    counts = [sums.new_full((), number) for number in (batch.num_predictions, batch.num_pairs)]
    compute(seeded(), torch.stack(counts), learning_rate)
    if graphs is not None:
        graphs.check()


def _add_gradients(
    network: nn.Module,
    micro_batches: Iterable[Batch],
    number: int,
    counts: Tensor,
    dtype: torch.dtype,
    loss_scale: LossScale | None,
    dist_context: DistContext,
) -> list[LossSums]:
    """Add up the gradients of `number` micro-batches; `counts`, (2,), of predictions and pairs divide their losses."""
    num_predictions, num_pairs = counts.clamp(min=1.0).float().unbind()
    # DDP takes the mean of the ranks' gradients; each rank's loss is a share of a sum.
    scale = (loss_scale.scale if loss_scale is not None else 1.0) * dist_context.size
    parts: list[LossSums] = []
    # One autocast region for the whole step: each weight is cast once, where layers are compiled once per micro-batch.
    # The backward pass is outside it, in a region within, after which the casts are still there.
    with torch.autocast(counts.device.type, dtype, enabled=dtype != torch.float32):
        for micro_batch in micro_batches:
            with gradient_sync(network, is_last=len(parts) == number - 1):
                try:
                    part: LossSums = network(micro_batch)
                    loss = part.mean(num_predictions, num_pairs) * scale
                    with torch.autocast(counts.device.type, enabled=False):
                        loss.backward()  # type: ignore[no-untyped-call]
                except torch.OutOfMemoryError as error:
                    raise DoesNotFit from error
            parts.append(part)
    return parts


def _clip(network: nn.Module, max_grad_norm: float, loss_scale: LossScale | None) -> Tensor:
    """Divide the gradients by the scale of the loss and clip them; returns their 2-norm before clipping."""
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    if loss_scale is not None:
        norm = norm / loss_scale.scale
    # Weights of the same step for the same seed and any scale; a norm of 0 must not divide.
    factor = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    if loss_scale is not None:
        factor = factor / loss_scale.scale
    torch._foreach_mul_(gradients, factor)
    return norm


@torch.no_grad()
def _measured(parts: list[LossSums], counts: Tensor, norm: Tensor, dist_context: DistContext) -> StepSums[Tensor]:
    """Return the metrics of a step that is not skipped."""
    measured = torch.stack([value.to(counts.dtype) for part in parts for value in part])
    measured = measured.view(len(parts), -1).sum(dim=0)
    mlm_loss, nsp_loss, mlm_correct, nsp_correct = dist_context.all_reduce_sum(measured).unbind()
    predictions, pairs = counts.unbind()
    mean = mlm_loss / predictions.clamp(min=1.0) + nsp_loss / pairs.clamp(min=1.0)
    zero = torch.zeros_like(mean)
    return StepSums(
        mlm_loss, nsp_loss, mlm_correct, nsp_correct, predictions, pairs,
        skipped=zero, loss=mean, grad_norm=norm.to(counts.dtype), skipped_in_a_row=zero,
    )  # fmt: skip


@torch.no_grad()
def _add(sums: Tensor, measured: StepSums[Tensor], finite: Tensor) -> None:
    """Add a step's metrics to the sums, or only note that it was skipped."""
    zero, one = measured.skipped, torch.ones_like(measured.skipped)
    if_skipped = StepSums(*[zero] * len(measured))._replace(skipped=one, skipped_in_a_row=one)
    sums += torch.where(finite, torch.stack(measured), torch.stack(if_skipped))
    StepSums(*sums.unbind()).skipped_in_a_row.mul_(~finite)
