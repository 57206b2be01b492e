"""Distillation (DistilBERT; Sanh et al., 2019): the loss of a student also compares its outputs with a teacher's.

The loss is 2 * masked tokens + 5 * KL of the softened distributions (`decoder_loss.py`) + 1 - the cosine of the last
hidden states, if they are equally wide, + sentence pairs, if there are any. The factors and the temperature of 2 are
those with which DistilBERT was trained. It compared the distributions at all tokens. Here only those at masked tokens
are computed, a seventh as many.
"""

import torch
from torch import Tensor

from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.decoder_loss import TEACHER_RATIO, TeacherLayer
from bert_pretrain.train.loss import Counts, Extra, LossSums, PretrainingLoss, TeacherOutput, pretraining_loss
from bert_pretrain.train.packing import Batch

MLM_WEIGHT = 2.0  # that of hidden states is 1


class DistillationLoss(PretrainingLoss):
    """The losses of a student. Evaluation does not use the teacher."""

    extras: tuple[Extra, ...] = (Extra("distillation_loss", per="predictions"),)

    def __init__(
        self,
        model: BertForPreTraining,
        teacher: BertForPreTraining,
        *,
        compiled: bool = False,
    ) -> None:
        """Initialize from a student and a teacher in evaluation mode, whose vocabulary may have additional rows."""
        super().__init__(model, compiled=compiled)
        weight = teacher.embeddings.word_embeddings.weight[: model.vocab_size].detach()
        bias = teacher.mlm_head.bias[: model.vocab_size].detach()
        self._layer = TeacherLayer(weight, bias, torch.zeros_like(bias))
        self._teacher = (teacher,)  # in a tuple, so that DDP, optimizers and checkpoints do not have its weights
        self.compares_hidden = teacher.config.hidden_size == model.config.hidden_size
        if self.compares_hidden:
            self.extras += (Extra("hidden_loss", per="tokens"),)

    def forward(self, batch: Batch) -> LossSums:
        if not self.training:
            return super().forward(batch)
        return pretraining_loss(self.model, batch, compiled=self.compiled, teacher=self._ask_teacher(batch))

    @torch.no_grad()
    def _ask_teacher(self, batch: Batch) -> TeacherOutput:
        (teacher,) = self._teacher
        hidden = teacher.encode(batch.sequences)
        features = teacher.mlm_head(hidden.index_select(0, batch.masked_positions))[: len(batch.masked_labels)]
        return TeacherOutput(self._layer, features, hidden if self.compares_hidden else None)

    def mean(self, sums: LossSums, counts: Counts) -> Tensor:
        distillation_loss, *hidden_loss = sums.extras
        weighted = MLM_WEIGHT * (sums.mlm_loss + TEACHER_RATIO * distillation_loss)
        total = sums._replace(mlm_loss=weighted).mean(counts.predictions, counts.pairs)
        return total + sum(hidden_loss) / counts.tokens
