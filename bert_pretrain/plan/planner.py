"""Choose what to train on a text, on a machine, in a given time: a pure function of the facts.

Each choice has a reason, which becomes a comment in the plan's YAML. `law.py` gives the forecasts.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from bert_pretrain.config import Config, duration_text
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError
from bert_pretrain.make_data.plan import MAX_HELD_OUT_SHARE, MAX_HELD_OUT_TOKENS
from bert_pretrain.plan import law
from bert_pretrain.plan.facts import MASKED_SHARE, MachineFacts, Size, TextFacts, num_outputs, rounded
from bert_pretrain.plan.law import Forecast
from bert_pretrain.report.diagnosis import MAX_WEIGHTS_PER_TOKEN
from bert_pretrain.text.sources import MIN_CORPUS_DOCUMENTS

MIN_SECONDS = 120.0
# `vocab` and `make-data` together: bytes per second on a slow core, the share of `vocab` in their time, and the time to
# start all stages, including initial weights.
DATA_BYTES_PER_CORE_SECOND, VOCAB_TIME_SHARE, START_SECONDS = 2.5e6, 0.35, 12.0
MAX_DATA_SHARE = 0.4  # largest share of the time for vocabulary and data
# Part of the text to read: tokens per expected training token, and the minimum in bytes and in documents.
READ_TOKENS_PER_TRAINED, MIN_TEXT_BYTES, MIN_DOCUMENTS = 2.0, 10e6, 100.0
# Maximum number of evaluations, their minimum number if there is only time to evaluate few examples, and their share of
# the time.
EVALUATIONS, MIN_EVALUATIONS, EVALUATION_SHARE = 8, 4, 0.02
# Minimum for a stable loss and next-sentence accuracy. Examples of one document are correlated: with only 20 held-out
# documents of Chinese, the held-out loss was 0.5 nats below the training loss. Further held-out examples are used only
# in the last evaluation, which takes at most as long as all others together.
MIN_HELD_OUT_EXAMPLES, MIN_HELD_OUT_DOCUMENTS = 256, 50
SHORT_LENGTH, LENGTH = 64, 128  # tokens per example, in the shortest trainings and in all others
# Second phase: length, share of the time, share of the peak learning rate, and minimum time of the training. The paper
# (appendix A.2) gives it a tenth of the steps.
LONG_LENGTH, LONG_TIME_SHARE, LONG_LR_SHARE, LONG_FROM_SECONDS = 512, 0.3, 0.3, 600.0
# By whether the text is Chinese: (upper limit of the text in bytes, vocabulary size). On 5 and 98 MB of English, a
# larger vocabulary gave a lower loss per byte in equal time. On 39 MB of Chinese, 21,128 tokens did not.
VOCAB_SIZES = {
    False: ((1e6, 4096), (2e6, 8192), (4e6, 16_384), (math.inf, 30_522)),
    True: ((1e9, 8192), (math.inf, 21_128)),
}
FAST_SHARE = 0.9  # minimum speed of a batch, as a share of the fastest batch's tokens per second


class Choice(NamedTuple):
    """A configuration key of the plan with its value and the reason."""

    key: str
    value: object
    reason: str


@dataclass(frozen=True)
class Training:
    """A candidate: a network, how it is trained, and its forecast."""

    size: Size
    vocab_size: int
    num_outputs: int  # logits per masked token in training; less than `vocab_size` with a sampled softmax
    length: int  # tokens per example in the first phase
    batch_tokens: int
    tokens: float  # seen in training, in millions
    epochs: float
    time_share: float  # share of the available training time that is used
    positions: int  # length of the longest examples, in tokens
    forecast: Forecast

    @property
    def steps(self) -> float:
        return 1e6 * self.tokens / self.batch_tokens

    @property
    def loss(self) -> float:
        return self.forecast.loss


@dataclass(frozen=True)
class RunPlan:
    """A configuration with reasons and a forecast."""

    inputs: tuple[str, ...]
    text: TextFacts
    seconds: float  # duration of the whole run
    why_seconds: str  # why the run is shorter than allowed; empty if it is not
    choices: tuple[Choice, ...]
    training: Training

    @property
    def config(self) -> Config:
        """The configuration that the plan describes."""
        flags: dict[str, tuple[str, object]] = {choice.key: ("plan", choice.value) for choice in self.choices}
        return load_config(None, (), {"inputs": ("plan", self.inputs), "time": ("plan", self.seconds), **flags})


def plan_run(inputs: tuple[str, ...], text: TextFacts, machine: MachineFacts, seconds: float) -> RunPlan:
    """Return the plan for `seconds` (at least `MIN_SECONDS`) from the start of the command to the finished model."""
    fraction = affordable = _affordable_fraction(text, machine, seconds)
    for _ in range(2):  # the vocabulary size, and so the speed, depends on the fraction of the text
        tokens = _best_training(text, machine, seconds, fraction)[0].tokens
        fraction = float(f"{min(affordable, _useful_fraction(text, tokens)):.2g}")
    best, considered = _best_training(text, machine, seconds, fraction)
    data_seconds = _data_seconds(text, machine, fraction)
    run_seconds = max(MIN_SECONDS, float(math.ceil(data_seconds + best.time_share * (seconds - data_seconds))))
    text_read = replace(text, num_bytes=fraction * text.num_bytes, documents=fraction * text.documents)
    choices = (
        *_data_choices(text_read, fraction, best),
        *_model_choices(best, considered, machine),
        *_train_choices(best, run_seconds),
        *_phases(best),
    )
    why_seconds = ""
    if run_seconds < seconds:
        enough = f"enough to see the text {best.epochs:,.0f} times; more passes help little"
        why_seconds = f"of {duration_text(float(seconds))}: {enough}"
    return RunPlan(inputs, text, run_seconds, why_seconds, choices, best)


def vocab_size_for(text: TextFacts, fraction: float = 1.0) -> int:
    """Return the vocabulary size for a fraction of the text."""
    return next(size for limit, size in VOCAB_SIZES[text.is_chinese] if fraction * text.num_bytes < limit)


def _data_seconds(text: TextFacts, machine: MachineFacts, fraction: float) -> float:
    """Return the time of `vocab` and `make-data` for a fraction of the text, including the start of all stages."""
    seconds = text.num_bytes / (DATA_BYTES_PER_CORE_SECOND * machine.cores)
    fixed_share = VOCAB_TIME_SHARE if text.vocab_reads_all else 0.0  # of the time, for any fraction
    share = fixed_share + (1.0 - fixed_share) * fraction if text.is_divisible else 1.0
    return START_SECONDS + seconds * share


def _affordable_fraction(text: TextFacts, machine: MachineFacts, seconds: float) -> float:
    """Return the largest fraction of the text for which vocabulary and data take at most `MAX_DATA_SHARE` of the time.

    Raises ConfigError if no fraction of the text meets this limit.
    """
    least, needed = (_data_seconds(text, machine, fraction) for fraction in (0.0, 1.0))
    allowed = MAX_DATA_SHARE * seconds
    if needed <= allowed:
        return 1.0
    if least >= allowed:
        reason = "vocab reads all text that is compressed or not in UTF-8" if text.is_divisible else "all text is read"
        what = f"vocabulary and data of {text.num_bytes / 1e6:,.0f} MB would take at least {least:,.0f} of "
        what += f"{seconds:,.0f} seconds, above the limit of {MAX_DATA_SHARE:.0%}: {reason}"
        remedy = f"allow {math.ceil(needed / MAX_DATA_SHARE / 60)} minutes or more, or name fewer files"
        raise ConfigError(what, where="--time", remedy=remedy)
    return (allowed - least) / (needed - least)


def _useful_fraction(text: TextFacts, tokens: float) -> float:
    """Return the fraction of the text that the vocabulary, the pairs and `tokens` million training tokens need."""
    if not text.is_divisible:
        return 1.0
    for_tokens = READ_TOKENS_PER_TRAINED * 1e6 * tokens / text.tokens
    wanted = max(for_tokens, MIN_TEXT_BYTES / text.num_bytes, MIN_DOCUMENTS / text.documents)
    return wanted if wanted < 0.8 else 1.0  # from 80 % on, all of it


def _best_training(
    text: TextFacts, machine: MachineFacts, seconds: float, fraction: float
) -> tuple[Training, list[Training]]:
    """Return the best candidate for a fraction of the text, and the suitable ones, the smallest network first."""
    train_seconds = (1.0 - EVALUATION_SHARE) * (seconds - _data_seconds(text, machine, fraction))
    trainings = [_training(size, machine, train_seconds, fraction, text) for size in machine.sizes]
    max_weights = MAX_WEIGHTS_PER_TOKEN * fraction * text.tokens
    considered = [
        one
        for one in trainings
        if law.min_tokens_per_weight(one.size) * one.size.weights <= 1e6 * law.effective_tokens(one.tokens, one.epochs)
        and one.size.weights <= max_weights
    ] or trainings[:1]
    best = considered[0]
    for one in considered[1:]:
        tie = 0.0 if one.size in law.MEASURED_SIZES else law.TIE
        best = one if one.loss < (1.0 - tie) * best.loss else best
    return best, considered


def _training(size: Size, machine: MachineFacts, train_seconds: float, fraction: float, text: TextFacts) -> Training:
    """Return the candidate for a network, with its best batch size. A training on few tokens gets short examples."""
    text_tokens, vocab_size = 1e-6 * fraction * text.tokens, vocab_size_for(text, fraction)
    outputs = num_outputs(machine.device, vocab_size)

    def candidate(batch_tokens: int, length: int) -> Training:
        possible = 1e-6 * train_seconds * machine.tokens_per_second(size, vocab_size, length, batch_tokens)
        tokens = min(possible, law.MAX_EPOCHS * text_tokens)
        epochs, time_share = tokens / text_tokens, tokens / possible
        forecast = law.forecast(size, vocab_size, tokens, epochs, is_chinese=text.is_chinese, batch_tokens=batch_tokens)
        has_long_phase = tokens > law.LONG_FROM_TOKENS and time_share * train_seconds > LONG_FROM_SECONDS
        positions = LONG_LENGTH if has_long_phase else length
        return Training(
            size, vocab_size, outputs, length, batch_tokens, tokens, epochs, time_share, positions, forecast
        )

    short = _best_batch([candidate(batch_tokens, SHORT_LENGTH) for batch_tokens in law.BATCHES])
    if short.tokens <= law.SHORT_UP_TO_TOKENS:
        return short
    return _best_batch([candidate(batch_tokens, LENGTH) for batch_tokens in law.BATCHES])


def _best_batch(trainings: list[Training]) -> Training:
    """Return the smallest batch that is fast and close to the lowest loss, or else the batch with the lowest loss."""
    best = min(trainings, key=lambda one: one.loss)
    fastest = max(one.tokens / one.time_share for one in trainings)  # million tokens in the whole training time
    good = [
        one
        for one in trainings
        if one.tokens / one.time_share >= FAST_SHARE * fastest and one.loss <= (1.0 + law.TIE) * best.loss
    ]
    return good[0] if good else best


def _data_choices(text: TextFacts, fraction: float, best: Training) -> list[Choice]:
    """Return the keys of the sections `vocab` and `data`; `text` is the part of the text that is read."""
    is_measured = text.is_chinese or text.language == "en"
    law_note = "" if is_measured else "; size and forecast use the law measured on English"
    choices = [Choice("vocab.size", best.vocab_size, f"for {text.megabytes} MB of text{law_note}")]
    if not is_measured:
        choices.append(Choice("data.language", text.language, "recognized from the first text of the inputs"))
    if text.is_chinese:
        choices.append(Choice("data.language", "zh", f"{text.cjk_share:.0%} of the letters are Chinese characters"))
    if fraction < 1.0:
        choices.append(Choice("data.fraction", fraction, "training will not reach the rest in this time"))
    if text.boundary:
        rule = "blank lines end documents" if text.boundary == "blank_line" else "each line is a document"
        why = f"{rule}: otherwise there would be {text.documents_as_configured:,.0f}, too few to hold one out"
        choices.append(Choice("data.document_boundary", text.boundary, why))
    why_short = "short examples: more pairs and steps in the time"
    copies = 1 if best.epochs < 1.5 else min(5, math.ceil(best.epochs / 2))
    why_copies = f"training sees about {best.tokens:,.1f} million tokens, {rounded(best.epochs)} times the text"
    why_copies += "; each copy has new pairs" if copies > 1 else ""
    pairs, why_pairs = _pairs(text)
    return [
        *choices,
        Choice("data.max_seq_length", best.length, why_short if best.length == SHORT_LENGTH else "the paper's length"),
        Choice("data.masked_lm_prob", MASKED_SHARE, "lower loss in the same time than with the paper's 15 %"),
        Choice("data.masking", "dynamic", "new masks in every epoch, without more copies on disk"),
        Choice("data.dupe_factor", copies, why_copies),
        Choice("data.next_sentence", pairs, why_pairs),
        _held_out(text, best, 2 if pairs == "nsp" else 1),
    ]


def _held_out(text: TextFacts, best: Training, needed: int) -> Choice:
    """Return the fraction of the documents to hold out: at least `needed` documents, or 0 if the text has too few."""
    if needed / text.documents > MAX_HELD_OUT_SHARE:
        why = f"too few documents ({text.documents:,.0f}); --set 'data.validation=[FILE]' holds out another file"
        return Choice("data.validation_fraction", 0.0, why)
    affordable = _evaluated_tokens(best)
    enough = min(MIN_HELD_OUT_DOCUMENTS / text.documents * text.tokens, EVALUATIONS * affordable)
    largest = min(affordable, 0.01 * text.tokens, MAX_HELD_OUT_TOKENS)
    held_out = max(largest, enough, MIN_HELD_OUT_EXAMPLES * best.length)
    share = min(MAX_HELD_OUT_SHARE, max(held_out / text.tokens, (needed + 0.5) / text.documents))
    return Choice("data.validation_fraction", float(f"{share:.2g}"), "evaluations take 2 to 6 % of the time")


def _evaluated_tokens(best: Training) -> float:
    """Return the number of tokens of each evaluation but the last."""
    trained = best.size.flops_per_token(best.num_outputs, best.length)
    evaluated = best.size.flops_per_token(best.vocab_size, best.length)
    forward_speed = 2.5 * trained / evaluated  # tokens per second, relative to training; 2.5: no backward pass
    return EVALUATION_SHARE * 1e6 * best.tokens * forward_speed / EVALUATIONS


def _num_evaluations(best: Training) -> int:
    """Return the number of evaluations, besides the last, that the time allows with the minimum of examples."""
    affordable = EVALUATIONS * _evaluated_tokens(best) / (MIN_HELD_OUT_EXAMPLES * best.length)
    return min(EVALUATIONS, max(MIN_EVALUATIONS, int(affordable)))


def _pairs(text: TextFacts) -> tuple[str, str]:
    """Return `data.next_sentence` and the reason for it."""
    if text.single_sentence_share > 0.5:
        return "none", f"{text.single_sentence_share:.0%} of the documents are one sentence, too short for a pair"
    if text.documents < MIN_CORPUS_DOCUMENTS:
        return "sop", "too few documents to draw a random B from; sentence order needs only one"
    return "nsp", f"about {text.documents:,.0f} documents of {text.sentences_per_document:g} sentences (median)"


def _model_choices(best: Training, considered: list[Training], machine: MachineFacts) -> list[Choice]:
    size = best.size
    nearest = sorted((one for one in considered if one.size != size), key=lambda one: one.loss)[:2]
    others = ", ".join(f"{one.size} {one.loss:.2f}" for one in nearest)
    why = f"{best.loss:.2f} nats expected"
    why += f" ({others})" if nearest else ", and no other network has a suitable size for this text and time"
    why += "" if machine.speed(size).is_timed else "; its speed is computed from other networks"
    dropout = 0.0, "dropout slows learning with few passes over the text"
    if best.epochs >= law.DROPOUT_FROM_EPOCHS:
        dropout = law.REPEATED_DROPOUT, f"for {best.epochs:,.0f} passes over the text"
    config = size.model_config(best.positions)
    return [
        Choice("model.num_hidden_layers", size.layers, why),
        Choice("model.hidden_size", size.hidden, "chosen together with the number of layers"),
        Choice("model.num_attention_heads", config.num_attention_heads, "64 wide each, as in the paper"),
        Choice("model.intermediate_size", config.intermediate_size, "four times the width, as in the paper"),
        Choice("model.max_position_embeddings", best.positions, "the longest examples"),
        Choice("model.hidden_dropout_prob", *dropout),
        Choice("model.attention_probs_dropout_prob", 0.0, "the fastest attention has no dropout"),
    ]


def _train_choices(best: Training, seconds: float) -> list[Choice]:
    batch = best.batch_tokens // best.length
    steps = max(1.0, best.steps / 0.97)  # the mean length of an example is 97 % of the maximum
    evaluations = _num_evaluations(best)
    every = max(20, int(steps / evaluations))
    examples = min(10_000, max(MIN_HELD_OUT_EXAMPLES, int(_evaluated_tokens(best) / best.length)))
    save_every = max(20, min(every, int(steps * 600.0 / seconds)))  # in long trainings, about every ten minutes
    weight_decay = law.WEIGHT_DECAY if best.epochs <= law.REPEATED_FROM_EPOCHS else law.REPEATED_WEIGHT_DECAY
    sampled: list[Choice] = []
    if best.num_outputs < best.vocab_size:
        sampled.append(Choice("train.softmax_candidates", best.num_outputs, "more steps in the time"))
    return [
        Choice("train.optimizer", "muon", "lower loss than AdamW in the same time"),
        Choice("train.mlm_bias", "unigram", "starts from the token frequencies"),
        Choice("train.init", "cooccurrences", "starts from counts of neighboring tokens"),
        *sampled,
        Choice("train.peak_lr", law.peak_lr(best.size, best.batch_tokens), "for this width, depth and batch size"),
        Choice("train.global_batch_size", batch, f"about {steps:,.0f} steps"),
        Choice("train.warmup_ratio", 0.05, "share of the time"),
        Choice("train.schedule", "linear", "to zero at the end of the time"),
        Choice("train.weight_decay", weight_decay, "keeps the weights at a scale that suits fine-tuning"),
        Choice("train.log_every", max(10, every // 10), "about ten lines between evaluations"),
        Choice("train.eval_every", every, f"about {evaluations} evaluations"),
        Choice("train.eval_examples", examples, "the last evaluation uses all held-out examples"),
        Choice("train.save_every", save_every, "a kill loses the steps since the last checkpoint"),
    ]


def _phases(best: Training) -> list[Choice]:
    """Return two phases, the second with long examples; none if the training is too short for them."""
    if best.positions == best.length:
        return []
    peak_lr = float(f"{LONG_LR_SHARE * law.peak_lr(best.size, best.batch_tokens):.1g}")
    short = {"name": str(best.length), "time_share": 1.0 - LONG_TIME_SHARE}
    long = {
        "name": str(best.positions),
        "time_share": LONG_TIME_SHARE,
        "data": {"max_seq_length": best.positions},
        "train": {"global_batch_size": best.batch_tokens // best.positions, "peak_lr": peak_lr},
    }
    return [Choice("phases", [short, long], "most steps on short examples, the rest on long ones, as in the paper")]
