"""AdamW as BERT uses it: decoupled weight decay on everything but biases and layer normalisation (appendix A.2)."""

import torch
from torch import nn

from bert_pretrain.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW over two groups of parameters, with and without decay.

    Unlike the paper's own code it corrects the bias of the moments, as Adam does.
    """
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (decayed if has_decay(name) else exempt).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    # Fused, because it can skip a step on the device (`found_inf`), and is the fastest on CPU too.
    return torch.optim.AdamW(groups, lr=config.peak_lr, betas=config.betas, eps=config.eps, fused=True)


def has_decay(name: str) -> bool:
    """Whether weight decay applies to the parameter of this name."""
    return not (name.endswith("bias") or name.endswith("norm.weight"))
