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
MATRICES_AT_ONCE = 16
"""So many of equal shape are computed together; more would only take more memory."""


class Muon(torch.optim.Optimizer):
    """Muon over groups of matrices; `matrices` is the number of equal ones one below the other in each parameter."""

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
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            at_once = max(1, MATRICES_AT_ONCE // group["matrices"])
            for alike in by_shape.values():
                for begin in range(0, len(alike), at_once):
                    self._update(group, alike[begin : begin + at_once], skip)

    def _update(self, group: dict[str, Any], weights: list[Tensor], skip: Tensor) -> None:
        """Update parameters of equal shape together, or none of them."""
        ahead = self._look_ahead(group, weights, skip)  # (parameters, rows, width)
        height, width = ahead.shape[1] // group["matrices"], ahead.shape[2]
        updates = orthogonalised(ahead.view(-1, height, width)).reshape(ahead.shape)
        # As long as AdamW's update is on average (Liu et al., 2025, section 2.2).
        scale = group["lr"] * 0.2 * math.sqrt(max(height, width))
        torch._foreach_mul_(weights, torch.where(skip, 1.0, 1.0 - group["lr"] * group["weight_decay"]))
        steps = updates.to(weights[0].dtype).mul_(torch.where(skip, 0.0, -scale))
        torch._foreach_add_(weights, steps.unbind())

    def _look_ahead(self, group: dict[str, Any], weights: list[Tensor], skip: Tensor) -> Tensor:
        """Take the gradients into the momentum and return what Nesterov makes of both: (parameters, rows, width)."""
        buffers = []
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            buffers.append(state["momentum_buffer"])
        # Where the step is skipped the gradients count as 0 and the decay as 1: the momentum stays as it is.
        ahead = torch.stack([weight.grad for weight in weights])  # type: ignore[misc]
        ahead.masked_fill_(skip, 0.0)
        torch._foreach_mul_(buffers, torch.where(skip, 1.0, group["momentum"]))
        torch._foreach_add_(buffers, ahead.unbind(), alpha=1.0 - group["momentum"])
        torch._foreach_lerp_(ahead.unbind(), buffers, group["momentum"])
        return ahead


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
