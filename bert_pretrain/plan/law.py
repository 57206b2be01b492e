"""What a training learns: held-out figures by size, vocabulary, tokens and epochs, fitted to measured runs.

`scripts/fit_law.py` fits the constants to the runs in `scripts/learning_runs.jsonl` and draws them. The form of losses
is that of Hoffmann et al. (2022, section 3.3), floor + a / weights^alpha + b / tokens^beta. Losses that choose between
plans are in nats per byte of masked words, by which vocabularies compare. Tokens that are seen again count less, as in
Muennighoff et al. (2023, section 3.1).
"""

import math
from dataclasses import dataclass

from bert_pretrain.plan.machine_facts import Size


@dataclass(frozen=True)
class Loss:
    """The constants of one loss; weights are those of the encoder's matrices, both numbers in millions."""

    floor: float
    size_factor: float
    size_power: float
    token_factor: float
    token_power: float
    spread: float
    """Largest ratio, less one, between a measured run and the fit."""

    def at(self, weights: float, tokens: float) -> float:
        """Return the loss expected of a network with so many weights after so many tokens."""
        by_size = self.size_factor * (weights / 1e6) ** -self.size_power
        return self.floor + by_size + self.token_factor * (tokens / 1e6) ** -self.token_power


@dataclass(frozen=True)
class Losses:
    """The fits of one language."""

    nats_per_byte: Loss
    mlm_loss: Loss


VOCAB_SIZE = 8192
"""Of the measured runs."""
MEASURED_SIZES = {Size(2, 128), Size(2, 256)}
MOST_TOKENS = 11e6
MOST_EPOCHS = 1.0
LANGUAGES = {
    "en": Losses(Loss(1.0, 0.1, 0.3, 1.0, 0.1, 0.02), Loss(1.0, 0.1, 0.3, 5.0, 0.1, 0.02)),
    "zh": Losses(Loss(1.0, 0.1, 0.3, 1.0, 0.1, 0.02), Loss(1.0, 0.1, 0.3, 5.0, 0.1, 0.02)),
}
"""By the language of the text: English, for all that is written with letters, and Chinese."""
BYTES_POWER = 0.1
"""Loss per token grows as this power of the size of the vocabulary: its tokens stand for more bytes."""
MARGIN = 0.05
"""Added to the spread of the fit: another corpus, another machine."""
REPETITION_HALF_LIFE = 15.0
"""Epochs, about, after which another pass over the same text is worth little (Muennighoff et al., 2023)."""
NSP_SLOPE, NSP_MIDDLE, NSP_SIZE, NSP_MOST, NSP_SPREAD = 4.0, 0.5, 0.5, 0.9, 0.08
PEAK_LR, REFERENCE_WIDTH, LR_POWER = 5e-3, 128, 0.5
BATCHES, LARGEST_BATCH = ((16e6, 32), (64e6, 64), (256e6, 128)), 256
"""Tokens of a training up to which a batch size is used."""
SHORT_UP_TO_TOKENS = 64e6
"""Tokens of a training up to which examples have 64 tokens, else 128."""
FILLED_SHARE = 0.97
"""Of the length of an example, on average."""


@dataclass(frozen=True)
class Forecast:
    """What to expect of a training."""

    nats_per_byte: float
    """Of masked words; what plans are compared by."""
    mlm_loss: tuple[float, float]
    """Range of the held-out loss per masked token, nats."""
    nsp_accuracy: tuple[float, float]
    """Range of the held-out accuracy."""
    beyond: str
    """In what the plan lies beyond the measured runs; empty where it does not."""


def forecast(size: Size, vocab_size: int, tokens: float, epochs: float, *, is_chinese: bool) -> Forecast:
    """Return what to expect of a network after training on so many tokens, in so many epochs."""
    counted = tokens if epochs <= 1.0 else tokens / epochs * _worth(epochs)
    language = LANGUAGES["zh" if is_chinese else "en"]
    nats_per_byte = language.nats_per_byte.at(size.weights, counted)
    # A token of a larger vocabulary stands for more bytes.
    per_token = (vocab_size / VOCAB_SIZE) ** BYTES_POWER
    mlm = language.mlm_loss.at(size.weights, counted) * per_token
    beyond = _beyond(size, vocab_size, tokens, epochs)
    spread = language.mlm_loss.spread + MARGIN * (2.0 if beyond else 1.0)
    return Forecast(
        nats_per_byte,
        (mlm * (1.0 - spread), mlm * (1.0 + spread)),
        nsp_range(size, counted),
        beyond,
    )


def _worth(epochs: float) -> float:
    """Return how many epochs of new text so many passes over one text are worth."""
    return 1.0 + REPETITION_HALF_LIFE * (1.0 - math.exp(-(epochs - 1.0) / REPETITION_HALF_LIFE))


def _beyond(size: Size, vocab_size: int, tokens: float, epochs: float) -> str:
    found = []
    if size not in MEASURED_SIZES:
        found.append(f"networks of {size.layers} layers of {size.hidden}")
    if vocab_size != VOCAB_SIZE:
        found.append(f"vocabularies of {vocab_size:,} tokens")
    if tokens > MOST_TOKENS:
        found.append(f"{tokens / 1e6:,.0f} million tokens")
    if epochs > MOST_EPOCHS:
        found.append(f"{epochs:,.0f} epochs")
    return ", ".join(found)


def nsp_range(size: Size, tokens: float) -> tuple[float, float]:
    """Return the range of next-sentence accuracy to expect: chance until a threshold of tokens, then a slow rise."""
    logit = NSP_SLOPE * (math.log10(tokens / 1e6) - NSP_MIDDLE + NSP_SIZE * math.log10(size.weights / 1e6))
    middle = 0.5 + (NSP_MOST - 0.5) / (1.0 + math.exp(-logit))
    return max(0.5, middle - NSP_SPREAD), min(1.0, middle + NSP_SPREAD)


@dataclass(frozen=True)
class Recipe:
    """How to train a network of some width."""

    peak_lr: float
    batch: int
    warmup_ratio: float
    weight_decay: float


def recipe(size: Size, tokens: float) -> Recipe:
    """Return the recipe for a network and a number of tokens."""
    batch = next((batch for most, batch in BATCHES if tokens <= most), LARGEST_BATCH)
    # Measured at widths 128 and 256; beyond, the rate falls with the width.
    peak_lr = PEAK_LR * min(1.0, REFERENCE_WIDTH / size.hidden) ** LR_POWER
    return Recipe(float(f"{peak_lr:.1g}"), batch, warmup_ratio=0.05, weight_decay=0.01)
