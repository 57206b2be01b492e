"""From facts to a plan: what to train on this text, with this machine, in this time. A pure function.

Each choice has a reason, which the plan's YAML gives as a comment. The forecasts are those of `law.py`.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from bert_pretrain.config import Config, duration_text
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError
from bert_pretrain.make_data.plan import MAX_HELD_OUT_SHARE
from bert_pretrain.plan import law
from bert_pretrain.plan.facts import MASKED_SHARE, MachineFacts, Size, TextFacts
from bert_pretrain.plan.law import Forecast
from bert_pretrain.report.diagnosis import MAX_WEIGHTS_PER_TOKEN
from bert_pretrain.text.sources import MIN_CORPUS_DOCUMENTS

MIN_SECONDS = 120.0
# `vocab` and `make-data` together, one copy, on a slow core; the share of `vocab` in that; the start of all stages.
DATA_BYTES_PER_CORE_SECOND, VOCAB_TIME_SHARE, START_SECONDS = 2.5e6, 0.35, 8.0
MAX_DATA_SHARE = 0.4  # of the time, for vocabulary and data
# Text to read: 2 x the expected training tokens, at least 10 MB and 100 documents.
SPARE_TOKENS, MIN_TEXT_BYTES, MIN_DOCUMENTS = 2.0, 10e6, 100.0
SAVE_SECONDS = 600.0  # between checkpoints of long trainings, about
EVALUATIONS, EVALUATION_SHARE = 8, 0.02  # number of evaluations, and their share of the time
# Next-sentence accuracy on fewer is too noisy: pairs of one document are alike. More examples than this are held out
# only for the last evaluation, and read in at most as much time as the others take together.
MIN_HELD_OUT_EXAMPLES, MIN_HELD_OUT_DOCUMENTS = 256, 20
FORWARD_SPEED = 2.5  # tokens per second of an evaluation over those of training
SHORT_LENGTH, LENGTH = 64, 128  # of examples, in the shortest trainings and in all others
# Second phase: length, share of the time and of the peak learning rate, roughly as in the paper (appendix A.2), where
# it has a tenth of the steps; none where training takes less than this.
LONG_LENGTH, LONG_TIME_SHARE, LONG_LR_SHARE, LONG_FROM_SECONDS = 512, 0.3, 0.3, 600.0
# By whether the text is Chinese: bytes up to which a vocabulary has this size. Measured: 5 and 98 MB of English, where
# more tokens gave less loss per byte in the same time, and 39 MB of Chinese, where 21,128 tokens gave no less.
VOCAB_SIZES = {
    False: ((1e6, 4096), (2e6, 8192), (4e6, 16_384), (math.inf, 30_522)),
    True: ((1e9, 8192), (math.inf, 21_128)),
}
FAST_SHARE = 0.9  # of the tokens per second with the best batch, from which on a smaller batch is as good
MAX_SINGLE_SENTENCES = 0.5  # share of documents of one sentence above which no pairs are made


class Choice(NamedTuple):
    """One key of the plan, and why it has its value."""

    key: str
    value: object
    reason: str


@dataclass(frozen=True)
class Training:
    """A network to train, and what to expect of it."""

    size: Size
    vocab_size: int
    length: int  # tokens per example in the first phase
    batch_tokens: int
    tokens: float  # seen in training, millions
    epochs: float
    time_share: float  # share of the training time that these tokens need
    positions: int  # tokens of the longest examples
    forecast: Forecast

    @property
    def steps(self) -> float:
        return 1e6 * self.tokens / self.batch_tokens

    @property
    def loss(self) -> float:
        return self.forecast.loss


@dataclass(frozen=True)
class Plan:
    """A configuration with reasons, and what to expect of it."""

    inputs: tuple[str, ...]
    text: TextFacts
    seconds: float  # duration of the whole run
    why_seconds: str  # why the run is shorter than allowed; empty if it is not
    choices: tuple[Choice, ...]
    training: Training

    @property
    def config(self) -> Config:
        """The plan as a configuration."""
        flags: dict[str, tuple[str, object]] = {choice.key: ("plan", choice.value) for choice in self.choices}
        return load_config(None, (), {"inputs": ("plan", self.inputs), "time": ("plan", self.seconds), **flags})


def check_time(seconds: float) -> None:
    """Refuse too little time."""
    if seconds < MIN_SECONDS:
        what = f"{seconds:g} seconds are too short for vocabulary, data and training"
        raise ConfigError(what, where="--time", remedy="allow at least 2m")


def make_plan(inputs: tuple[str, ...], text: TextFacts, machine: MachineFacts, seconds: float) -> Plan:
    """Choose what to train in `seconds`, counted from the start of the command to the finished model."""
    check_time(seconds)
    fraction = affordable = _affordable_fraction(text, machine, seconds)
    for _ in range(2):  # the vocabulary, and with it the speed, depends on the text that is read
        tokens = _best_training(text, machine, seconds, fraction)[0].tokens
        fraction = float(f"{min(affordable, _useful_fraction(text, tokens)):.2g}")
    best, considered = _best_training(text, machine, seconds, fraction)
    before = _data_seconds(text, machine, fraction)
    taken = max(MIN_SECONDS, float(math.ceil(before + best.time_share * (seconds - before))))
    read = replace(text, num_bytes=fraction * text.num_bytes, documents=fraction * text.documents)
    choices = (
        *_data_choices(read, fraction, best),
        *_model_choices(best, considered, machine),
        *_train_choices(best, taken),
        *_phases(best),
    )
    why_seconds = (
        f"of {duration_text(float(seconds))}: enough to see the text {best.epochs:,.0f} times; more passes did not help"
        if taken < seconds
        else ""
    )
    return Plan(inputs, text, taken, why_seconds, choices, best)


def vocab_size_for(text: TextFacts, fraction: float = 1.0) -> int:
    """Return the size of the vocabulary for a fraction of the text."""
    return next(size for limit, size in VOCAB_SIZES[text.is_chinese] if fraction * text.num_bytes < limit)


def _data_seconds(text: TextFacts, machine: MachineFacts, fraction: float) -> float:
    """Return the time of `vocab` and `make-data` for a fraction of the text, with the start of all stages."""
    whole = text.num_bytes / (DATA_BYTES_PER_CORE_SECOND * machine.cores)
    always_read = 1.0 if not text.is_divisible else VOCAB_TIME_SHARE if text.vocab_reads_all else 0.0
    return START_SECONDS + whole * (always_read + (1.0 - always_read) * fraction)


def _affordable_fraction(text: TextFacts, machine: MachineFacts, seconds: float) -> float:
    """Return the largest fraction of the text for which vocabulary and data leave enough time to train."""
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
    """Return the fraction of the text that training on this many million tokens, vocabulary and pairs need."""
    if not text.is_divisible:
        return 1.0
    wanted = max(
        SPARE_TOKENS * 1e6 * tokens / text.tokens,
        MIN_TEXT_BYTES / text.num_bytes,
        MIN_DOCUMENTS / text.documents,
    )
    return wanted if wanted < 0.8 else 1.0


def _best_training(
    text: TextFacts, machine: MachineFacts, seconds: float, fraction: float
) -> tuple[Training, list[Training]]:
    """Return what to train on a fraction of the text, and all that was considered, the smallest network first."""
    train_seconds = (1.0 - EVALUATION_SHARE) * (seconds - _data_seconds(text, machine, fraction))
    trainings = [_training(size, machine, train_seconds, fraction, text) for size in machine.sizes]
    max_weights = MAX_WEIGHTS_PER_TOKEN * fraction * text.tokens
    considered = [
        one
        for one in trainings
        if law.min_tokens_per_weight(one.size) * one.size.weights <= 1e6 * law.counted(one.tokens, one.epochs)
        and one.size.weights <= max_weights
    ] or trainings[:1]
    best = considered[0]
    for one in considered[1:]:
        tie = 0.0 if one.size in law.MEASURED_SIZES else law.TIE
        best = one if one.loss < (1.0 - tie) * best.loss else best
    return best, considered


def _training(size: Size, machine: MachineFacts, train_seconds: float, fraction: float, text: TextFacts) -> Training:
    """Return what to expect of a network with the batch and the length of examples that teach it most."""
    new, vocab_size = 1e-6 * fraction * text.tokens, vocab_size_for(text, fraction)

    def tried(batch_tokens: int, length: int) -> Training:
        possible = 1e-6 * train_seconds * machine.tokens_per_second(size, vocab_size, length, batch_tokens)
        tokens = min(possible, law.MAX_EPOCHS * new)
        expected = law.forecast(
            size, vocab_size, tokens, tokens / new, is_chinese=text.is_chinese, batch_tokens=batch_tokens
        )
        share = tokens / possible
        has_long_phase = tokens > law.LONG_FROM_TOKENS and share * train_seconds > LONG_FROM_SECONDS
        positions = LONG_LENGTH if has_long_phase else length
        return Training(size, vocab_size, length, batch_tokens, tokens, tokens / new, share, positions, expected)

    short = _best_batch([tried(batch_tokens, SHORT_LENGTH) for batch_tokens in law.BATCHES])
    if short.tokens <= law.SHORT_UP_TO_TOKENS:
        return short
    return _best_batch([tried(batch_tokens, LENGTH) for batch_tokens in law.BATCHES])


def _best_batch(trainings: list[Training]) -> Training:
    """Return the training of the smallest batch that is fast and costs nearly no loss, or else of the lowest loss."""
    best = min(trainings, key=lambda one: one.loss)
    fastest = max(one.tokens / one.time_share for one in trainings)
    good = [
        one
        for one in trainings
        if one.tokens / one.time_share >= FAST_SHARE * fastest and one.loss <= (1.0 + law.TIE) * best.loss
    ]
    return good[0] if good else best


def _data_choices(text: TextFacts, fraction: float, best: Training) -> list[Choice]:
    """Return the choices of stages 1 and 2; `text` is the share that is read."""
    is_measured = text.is_chinese or text.language == "en"
    law_of = "" if is_measured else "; this and the forecast by the law of English, none other was measured"
    choices = [Choice("vocab.size", best.vocab_size, f"for {text.num_bytes / 1e6:,.0f} MB of text{law_of}")]
    if not is_measured:
        choices.append(Choice("data.language", text.language, "recognized at the beginnings of the inputs"))
    if text.is_chinese:
        choices.append(Choice("data.language", "zh", f"{text.cjk_share:.0%} of the letters are Chinese characters"))
    if fraction < 1.0:
        choices.append(Choice("data.fraction", fraction, "more of the text would not be seen in this time"))
    if text.boundary:
        ends = "blank lines end documents" if text.boundary == "blank_line" else "each line is a document"
        why = f"{ends}: otherwise there would be {text.documents_as_configured:,.0f}, too few to hold one out"
        choices.append(Choice("data.document_boundary", text.boundary, why))
    short = "short examples: more pairs and steps in the time"
    copies = 1 if best.epochs < 1.5 else min(5, math.ceil(best.epochs / 2))
    seen = f"training sees about {best.tokens:,.1f} million tokens, {best.epochs:.2g} times the text"
    pairs, why_pairs = _pairs(text)
    return [
        *choices,
        Choice("data.max_seq_length", best.length, short if best.length == SHORT_LENGTH else "the paper's length"),
        Choice("data.masked_lm_prob", MASKED_SHARE, "lower loss in the same time than with the paper's 15 %"),
        Choice("data.masking", "dynamic", "other masks in every epoch, without more copies on disk"),
        Choice("data.dupe_factor", copies, seen + ("; copies have other pairs" if copies > 1 else "")),
        Choice("data.next_sentence", pairs, why_pairs),
        _held_out(text, best, 2 if pairs == "nsp" else 1),
    ]


def _held_out(text: TextFacts, best: Training, needed: int) -> Choice:
    """Return the share of the documents that is held out; the objective needs a minimum."""
    if needed / text.documents > MAX_HELD_OUT_SHARE:
        why = f"{needed} of {text.documents:,.0f} is too much; --set 'data.validation=[FILE]' holds out another"
        return Choice("data.validation_fraction", 0.0, why)
    affordable = _evaluated_tokens(best)
    enough = min(MIN_HELD_OUT_DOCUMENTS / text.documents * text.tokens, EVALUATIONS * affordable)
    held_out = max(min(affordable, 0.01 * text.tokens), enough, MIN_HELD_OUT_EXAMPLES * best.length)
    share = min(MAX_HELD_OUT_SHARE, max(held_out / text.tokens, (needed + 0.5) / text.documents))
    return Choice("data.validation_fraction", float(f"{share:.2g}"), "evaluations take 2 to 4 % of the time")


def _evaluated_tokens(best: Training) -> float:
    """Return the tokens of an evaluation before the last."""
    return EVALUATION_SHARE * 1e6 * best.tokens * FORWARD_SPEED / EVALUATIONS


def _pairs(text: TextFacts) -> tuple[str, str]:
    """Return the objective besides masked tokens, and why."""
    if text.single_sentence_share > MAX_SINGLE_SENTENCES:
        return "none", f"{text.single_sentence_share:.0%} of the documents are one sentence, too short for a pair"
    if text.documents < MIN_CORPUS_DOCUMENTS:
        return "sop", "there are too few documents to take a random B from; the order of A and B needs only one"
    return "nsp", f"about {text.documents:,.0f} documents of {text.sentences_per_document:g} sentences (median)"


def _model_choices(best: Training, considered: list[Training], machine: MachineFacts) -> list[Choice]:
    size = best.size
    near = sorted((one for one in considered if one.size != size), key=lambda one: one.loss)[:2]
    others = ", ".join(f"{one.size} {one.loss:.2f}" for one in near)
    than = f" ({others})" if near else ", and no other network is of a size for this text and time"
    timed = "" if machine.speed(size).is_timed else "; its speed is computed from other networks"
    config = size.model_config(best.positions)
    return [
        Choice("model.num_hidden_layers", size.layers, f"{best.loss:.2f} nats expected{than}{timed}"),
        Choice("model.hidden_size", size.hidden, "as above"),
        Choice("model.num_attention_heads", config.num_attention_heads, "64 wide each, as in the paper"),
        Choice("model.intermediate_size", config.intermediate_size, "four times the width, as in the paper"),
        Choice("model.max_position_embeddings", best.positions, "those that are trained"),
        Choice("model.hidden_dropout_prob", 0.0, "in a short training dropout only slows the network down"),
        Choice("model.attention_probs_dropout_prob", 0.0, "the same; the fastest attention has none"),
    ]


def _train_choices(best: Training, seconds: float) -> list[Choice]:
    batch = best.batch_tokens // best.length
    steps = max(1.0, best.steps / law.FILLED_SHARE)
    every = max(20, int(steps / EVALUATIONS))
    examples = min(10_000, max(MIN_HELD_OUT_EXAMPLES, int(_evaluated_tokens(best) / best.length)))
    save_every = max(20, min(every, int(steps * SAVE_SECONDS / seconds)))
    return [
        Choice("train.optimizer", "muon", "lower loss than AdamW in the same time"),
        Choice("train.mlm_bias", "unigram", "training need not learn the frequencies of tokens first"),
        Choice("train.init", "positional_heads", "nor to attend to neighbouring tokens: there is no plateau"),
        Choice("train.peak_lr", law.peak_lr(best.size, best.batch_tokens), f"for a width of {best.size.hidden}"),
        Choice("train.global_batch_size", batch, f"about {steps:,.0f} steps"),
        Choice("train.warmup_ratio", law.WARMUP_RATIO, "of the time"),
        Choice("train.schedule", "linear", "to zero at the end of the time"),
        Choice("train.weight_decay", law.weight_decay(best.epochs), "weights of a scale from which fine-tuning works"),
        Choice("train.log_every", max(10, every // 10), "about ten lines between evaluations"),
        Choice("train.eval_every", every, f"about {EVALUATIONS} evaluations"),
        Choice("train.eval_examples", examples, "the last one takes all"),
        Choice("train.save_every", save_every, "a kill costs at most what was done since the last one"),
    ]


def _phases(best: Training) -> list[Choice]:
    """Return a second phase of long examples, for trainings that are long enough."""
    if best.positions == best.length:
        return []
    peak_lr = float(f"{LONG_LR_SHARE * law.peak_lr(best.size, best.batch_tokens):.1g}")
    long = {
        "data": {"max_seq_length": best.positions},
        "train": {"global_batch_size": best.batch_tokens // best.positions, "peak_lr": peak_lr},
    }
    phases = [
        {"name": str(best.length), "time_share": 1.0 - LONG_TIME_SHARE},
        {"name": str(best.positions), "time_share": LONG_TIME_SHARE, **long},
    ]
    return [Choice("phases", phases, "most steps on short examples, the rest on long ones, as in the paper")]
