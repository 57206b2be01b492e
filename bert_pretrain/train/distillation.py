"""What a student learns from its teacher beyond the labels: the relations between tokens in self-attention.

MiniLMv2 (Wang et al., 2021, arXiv 2012.15828, section 3): the queries of the last layer, of teacher and student, are
split into equally many relation heads; the softmax over q · q / √size says how each token relates to those of its
sequence, and the student's is trained to equal the teacher's. So for keys and for values. Widths, numbers of layers and
of attention heads may differ, and nothing is added to the student. The teacher computes nothing beyond these vectors.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bert_pretrain.model.attention import layout_of, pad
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.batches import Batch

RELATION_HEAD_SIZE = 32
"""Of the greatest common divisor of both widths: what a relation head has at least."""
RELATIONS = 3
"""Query to query, key to key, value to value."""
BLOCK_SCORES = 1 << 22
"""Scores of student and teacher that exist at once."""
_MASKED = -1e30
"""A score without probability; finite, so that the difference of two logarithms of it is 0."""


class Teacher:
    """A trained BERT with the student's vocabulary; it is not changed.

    Args:
        network: the teacher, on the student's device; its weights need no gradient afterwards.
        hidden_size: of the student.
        weight: of the relations' loss, above 0.
    """

    def __init__(self, network: BertForPreTraining, hidden_size: int, weight: float = 1.0) -> None:
        self.network = network.eval().requires_grad_(False)
        self.weight = weight
        self.num_heads = num_relation_heads(hidden_size, network.config.hidden_size)

    def relation_loss(self, query_key_value: Tensor, batch: Batch) -> Tensor:
        """Return the divergence from the teacher's relations to the student's, summed over the real tokens.

        It is in nats, times the weight. For each token it is the mean over relation heads, and the sum over query, key
        and value.

        Args:
            query_key_value: (tokens, 3 * hidden), of the student's last layer.
            batch: that they come from.
        """
        with torch.no_grad():
            target = self.network.project_last(*batch.sequences)  # (tokens, 3 * the teacher's hidden)
        real = batch.num_tokens  # what follows is a dummy tail
        bounds = batch.cu_seqlens[: batch.num_sequences + 1]
        with torch.autocast(target.device.type, enabled=False):
            return self.weight * _relation_loss(
                query_key_value[:real], target[:real], bounds, batch.max_seqlen, self.num_heads, torch.is_grad_enabled()
            )


def num_relation_heads(student_hidden: int, teacher_hidden: int) -> int:
    """Return how many relation heads split both widths, of at least `RELATION_HEAD_SIZE` dimensions if possible."""
    common = math.gcd(student_hidden, teacher_hidden)
    fitting = [number for number in range(1, common + 1) if common % number == 0]
    return max(number for number in fitting if number == 1 or common // number >= RELATION_HEAD_SIZE)


class _RelationLoss(torch.autograd.Function):
    """Takes its gradient on the way forward, some sequences at a time, so that few scores exist at once."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, bounds: Tensor, max_seqlen: int, num_heads: int, with_gradient: bool
    ) -> Tensor:
        num_sequences = len(bounds) - 1
        layout = layout_of(bounds, max_seqlen, len(student), "padded")
        own, target = (
            pad(vectors, layout).view(num_sequences, max_seqlen, RELATIONS, num_heads, -1).permute(0, 2, 3, 1, 4)
            for vectors in (student, teacher)
        )  # (sequences, 3, heads, max_seqlen, size): what pads is 0, so that its rows are equal and add nothing
        loss = student.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(own) if with_gradient else None
        per_block = max(1, BLOCK_SCORES // (RELATIONS * num_heads * max_seqlen**2))
        for start in range(0, num_sequences, per_block):
            block = slice(start, start + per_block)
            mask = None if layout.mask is None else layout.mask[block, None]  # (block, 1, 1, 1, max_seqlen)
            log_own, log_target = _log_relations(own[block], mask), _log_relations(target[block], mask)
            probabilities = log_target.exp()
            loss += (probabilities * (log_target - log_own)).sum() / num_heads
            if gradient is not None:
                difference = log_own.exp_().sub_(probabilities)  # of the loss, by the scores
                difference = (difference + difference.mT).to(own.dtype)  # each vector is in a row and in a column
                gradient[block] = difference @ own[block] * (own.shape[-1] ** -0.5 / num_heads)
        if gradient is not None:
            flat = gradient.permute(0, 3, 1, 2, 4).reshape(num_sequences * max_seqlen, -1)
            ctx.save_for_backward(flat if layout.slots is None else flat.index_select(0, layout.slots))
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None, None, None, None


_relation_loss: Callable[..., Tensor] = _RelationLoss.apply


def _log_relations(vectors: Tensor, mask: Tensor | None) -> Tensor:
    """Return the logarithm of softmax(x · x / √size), (…, max_seqlen, max_seqlen) fp32, of (…, max_seqlen, size)."""
    scores = ((vectors * vectors.shape[-1] ** -0.5) @ vectors.mT).float()
    return (scores if mask is None else scores.masked_fill_(~mask, _MASKED)).log_softmax(dim=-1)
