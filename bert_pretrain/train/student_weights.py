"""First weights of a student from its teacher, as far as shapes allow.

Of equal width, weights are copied: embeddings, heads, and of the layers a selection spread from the first to the last
(as by Sanh et al., 2019). A narrower student gets the teacher's token embeddings on their principal axes, and its
output bias. All else stays as it was drawn.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bert_pretrain.config import ModelConfig, TrainConfig
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.folder import check_model, read_config, weights_sha256
from bert_pretrain.model.hub import model_folder
from bert_pretrain.model.huggingface import load_model
from bert_pretrain.model.vocabulary import check_rows, check_same_vocabulary
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.train.inputs import TEACHER

_NEEDED = ("bert.embeddings", "bert.encoder", "cls.predictions")
_WORDS, _OUTPUT_BIAS = "embeddings.word_embeddings.weight", "mlm_head.bias"


@dataclass(frozen=True)
class TeacherFolder:
    """What `train.teacher` names: a model folder with the vocabulary of the data."""

    folder: Path
    weights_sha256: str
    model: ModelConfig

    def read(self) -> BertForPreTraining:
        """Return the teacher, on the CPU."""
        return load_model(self.folder, required=_NEEDED, flag=TEACHER).model


def open_teacher(train: TrainConfig, tokenizer: Tokenizer) -> TeacherFolder | None:
    """Open what `train.teacher` names, and refuse another vocabulary; None where there is no teacher."""
    if train.teacher is None:
        return None
    folder = model_folder(train.teacher, TEACHER)
    check_model(folder, TEACHER)
    model, vocab_size = read_config(folder, TEACHER)
    check_same_vocabulary(folder, tokenizer, TEACHER)
    check_rows(folder, vocab_size, tokenizer, TEACHER)
    return TeacherFolder(folder, weights_sha256(folder, TEACHER), model)


@torch.no_grad()
def start_from_teacher(model: BertForPreTraining, teacher: BertForPreTraining) -> str:
    """Overwrite first weights of a model, after `initialize`; returns, for users, what was taken."""
    found: dict[str, Tensor] = dict(teacher.named_parameters())
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
