"""The optimizers: AdamW as BERT uses it (appendix A.2), LAMB, or Muon with AdamW for what is no hidden matrix.

All of them obey `found_inf` on the device, PyTorch's contract between a gradient scaler and a fused optimizer: a step
is skipped without the host knowing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bert_pretrain.config import TrainConfig
from bert_pretrain.train.optim.lamb import Lamb
from bert_pretrain.train.optim.muon import Muon

Optimizers = Sequence[torch.optim.Optimizer]
"""Each parameter belongs to one of them."""

LONG_AGO = 2.0**60
"""A count of steps at which AdamW corrects nothing, and beyond where fp32 can count: one more leaves it as it is."""


def make_optimizers(model: nn.Module, config: TrainConfig) -> Optimizers:
    """Return the configured optimizers over a model's parameters, with decay on matrices only."""
    adam: dict[str, Any] = {"lr": config.peak_lr, "betas": config.betas, "eps": config.eps}
    named = list(model.named_parameters())
    if config.optimizer == "lamb":
        groups = _groups(named, config)
        return (Lamb(groups, **adam, bias_correction=config.bias_correction),)
    hidden = [(name, weight) for name, weight in named if config.optimizer == "muon" and is_hidden_matrix(name)]
    names = {name for name, _ in hidden}
    rest = _groups([(name, parameter) for name, parameter in named if name not in names], config)
    # Fused, because it can skip a step on the device, and is the fastest on CPU too.
    adamw = torch.optim.AdamW(
        [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in rest], **adam, fused=True
    )
    if not config.bias_correction:
        forget_the_beginning(adamw)
    if not hidden:
        return (adamw,)
    return (Muon(_groups(hidden, config), lr=config.peak_lr, weight_decay=config.weight_decay), adamw)


def update(optimizers: Optimizers, learning_rate: float, skip: Tensor) -> None:
    """Run the optimizers, or leave weights and state as they are where `skip`, () bool, is true."""
    found_inf: Tensor | None = skip.float()
    if skip.device.type == "mps":
        if bool(skip):  # PyTorch's fused AdamW ignores `found_inf` there (torch 2.13), so the host must look
            return
        found_inf = None
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        optimizer.step()


def forget_the_beginning(adamw: torch.optim.AdamW) -> None:
    """Take the correction of the moments' bias out of a fresh AdamW, as in the paper's own code.

    The correction fades with the number of steps, so the count begins where it is 1; the fused kernel stays as it is.
    """
    for group in adamw.param_groups:
        for parameter in group["params"]:
            adamw.state[parameter] = {
                "step": torch.tensor(LONG_AGO, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def has_decay(name: str) -> bool:
    """Whether weight decay, and LAMB's trust ratio, apply to the parameter of this name."""
    return not (name.endswith("bias") or name.endswith("norm.weight"))


def is_hidden_matrix(name: str) -> bool:
    """Whether a parameter is a matrix inside the encoder: not an embedding, and in none of the heads."""
    return name.startswith("encoder.layers.") and has_decay(name)


def num_matrices(name: str) -> int:
    """Return how many matrices a parameter consists of: query, key and value lie one below the other."""
    return 3 if name.endswith("query_key_value.weight") else 1


def _groups(named: Sequence[tuple[str, nn.Parameter]], config: TrainConfig) -> list[dict[str, Any]]:
    """Sort parameters into groups by decay and number of matrices."""
    groups: dict[tuple[bool, int], list[nn.Parameter]] = {}
    for name, parameter in named:
        groups.setdefault((has_decay(name), num_matrices(name)), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": config.weight_decay if decays else 0.0,
            "adapts": decays,
            "matrices": matrices,
        }
        for (decays, matrices), parameters in groups.items()
    ]
