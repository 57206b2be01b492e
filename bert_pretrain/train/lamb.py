"""LAMB for large batches: Adam's direction, as long in every layer as the layer's weights (You et al., 2019).

Algorithm 2 of the paper with φ the identity, as its authors' own code has it. A step can be skipped on the device, as
PyTorch's fused AdamW can: set `found_inf` to 1 before it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bert_pretrain.train.matrices import local, norms, parts_of


class Lamb(torch.optim.Optimizer):
    """LAMB over groups of parameters.

    Besides the usual ones a group may have `adapts` (false: plain Adam, for biases and layer normalisation) and
    `matrices`, the number of equal matrices one below the other in each of its parameters.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        bias_correction: bool,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "bias_correction": bias_correction}
        super().__init__(list(groups), {**defaults, "weight_decay": 0.0, "adapts": True, "matrices": 1})
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, or none of them where `found_inf` is 1."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(group, parameters)

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        weights = [local(parameter) for parameter in parameters]
        found_inf = self.found_inf if self.found_inf is not None else torch.zeros((), device=weights[0].device)
        skip = found_inf > 0
        directions = self._directions(group, parameters, skip)
        torch._foreach_add_(directions, weights, alpha=group["weight_decay"])
        if group["adapts"]:
            _scale_to_weights(parameters, weights, directions, group["matrices"])
        torch._foreach_mul_(directions, torch.where(skip, 0.0, -group["lr"]))
        torch._foreach_add_(weights, directions)

    def _directions(self, group: dict[str, Any], parameters: list[Tensor], skip: Tensor) -> list[Tensor]:
        """Take the gradients into the moments, and return Adam's directions as fresh tensors."""
        # Where the step is skipped the gradients count as 0 and the decay as 1: the moments stay as they are.
        gradients = [torch.where(skip, 0.0, local(parameter.grad)) for parameter in parameters]  # type: ignore[arg-type]
        beta1, beta2 = group["betas"]
        states = [self._state_of(parameter, skip.device) for parameter in parameters]
        first, second = ([local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_mul_(first, torch.where(skip, 1.0, beta1))
        torch._foreach_add_(first, gradients, alpha=1.0 - beta1)
        torch._foreach_mul_(second, torch.where(skip, 1.0, beta2))
        torch._foreach_addcmul_(second, gradients, gradients, value=1.0 - beta2)
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, torch.where(skip, 0.0, 1.0))
        roots = list(second)
        directions = list(first)
        if group["bias_correction"]:
            count = steps[0].clamp(min=1.0).double()  # all the same: every parameter has a gradient in every step
            directions = list(torch._foreach_div(directions, (1.0 - beta1**count).float()))
            roots = list(torch._foreach_div(roots, (1.0 - beta2**count).float()))
        roots = list(torch._foreach_sqrt(roots))
        torch._foreach_add_(roots, group["eps"])
        return list(torch._foreach_div(directions, roots))

    def _state_of(self, parameter: Tensor, device: torch.device) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state


def _scale_to_weights(parameters: list[Tensor], weights: list[Tensor], directions: list[Tensor], matrices: int) -> None:
    """Make each matrix's update as long as the matrix itself (the trust ratio); a matrix of zeros is left alone."""
    weight_norms, direction_norms = norms(parameters, weights, matrices), norms(parameters, directions, matrices)
    usable = (weight_norms > 0) & (direction_norms > 0)
    ratios = iter(torch.where(usable, weight_norms / direction_norms, 1.0).unbind())
    for parameter, direction in zip(parameters, directions, strict=True):
        for rows in parts_of(parameter, matrices):
            direction[rows].mul_(next(ratios))
