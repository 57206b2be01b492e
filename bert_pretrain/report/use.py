"""Expected accuracy in classification, by held-out loss, next to that of word counts, as measured.

The runs are of `run auto`, fine-tuned by `finetune classify` with its defaults; `scripts/bench_use.py` repeats them.
"""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from bert_pretrain.report.curves import Metrics, value_of

VOCAB_SIZE, VOCAB_POWER = 8192, 0.075
"""Losses are compared per masked token of a vocabulary of this size; a loss grows as this power of the size, fitted by
`scripts/fit_law.py`."""
MEASURED = {
    "en": ((4.10, 1.5), (3.81, 1.7), (3.72, 2.7), (3.58, 2.7)),
    "zh": ((4.08, -1.7), (3.87, -1.5), (3.45, -1.5)),
}
"""By language: held-out loss in nats with 30 % of the tokens masked, and the points of accuracy above word counts, mean
of the tasks (RESULTS.md, "Worth in use"). Of two runs, the one with the lower loss is worth less. A run of an H200 with
less loss (2.73 nats by this vocabulary) was 6.7 points above word counts in sentiment, not one of these tasks."""
NEAR = 0.15  # nats from a measured loss within which the points hold
BETTER, WORSE = 2.0, -1.0
"""Points above word counts from which on, and below which, a model is called better and worse."""


class Use(NamedTuple):
    """The expected use of a model in classification."""

    points: float  # of accuracy, above word counts
    is_measured: bool  # whether the loss is within the measured range

    @property
    def is_better(self) -> bool:
        """Whether it is better than word counts."""
        return self.points >= BETTER

    def __str__(self) -> str:
        if self.is_better:
            text = f"better than word counts, by about {self.points:.0f} points"
        else:
            text = "about as good as word counts" if self.points > WORSE else "worse than word counts"
        return text if self.is_measured else f"{text} (beyond the measured runs)"


def expected_use(mlm_loss: float, vocab_size: int, language: str) -> Use | None:
    """Return what to expect of a model by its held-out loss in nats; None for a language that was not measured.

    Between measured losses the points are interpolated, beyond them they are those of the nearest one.
    """
    if language not in MEASURED:
        return None
    measured, loss = sorted(MEASURED[language]), mlm_loss / (vocab_size / VOCAB_SIZE) ** VOCAB_POWER
    for (low, points), (high, next_points) in itertools.pairwise(measured):
        if low <= loss <= high:
            return Use(points + (next_points - points) * (loss - low) / (high - low), is_measured=True)
    nearest = measured[0] if loss < measured[0][0] else measured[-1]
    return Use(nearest[1], is_measured=abs(loss - nearest[0]) <= NEAR)


def use_of(record: Mapping[str, Any], metrics: Metrics) -> Use | None:
    """Return what to expect of the model of a run; None before its first evaluation, and for other languages."""
    losses = [line["validation_mlm_loss"] for line in metrics if "validation_mlm_loss" in line]
    vocab_size, language = (value_of(record, f"data.statistics.{key}") for key in ("vocab_size", "language"))
    return expected_use(losses[-1], vocab_size, language) if losses and vocab_size and language else None
