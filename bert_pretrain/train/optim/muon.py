"""Muon for the matrices inside the encoder: momentum, made orthogonal before it is applied (Jordan et al., 2024).

Every singular value of an update becomes about 1, so that rare directions move as far as common ones. The mathematics
is `torch.optim.Muon`'s with `match_rms_adamw` (Liu et al., 2025), so AdamW's learning rate and decay fit. Ours can
skip a step on the device, and takes matrices of equal shape together.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bert_pretrain.train.device import cpu

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic, from Jordan's post: steep at 0; singular values end between 0.5 and 1.5 rather than at 1."""
ITERATIONS = 5
NUMBERS_AT_ONCE = 2**25
"""In matrices that are computed together: all of BERT-Base's square ones. More would take more memory."""


class Muon(torch.optim.Optimizer):
    """Muon over groups that differ in `matrices` only: how many equal ones each parameter has, one below the other."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "matrices": 1}
        super().__init__(list(groups), defaults)
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, or none of them where `found_inf` is 1."""
        device = self.param_groups[0]["params"][0].device
        found_inf = self.found_inf if self.found_inf is not None else torch.zeros((), device=device)
        skip = found_inf > 0
        by_shape: dict[tuple[int, int], list[Tensor]] = {}
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    shape = weight.shape[0] // group["matrices"], weight.shape[1]
                    by_shape.setdefault(shape, []).append(weight)
        group = self.param_groups[0]
        everything = [weight for weights in by_shape.values() for weight in weights]
        self._look_ahead(everything, group["momentum"], skip)
        torch._foreach_mul_(everything, torch.where(skip, 1.0, 1.0 - group["lr"] * group["weight_decay"]))
        for (height, width), weights in by_shape.items():
            at_once = max(1, NUMBERS_AT_ONCE // max(weight.numel() for weight in weights))
            # As long as AdamW's update is on average (Liu et al., 2025, section 2.2).
            factor = torch.where(skip, 0.0, -group["lr"] * 0.2 * math.sqrt(max(height, width)))
            for begin in range(0, len(weights), at_once):
                _update(weights[begin : begin + at_once], height, width, factor)

    def _look_ahead(self, weights: list[Tensor], momentum: float, skip: Tensor) -> None:
        """Take the gradients into the momentum, and make them what Nesterov makes of both."""
        gradients: list[Any] = [weight.grad for weight in weights]
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
        # Where the step is skipped the gradients count as 0 and the decay as 1: the momentum stays as it is. The
        # gradients are taken as integers, because 0 times what is not finite is not 0.
        torch._foreach_mul_([gradient.view(torch.int32) for gradient in gradients], (~skip).int())
        torch._foreach_mul_(buffers, torch.where(skip, 1.0, momentum))
        torch._foreach_add_(buffers, gradients, alpha=1.0 - momentum)
        torch._foreach_lerp_(gradients, buffers, momentum)


def _update(weights: list[Tensor], height: int, width: int, factor: Tensor) -> None:
    """Add `factor`, (), times their orthogonalised gradients to parameters that consist of matrices of one shape."""
    rows = [len(weight) for weight in weights]
    matrices = torch.empty(sum(rows), width, dtype=torch.bfloat16, device=factor.device)
    torch._foreach_copy_(torch.split(matrices, rows), [weight.grad for weight in weights])  # type: ignore[misc]
    updates = orthogonalised(matrices.view(-1, height, width)).reshape(matrices.shape)
    torch._foreach_add_(weights, torch.split(updates.to(weights[0].dtype).mul_(factor), rows))


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return nearly the nearest matrices with orthonormal rows or columns, (number, height, width), in bf16.

    Five Newton–Schulz iterations; products only, so it runs at the speed of the tensor cores. A CPU without
    instructions for bf16 takes the products in fp32: emulated, they would take most of the step.
    """
    a, b, c = COEFFICIENTS
    is_emulated = matrices.device.type == "cpu" and not cpu.cpu_bf16_feature()
    current = matrices.bfloat16().to(torch.float32 if is_emulated else torch.bfloat16)
    is_tall = current.shape[1] > current.shape[2]
    if is_tall:
        current = current.mT
    current = current / torch.linalg.matrix_norm(current, keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = current @ current.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        current = torch.baddbmm(current, polynomial, current, beta=a)
    return (current.mT if is_tall else current).bfloat16()
