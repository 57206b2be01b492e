"""A sampled softmax (Jean et al., 2015, section 3.1): draw its candidates, and compute its loss.

In a small network, the logits of the whole vocabulary take most of a step. A sampled softmax computes those of the
label and of some candidates, and divides the exponential of each candidate by the probability that it is a candidate.
The expected value of the sum of these exponentials is the sum over the vocabulary.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bert_pretrain import rng
from bert_pretrain.train.decoder_loss import TEMPERATURE, Targets, TeacherLayer, decoder_loss

# The probability of a candidate is proportional to its frequency to this power. With 1, rare candidates have large
# weights, and the loss after 9.4 million tokens is up to 0.11 nats higher (RESULTS.md).
FREQUENCY_POWER = 0.5


class Candidates(NamedTuple):
    """The candidates of one step. All its micro-batches, on all ranks, have the same ones."""

    token_ids: Tensor  # (candidates,) int64, ascending
    log_probabilities: Tensor  # (candidates,) float32: log of the probability that the token is a candidate


class CandidateSampler:
    """Draws candidates as a function of (seed, step). Frequent tokens are candidates in every step."""

    def __init__(
        self,
        frequencies: np.ndarray,
        number: int,
        seed: int,
    ) -> None:
        """Initialize from the frequencies of all tokens, (vocabulary,), positive. `number` is less than their count."""
        self._number = number
        self._seed = seed
        probabilities = inclusion_probabilities(frequencies**FREQUENCY_POWER, number)
        self._bounds = np.cumsum(probabilities)
        self._log_probabilities = np.log(probabilities).astype(np.float32)

    def draw(self, step: int) -> Candidates:
        """Return the candidates of a step.

        Systematic sampling: each token has an interval as long as its probability. The intervals are end to end. The
        candidates are the tokens whose intervals contain one of `number` points at distances of 1.
        """
        first = rng.stream(self._seed, "candidates", step=step).uniform(1e-6, 1 - 1e-6)  # margins for rounding errors
        token_ids = np.searchsorted(self._bounds, first + np.arange(self._number))
        log_probabilities = self._log_probabilities[token_ids]
        return Candidates(torch.from_numpy(token_ids), torch.from_numpy(log_probabilities))


def inclusion_probabilities(weights: np.ndarray, number: int) -> np.ndarray:
    """Return the probability that each token is a candidate, (vocabulary,) float64. Their sum is `number`.

    The probability of the tokens with the largest weights is 1. For all other tokens, it is proportional to the weight.
    """
    order = np.argsort(-weights, kind="stable")
    descending = weights[order].astype(np.float64)
    remaining = np.cumsum(descending[::-1])[::-1]  # the sum of each weight and all smaller ones
    # The first token with a probability of at most 1 if all before it are certain. Later tokens have smaller ones.
    num_left = number - np.arange(len(order))
    num_certain = int(np.argmax(num_left * descending <= remaining))
    factor = num_left[num_certain] / remaining[num_certain]
    probabilities = np.ones(len(order))
    probabilities[order[num_certain:]] = factor * descending[num_certain:]
    return probabilities


def sampled_softmax_loss(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Targets,
    candidates: Candidates,
    *,
    teacher: TeacherLayer | None = None,
    compiled: bool = False,
) -> tuple[Tensor, ...]:
    """Return estimates of the summed cross-entropy over the vocabulary, and of the number of correct predictions.

    `features` is (masked, hidden), `weight` (vocabulary, hidden), `bias` (vocabulary,) and `targets.labels` tokens.
    Each row has the logits of the candidates and, in one more column, the logit of its label. If the label is also a
    candidate, the row excludes the candidate's column.

    The loss against a teacher is estimated as well: dividing the exponentials of both softened distributions by the
    probabilities of the candidates makes all sums over candidates, also that of KL, estimates of those over tokens.
    """
    number = len(candidates.token_ids)
    labels = targets.labels
    label_ids = labels.clamp(min=0)
    selected = torch.cat([candidates.token_ids, label_ids])

    def select(features: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = weight.index_select(0, selected)
        biases = bias.index_select(0, selected)
        label_logits = (features.float() * rows[number:]).sum(dim=1) + biases[number:]
        return rows[:number], biases[:number] - candidates.log_probabilities, label_logits

    candidate_weight, candidate_bias, label_logits = select(features, weight, bias)
    # Labels outside the candidates exclude the extra column, in which their logits are written afterwards.
    column_of = torch.full_like(bias, number, dtype=torch.int64)  # (vocabulary,)
    column_of[candidates.token_ids] = torch.arange(number, device=bias.device)
    targets = targets._replace(
        labels=torch.where(labels < 0, labels, number),
        logits=label_logits,
        excluded=column_of[label_ids],
    )
    if teacher is not None and targets.teacher_features is not None:
        teacher_weight, teacher_bias, teacher_logits = select(targets.teacher_features, teacher.weight, teacher.bias)
        targets = targets._replace(teacher_logits=teacher_logits)
        # The temperature also divides -log(probability) in the logits; this adds the rest.
        correction = (1.0 / TEMPERATURE - 1.0) * candidates.log_probabilities
        teacher = TeacherLayer(teacher_weight, teacher_bias, correction)
    return decoder_loss(
        features,
        candidate_weight,
        candidate_bias,
        targets,
        teacher=teacher,
        compiled=compiled,
    )
