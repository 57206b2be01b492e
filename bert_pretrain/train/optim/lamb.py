"""LAMB for large batches: Adam's direction, as long in every layer as the layer's weights (You et al., 2019).

Algorithm 2 of the paper with φ the identity, as its authors' own code has it. A step can be skipped on the device, as
PyTorch's fused AdamW can: set `found_inf` to 1 before it.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


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
        found_inf = self.found_inf if self.found_inf is not None else torch.zeros((), device=parameters[0].device)
        skip = found_inf > 0
        directions = self._directions(group, parameters, skip)
        torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
        if group["adapts"]:
            _scale_to_weights(parameters, directions, group["matrices"])
        torch._foreach_mul_(directions, torch.where(skip, 0.0, -group["lr"]))
        torch._foreach_add_(parameters, directions)

    def _directions(self, group: dict[str, Any], parameters: list[Tensor], skip: Tensor) -> list[Tensor]:
        """Take the gradients into the moments, and return Adam's directions as fresh tensors."""
        # Where the step is skipped the gradients become 0 and the decay 1: the moments stay as they are.
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        # As integers, because 0 times what is not finite is not 0; at once, where a condition would be a launch each.
        torch._foreach_mul_([gradient.view(torch.int32) for gradient in gradients], (~skip).int())
        beta1, beta2 = group["betas"]
        states = [self._state_of(parameter, skip.device) for parameter in parameters]
        first, second = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_mul_(first, torch.where(skip, 1.0, beta1))
        torch._foreach_add_(first, gradients, alpha=1.0 - beta1)
        torch._foreach_mul_(second, torch.where(skip, 1.0, beta2))
        torch._foreach_addcmul_(second, gradients, gradients, value=1.0 - beta2)
        steps = [state["step"] for state in states]
        # Without `alpha` PyTorch takes the overload that reads the number on the host, and waits.
        torch._foreach_add_(steps, torch.where(skip, 0.0, 1.0), alpha=1)
        roots = list(second)
        directions = list(first)
        if group["bias_correction"]:
            count = steps[0].clamp(min=1.0)  # all the same: every parameter has a gradient in every step
            directions = list(torch._foreach_div(directions, _bias_of_zeros(beta1, count)))
            roots = list(torch._foreach_div(roots, _bias_of_zeros(beta2, count)))
        roots = list(torch._foreach_sqrt(roots))
        torch._foreach_add_(roots, group["eps"])
        return list(torch._foreach_div(directions, roots))

    def _state_of(self, parameter: Tensor, device: torch.device) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state


def _bias_of_zeros(beta: float, count: Tensor) -> Tensor:
    """Return 1 - beta ** count, (), how much of a moment that began as zeros is made of gradients.

    Taken so that fp32 is enough: the difference of 1 and 0.999 has but four digits there.
    """
    return -torch.expm1(count * (math.log(beta) if beta > 0.0 else -math.inf))


def _scale_to_weights(weights: list[Tensor], directions: list[Tensor], number: int) -> None:
    """Make each matrix's update as long as the matrix itself (the trust ratio); a matrix of zeros is left alone."""
    old, new = ([part for each in tensors for part in each.chunk(number)] for tensors in (weights, directions))
    old_norms, new_norms = torch.stack(torch._foreach_norm([*old, *new])).chunk(2)
    usable = (old_norms > 0) & (new_norms > 0)
    # One call, but a launch per matrix: PyTorch takes lists of numbers at once only from the host.
    torch._foreach_mul_(new, torch.where(usable, old_norms / new_norms, 1.0).unbind())
