"""Predict from the held-out loss how accurate a model is in classification, compared with word counts.

The table comes from models of `run auto`, fine-tuned by `finetune classify` with its defaults. `scripts/bench_use.py`
repeats the measurement.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from bert_pretrain.metrics import Metrics, value_of

# Losses are converted to a vocabulary of VOCAB_SIZE tokens: a loss grows as size ** VOCAB_POWER (scripts/fit_law.py).
VOCAB_SIZE, VOCAB_POWER = 8192, 0.075
MEASURED_MASKED_SHARE = 0.3  # of the tokens in the measured runs
# By language: held-out loss in nats, and points of accuracy above word counts, the mean over the tasks (RESULTS.md,
# "Worth in use"). The models of Chinese, and some of the first three points of English, start from co-occurrences. The
# last point of English is one run on an H200 and one task, sentiment.
MEASURED = {
    "en": ((4.47, 0.4), (4.05, 1.0), (3.79, 1.8), (3.72, 2.7), (3.58, 2.7), (2.73, 6.7)),
    "zh": ((4.0, -1.2), (3.53, -1.0)),
}
BETTER, WORSE = 2.0, -1.0  # points at which a model counts as better or worse than word counts


class Use(NamedTuple):
    """The expected accuracy of a model in classification."""

    points: float  # of accuracy, above word counts
    is_measured: bool  # whether the loss is in the measured range

    def __str__(self) -> str:
        if self.points >= BETTER:
            text = f"better than word counts, by about {self.points:.0f} points"
        else:
            text = "about as good as word counts" if self.points > WORSE else "worse than word counts"
        return text if self.is_measured else f"{text} (beyond the measured runs)"


def expected_use(
    mlm_loss: float,
    vocab_size: int,
    language: str,
    masked_share: float = MEASURED_MASKED_SHARE,
) -> Use | None:
    """Return the expected use for a held-out loss in nats; None for a language that was not measured.

    Points are interpolated between the measured losses. Outside their range, the nearest measurement is used.
    """
    if language not in MEASURED:
        return None
    loss = mlm_loss / (vocab_size / VOCAB_SIZE) ** VOCAB_POWER
    losses, points = zip(*sorted(MEASURED[language]), strict=True)
    near = 0.15  # nats outside the measured losses within which the points are valid
    is_measured = losses[0] - near <= loss <= losses[-1] + near and masked_share == MEASURED_MASKED_SHARE
    return Use(float(np.interp(loss, losses, points)), is_measured)


def use_of(record: Mapping[str, Any], metrics: Metrics) -> Use | None:
    """Return the expected use of a run's model; None before the first evaluation, for other languages, for ELECTRA."""
    if value_of(record, "config.model.architecture") == "electra":
        return None  # the loss is that of its generator
    losses = [line["validation_mlm_loss"] for line in metrics if "validation_mlm_loss" in line]
    if not losses or losses[-1] is None:  # null: it was not finite
        return None
    vocab_size, language = (value_of(record, f"data.statistics.{key}") for key in ("vocab_size", "language"))
    masked_share = value_of(record, "data.statistics.masked_lm_prob") or MEASURED_MASKED_SHARE
    return expected_use(losses[-1], vocab_size, language, masked_share) if vocab_size and language else None
