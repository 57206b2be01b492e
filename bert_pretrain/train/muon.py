"""Muon for the matrices inside the encoder: momentum, made orthogonal before it is applied (Jordan et al., 2024).

Every singular value of an update becomes about 1, so that rare directions move as far as common ones. The mathematics
is `torch.optim.Muon`'s with `match_rms_adamw` (Liu et al., 2025), so AdamW's learning rate and decay fit. Ours can
skip a step on the device, takes matrices of equal shape together, and works under FSDP: there the momentum is gathered,
and every rank makes all of it orthogonal, which costs time but no second round of messages.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bert_pretrain.train.matrices import like, local, own_rows, whole

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic, from Jordan's post: steep at 0; singular values end between 0.5 and 1.5 rather than at 1."""
ITERATIONS = 5
MATRICES_AT_ONCE = 16
"""Taken together; more would only take more memory."""


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
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            at_once = max(1, MATRICES_AT_ONCE // group["matrices"])
            for alike in by_shape.values():
                for begin in range(0, len(alike), at_once):
                    self._update(group, alike[begin : begin + at_once])

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update some parameters of equal shape."""
        weights = [local(parameter) for parameter in parameters]
        found_inf = self.found_inf if self.found_inf is not None else torch.zeros((), device=weights[0].device)
        skip, momentum = found_inf > 0, group["momentum"]
        gradients = [torch.where(skip, 0.0, local(parameter.grad)) for parameter in parameters]  # type: ignore[arg-type]
        buffers = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffers.append(local(state["momentum_buffer"]))
        torch._foreach_mul_(buffers, torch.where(skip, 1.0, momentum))
        torch._foreach_add_(buffers, gradients, alpha=1.0 - momentum)
        ahead = torch._foreach_lerp(gradients, buffers, momentum)  # Nesterov's look ahead
        full = [whole(like(parameter, rows)) for parameter, rows in zip(parameters, ahead, strict=True)]
        height, width = full[0].shape[0] // group["matrices"], full[0].shape[1]
        matrices = torch.cat(full).view(-1, height, width)
        updates = orthogonalised(matrices).to(weights[0].dtype).view(len(full), -1, width)
        scale = group["lr"] * 0.2 * math.sqrt(max(height, width))
        torch._foreach_mul_(weights, torch.where(skip, 1.0, 1.0 - group["lr"] * group["weight_decay"]))
        step = torch.where(skip, 0.0, -scale)
        for parameter, weight, update in zip(parameters, weights, updates, strict=True):
            own = own_rows(parameter)
            weight.add_(update[own.start : own.stop] * step)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return nearly the nearest matrices with orthonormal rows or columns, (number, height, width), in bf16.

    Five Newton–Schulz iterations; products only, so it runs at the speed of the tensor cores.
    """
    a, b, c = COEFFICIENTS
    current = matrices.bfloat16()
    is_tall = current.shape[1] > current.shape[2]
    if is_tall:
        current = current.mT
    current = current / torch.linalg.matrix_norm(current, keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = current @ current.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        current = torch.baddbmm(current, polynomial, current, beta=a)
    return current.mT if is_tall else current
