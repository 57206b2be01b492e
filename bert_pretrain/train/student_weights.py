"""First weights of a student from its teacher, as far as shapes allow.

Of equal width, weights are copied: embeddings, heads, and of the layers a selection spread from the first to the last
(as by Sanh et al., 2019). A narrower student gets the teacher's token embeddings on their principal axes, and its
output bias. All else stays as it was drawn.
"""

import re

import torch
from torch import Tensor

from bert_pretrain.model.bert import BertForPreTraining

_WORDS, _OUTPUT_BIAS = "embeddings.word_embeddings.weight", "mlm_head.bias"


@torch.no_grad()
def start_from_teacher(model: BertForPreTraining, teacher: BertForPreTraining) -> str:
    """Overwrite first weights of a model, after `initialize`; returns, for users, what was taken."""
    found = {name: parameter.cpu() for name, parameter in teacher.named_parameters()}
    own, theirs = model.config, teacher.config
    chosen = spread(own.num_hidden_layers, theirs.num_hidden_layers)
    if own.hidden_size == theirs.hidden_size:
        taken = {name: found[_renumbered(name, chosen)] for name, _ in model.named_parameters()}
        what = f"embeddings, heads, and of {theirs.num_hidden_layers} layers {', '.join(str(i + 1) for i in chosen)}"
    else:
        taken, what = {_OUTPUT_BIAS: found[_OUTPUT_BIAS]}, "output bias"
        if own.hidden_size < theirs.hidden_size:
            embeddings = on_principal_axes(found[_WORDS][: model.vocab_size], own.hidden_size)
            # As large as drawn ones, for which the other first weights are made.
            taken[_WORDS] = embeddings * (own.initializer_range / embeddings.square().mean().sqrt())
            what = f"token embeddings on {own.hidden_size} principal axes, {what}"
    for name, parameter in model.named_parameters():
        if name in taken:
            block = tuple(map(slice, map(min, parameter.shape, taken[name].shape)))
            parameter[block] = taken[name][block]
    return what


def spread(number: int, num_layers: int) -> list[int]:
    """Return so many numbers of layers, in order, from the first to the last; of one, the first."""
    return [round(index * (num_layers - 1) / max(number - 1, 1)) for index in range(number)]


def on_principal_axes(rows: Tensor, size: int) -> Tensor:
    """Return rows, (rows, hidden), in the coordinates of their `size` principal axes, (rows, size)."""
    rows = rows.double()
    _, axes = torch.linalg.eigh(rows.T @ rows)  # ascending
    axes = axes[:, -size:].flip(1)
    signs = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True)).sign()  # which of the two is up to the library
    return (rows @ (axes * signs)).float()


def _renumbered(name: str, chosen: list[int]) -> str:
    """Return the teacher's name of a student's parameter."""
    return re.sub(r"\.layers\.(\d+)\.", lambda found: f".layers.{chosen[int(found.group(1))]}.", name)
