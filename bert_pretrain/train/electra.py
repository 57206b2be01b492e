"""ELECTRA's losses (Clark et al., 2020, section 2): a generator replaces masked tokens, a discriminator finds them.

The discriminator reads the examples with a token drawn from the generator's softmax at each masked position. A drawn
token that equals the original one does not count as replaced. No gradient flows through the draw. With a sampled
softmax, the token is drawn among the candidates, each weighted by 1 / the probability that it is a candidate.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from bert_pretrain.config import TrainConfig
from bert_pretrain.model.bert import BertForPreTraining, ElectraForPreTraining
from bert_pretrain.train.decoder_loss import SOFTMAX_ROWS
from bert_pretrain.train.loss import Counts, Extra, LossSums, PretrainingLoss, masked_token_loss
from bert_pretrain.train.packing import Batch


class ElectraLoss(PretrainingLoss):
    """Generator, discriminator and both losses. The losses of sentence pairs are 0: there is no head for them."""

    model: ElectraForPreTraining
    extras = eval_extras = (
        Extra("discriminator_loss", per="tokens"),
        Extra("replaced", per="tokens"),
        Extra("replaced_found", per="replaced"),
        Extra("originals", per="tokens"),
        Extra("originals_flagged", per="originals"),
    )

    def __init__(
        self,
        model: ElectraForPreTraining,
        discriminator_weight: float,
        *,
        compiled: bool = False,
    ) -> None:
        super().__init__(model, compiled=compiled)
        self.discriminator_weight = discriminator_weight

    def mean(self, sums: LossSums, counts: Counts) -> Tensor:
        return sums.mlm_loss / counts.predictions + self.discriminator_weight * sums.extras[0] / counts.tokens

    def forward(self, batch: Batch) -> LossSums:
        features = self.model(batch.sequences, batch.masked_positions).mlm_features
        features = features[: len(batch.masked_labels)]  # drop dummy rows at the end
        compiled = self.compiled and torch.is_grad_enabled()
        mlm_loss, mlm_correct = masked_token_loss(self.model, features, batch, compiled=compiled)
        replaced_ids, is_replaced = self.replace(batch, features.detach())
        extras = self.discriminate(batch, replaced_ids, is_replaced)
        zero = torch.zeros_like(mlm_loss)
        return LossSums(mlm_loss, zero, mlm_correct, zero, extras)

    @torch.no_grad()
    def replace(self, batch: Batch, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids with drawn tokens at masked positions, and whether they differ from the original ones.

        Both are (tokens,). The batch has the random numbers.
        """
        assert batch.draws is not None
        weight = self.model.embeddings.word_embeddings.weight
        bias = self.model.mlm_head.bias
        if batch.candidates is None:
            drawn = draw_tokens(features, weight, bias, batch.draws)
        else:
            ids, log_probabilities = batch.candidates
            drawn = ids[draw_tokens(features, weight[ids], bias[ids] - log_probabilities, batch.draws)]
        positions = batch.masked_positions[: len(batch.masked_labels)]
        # Positions of a tail are 0, that of a [CLS], which is not masked.
        is_masked = batch.masked_labels >= 0
        originals = torch.where(is_masked, batch.masked_labels, batch.input_ids[positions])
        drawn = torch.where(is_masked, drawn, originals)
        is_replaced = torch.zeros_like(batch.input_ids, dtype=torch.bool)
        return (
            batch.input_ids.index_copy(0, positions, drawn),
            is_replaced.index_copy(0, positions, drawn != originals),
        )

    def discriminate(
        self,
        batch: Batch,
        replaced_ids: Tensor,
        is_replaced: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the `extras`: the discriminator's loss in nats, and counts of tokens that are not of the tail."""
        sequences = batch.sequences._replace(input_ids=replaced_ids)
        logits = self.model.discriminate(sequences).float()
        losses = F.binary_cross_entropy_with_logits(logits, is_replaced.float(), reduction="none")
        is_real = batch.is_real
        is_flagged = is_real & (logits > 0)
        num_replaced = is_replaced.sum()
        num_found = (is_flagged & is_replaced).sum()
        return (
            losses.masked_fill(~is_real, 0.0).sum(),
            num_replaced,
            num_found,
            is_real.sum() - num_replaced,
            is_flagged.sum() - num_found,
        )


def losses_of(model: BertForPreTraining, train: TrainConfig, *, compiled: bool) -> PretrainingLoss:
    """Return the losses of a network to train without a teacher."""
    if isinstance(model, ElectraForPreTraining):
        return ElectraLoss(model, train.discriminator_weight, compiled=compiled)
    return PretrainingLoss(model, compiled=compiled)


def draw_tokens(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    numbers: Tensor,
) -> Tensor:
    """Draw a token for each row from the softmax of `features @ weight.T + bias`, (rows,) int64.

    `numbers`, (rows,) and uniform in [0, 1), are looked up in the cumulative distributions, some rows at a time.
    """
    drawn = []
    for begin in range(0, len(features), SOFTMAX_ROWS[features.device.type]):
        rows = slice(begin, begin + SOFTMAX_ROWS[features.device.type])
        logits = F.linear(features[rows], weight, bias).float()
        cumulative = logits.softmax(dim=1).cumsum(dim=1)
        drawn.append(torch.searchsorted(cumulative, numbers[rows, None] * cumulative[:, -1:], right=True))
    return torch.cat(drawn).squeeze(1).clamp(max=len(bias) - 1)
