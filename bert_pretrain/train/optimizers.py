"""Optimizers: AdamW as in BERT (appendix A.2), LAMB, or Muon for hidden matrices with AdamW for other parameters.

All of them read `found_inf` on the device, as PyTorch's fused optimizers do for a gradient scaler. Skipping a step
therefore needs no synchronization with the host.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bert_pretrain.config import TrainConfig
from bert_pretrain.io import cores

Optimizers = Sequence[torch.optim.Optimizer]  # each parameter belongs to one of them
SATURATED_STEP = 2.0**60  # here AdamW's bias correction is 1, and adding 1 does not change the step in fp32


def make_optimizers(model: nn.Module, config: TrainConfig) -> Optimizers:
    """Return the configured optimizers for a model's parameters, with weight decay on matrices only."""
    adam: dict[str, Any] = {"lr": config.peak_lr, "betas": config.betas, "eps": config.eps}
    named = dict(model.named_parameters())
    if config.optimizer == "lamb":
        groups = _groups(named, config)
        return (Lamb(groups, **adam, bias_correction=config.bias_correction),)
    hidden = {name: weight for name, weight in named.items() if config.optimizer == "muon" and is_hidden_matrix(name)}
    rest = {name: weight for name, weight in named.items() if name not in hidden}
    # Fused, because it can skip a step on the device. It is also the fastest on CPU.
    adamw = torch.optim.AdamW(_groups(rest, config), **adam, fused=True)
    if not config.bias_correction:
        disable_bias_correction(adamw)
    if not hidden:
        return (adamw,)
    return (Muon(_groups(hidden, config), lr=config.peak_lr, weight_decay=config.weight_decay), adamw)


def update(optimizers: Optimizers, learning_rate: float | Tensor, skip: Tensor) -> None:
    """Run the optimizers without a synchronization. If `skip`, () bool, is True, weights and state do not change."""
    found_inf = skip.float()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        optimizer.step()


def disable_bias_correction(adamw: torch.optim.AdamW) -> None:
    """Disable the bias correction of a new AdamW, as in BERT's code, by starting at `SATURATED_STEP`."""
    for group in adamw.param_groups:
        for parameter in group["params"]:
            adamw.state[parameter] = {
                "step": torch.tensor(SATURATED_STEP, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def has_decay(name: str) -> bool:
    """Return whether weight decay and LAMB's trust ratio apply to the parameter with this name."""
    return not name.endswith(("bias", "norm.weight"))


def is_hidden_matrix(name: str) -> bool:
    """Return whether a parameter is a matrix of the encoder. Embeddings and heads are not in the encoder."""
    return name.startswith("encoder.layers.") and has_decay(name)


def _groups(named: dict[str, nn.Parameter], config: TrainConfig) -> list[dict[str, Any]]:
    """Group parameters by weight decay and number of matrices."""
    groups: dict[tuple[bool, int], dict[str, Any]] = {}
    for name, parameter in named.items():
        decays, num_matrices = has_decay(name), 3 if name.endswith("query_key_value.weight") else 1
        weight_decay = config.weight_decay if decays else 0.0
        new = {"params": [], "weight_decay": weight_decay, "trust_ratio": decays, "matrices": num_matrices}
        groups.setdefault((decays, num_matrices), new)["params"].append(parameter)
    return list(groups.values())


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al., 2019, algorithm 2), with two additional keys of a parameter group.

    `trust_ratio` is False for biases and layer normalization, which get Adam's update. `matrices` is the number of
    matrices of equal shape that are stacked in each parameter, each with its own trust ratio.
    """

    found_inf: Tensor | None = None

    def __init__(
        self, groups: Iterable[dict[str, Any]], *,
        lr: float, betas: tuple[float, float], eps: float, bias_correction: bool,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "bias_correction": bias_correction}
        super().__init__(list(groups), {**defaults, "weight_decay": 0.0, "trust_ratio": True, "matrices": 1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient. If `found_inf` is 1, no parameter or state changes."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                skip = _skip(self.found_inf, parameters)
                directions = self._directions(group, parameters, skip)
                torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
                if group["trust_ratio"]:
                    _scale_by_trust_ratio(parameters, directions, group["matrices"])
                torch._foreach_mul_(directions, torch.where(skip, 0.0, -group["lr"]))
                torch._foreach_add_(parameters, directions)

    def _directions(self, group: dict[str, Any], parameters: list[Tensor], skip: Tensor) -> list[Tensor]:
        """Update the moments, and return Adam's update directions as new tensors."""
        gradients = _gradients(parameters, skip)
        beta1, beta2 = group["betas"]
        for parameter in parameters:
            if not self.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = {"step": torch.zeros((), device=skip.device), **moments}
        states = [self.state[parameter] for parameter in parameters]
        steps, first, second = ([state[name] for state in states] for name in ("step", "exp_avg", "exp_avg_sq"))
        torch._foreach_mul_(first, torch.where(skip, 1.0, beta1))
        torch._foreach_add_(first, gradients, alpha=1.0 - beta1)
        torch._foreach_mul_(second, torch.where(skip, 1.0, beta2))
        torch._foreach_addcmul_(second, gradients, gradients, value=1.0 - beta2)
        # Without `alpha` PyTorch selects the overload that reads the tensor on the host.
        torch._foreach_add_(steps, torch.where(skip, 0.0, 1.0), alpha=1)
        roots, directions = list(second), list(first)
        if group["bias_correction"]:
            count = steps[0].clamp(min=1.0)  # equal for all parameters
            directions = list(torch._foreach_div(directions, _bias_correction(beta1, count)))
            roots = list(torch._foreach_div(roots, _bias_correction(beta2, count)))
        roots = list(torch._foreach_sqrt(roots))
        torch._foreach_add_(roots, group["eps"])
        return list(torch._foreach_div(directions, roots))


def _skip(found_inf: Tensor | None, parameters: list[Tensor]) -> Tensor:
    """Return whether to skip the step, () bool."""
    return torch.zeros((), dtype=torch.bool, device=parameters[0].device) if found_inf is None else found_inf > 0


def _gradients(parameters: list[Tensor], skip: Tensor) -> Any:
    """Return the gradients, set to zero in place if the step is skipped."""
    # Multiply bits as integers, because 0 * inf is NaN. `torch.where` would need one launch per parameter.
    gradients: list[Any] = [parameter.grad for parameter in parameters]
    torch._foreach_mul_([gradient.view(torch.int32) for gradient in gradients], (~skip).int())
    return gradients


def _bias_correction(beta: float, count: Tensor) -> Tensor:
    """Return 1 - beta ** count, (), with `expm1`, because the difference is inaccurate in fp32 for beta near 1."""
    return -torch.expm1(count * (math.log(beta) if beta > 0.0 else -math.inf))


def _scale_by_trust_ratio(weights: list[Tensor], directions: list[Tensor], num_matrices: int) -> None:
    """Scale the update of each matrix to the norm of the matrix, unless either norm is 0."""
    old, new = ([part for each in tensors for part in each.chunk(num_matrices)] for tensors in (weights, directions))
    old_norms, new_norms = torch.stack(torch._foreach_norm([*old, *new])).chunk(2)
    usable = (old_norms > 0) & (new_norms > 0)
    # This launches one kernel per matrix: PyTorch's fused version accepts only scalars on the host.
    torch._foreach_mul_(new, torch.where(usable, old_norms / new_norms, 1.0).unbind())


class Muon(torch.optim.Optimizer):
    """Muon (Jordan, 2024): Nesterov momentum, orthogonalized updates and decoupled weight decay.

    Parameter groups may differ only in `matrices`, the number of matrices that are stacked in each parameter.
    """

    found_inf: Tensor | None = None

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, weight_decay: float) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95, "matrices": 1}
        super().__init__(list(groups), defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient. If `found_inf` is 1, no parameter or state changes."""
        by_shape: dict[tuple[int, int], list[Tensor]] = {}
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    shape = weight.shape[0] // group["matrices"], weight.shape[1]
                    by_shape.setdefault(shape, []).append(weight)
        group = self.param_groups[0]
        all_weights = [weight for weights in by_shape.values() for weight in weights]
        skip = _skip(self.found_inf, group["params"])
        self._apply_momentum(all_weights, group["momentum"], skip)
        torch._foreach_mul_(all_weights, torch.where(skip, 1.0, 1.0 - group["lr"] * group["weight_decay"]))
        for (height, width), weights in by_shape.items():
            # Orthogonalize at most 2 ** 25 weights together, or one parameter if it is larger.
            num_together = max(1, 2**25 // max(weight.numel() for weight in weights))
            # Scale to the root mean square of AdamW's typical update, 0.2 (Liu et al., 2025, section 2.2).
            factor = torch.where(skip, 0.0, -group["lr"] * 0.2 * math.sqrt(max(height, width)))
            for begin in range(0, len(weights), num_together):
                _add_orthogonalized(weights[begin : begin + num_together], height, width, factor)

    def _apply_momentum(self, weights: list[Tensor], momentum: float, skip: Tensor) -> None:
        """Update the momentum, and replace the gradients by those of Nesterov momentum."""
        gradients = _gradients(weights, skip)
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_mul_(buffers, torch.where(skip, 1.0, momentum))
        torch._foreach_add_(buffers, gradients, alpha=1.0 - momentum)
        torch._foreach_lerp_(gradients, buffers, momentum)


def _add_orthogonalized(weights: list[Tensor], height: int, width: int, factor: Tensor) -> None:
    """Add `factor`, (), times the orthogonalized gradients to parameters that stack (height, width) matrices."""
    rows = [len(weight) for weight in weights]
    matrices = torch.empty(sum(rows), width, dtype=torch.bfloat16, device=factor.device)
    torch._foreach_copy_(torch.split(matrices, rows), [weight.grad for weight in weights])  # type: ignore[misc]
    updates = orthogonalized(matrices.view(-1, height, width)).reshape(matrices.shape)
    torch._foreach_add_(weights, torch.split(updates.to(weights[0].dtype).mul_(factor), rows))


def orthogonalized(matrices: Tensor) -> Tensor:
    """Approximate the nearest matrices with orthonormal rows or columns, (matrices, height, width), in bf16.

    Run five Newton–Schulz iterations, which consist of matrix products. A CPU without bf16 instructions runs them in
    fp32, because emulated bf16 would take most of a step.
    """
    # Coefficients of a quintic polynomial (Jordan, 2024). It brings singular values to between 0.5 and 1.5.
    a, b, c = 3.4445, -4.7750, 2.0315
    is_emulated = matrices.device.type == "cpu" and not cores.cpu_bf16_feature()
    current = matrices.bfloat16().to(torch.float32 if is_emulated else torch.bfloat16)
    is_tall = current.shape[1] > current.shape[2]
    if is_tall:
        current = current.mT
    current = current / torch.linalg.matrix_norm(current, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = current @ current.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        current = torch.baddbmm(current, polynomial, current, beta=a)
    return (current.mT if is_tall else current).bfloat16()
