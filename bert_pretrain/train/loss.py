"""The two pretraining losses as sums over a micro-batch, with the numbers of correct predictions.

The sums are later divided by the number of predictions in the global batch, not in the micro-batch, so that the
gradient does not depend on the division into micro-batches. The loss of masked tokens is in `decoder_loss.py`. In
training it may use a sampled softmax, see `sampled_softmax.py`.

A module of another loss derives from `PretrainingLoss`. It may name extra sums, which become metrics.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.decoder_loss import Targets, TeacherLayer, decoder_loss
from bert_pretrain.train.packing import Batch
from bert_pretrain.train.sampled_softmax import sampled_softmax_loss


class Extra(NamedTuple):
    """A sum that a loss has besides those of every loss. Its metric is a mean."""

    name: str  # of the metric
    per: str  # what the sum is divided by: "predictions", "tokens" or the name of another extra sum


class Counts(NamedTuple):
    """Counts of a global batch, at least 1, each a scalar."""

    predictions: Tensor
    pairs: Tensor
    tokens: Tensor


class LossSums(NamedTuple):
    """Sums over a micro-batch, each a scalar on the model's device."""

    mlm_loss: Tensor  # nats, over masked tokens
    nsp_loss: Tensor  # nats, over sentence pairs; 0 without pairs
    mlm_correct: Tensor
    nsp_correct: Tensor
    extras: tuple[Tensor, ...] = ()  # those that `PretrainingLoss` names

    def mean(self, num_predictions: float | Tensor, num_pairs: float | Tensor) -> Tensor:
        """Return this micro-batch's part of the mean loss of a global batch. Both counts must be at least 1."""
        return self.mlm_loss / num_predictions + self.nsp_loss / num_pairs


class TeacherOutput(NamedTuple):
    """What a teacher computes for one micro-batch. None is not compared with the student's."""

    layer: TeacherLayer | None = None
    features: Tensor | None = None  # (masked, teacher's hidden): input of the layer
    hidden: Tensor | None = None  # (tokens, hidden): the last hidden states


NO_TEACHER = TeacherOutput()


class PretrainingLoss(nn.Module):
    """Model and losses in one module, for DDP to wrap."""

    extras: tuple[Extra, ...] = ()  # in training
    eval_extras: tuple[Extra, ...] = ()  # in evaluation

    def __init__(self, model: BertForPreTraining, *, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        self.compiled = compiled

    def forward(self, batch: Batch) -> LossSums:
        return pretraining_loss(self.model, batch, compiled=self.compiled and torch.is_grad_enabled())

    def mean(self, sums: LossSums, counts: Counts) -> Tensor:
        """Return the part of the loss of a global batch that sums over some of its examples contribute."""
        return sums.mean(counts.predictions, counts.pairs)


def extra_metrics(extras: Sequence[Extra], sums: Sequence[float], num_predictions: float) -> dict[str, float]:
    """Return the metrics of extra sums by name, NaN where the divisor is 0.

    `sums` are the number of tokens and the extra sums. Without extra sums, they are not used.
    """
    totals = {"predictions": num_predictions}
    totals |= zip(("tokens", *(extra.name for extra in extras)), sums, strict=False)
    return {extra.name: totals[extra.name] / totals[extra.per] if totals[extra.per] else math.nan for extra in extras}


def pretraining_loss(
    model: BertForPreTraining,
    batch: Batch,
    *,
    compiled: bool = False,
    teacher: TeacherOutput = NO_TEACHER,
) -> LossSums:
    """Run the model on one micro-batch and return its losses. Without sentence pairs, `nsp_loss` is 0.

    With a teacher, the extra sums are those of `decoder_loss` and of the hidden states, if they are compared.
    """
    inputs = (batch.sequences, batch.masked_positions)
    weights = _cast_weights(model, compiled)
    features, nsp_logits, hidden = functional_call(model, weights, inputs) if weights else model(*inputs)
    hidden_loss = []
    if teacher.hidden is not None:
        cosines = F.cosine_similarity(hidden.float(), teacher.hidden.float(), dim=1)
        hidden_loss.append((1.0 - cosines).where(batch.is_real, 0.0).sum())
    del hidden  # frees its memory
    features = features[: len(batch.masked_labels)]  # drop dummy rows at the end
    mlm_loss, mlm_correct, *teacher_loss = masked_token_loss(
        model,
        features,
        batch,
        compiled=compiled,
        teacher=teacher,
    )
    if batch.next_sentence_labels is None or nsp_logits is None:
        nsp_loss = torch.zeros_like(mlm_loss)
        nsp_correct = torch.zeros_like(mlm_correct)
    else:
        nsp_logits = nsp_logits[: len(batch.next_sentence_labels)].float()
        nsp_loss = F.cross_entropy(nsp_logits, batch.next_sentence_labels, reduction="sum")
        nsp_correct = (nsp_logits.argmax(dim=1) == batch.next_sentence_labels).sum()
    return LossSums(
        mlm_loss,
        nsp_loss,
        mlm_correct,
        nsp_correct,
        (*teacher_loss, *hidden_loss),
    )


def masked_token_loss(
    model: BertForPreTraining,
    features: Tensor,
    batch: Batch,
    *,
    compiled: bool,
    teacher: TeacherOutput = NO_TEACHER,
) -> tuple[Tensor, ...]:
    """Return the sums of `decoder_loss` over masked tokens, from the decoder's inputs."""
    targets = Targets(batch.masked_labels, teacher_features=teacher.features)
    weight = model.embeddings.word_embeddings.weight
    bias = model.mlm_head.bias
    if batch.candidates is None:
        return decoder_loss(
            features,
            weight,
            bias,
            targets,
            teacher=teacher.layer,
            compiled=compiled,
        )
    return sampled_softmax_loss(
        features,
        weight,
        bias,
        targets,
        batch.candidates,
        teacher=teacher.layer,
        compiled=compiled,
    )


def _cast_weights(model: BertForPreTraining, compiled: bool) -> dict[str, Tensor]:
    """Cast the encoder's matrices and biases to 16 bits, one operation per layer. Return {} to leave it to autocast.

    Compiled layers do not use autocast's cache and would cast each weight with a separate kernel. With activation
    checkpointing, recomputed layers use the original weights, so autocast must cast those.
    """
    if not compiled or not torch.is_autocast_enabled("cuda") or model.encoder.activation_checkpointing:
        return {}
    cast: Any = _Cast.apply
    dtype = torch.get_autocast_dtype("cuda")
    weights: dict[str, Tensor] = {}
    for index, layer in enumerate(model.encoder.layers):
        originals = {name: weight for name, weight in layer.named_parameters() if "norm" not in name}
        names = (f"encoder.layers.{index}.{name}" for name in originals)
        weights |= zip(names, cast(dtype, *originals.values()), strict=True)
    return weights


class _Cast(torch.autograd.Function):
    """Cast several tensors with one operation, and their gradients back to fp32."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        torch._foreach_copy_(results, list(tensors))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        results = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
        torch._foreach_copy_(results, list(gradients))
        return (None, *results)
