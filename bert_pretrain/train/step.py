"""One optimizer step: the only place that touches gradients.

Nothing here waits for the device: whether the gradients are finite is decided there, a step that is not is skipped
there, and all figures are added to a tensor there, read when a log line is due.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bert_pretrain import rng
from bert_pretrain.train.batches import GlobalBatch
from bert_pretrain.train.distributed import ALONE, Team, gradients_of
from bert_pretrain.train.loss import LossSums
from bert_pretrain.train.matrices import local, whole
from bert_pretrain.train.optimizer import Optimizers, update

LOSS_SCALE_START = 2.0**16
LOSS_SCALE_GROWTH_STEPS = 2000
"""Both as in Micikevicius et al. (2018) and PyTorch's own scaler."""


@dataclass
class LossScale:
    """What an fp16 loss is multiplied by, so that small gradients do not vanish; halved when they overflow."""

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
    team: Team = ALONE,
) -> None:
    """Update the weights by one global batch, and add its figures to `sums` (see `state.StepSums`).

    Args:
        network: a `PretrainingLoss` in training mode, or what `distributed.spread` made of it.
        optimizers: of all its parameters.
        batch: on the model's device; this rank's share of it.
        sums: (10,) float64; a skipped step adds nothing but itself. The same on all ranks.
        seed: with `step` and the number of the micro-batch among those of all ranks, fixes every dropout mask.
        step: finished steps before this one.
        learning_rate: for this step.
        max_grad_norm: the gradient is shortened to this 2-norm.
        dtype: of the matrix products; fp32 means no autocast.
        loss_scale: needed for fp16 only.
        team: the ranks that share the batch.
    """
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    # Wrappers take the mean of the ranks' gradients; each rank's loss is a share of a sum.
    scale = (loss_scale.scale if loss_scale is not None else 1.0) * team.size
    parts, last = [], len(batch.micro_batches) - 1
    device = sums.device
    # One autocast region for the whole step, so that each weight is cast once and not in every micro-batch.
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        for number, micro_batch in enumerate(batch.micro_batches):
            place = number * team.size + team.rank
            torch.manual_seed(rng.torch_seed(seed, "dropout", step=step, micro_batch=place))
            with gradients_of(network, is_last=number == last):
                part = LossSums(*network(micro_batch))
                loss = part.mean(batch.num_predictions, batch.num_pairs) * scale
                loss.backward()  # type: ignore[no-untyped-call]
            parts.append(part)
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    norm = whole(torch.nn.utils.get_total_norm(gradients))
    if loss_scale is not None:
        norm = norm / loss_scale.scale
    # Weights of the same step for the same seed, whatever the scale was; a norm of 0 must not divide.
    shrink = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    if loss_scale is not None:
        shrink = shrink / loss_scale.scale
    torch._foreach_mul_([local(gradient) for gradient in gradients], shrink)
    figures = _figures(parts, batch, norm, team)
    finite = figures.isfinite().all()
    update(optimizers, learning_rate, ~finite)
    if loss_scale is not None:
        loss_scale.update(~finite)
    _add(sums, figures, finite)


def _figures(parts: list[LossSums], batch: GlobalBatch, norm: Tensor, team: Team) -> Tensor:
    """Return one step's figures, (9,): those of `state.StepSums` but the last."""
    with torch.no_grad():
        measured = torch.stack(
            [
                torch.stack([getattr(part, name).double() for part in parts]).sum()
                for name in ("mlm_loss", "nsp_loss", "mlm_correct", "nsp_correct")
            ]
        )
        mlm_loss, nsp_loss, *_ = team.add_up(measured).unbind()
        loss = mlm_loss / max(batch.num_predictions, 1) + nsp_loss / max(batch.num_pairs, 1)
        counts = torch.tensor([batch.num_predictions, batch.num_pairs, 0.0], dtype=torch.float64)
        return torch.cat([measured, counts.to(norm.device, non_blocking=True), torch.stack([loss, norm.double()])])


def _add(sums: Tensor, figures: Tensor, finite: Tensor) -> None:
    """Add a step's figures to the sums, or only note that it was skipped."""
    skipped = torch.zeros_like(figures)
    skipped[6] = 1.0
    sums[:9] += torch.where(finite, figures, skipped)
    sums[9] = torch.where(finite, 0.0, sums[9] + 1.0)
