"""What a training learns: held-out loss and next-sentence accuracy by size, tokens and epochs.

The loss falls from that of a network which knows how often tokens occur, and nothing of their context, to a floor that
depends on the size of the network, as a power of the tokens:

    loss = floor + (6.3 - floor) * (1 + tokens / first) ^ -power

The floor falls with the weights as the losses of five networks after the whole pretraining do in Devlin et al. (2018,
table 6); the rest is fitted by `scripts/fit_law.py` to runs with the recipe that `run auto` uses. Weights are those of
the matrices inside the encoder; they and tokens are in millions. Losses are in nats per masked token of a vocabulary
of 8,192. Tokens that are seen again count less, as in Muennighoff et al. (2023, section 3.1).
"""

import math
from dataclasses import dataclass

from bert_pretrain.plan.machine_facts import Size
from bert_pretrain.report.use import VOCAB_POWER, VOCAB_SIZE, Use, expected_use

FLOOR_POWER = 0.153
"""Of the table: perplexities 5.84, 4.68, 3.99, 3.54, 3.23 for 21, 42, 85, 151 and 302 million weights, within 3 %."""


PLATEAU = 6.3
"""Loss of a network that knows how often tokens occur, and nothing of their context."""


@dataclass(frozen=True)
class Curve:
    """The fit of one language."""

    floor: float
    """Of a network of a million weights."""
    first: float
    """Million tokens from which on the loss falls as a power of them."""
    power: float
    spread: float
    """Largest ratio, less one, between a measured run and the fit."""

    def loss(self, weights: float, tokens: float) -> float:
        """Return the held-out loss of a network of so many million weights after so many million tokens."""
        floor = self.floor * weights**-FLOOR_POWER
        return floor + (PLATEAU - floor) * (1.0 + tokens / self.first) ** -self.power


MEASURED_VOCAB_SIZES = (4096, 30_522)
"""Smallest and largest of the runs that compare vocabularies."""
MEASURED_SIZES = {Size(2, 128), Size(4, 128), Size(2, 256)}
MIN_TOKENS_PER_WEIGHT, MIN_EXTRAPOLATED_TOKENS_PER_WEIGHT = 2.0, 10.0
"""With fewer, counted as new text, a network is not considered: no measured one had fewer than the first, and of other
networks the law is too hopeful. The second is an assumption: half of what Hoffmann et al. (2022) found for GPTs."""
TIE = 0.025
"""Share of the loss by which a network outside the fit must be expected to be better than a smaller one, or a batch
than a larger one. An assumption, about half of the fit's spread; set by hand, with an eye on the plans of the docs."""
MIN_STEPS, MANY_STEPS = 1000, 10_000
"""Updates: no batch leaves fewer than the first if a smaller one does not, and none is taken for a tie that leaves
fewer than the second. Assumptions: measured runs had 500 to 11,464."""
MOST_TOKENS, MOST_BATCH_TOKENS = 44.778316, 4096
MAX_EPOCHS = 40.0
"""Passes over the text beyond which a training is not planned. As in Muennighoff et al. (2023), and a hundred gave no
less loss per byte than 25."""
MAX_WEIGHTS_PER_TOKEN = 10.0
"""With fewer tokens of text, however often they are seen, a network is not considered: none was measured so."""
CURVES = {
    "en": Curve(2.0, 0.19, 0.1797, 0.0413),
    "zh": Curve(2.0, 0.0458, 0.1797, 0.0573),
}
"""By the language of the text: English, for all that is written with letters, and Chinese."""
MARGIN = 0.05
"""Added to the spread of the fit: another corpus, another machine, other documents that are held out."""
MARGINS_BEYOND = (0.1, 0.3)
"""Instead of it below and above, outside the fit: set so that it holds the one run there, 30 % above on an H100."""
REPETITION_HALF_LIFE = 15.0
"""Epochs, about, after which another pass over the same text is worth little (Muennighoff et al., 2023)."""
NSP_MIDDLE = {"en": 3.0, "zh": 0.4}
NSP_POWER, NSP_MOST, NSP_SPREAD = 1.05, 0.8, 0.1
"""Next-sentence accuracy: a logistic curve over the logarithm of the tokens, from 50 % up to the most that was
measured; by hand. It did not depend on the size."""
WEIGHT_DECAY = 0.3
"""Holds the weights at the scale of other BERTs, from which fine-tuning by AdamW starts well; it costs no loss."""
WEIGHT_DECAYS = ((12.0, WEIGHT_DECAY), (math.inf, 1.0))
"""Epochs up to which the weight decay is as large: the more often text is seen, the sooner it is learnt by heart."""
PEAK_LR, LR_SIZE, LR_BATCH_TOKENS, MAX_LR_FACTOR = 4e-3, Size(2, 256), 4096, 1.5
"""Peak learning rate up to a size and a batch: measured. The rest of `peak_lr` is an assumption. It falls as 1/width,
as Yang and Hu (2021) derive for AdamW, which trains the tied embeddings; for Muon's matrices, whose update has a
norm of `rate * sqrt(width)`, sqrt(width) should do (Yang et al., 2023), but a rate of 3e-3 by that rule, at L4-H512,
came out 30 % above the law on an H100 and learnt only as the rate fell. It falls as 1/sqrt(layers) (Yang et al.,
2024): at 4e-3 L4-H128 learns no more than L2-H128. It rises with the square root of the batch (Malladi et al., 2022),
up to a factor: where normalisation follows the residual sum, a rate too high costs more than one too low."""
BATCHES = tuple(2048 * 2**doubling for doubling in range(9))
"""Tokens of the batches to choose from, up to that of Izsak et al. (2021) for BERT-Large."""
CRITICAL_BATCH, CRITICAL_POWER = 8192.0, 0.5
"""Tokens of the batch with which a training of a million tokens needs twice as many tokens as with the smallest, and
the power of the tokens by which it grows (form: McCandlish et al., 2018). Both are assumptions."""
SHORT_UP_TO_TOKENS, LONG_FROM_TOKENS = 4.0, 200.0
"""Million tokens of a training up to which examples have 64 tokens, and from which a phase of 512 ends it; in between
they have 128."""
TIMES = (1, 2, 4, 8, 16)
"""Lengths of training, as multiples of a given one, that are tried for a model better than word counts."""
FILLED_SHARE = 0.97
"""Of the length of an example, on average."""


@dataclass(frozen=True)
class Forecast:
    """What to expect of a training."""

    loss: float
    """Held-out, per masked token of a vocabulary of 8,192, nats; what networks are compared by."""
    mlm_loss: tuple[float, float]
    """Range of the held-out loss per masked token of the vocabulary that is used, nats."""
    nsp_accuracy: tuple[float, float]
    """Range of the held-out accuracy."""
    use: Use
    beyond: str
    """In what the plan lies beyond the measured runs; empty where it does not."""


def forecast(
    size: Size, vocab_size: int, tokens: float, epochs: float, *, is_chinese: bool, batch_tokens: int = BATCHES[0]
) -> Forecast:
    """Return what to expect of a network after so many million tokens, in so many epochs, in batches of so many."""
    new_tokens = counted(tokens, epochs) * batch_worth(batch_tokens, tokens)
    weights = size.weights / 1e6
    language = "zh" if is_chinese else "en"
    curve = CURVES[language]
    loss = curve.loss(weights, new_tokens)
    mlm_loss = loss * (vocab_size / VOCAB_SIZE) ** VOCAB_POWER
    beyond = _beyond(size, vocab_size, tokens, batch_tokens)
    below, above = (curve.spread + margin for margin in (MARGINS_BEYOND if beyond else (MARGIN, MARGIN)))
    use = expected_use(loss, VOCAB_SIZE, language)
    assert use is not None
    mlm_range = (mlm_loss * (1.0 - below), mlm_loss * (1.0 + above))
    return Forecast(loss, mlm_range, nsp_range(new_tokens, language), use, beyond)


def times_to_beat_word_counts(size: Size, vocab_size: int, tokens: float, language: str) -> int | None:
    """Return how many times as many tokens, on new text, are expected to make a network better than word counts.

    None: more than 16 times as many, or a language that was not measured.
    """
    if language not in CURVES:
        return None
    found = (forecast(size, vocab_size, times * tokens, 1.0, is_chinese=language == "zh") for times in TIMES)
    return next((times for times, one in zip(TIMES, found, strict=True) if one.use.is_better), None)


def counted(tokens: float, epochs: float) -> float:
    """Return how many tokens of new text so many in so many epochs are worth."""
    return tokens if epochs <= 1.0 else tokens / epochs * _worth(epochs)


def critical_batch(tokens: float) -> float:
    """Return the tokens of the batch with which a training of so many million tokens needs twice as many."""
    return CRITICAL_BATCH * tokens**CRITICAL_POWER


def batch_worth(batch_tokens: int, tokens: float) -> float:
    """Return the share of the tokens that the smallest batch would need for the same loss."""
    critical = critical_batch(tokens)
    return (1.0 + BATCHES[0] / critical) / (1.0 + batch_tokens / critical)


def nsp_range(tokens: float, language: str) -> tuple[float, float]:
    """Return the range of next-sentence accuracy to expect after so many million tokens."""
    learnt = 1.0 - 1.0 / (1.0 + (tokens / NSP_MIDDLE[language]) ** NSP_POWER)
    expected = 0.5 + (NSP_MOST - 0.5) * learnt
    return max(0.47, expected - NSP_SPREAD), min(1.0, expected + NSP_SPREAD)


def _worth(epochs: float) -> float:
    """Return how many epochs of new text so many passes over one text are worth."""
    return 1.0 + REPETITION_HALF_LIFE * (1.0 - math.exp(-(epochs - 1.0) / REPETITION_HALF_LIFE))


def _beyond(size: Size, vocab_size: int, tokens: float, batch_tokens: int) -> str:
    found = []
    if size not in MEASURED_SIZES:
        found.append(f"a network of {size.layers} layers of {size.hidden}")
    if not MEASURED_VOCAB_SIZES[0] <= vocab_size <= MEASURED_VOCAB_SIZES[1]:
        found.append(f"a vocabulary of {vocab_size:,} tokens")
    if tokens > MOST_TOKENS:
        found.append(f"{tokens:,.0f} million tokens")
    if batch_tokens > MOST_BATCH_TOKENS:
        found.append(f"batches of {batch_tokens:,} tokens")
    return ", ".join(found)


@dataclass(frozen=True)
class Recipe:
    """How to train a network of some width."""

    peak_lr: float
    batch: int
    warmup_ratio: float
    weight_decay: float


def recipe(size: Size, batch_tokens: int, length: int, epochs: float) -> Recipe:
    """Return the recipe for a network in batches of so many tokens in examples of a length, in so many epochs."""
    return Recipe(
        peak_lr(size, batch_tokens), batch_tokens // length, warmup_ratio=0.05, weight_decay=_weight_decay(epochs)
    )


def peak_lr(size: Size, batch_tokens: int) -> float:
    """Return the peak learning rate of a network in batches of so many tokens."""
    width, depth = min(1.0, LR_SIZE.hidden / size.hidden), min(1.0, LR_SIZE.layers / size.layers)
    batch = min(MAX_LR_FACTOR, max(1.0, batch_tokens / LR_BATCH_TOKENS) ** 0.5)
    return float(f"{PEAK_LR * width * depth**0.5 * batch:.2g}")


def _weight_decay(epochs: float) -> float:
    return next(decay for most, decay in WEIGHT_DECAYS if epochs <= most)
