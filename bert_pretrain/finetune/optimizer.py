"""The optimizer of fine-tuning: a rate for each matrix by its scale, and Muon inside an encoder that Muon pretrained.

AdamW moves a weight by about its rate per step, whatever the size of the weight. So the rate of a matrix is the base
rate, which fits BERT's initial weights, times the matrix's rms over theirs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bert_pretrain.model.scale import INITIAL_RMS, base_rate, rms

MUON_RATE = 3e-3
"""For matrices inside the encoder; an update has the rms of AdamW's at this rate."""


def make_optimizer(network: Any, rate: float | None, weight_decay: float, *, muon: bool) -> torch.optim.Optimizer:
    """Return the optimizer of a model of `transformers` whose encoder was pretrained.

    Args:
        network: the model with its task's head.
        rate: of all weights; with `muon`, of the matrices inside the encoder. None: by width and by scale.
        weight_decay: on matrices only.
        muon: whether Muon takes the matrices inside the encoder.
    """
    base = base_rate(network.config.hidden_size)
    pretrained = {id(weight) for weight in network.base_model.parameters()}
    hidden: list[nn.Parameter] = []
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, weight in network.named_parameters():
        is_matrix = weight.dim() == 2
        if muon and is_matrix and ".encoder.layer." in name:
            hidden.append(weight)
            continue
        own = base if rate is None or muon else rate
        if (rate is None or muon) and is_matrix and id(weight) in pretrained:
            own *= rms(weight) / INITIAL_RMS
        groups.setdefault((own, weight_decay if is_matrix else 0.0), []).append(weight)
    adamw = torch.optim.AdamW(
        [{"params": weights, "lr": own, "weight_decay": decay} for (own, decay), weights in groups.items()], fused=True
    )
    if not hidden:
        return adamw
    settings: dict[str, Any] = {"lr": rate or MUON_RATE, "weight_decay": weight_decay}
    return _Joined([torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **settings), adamw])


class _Joined(torch.optim.Optimizer):
    """Several optimizers as one, since the Trainer takes one; they share their groups with it."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
