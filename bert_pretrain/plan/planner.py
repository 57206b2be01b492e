"""From facts to a plan: what to train on this text, with this machine, in this time. A pure function.

Each choice comes with a reason, which the plan's YAML gives as a comment. What the choices rest on is measured
(`law.py`); where a plan goes beyond that, its reason says so.
"""

import math
from dataclasses import dataclass, replace

from bert_pretrain.config import Config
from bert_pretrain.config_file import load_config
from bert_pretrain.config_values import duration_text
from bert_pretrain.errors import ConfigError
from bert_pretrain.make_data.plan import MAX_HELD_OUT_SHARE
from bert_pretrain.plan import law
from bert_pretrain.plan.law import Forecast
from bert_pretrain.plan.machine_facts import MASKED_SHARE, MachineFacts, Size
from bert_pretrain.plan.text_facts import TextFacts
from bert_pretrain.text.language import CHINESE_FROM
from bert_pretrain.text.sources import FEW_DOCUMENTS

MIN_SECONDS = 120.0
DATA_BYTES_PER_CORE_SECOND = 2.5e6
"""What `vocab` and `make-data` together read, with one copy, on a slow core; with their start it is what they take."""
VOCAB_TIME_SHARE = 0.35
"""Of that, the share of `vocab`."""
START_SECONDS = 8.0
"""Of the stages: imports, processes, opening the data."""
MAX_DATA_SHARE = 0.4
"""Of the time; with more for vocabulary and data, too little would be left for training."""
SPARE_TOKENS, MIN_TEXT_BYTES, MIN_DOCUMENTS = 2.0, 10e6, 100.0
"""So many times the text that training is expected to see is read, and at least what a vocabulary is learnt from, and
documents to hold some out and to take a random B from."""
SAVE_SECONDS = 600.0
"""About, between checkpoints of long trainings."""
EVALUATIONS = 8
EVALUATION_SHARE = 0.02
"""Of the time, for all evaluations together."""
MIN_HELD_OUT_EXAMPLES = 256
"""Fewer tell little, next-sentence accuracy above all."""
FORWARD_SPEED = 2.5
"""How much faster an evaluation is than training, per token."""
TOKENS_PER_BYTE = {False: 0.24, True: 0.30}
"""By whether the text is Chinese; of the corpora of RESULTS.md."""
SHORT_LENGTH, LENGTH = 64, 128
"""Of the examples of the shortest trainings, and of the others."""
LONG_LENGTH, LONG_TIME_SHARE, LONG_LR_SHARE = 512, 0.3, 0.3
"""Of the second phase: its examples' length, its share of the time and of the peak learning rate, about as in the paper
(appendix A.2), where it has a tenth of the steps and the end of the schedule."""
LONG_FROM_SECONDS = 600.0
"""Of training, below which there is no second phase, whose data takes time, too."""
VOCAB_SIZES = {
    False: ((1e6, 4096), (2e6, 8192), (4e6, 16_384), (math.inf, 30_522)),
    True: ((1e9, 8192), (math.inf, 21_128)),
}
"""By whether the text is Chinese: bytes up to which a vocabulary has so many tokens. Measured are 5 and 98 MB of
English, where more tokens gave less loss per byte in the same time, and 39 MB of Chinese, where 21,128 gave no less."""
MAX_DOUBLINGS = 6
"""Of the time, to find out when a model is expected to be better than word counts."""
MAX_SINGLE_SENTENCES = 0.5


@dataclass(frozen=True)
class Choice:
    """One key of the plan, and why it has its value."""

    key: str
    value: object
    reason: str


@dataclass(frozen=True)
class Plan:
    """A configuration with reasons, and what to expect of it."""

    inputs: tuple[str, ...]
    text: TextFacts
    seconds: float
    """That the run takes."""
    why_seconds: str
    """Why it takes less than it may; empty where it takes all."""
    choices: tuple[Choice, ...]
    size: Size
    tokens: float
    """That training will see, millions."""
    epochs: float
    forecast: Forecast
    better_after: float | None
    """Seconds in which a model is expected to be better than word counts on classification; None: more than tried."""

    @property
    def config(self) -> Config:
        """The plan as a configuration."""
        flags: dict[str, tuple[str, object]] = {choice.key: ("plan", choice.value) for choice in self.choices}
        return load_config(None, (), {"inputs": ("plan", self.inputs), "time": ("plan", self.seconds), **flags})


@dataclass(frozen=True)
class _Option:
    """A network that might be trained."""

    size: Size
    vocab_size: int
    length: int
    batch_tokens: int
    tokens: float
    """Millions."""
    epochs: float
    time_share: float
    """Of the time for training, what this many tokens take."""
    positions: int
    """Of the network: the length of the longest examples."""
    forecast: Forecast

    @property
    def steps(self) -> float:
        return 1e6 * self.tokens / self.batch_tokens


def make_plan(inputs: tuple[str, ...], text: TextFacts, machine: MachineFacts, seconds: float) -> Plan:
    """Choose what to train in so many seconds, from the start of the command to the finished model."""
    if seconds < MIN_SECONDS:
        raise ConfigError(
            f"{seconds:g} seconds are too short for vocabulary, data and training",
            where="--time",
            remedy="allow at least 2m",
        )
    fraction = affordable = _affordable_fraction(text, machine, seconds)
    for _ in range(2):  # the vocabulary, and with it the speed, depends on what is read
        best, _ = _best_option(text, machine, seconds, fraction)
        fraction = float(f"{min(affordable, _useful_fraction(text, best.tokens)):.2g}")
    best, options = _best_option(text, machine, seconds, fraction)
    before = _data_seconds(text, machine, fraction)
    taken = max(MIN_SECONDS, float(math.ceil(before + best.time_share * (seconds - before))))
    read = replace(text, num_bytes=fraction * text.num_bytes, documents=fraction * text.documents)
    choices = (
        *_text_choices(read, best),
        *_data_choices(read, fraction, best),
        *_model_choices(best, options, machine),
        *_train_choices(best, taken),
        *_phases(best),
    )
    why_seconds = (
        f"of {duration_text(float(seconds))}: enough to see the text {best.epochs:,.0f} times; more passes did not help"
        if taken < seconds
        else ""
    )
    better_after = _better_after(text, machine, seconds)
    return Plan(
        inputs, text, taken, why_seconds, choices, best.size, best.tokens, best.epochs, best.forecast, better_after
    )


def _better_after(text: TextFacts, machine: MachineFacts, seconds: float) -> float | None:
    """Return the first of `seconds`, twice as many, and so on, that are expected to beat word counts."""
    for doublings in range(MAX_DOUBLINGS + 1):
        allowed = seconds * 2.0**doublings
        best, _ = _best_option(text, machine, allowed, _affordable_fraction(text, machine, allowed))
        if best.forecast.use.is_better:
            return allowed
    return None


def _affordable_fraction(text: TextFacts, machine: MachineFacts, seconds: float) -> float:
    """Return the largest share of the text for which vocabulary and data leave enough time to train."""
    least, needed = (_data_seconds(text, machine, fraction) for fraction in (0.0, 1.0))
    allowed = MAX_DATA_SHARE * seconds
    if needed <= allowed:
        return 1.0
    if least >= allowed:
        raise ConfigError(
            f"vocabulary and data of {text.num_bytes / 1e6:,.0f} MB would take about {least:,.0f} of "
            f"{seconds:,.0f} seconds, and these inputs are read whole"
            + (" by vocab, as they are compressed or not in UTF-8" if text.is_divisible else ""),
            where="--time",
            remedy=f"allow {math.ceil(needed / MAX_DATA_SHARE / 60)} minutes or more, or name fewer files",
        )
    return (allowed - least) / (needed - least)


def _useful_fraction(text: TextFacts, tokens: float) -> float:
    """Return the share of the text that so many million tokens of training see, and vocabulary and pairs need."""
    if not text.is_divisible:
        return 1.0
    wanted = max(
        SPARE_TOKENS * 1e6 * tokens / _tokens_of(text),
        MIN_TEXT_BYTES / text.num_bytes,
        MIN_DOCUMENTS / text.documents,
    )
    return wanted if wanted < 0.8 else 1.0


def _best_option(
    text: TextFacts, machine: MachineFacts, seconds: float, fraction: float
) -> tuple[_Option, list[_Option]]:
    """Return what to train on a share of the text, and all that was considered: of a size for this text and time."""
    train_seconds = (1.0 - EVALUATION_SHARE) * (seconds - _data_seconds(text, machine, fraction))
    vocab_size = vocab_size_for(text, fraction)
    options = [_option(size, vocab_size, machine, train_seconds, fraction, text) for size in machine.sizes]
    most_weights = law.MAX_WEIGHTS_PER_TOKEN * fraction * _tokens_of(text)
    enough = [
        option
        for option in options
        if _min_tokens_per_weight(option.size) * option.size.weights <= 1e6 * law.counted(option.tokens, option.epochs)
        and option.size.weights <= most_weights
    ]
    considered = enough or options[:1]
    best = considered[0]
    for option in considered[1:]:  # the smallest first
        tie = 0.0 if option.size in law.MEASURED_SIZES else law.TIE
        best = option if _loss(option) < (1.0 - tie) * _loss(best) else best
    return best, considered


def _min_tokens_per_weight(size: Size) -> float:
    return law.MIN_TOKENS_PER_WEIGHT if size in law.MEASURED_SIZES else law.MIN_EXTRAPOLATED_TOKENS_PER_WEIGHT


def _data_seconds(text: TextFacts, machine: MachineFacts, fraction: float) -> float:
    """Return what `vocab` and `make-data` take for a share of the text, with the start of all stages."""
    whole = text.num_bytes / (DATA_BYTES_PER_CORE_SECOND * machine.cores)
    read_anyway = 1.0 if not text.is_divisible else VOCAB_TIME_SHARE if text.vocab_reads_all else 0.0
    return START_SECONDS + whole * (read_anyway + (1.0 - read_anyway) * fraction)


def _tokens_of(text: TextFacts) -> float:
    return text.num_bytes * TOKENS_PER_BYTE[_is_chinese(text)]


def _is_chinese(text: TextFacts) -> bool:
    return text.cjk_share > CHINESE_FROM


def _option(
    size: Size, vocab_size: int, machine: MachineFacts, train_seconds: float, fraction: float, text: TextFacts
) -> _Option:
    """Return what to expect of a network with the batch and the length of examples that teach it most."""
    new = 1e-6 * fraction * _tokens_of(text)

    def tried(batch_tokens: int, length: int) -> _Option:
        possible = 1e-6 * train_seconds * machine.tokens_per_second(size, vocab_size, length, batch_tokens)
        tokens = min(possible, law.MAX_EPOCHS * new)
        expected = law.forecast(
            size, vocab_size, tokens, tokens / new, is_chinese=_is_chinese(text), batch_tokens=batch_tokens
        )
        share = tokens / possible
        is_long = tokens > law.LONG_FROM_TOKENS and share * train_seconds > LONG_FROM_SECONDS
        positions = LONG_LENGTH if is_long else length
        return _Option(size, vocab_size, length, batch_tokens, tokens, tokens / new, share, positions, expected)

    best = _best_batch([tried(batch_tokens, SHORT_LENGTH) for batch_tokens in law.BATCHES])
    if best.tokens <= law.SHORT_UP_TO_TOKENS:
        return best
    return _best_batch([tried(batch_tokens, LENGTH) for batch_tokens in law.BATCHES])


def _best_batch(options: list[_Option]) -> _Option:
    """Return the option of the lowest loss with enough steps, or a larger batch of nearly the same loss."""
    best = min([option for option in options if option.steps >= law.MIN_STEPS] or options[:1], key=_loss)
    ties = [
        option
        for option in options
        if option.steps >= law.MANY_STEPS
        and option.batch_tokens <= law.critical_batch(option.tokens)
        and _loss(option) <= (1.0 + law.TIE) * _loss(best)
    ]
    return max([best, *ties], key=lambda option: option.batch_tokens)


def _loss(option: _Option) -> float:
    return option.forecast.loss


def vocab_size_for(text: TextFacts, fraction: float = 1.0) -> int:
    """Return the size of the vocabulary for a share of the text."""
    return next(size for most, size in VOCAB_SIZES[_is_chinese(text)] if fraction * text.num_bytes < most)


def _text_choices(text: TextFacts, best: _Option) -> list[Choice]:
    is_measured_best = best.vocab_size == VOCAB_SIZES[False][-1][1]
    why = (
        "smaller ones gave more loss per byte in the same time"
        if is_measured_best
        else "its tokens occur often enough to be learnt"
    )
    found = [Choice("vocab.size", best.vocab_size, f"for {text.num_bytes / 1e6:,.0f} MB of text; {why}")]
    if _is_chinese(text):
        share = f"{text.cjk_share:.0%} of the letters are Chinese characters"
        found.append(Choice("data.language", "zh", share))
    return found


def _data_choices(text: TextFacts, fraction: float, best: _Option) -> list[Choice]:
    """Return the choices of stage 2; `text` is the share that is read."""
    copies = 1 if best.epochs < 1.5 else min(5, math.ceil(best.epochs / 2))
    pairs, why = _pairs(text)
    share = [Choice("data.fraction", fraction, "more of the text would not be seen in this time")]
    return [
        *(share if fraction < 1.0 else ()),
        *_boundary(text),
        Choice(
            "data.max_seq_length",
            best.length,
            "short examples: more pairs and steps in the time" if best.length == 64 else "the paper's length",
        ),
        Choice("data.masked_lm_prob", MASKED_SHARE, "lower loss in the same time than with the paper's 15 %"),
        Choice("data.masking", "dynamic", "other masks in every epoch, without more copies on disk"),
        Choice(
            "data.dupe_factor",
            copies,
            f"training sees about {best.tokens:,.1f} million tokens, {best.epochs:.2g} times the text"
            + ("; copies have other pairs" if copies > 1 else ""),
        ),
        Choice("data.next_sentence", pairs, why),
        _held_out(text, best, 2 if pairs == "nsp" else 1),
    ]


def _boundary(text: TextFacts) -> list[Choice]:
    """Return what ends documents, where it is not as configured."""
    if not text.boundary:
        return []
    ends = "blank lines end documents" if text.boundary == "blank_line" else "each line is a document"
    why = f"{ends}: otherwise there would be {text.documents_as_configured:,.0f}, too few to hold one out"
    return [Choice("data.document_boundary", text.boundary, why)]


def _held_out(text: TextFacts, best: _Option, needed: int) -> Choice:
    """Return the share of the documents that is held out, of which the objective needs so many."""
    if needed / text.documents > MAX_HELD_OUT_SHARE:
        why = f"{needed} of {text.documents:,.0f} is too much; --set 'data.validation=[FILE]' holds out another"
        return Choice("data.validation_fraction", 0.0, why)
    corpus_tokens = _tokens_of(text)
    affordable = EVALUATION_SHARE * 1e6 * best.tokens * FORWARD_SPEED / EVALUATIONS
    held_out = max(min(affordable, 0.01 * corpus_tokens), MIN_HELD_OUT_EXAMPLES * best.length)
    share = min(MAX_HELD_OUT_SHARE, max(held_out / corpus_tokens, (needed + 0.5) / text.documents))
    return Choice("data.validation_fraction", float(f"{share:.2g}"), "evaluations take about 2 % of the time")


def _pairs(text: TextFacts) -> tuple[str, str]:
    """Return the objective beside masked tokens, and why."""
    if text.single_sentence_share > MAX_SINGLE_SENTENCES:
        return "none", f"{text.single_sentence_share:.0%} of the documents are one sentence, of which no pair is made"
    if text.documents < FEW_DOCUMENTS:
        return "sop", "there are too few documents to take a random B from; the order of A and B needs only one"
    return "nsp", f"about {text.documents:,.0f} documents of {text.sentences_per_document:g} sentences (median)"


def _model_choices(best: _Option, options: list[_Option], machine: MachineFacts) -> list[Choice]:
    size = best.size
    near = sorted(
        (option for option in options if option.size != size),
        key=_loss,
    )[:2]
    others = ", ".join(f"L{o.size.layers}-H{o.size.hidden} {o.forecast.loss:.2f}" for o in near)
    than = f" ({others})" if near else ", and no other network is of a size for this text and time"
    timed = "" if machine.speed(size).is_timed else "; its speed is computed from other networks"
    config = size.model_config(best.positions)
    return [
        Choice(
            "model.num_hidden_layers",
            size.layers,
            f"{best.forecast.loss:.2f} nats expected{than}{timed}",
        ),
        Choice("model.hidden_size", size.hidden, "as above"),
        Choice("model.num_attention_heads", config.num_attention_heads, "64 wide each, as in the paper"),
        Choice("model.intermediate_size", config.intermediate_size, "four times the width, as in the paper"),
        Choice("model.max_position_embeddings", best.positions, "those that are trained"),
        Choice("model.hidden_dropout_prob", 0.0, "in a short training dropout only slows the network down"),
        Choice("model.attention_probs_dropout_prob", 0.0, "the same; the fastest attention has none"),
    ]


def _train_choices(best: _Option, seconds: float) -> list[Choice]:
    recipe = law.recipe(best.size, best.batch_tokens, best.length, best.epochs)
    steps = max(1.0, 1e6 * best.tokens / (recipe.batch * law.FILLED_SHARE * best.length))
    every = max(20, int(steps / EVALUATIONS))
    save_every = max(20, min(every, int(steps * SAVE_SECONDS / seconds)))
    return [
        Choice("train.optimizer", "muon", "lower loss than AdamW in the same time"),
        Choice("train.mlm_bias", "unigram", "training need not learn the frequencies of tokens first"),
        Choice("train.init", "positional_heads", "nor to attend to neighbouring tokens: there is no plateau"),
        Choice("train.peak_lr", recipe.peak_lr, f"for a width of {best.size.hidden}"),
        Choice("train.global_batch_size", recipe.batch, f"about {steps:,.0f} steps"),
        Choice("train.warmup_ratio", recipe.warmup_ratio, "of the time"),
        Choice("train.schedule", "linear", "to zero at the end of the time"),
        Choice(
            "train.weight_decay",
            recipe.weight_decay,
            "holds weights at the scale for which fine-tuning is made; costs no loss"
            if recipe.weight_decay == law.WEIGHT_DECAY
            else f"less overfitting where the text is seen {best.epochs:,.0f} times",
        ),
        Choice("train.log_every", max(10, every // 10), "about ten lines between evaluations"),
        Choice("train.eval_every", every, f"about {EVALUATIONS} evaluations"),
        Choice("train.save_every", save_every, "a kill costs at most what was done since the last one"),
    ]


def _phases(best: _Option) -> list[Choice]:
    """Return a second phase of long examples, for trainings that are long enough."""
    if best.positions == best.length:
        return []
    recipe = law.recipe(best.size, best.batch_tokens, best.positions, best.epochs)
    long = {
        "data": {"max_seq_length": best.positions},
        "train": {"global_batch_size": recipe.batch, "peak_lr": float(f"{LONG_LR_SHARE * recipe.peak_lr:.1g}")},
    }
    phases = [
        {"name": str(best.length), "time_share": 1.0 - LONG_TIME_SHARE},
        {"name": str(best.positions), "time_share": LONG_TIME_SHARE, **long},
    ]
    return [Choice("phases", phases, "most steps on short examples, the rest on long ones, as in the paper")]
