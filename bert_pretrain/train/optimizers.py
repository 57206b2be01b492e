"""Optimizers: AdamW as in BERT (appendix A.2), LAMB, or Muon for hidden matrices with AdamW for other parameters.

All of them read `found_inf` on the device, as PyTorch's fused optimizers do for a gradient scaler. Skipping a step
therefore needs no synchronization with the host.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bert_pretrain.config import TrainConfig
from bert_pretrain.io import cores

Optimizers = Sequence[torch.optim.Optimizer]  # each parameter belongs to one of them
STACKED = {"query_key_value": 3, "wide_and_gate": 2}  # number of matrices that a parameter stacks
SATURATED_STEP = 2.0**60  # here AdamW's bias correction is 1, and adding 1 does not change the step in fp32


def make_optimizers(model: nn.Module, config: TrainConfig) -> Optimizers:
    """Return the configured optimizers for a model's parameters, with weight decay on matrices only."""
    named = dict(model.named_parameters())
    adam: dict[str, Any] = {"lr": config.peak_lr, "betas": config.betas, "eps": config.eps}
    if config.optimizer == "lamb":
        return (Lamb(_groups(named, config), **adam, bias_correction=config.bias_correction),)
    hidden = {}
    if config.optimizer == "muon":
        hidden = {name: named.pop(name) for name in list(named) if is_hidden_matrix(name)}
    # Fused, because it can skip a step on the device. It is also the fastest on CPU.
    adamw = torch.optim.AdamW(_groups(named, config), **adam, fused=True)
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
    return name.startswith(("encoder.layers.", "generator.layers.")) and has_decay(name)


def _groups(named: dict[str, nn.Parameter], config: TrainConfig) -> list[dict[str, Any]]:
    """Group parameters by weight decay and number of matrices."""
    groups: dict[tuple[bool, int], dict[str, Any]] = {}
    for name, parameter in named.items():
        decays = has_decay(name)
        num_matrices = STACKED.get(name.removesuffix(".weight").rpartition(".")[2], 1)
        group = groups.setdefault((decays, num_matrices), {"params": []})
        group["params"].append(parameter)
        group["weight_decay"] = config.weight_decay if decays else 0.0
        group["trust_ratio"] = decays
        group["matrices"] = num_matrices
    return list(groups.values())


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al., 2019, algorithm 2), with two additional keys of a parameter group.

    `trust_ratio` is False for biases and layer normalization, which get Adam's update. `matrices` is the number of
    matrices of equal shape that are stacked in each parameter, each with its own trust ratio.
    """

    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], **defaults: Any) -> None:
        """`defaults` are `lr`, `betas`, `eps` and `bias_correction`."""
        super().__init__(groups, {**defaults, "weight_decay": 0.0, "trust_ratio": True, "matrices": 1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient. If `found_inf` is 1, no parameter or state changes."""
        for group in self.param_groups:
            parameters = _with_gradients(group)
            if not parameters:
                continue
            skip = _skip(self.found_inf, parameters)
            directions = self._directions(group, parameters, skip)
            torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
            if group["trust_ratio"]:
                _scale_by_trust_ratio(parameters, directions, group["matrices"])
            torch._foreach_mul_(directions, torch.where(skip, 0.0, -group["lr"]))
            torch._foreach_add_(parameters, directions)

    def _directions(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        skip: Tensor,
    ) -> list[Tensor]:
        """Update the moments, and return Adam's update directions as new tensors."""
        gradients = _gradients(parameters, skip)
        for parameter in parameters:
            if "step" not in self.state[parameter]:
                self.state[parameter]["step"] = torch.zeros((), device=skip.device)
        steps = [self.state[parameter]["step"] for parameter in parameters]
        first = _moments(self, "exp_avg", parameters)
        second = _moments(self, "exp_avg_sq", parameters)
        beta1, beta2 = group["betas"]
        torch._foreach_mul_(first, torch.where(skip, 1.0, beta1))
        torch._foreach_add_(first, gradients, alpha=1.0 - beta1)
        torch._foreach_mul_(second, torch.where(skip, 1.0, beta2))
        torch._foreach_addcmul_(second, gradients, gradients, value=1.0 - beta2)
        # Without `alpha` PyTorch selects the overload that reads the tensor on the host.
        torch._foreach_add_(steps, torch.where(skip, 0.0, 1.0), alpha=1)
        if group["bias_correction"]:
            count = steps[0].clamp(min=1.0)  # equal for all parameters
            first = torch._foreach_div(first, _bias_correction(beta1, count))
            second = torch._foreach_div(second, _bias_correction(beta2, count))
        roots = torch._foreach_sqrt(second)
        torch._foreach_add_(roots, group["eps"])
        return list(torch._foreach_div(first, roots))


def _with_gradients(group: dict[str, Any]) -> list[Tensor]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def _skip(found_inf: Tensor | None, parameters: list[Tensor]) -> Tensor:
    """Return whether to skip the step, () bool."""
    if found_inf is None:
        return torch.zeros((), dtype=torch.bool, device=parameters[0].device)
    return found_inf > 0


def _gradients(parameters: list[Tensor], skip: Tensor) -> Any:
    """Return the gradients, set to zero in place if the step is skipped."""
    gradients: list[Any] = [parameter.grad for parameter in parameters]
    # Multiply bits as integers, because 0 * inf is NaN. `torch.where` would need one launch per parameter.
    torch._foreach_mul_([gradient.view(torch.int32) for gradient in gradients], (~skip).int())
    return gradients


def _moments(optimizer: torch.optim.Optimizer, name: str, parameters: list[Tensor]) -> Any:
    """Return the state `name` of each parameter, zeros at the first step."""
    for parameter in parameters:
        if name not in optimizer.state[parameter]:
            optimizer.state[parameter][name] = torch.zeros_like(parameter)
    return [optimizer.state[parameter][name] for parameter in parameters]


def _bias_correction(beta: float, count: Tensor) -> Tensor:
    """Return 1 - beta ** count, (), with `expm1`, because the difference is inaccurate in fp32 for beta near 1."""
    log_beta = math.log(beta) if beta > 0.0 else -math.inf
    return -torch.expm1(count * log_beta)


def _scale_by_trust_ratio(weights: list[Tensor], directions: list[Tensor], num_matrices: int) -> None:
    """Scale the update of each matrix to the norm of the matrix, unless either norm is 0."""
    matrices = [matrix for weight in weights for matrix in weight.chunk(num_matrices)]
    updates = [matrix for direction in directions for matrix in direction.chunk(num_matrices)]
    old_norms, new_norms = torch.stack(torch._foreach_norm([*matrices, *updates])).chunk(2)
    usable = (old_norms > 0) & (new_norms > 0)
    # This launches one kernel per matrix: PyTorch's fused version accepts only scalars on the host.
    torch._foreach_mul_(updates, torch.where(usable, old_norms / new_norms, 1.0).unbind())


class Muon(torch.optim.Optimizer):
    """Muon (Jordan, 2024): Nesterov momentum, orthogonalized updates and decoupled weight decay.

    Parameter groups may differ only in `matrices`, the number of matrices that are stacked in each parameter.
    """

    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], **defaults: Any) -> None:
        """`defaults` are `lr` and `weight_decay`."""
        super().__init__(groups, {**defaults, "momentum": 0.95, "matrices": 1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient. If `found_inf` is 1, no parameter or state changes."""
        by_shape: dict[tuple[int, int], list[Tensor]] = {}
        for group in self.param_groups:
            for weight in _with_gradients(group):
                height, width = weight.shape
                by_shape.setdefault((height // group["matrices"], width), []).append(weight)
        settings = self.param_groups[0]
        all_weights = [weight for weights in by_shape.values() for weight in weights]
        skip = _skip(self.found_inf, settings["params"])
        self._apply_momentum(all_weights, settings["momentum"], skip)
        decay = 1.0 - settings["lr"] * settings["weight_decay"]
        torch._foreach_mul_(all_weights, torch.where(skip, 1.0, decay))
        for (height, width), weights in by_shape.items():
            # Scale to the root mean square of AdamW's typical update, 0.2 (Liu et al., 2025, section 2.2).
            scale = -settings["lr"] * 0.2 * math.sqrt(max(height, width))
            factor = torch.where(skip, 0.0, scale)
            # Orthogonalize at most 2 ** 25 weights together, or one parameter if it is larger.
            num_together = max(1, 2**25 // max(weight.numel() for weight in weights))
            for begin in range(0, len(weights), num_together):
                _add_orthogonalized(weights[begin : begin + num_together], height, width, factor)

    def _apply_momentum(
        self,
        weights: list[Tensor],
        momentum: float,
        skip: Tensor,
    ) -> None:
        """Update the momentum, and replace the gradients by those of Nesterov momentum."""
        gradients = _gradients(weights, skip)
        buffers = _moments(self, "momentum_buffer", weights)
        torch._foreach_mul_(buffers, torch.where(skip, 1.0, momentum))
        torch._foreach_add_(buffers, gradients, alpha=1.0 - momentum)
        torch._foreach_lerp_(gradients, buffers, momentum)


def _add_orthogonalized(
    weights: list[Tensor],
    height: int,
    width: int,
    factor: Tensor,
) -> None:
    """Add `factor`, (), times the orthogonalized gradients to parameters that stack (height, width) matrices."""
    rows = [len(weight) for weight in weights]
    matrices = torch.empty(sum(rows), width, dtype=torch.bfloat16, device=factor.device)
    gradients: list[Any] = [weight.grad for weight in weights]
    torch._foreach_copy_(torch.split(matrices, rows), gradients)
    updates = orthogonalized(matrices.view(-1, height, width)).reshape(matrices.shape)
    updates = updates.to(weights[0].dtype).mul_(factor)
    torch._foreach_add_(weights, torch.split(updates, rows))


def orthogonalized(matrices: Tensor) -> Tensor:
    """Approximate the nearest matrices with orthonormal rows or columns, (matrices, height, width), in bf16.

    Run five Newton–Schulz iterations, which consist of matrix products. A CPU without bf16 instructions runs them in
    fp32, because emulated bf16 would take most of a step.
    """
    # Coefficients of a quintic polynomial (Jordan, 2024). It brings singular values to between 0.5 and 1.5.
    a, b, c = 3.4445, -4.7750, 2.0315
    current = matrices.bfloat16()
    if current.device.type == "cpu" and not cores.cpu_bf16_feature():
        current = current.float()
    is_tall = current.shape[1] > current.shape[2]
    if is_tall:
        current = current.mT
    norms = torch.linalg.matrix_norm(current, keepdim=True)
    current = current / norms.clamp(min=1e-7)
    for _ in range(5):
        gram = current @ current.mT
        polynomial = torch.baddbmm(
            gram,
            gram,
            gram,
            beta=b,
            alpha=c,
        )
        current = torch.baddbmm(current, polynomial, current, beta=a)
    if is_tall:
        current = current.mT
    return current.bfloat16()
