"""What a training learns: held-out loss and next-sentence accuracy by size, tokens, epochs and batch.

The loss falls from that of a network which knows how often tokens occur, and nothing of their context, to a floor that
depends on the size of the network, as a power of the tokens:

    loss = floor + (6.3 - floor) * (1 + tokens / first) ^ -power

The floor falls with the weights as the losses of five networks after the whole pretraining do in Devlin et al. (2018,
table 6); the rest is fitted by `scripts/fit_law.py` to runs with the recipe that `run auto` uses. Weights are those of
the matrices inside the encoder; they and tokens are in millions. Losses are in nats per masked token of a vocabulary
of 8,192. Tokens that are seen again count less, as in Muennighoff et al. (2023, section 3.1), and so do those of large
batches, as in McCandlish et al. (2018): some steps are needed however large the batch is, which is fitted, and from a
critical batch on, which grows as the loss falls, more examples hardly make a step better, which is not.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from bert_pretrain.plan.facts import Size
from bert_pretrain.report.use import VOCAB_POWER, VOCAB_SIZE, Use, expected_use

FLOOR_POWER = 0.153  # perplexities 5.84, 4.68, 3.99, 3.54, 3.23 at 21, 42, 85, 151, 302 million weights, within 3 %
PLATEAU = 6.3  # loss of a network that knows how often tokens occur, and nothing of their context
# Critical batch in tokens, with which a training needs twice the tokens: 2.1e8 * loss ^ -4.8, as Kaplan et al. (2020,
# section 5.1) fitted it to GPTs. An assumption for BERTs, of whose tokens 30 % are predicted; it allows the batches of
# Izsak et al. (2021), 524,288 tokens, from 3.5 nats on.
CRITICAL_BATCH, CRITICAL_POWER = 2.1e8, 4.8


class Curve(NamedTuple):
    """The fit of one language."""

    floor: float  # of a network of a million weights
    first: float  # million tokens from which on the loss falls as a power of them
    power: float
    lost_steps: float  # steps that are needed at least, however large the batch
    spread: float  # largest ratio, less one, between a measured run and the fit

    def loss(self, weights: float, tokens: float, steps: float = math.inf, batch_tokens: float = 0.0) -> float:
        """Return the held-out loss of a network of `weights` million weights after `tokens` million tokens."""
        floor = self.floor * weights**-FLOOR_POWER
        loss = floor + (PLATEAU - floor) * (1.0 + tokens / self.first) ** -self.power
        worth = max(0.0, 1.0 - self.lost_steps / steps) / (1.0 + batch_tokens / critical_batch(loss))
        return floor + (PLATEAU - floor) * (1.0 + worth * tokens / self.first) ** -self.power


# English is for all text written with letters.
CURVES = {"en": Curve(2.0, 0.1712, 0.1774, 52.4608, 0.0387), "zh": Curve(2.0, 0.0463, 0.1774, 52.4608, 0.0727)}
# What the measured runs cover: networks (with 1,000 steps or more), vocabularies, million tokens, tokens per batch.
MEASURED_SIZES, MEASURED_VOCAB_SIZES = {Size(2, 128), Size(4, 128), Size(2, 256)}, (4096, 30_522)
MAX_MEASURED_TOKENS, MAX_MEASURED_BATCH_TOKENS = 52.220833, 8192
# Added to the spread: another corpus, another machine, other held-out documents; beyond the measured runs, below and
# above, set so that the range contains a run there (24 % above, on an H100; a later one on an H200 was 2 % above).
MARGIN, MARGINS_BEYOND = 0.05, (0.1, 0.3)
# Half-life of repeated text in epochs, and the most that are planned (Muennighoff et al., 2023; measured: 100 epochs
# gave no less loss per byte than 25).
REPETITION_HALF_LIFE, MAX_EPOCHS = 15.0, 40.0
# Minimum training tokens per weight, for measured networks and others: half of what Hoffmann et al. (2022) found for
# GPTs (an assumption).
MIN_TOKENS_PER_WEIGHT, MIN_EXTRAPOLATED_TOKENS_PER_WEIGHT = 2.0, 10.0
# Share of the loss by which a network beyond the measured ones must beat a smaller one, or a batch a larger one. An
# assumption, about half of the fit's spread, chosen by looking at the plans in docs/auto.md.
TIE = 0.025
# Tokens per batch to choose from, up to that of Izsak et al. (2021) for BERT-Large.
BATCHES = tuple(2048 * 2**doubling for doubling in range(9))
# Million tokens of a training up to which examples have 64 tokens, and from which a phase of 512 ends it.
SHORT_UP_TO_TOKENS, LONG_FROM_TOKENS = 4.0, 200.0
FILLED_SHARE = 0.97  # mean length of an example over the maximum
# Next-sentence accuracy: a logistic curve over the logarithm of the tokens, from 50 % up to the best measured, by hand;
# it did not depend on the size.
NSP_MIDDLE, NSP_POWER, NSP_MAX, NSP_SPREAD = {"en": 3.0, "zh": 0.4}, 1.05, 0.8, 0.1
WARMUP_RATIO = 0.05
# Weight decay: keeps the weights at the scale of other BERTs, from which AdamW fine-tunes well, at no loss; more of it
# where the text is seen more often than this.
WEIGHT_DECAY, REPEATED_WEIGHT_DECAY, REPEATED_FROM_EPOCHS = 0.3, 1.0, 12.0
PEAK_LR, LR_SIZE, LR_BATCH_TOKENS, MAX_LR_FACTOR = 4e-3, Size(2, 256), 4096, 1.5
"""Peak learning rate up to a size and a batch: measured. The rest of `peak_lr` is an assumption. It falls as 1/width,
as Yang and Hu (2021) derive for AdamW, which trains the tied embeddings: in 250 steps the best rates of L4-H512 and
L2-H128 were 2e-3 and 8e-3, and on an H100 L4-H512 stopped learning at 3e-3. (For Muon's matrices sqrt(width) should
do; Yang et al., 2023.) It falls as 1/sqrt(layers) (Yang et al., 2024), which is not borne out: L4-H128 learns less at
2e-3 than at 4e-3. It rises with the square root of the batch (Malladi et al., 2022), up to a factor: with
post-LayerNorm, a rate too high costs more than one too low."""


@dataclass(frozen=True)
class Forecast:
    """The forecast of a training."""

    loss: float  # held-out, per masked token of a vocabulary of 8,192, nats; networks are compared by it
    mlm_loss: tuple[float, float]  # range of the held-out loss per masked token of the vocabulary in use, nats
    nsp_accuracy: tuple[float, float]
    use: Use
    beyond: str  # what is extrapolated from the measured runs; empty if nothing is


def forecast(
    size: Size, vocab_size: int, tokens: float, epochs: float, *, is_chinese: bool, batch_tokens: float = BATCHES[0]
) -> Forecast:
    """Return what to expect of a network after `tokens` million tokens, seen in `epochs` epochs."""
    language = "zh" if is_chinese else "en"
    curve, new_tokens = CURVES[language], counted(tokens, epochs)
    loss = curve.loss(size.weights / 1e6, new_tokens, 1e6 * tokens / batch_tokens, batch_tokens)
    mlm_loss = loss * (vocab_size / VOCAB_SIZE) ** VOCAB_POWER
    beyond = _beyond(size, vocab_size, tokens, batch_tokens)
    below, above = (curve.spread + margin for margin in (MARGINS_BEYOND if beyond else (MARGIN, MARGIN)))
    use = expected_use(loss, VOCAB_SIZE, language)
    assert use is not None
    mlm_range = (mlm_loss * (1.0 - below), mlm_loss * (1.0 + above))
    return Forecast(loss, mlm_range, nsp_range(new_tokens, language), use, beyond)


def counted(tokens: float, epochs: float) -> float:
    """Return the tokens of new text that are worth as much as `tokens` in `epochs` passes over the same text."""
    if epochs <= 1.0:
        return tokens
    return tokens / epochs * (1.0 + REPETITION_HALF_LIFE * (1.0 - math.exp(-(epochs - 1.0) / REPETITION_HALF_LIFE)))


def critical_batch(loss: float) -> float:
    """Return the batch, in tokens, with which a training to this loss needs twice as many tokens as with few."""
    return CRITICAL_BATCH * loss**-CRITICAL_POWER


def nsp_range(tokens: float, language: str) -> tuple[float, float]:
    """Return the range of next-sentence accuracy to expect after `tokens` million tokens."""
    learned = 1.0 - 1.0 / (1.0 + (tokens / NSP_MIDDLE[language]) ** NSP_POWER)
    expected = 0.5 + (NSP_MAX - 0.5) * learned
    return max(0.47, expected - NSP_SPREAD), min(1.0, expected + NSP_SPREAD)


def _beyond(size: Size, vocab_size: int, tokens: float, batch_tokens: float) -> str:
    found = []
    if size not in MEASURED_SIZES:
        found.append(f"a network of {size.layers} layers of {size.hidden}")
    if not MEASURED_VOCAB_SIZES[0] <= vocab_size <= MEASURED_VOCAB_SIZES[1]:
        found.append(f"a vocabulary of {vocab_size:,} tokens")
    if tokens > MAX_MEASURED_TOKENS:
        found.append(f"{tokens:,.0f} million tokens")
    if batch_tokens > MAX_MEASURED_BATCH_TOKENS:
        found.append(f"batches of {batch_tokens:,.0f} tokens")
    return ", ".join(found)


def min_tokens_per_weight(size: Size) -> float:
    """Return the training tokens per weight below which a network is not considered."""
    return MIN_TOKENS_PER_WEIGHT if size in MEASURED_SIZES else MIN_EXTRAPOLATED_TOKENS_PER_WEIGHT


def peak_lr(size: Size, batch_tokens: int) -> float:
    """Return the peak learning rate of a network in batches of `batch_tokens` tokens."""
    width, depth = min(1.0, LR_SIZE.hidden / size.hidden), min(1.0, LR_SIZE.layers / size.layers)
    batch = min(MAX_LR_FACTOR, max(1.0, batch_tokens / LR_BATCH_TOKENS) ** 0.5)
    return float(f"{PEAK_LR * width * depth**0.5 * batch:.2g}")


def weight_decay(epochs: float) -> float:
    """Return the weight decay of a training that sees its text so often."""
    return WEIGHT_DECAY if epochs <= REPEATED_FROM_EPOCHS else REPEATED_WEIGHT_DECAY
