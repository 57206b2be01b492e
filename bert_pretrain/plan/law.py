"""The scaling law: held-out loss and next-sentence accuracy by size, tokens, epochs and batch.

The loss starts at that of the token frequencies and falls to a floor, as a power of the tokens:

    loss = floor + (6.3 - floor) * (1 + tokens / first) ^ -power

The floor falls with the weights as the losses of five networks do in Devlin et al. (2018, table 6). The other constants
are fitted by `scripts/fit_law.py` to `docs/measured_runs.jsonl`. Weights and tokens are in millions; only the matrices
of the encoder count as weights. Losses are in nats per masked token of a vocabulary of 8,192.

`tokens` are training tokens with four corrections. Repeated tokens count less (Muennighoff et al., 2023, section 3.1).
The tokens of a fixed number of steps (fitted) do not count. Tokens of large batches count less, half at a critical size
that grows as the loss falls (McCandlish et al., 2018; not fitted). A start from co-occurrences counts as extra tokens.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from bert_pretrain.plan.facts import Size
from bert_pretrain.report.use import VOCAB_POWER, VOCAB_SIZE, Use, expected_use

FLOOR_POWER = 0.153  # fits perplexities 5.84, 4.68, 3.99, 3.54, 3.23 at 21, 42, 85, 151, 302 million weights within 3 %
# Nats of a ModernBERT above a BERT after equally many tokens: the mean of paired runs of 1.8 million tokens, of the
# sizes below. The difference was about the same after 10 million tokens with a prototype (RESULTS.md).
MODERN_OFFSET = -0.14
MODERN_SIZES = {Size(2, 128)}
PLATEAU = 6.3  # loss of the token frequencies, without context
# Critical batch in tokens: 2.1e8 * loss ^ -4.8, fitted to GPTs by Kaplan et al. (2020, section 5.1); an assumption for
# BERTs. It allows the batches of Izsak et al. (2021), 524,288 tokens, below 3.5 nats.
CRITICAL_BATCH = 2.1e8
CRITICAL_POWER = 4.8


class Curve(NamedTuple):
    """The fitted constants of one language."""

    floor: float  # floor of the loss for a network of a million weights
    first: float  # million tokens after which the loss falls as a power of the tokens
    power: float
    lost_steps: float  # steps that teach nothing, for any batch size
    spread: float  # largest relative error of the fit

    def loss(
        self,
        weights: float,
        tokens: float,
        steps: float = math.inf,
        batch_tokens: float = 0.0,
        *,
        start: float = 0.0,
    ) -> float:
        """Return the held-out loss in nats of a network of `weights` million weights after `tokens` million tokens.

        The tokens are seen in `steps` batches of `batch_tokens` tokens. The initial weights are worth `start` million
        tokens.
        """
        floor = self.floor * weights**-FLOOR_POWER
        loss = floor + (PLATEAU - floor) * (1.0 + tokens / self.first) ** -self.power
        worth = max(0.0, 1.0 - self.lost_steps / steps) / (1.0 + batch_tokens / critical_batch(loss))
        return floor + (PLATEAU - floor) * (1.0 + (start + worth * tokens) / self.first) ** -self.power


# "en" is used for all text that is written with letters.
CURVES = {
    "en": Curve(2.0, 0.1187, 0.1669, 55.3382, 0.0481),
    "zh": Curve(2.0, 0.0136, 0.1321, 55.3382, 0.0743),
}
# A start from co-occurrences is worth this share of the training tokens, up to this many million tokens: the share is
# from pairs of runs with and without it, the maximum from runs of up to 60 million tokens with it (docs/auto.md).
START_SHARE = 0.6
MAX_START = 8.0
# Range of the measured runs: networks with runs of 1,000 steps or more, vocabulary sizes, million tokens, tokens per
# batch. Twice as many tokens still count as measured: they change the forecast by 3 %, less than MARGIN.
MEASURED_SIZES = {Size(2, 128), Size(4, 128), Size(2, 256)}
MEASURED_VOCAB_SIZES = (4096, 30_522)
MAX_MEASURED_TOKENS = 561.040911
MAX_MEASURED_BATCH_TOKENS = 131_072
# One long run confirms the forecast of these sizes. That is little evidence, so the choice treats them as unmeasured.
CONFIRMED_SIZES = {Size(4, 512)}
# The range of a forecast is the spread of the fit plus a margin: MARGIN for other corpora, machines and held-out
# documents; outside the measured range MARGINS_BEYOND (below, above), because one H100 run was 24 % above the law.
MARGIN = 0.05
MARGINS_BEYOND = (0.1, 0.3)
# Half-life of repeated text (Muennighoff et al., 2023), which the fit of four runs of 25 and 40 epochs confirms (12.5),
# and the maximum of epochs: 100 lowered the loss by 0.7 % compared with 40 (one seed; RESULTS.md), as the law says.
REPETITION_HALF_LIFE = 15.0
MAX_EPOCHS = 100.0
# Dropout raised the loss after 40 epochs by 0.7 %, and lowered it after 100 by 0.1 % (one seed). 80 is an assumption.
REPEATED_DROPOUT = 0.1
DROPOUT_FROM_EPOCHS = 80.0
# Minimum training tokens per weight, for measured networks and for others (assumptions). Hoffmann et al. (2022) found
# 20 for GPTs.
MIN_TOKENS_PER_WEIGHT = 2.0
MIN_EXTRAPOLATED_TOKENS_PER_WEIGHT = 10.0
# Smallest relative difference of losses that counts, for networks outside the measured range and for batches. An
# assumption: about half of the fit's spread.
TIE = 0.025
BATCHES = tuple(2048 * 2**doubling for doubling in range(9))  # tokens, up to the batch of Izsak et al. (2021)
# Million training tokens up to which examples have 64 tokens, and above which a phase of 512 tokens ends the training.
SHORT_UP_TO_TOKENS = 4.0
LONG_FROM_TOKENS = 200.0
# Next-sentence accuracy: a logistic curve over the logarithm of the tokens, from 50 % to about the best measured
# accuracy, for any size.
NSP_MIDDLE = {"en": 11.03, "zh": 1.82}  # million tokens
NSP_POWER = 0.58
NSP_MAX = 0.92
NSP_SPREAD = 0.11
# Weight decay keeps the weights at the scale of other BERTs, which AdamW fine-tunes well. Trainings of more epochs than
# `REPEATED_FROM_EPOCHS` need more of it.
WEIGHT_DECAY = 0.3
REPEATED_WEIGHT_DECAY = 1.0
REPEATED_FROM_EPOCHS = 12.0
# Peak learning rate, measured up to this size and batch. Beyond them `peak_lr` assumes: 1/width, as Yang and Hu (2021)
# derive for AdamW, which trains the tied embeddings (an H100 run of L4-H512 stopped learning at 3e-3); 1/sqrt(layers)
# (Yang et al., 2024); the square root of the batch (Malladi et al., 2022) up to a factor, because a rate that is too
# high costs more than one that is too low with post-LayerNorm.
PEAK_LR = 4e-3
LR_SIZE = Size(2, 256)
LR_BATCH_TOKENS = 4096
MAX_LR_FACTOR = 1.5


@dataclass(frozen=True)
class Forecast:
    """The forecast of a training."""

    loss: float  # held-out loss in nats; comparable for equal vocabularies
    mlm_loss: tuple[float, float]  # its range
    nsp_accuracy: tuple[float, float]
    use: Use
    beyond: str  # settings outside the measured range; empty if there are none


def forecast(
    size: Size,
    vocab_size: int,
    tokens: float,
    epochs: float,
    is_chinese: bool,
    batch_tokens: float,
    *,
    from_cooccurrences: bool = True,
) -> Forecast:
    """Return the forecast after `tokens` million tokens in `epochs` epochs, with batches of `batch_tokens` tokens."""
    language = "zh" if is_chinese else "en"
    curve = CURVES[language]
    new_tokens = effective_tokens(tokens, epochs)
    start = worth_of_start(new_tokens) if from_cooccurrences else 0.0
    loss = curve.loss(
        size.weights / 1e6,
        new_tokens,
        1e6 * tokens / batch_tokens,
        batch_tokens,
        start=start,
    )
    use = expected_use(loss, VOCAB_SIZE, language)
    assert use is not None
    loss *= (vocab_size / VOCAB_SIZE) ** VOCAB_POWER
    beyond = _beyond(size, vocab_size, tokens, batch_tokens)
    below, above = MARGINS_BEYOND if beyond else (MARGIN, MARGIN)
    mlm_range = (loss * (1.0 - curve.spread - below), loss * (1.0 + curve.spread + above))
    return Forecast(
        loss,
        mlm_range,
        nsp_range(new_tokens, language),
        use,
        beyond,
    )


def worth_of_start(tokens: float) -> float:
    """Return how many million tokens a start from co-occurrences is worth in a training of `tokens` million tokens."""
    return min(START_SHARE * tokens, MAX_START)


def effective_tokens(tokens: float, epochs: float) -> float:
    """Return the number of unique tokens that are worth as much as `tokens` in `epochs` epochs over the same text."""
    if epochs <= 1.0:
        return tokens
    return tokens / epochs * (1.0 + REPETITION_HALF_LIFE * (1.0 - math.exp(-(epochs - 1.0) / REPETITION_HALF_LIFE)))


def critical_batch(loss: float) -> float:
    """Return the batch size in tokens at which a loss takes twice the training tokens that small batches take."""
    return CRITICAL_BATCH * loss**-CRITICAL_POWER


def nsp_range(tokens: float, language: str) -> tuple[float, float]:
    """Return the expected range of the next-sentence accuracy after `tokens` million tokens."""
    learned = 1.0 - 1.0 / (1.0 + (tokens / NSP_MIDDLE[language]) ** NSP_POWER)
    expected = 0.5 + (NSP_MAX - 0.5) * learned
    return max(0.47, expected - NSP_SPREAD), min(1.0, expected + NSP_SPREAD)


def _beyond(
    size: Size,
    vocab_size: int,
    tokens: float,
    batch_tokens: float,
) -> str:
    """Return the settings that are outside the measured range, as text."""
    beyond = []
    if size not in MEASURED_SIZES | CONFIRMED_SIZES:
        beyond.append(f"a network of {size.layers} layers of {size.hidden}")
    smallest, largest = MEASURED_VOCAB_SIZES
    if not smallest <= vocab_size <= largest:
        beyond.append(f"a vocabulary of {vocab_size:,} tokens")
    if tokens > 2.0 * MAX_MEASURED_TOKENS:
        beyond.append(f"{tokens:,.0f} million tokens")
    if batch_tokens > MAX_MEASURED_BATCH_TOKENS:
        beyond.append(f"batches of {batch_tokens:,.0f} tokens")
    return ", ".join(beyond)


def min_tokens_per_weight(size: Size) -> float:
    """Return the training tokens per weight below which a network is not considered."""
    return MIN_TOKENS_PER_WEIGHT if size in MEASURED_SIZES else MIN_EXTRAPOLATED_TOKENS_PER_WEIGHT


def peak_lr(size: Size, batch_tokens: int) -> float:
    """Return the peak learning rate of a network with batches of `batch_tokens` tokens."""
    width = min(1.0, LR_SIZE.hidden / size.hidden)
    depth = min(1.0, LR_SIZE.layers / size.layers)
    batch = min(MAX_LR_FACTOR, max(1.0, batch_tokens / LR_BATCH_TOKENS) ** 0.5)
    return float(f"{PEAK_LR * width * depth**0.5 * batch:.2g}")
