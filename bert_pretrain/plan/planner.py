"""Choose what to train on a text, on a machine, in a given time: a pure function of the facts.

Each choice has a reason, which becomes a comment in the plan's YAML. `law.py` gives the forecasts.
"""

import math
from dataclasses import dataclass

import yaml

from bert_pretrain.config import Architecture, Config, duration, duration_text
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError
from bert_pretrain.make_data.assignment import MAX_HELD_OUT_SHARE, MAX_HELD_OUT_TOKENS
from bert_pretrain.plan import law
from bert_pretrain.plan.facts import MASKED_SHARE, MachineFacts, Size, TextFacts, num_outputs, rounded
from bert_pretrain.plan.law import Forecast
from bert_pretrain.report.curves import TASKS
from bert_pretrain.report.diagnosis import MAX_WEIGHTS_PER_TOKEN
from bert_pretrain.report.render import render
from bert_pretrain.text.sources import MIN_CORPUS_DOCUMENTS

MIN_SECONDS = 120.0
MAX_DATA_SHARE = 0.4  # largest share of the time for vocabulary and data
DATA_BYTES_PER_CORE_SECOND = 2.5e6  # speed of `vocab` and `make-data` together, on a slow core
VOCAB_TIME_SHARE = 0.35  # share of `vocab` in their time
START_SECONDS = 12.0  # to start all stages, including initial weights
# Part of the text to read: tokens per expected training token, and the minimum in bytes and in documents.
READ_TOKENS_PER_TRAINED = 2.0
MIN_TEXT_BYTES = 10e6
MIN_DOCUMENTS = 100.0
EVALUATIONS = 8  # maximum number
MIN_EVALUATIONS = 4  # if there is only time to evaluate few examples
EVALUATION_SHARE = 0.02  # of the time
# Minimum for a stable loss and next-sentence accuracy. Examples of one document are correlated: with only 20 held-out
# documents of Chinese, the held-out loss was 0.5 nats below the training loss. Further held-out examples are used only
# in the last evaluation, which takes at most as long as all others together.
MIN_HELD_OUT_EXAMPLES = 256
MIN_HELD_OUT_DOCUMENTS = 50
SHORT_LENGTH = 64  # tokens per example in the shortest trainings
LENGTH = 128  # in all others
# The second phase. The paper (appendix A.2) gives it a tenth of the steps.
LONG_LENGTH = 512
LONG_TIME_SHARE = 0.3
LONG_LR_SHARE = 0.3  # of the peak learning rate
LONG_FROM_SECONDS = 600.0  # minimum time of the training
# By whether the text is Chinese: (upper limit of the text in bytes, vocabulary size). On 5 and 98 MB of English, a
# larger vocabulary gave a lower loss per byte in equal time. On 39 MB of Chinese, 21,128 tokens did not.
VOCAB_SIZES = {
    False: ((1e6, 4096), (2e6, 8192), (4e6, 16_384), (math.inf, 30_522)),
    True: ((1e9, 8192), (math.inf, 21_128)),
}
FAST_SHARE = 0.9  # minimum speed of a batch, as a share of the fastest batch's tokens per second


@dataclass(frozen=True)
class Training:
    """A candidate: a network, how it is trained, and its forecast."""

    size: Size
    vocab_size: int
    num_outputs: int  # logits per masked token in training; less than `vocab_size` with a sampled softmax
    length: int  # tokens per example in the first phase
    positions: int  # length of the longest examples, in tokens
    batch_tokens: int
    tokens: float  # seen in training, in millions
    epochs: float
    time_share: float  # share of the available training time that is used
    forecast: Forecast

    @property
    def steps(self) -> float:
        return 1e6 * self.tokens / self.batch_tokens

    @property
    def loss(self) -> float:
        return self.forecast.loss

    @property
    def is_short(self) -> bool:
        return self.length == SHORT_LENGTH

    @property
    def peak_lr(self) -> float:
        return law.peak_lr(self.size, self.batch_tokens)

    @property
    def relative_speed(self) -> float:
        """Million tokens in the whole training time."""
        return self.tokens / self.time_share

    @property
    def evaluated_tokens(self) -> float:
        """Tokens of each evaluation but the last."""
        trained_flops = self.size.flops_per_token(self.num_outputs, self.length)
        evaluated_flops = self.size.flops_per_token(self.vocab_size, self.length)
        forward_speed = 2.5 * trained_flops / evaluated_flops  # relative to training; 2.5: no backward pass
        return EVALUATION_SHARE * 1e6 * self.tokens * forward_speed / EVALUATIONS


@dataclass(frozen=True)
class RunPlan:
    """A configuration with reasons and a forecast."""

    yaml: str  # the configuration, with the reasons and the forecast as comments
    seconds: float  # duration of the whole run
    training: Training
    expected: dict[str, tuple[float, float]]  # ranges of held-out metrics, rounded as printed

    @property
    def config(self) -> Config:
        """The configuration that the plan describes."""
        return load_config(flags={key: ("plan", value) for key, value in yaml.safe_load(self.yaml).items()})


def plan_run(
    inputs: tuple[str, ...],
    text: TextFacts,
    machine: MachineFacts,
    seconds: float,
    architecture: Architecture = "bert",
) -> RunPlan:
    """Return the plan for `seconds` (at least `MIN_SECONDS`) from the start of the command to the finished model.

    Speeds are those of BERT. The forecast for a ModernBERT is the law's, with `law.MODERN_OFFSET`.
    """
    affordable = _affordable_fraction(text, machine, seconds)
    fraction = affordable
    for _ in range(2):  # the vocabulary size, and so the speed, depends on the fraction of the text
        trainings = _suitable_trainings(text, machine, seconds, fraction)
        useful = _useful_fraction(text, _best_size(trainings).tokens)
        fraction = float(f"{min(affordable, useful):.2g}")
    trainings = _suitable_trainings(text, machine, seconds, fraction)
    best = _best_size(trainings)
    data_seconds = _data_seconds(text, machine, fraction)
    run_seconds = max(MIN_SECONDS, float(math.ceil(data_seconds + best.time_share * (seconds - data_seconds))))
    read = text.part(fraction)
    is_modern = architecture == "modernbert"
    pairs = "none" if is_modern else _pairs(read)
    expected = _expected(best.forecast, pairs, law.MODERN_OFFSET if is_modern else 0.0)
    others = [training for training in trainings if training is not best]
    page = render(
        "plan.yaml",
        inputs=inputs,
        text=text,
        read=read,
        machine=machine,
        best=best,
        others=sorted(others, key=lambda training: training.loss)[:2],
        duration=duration(run_seconds),
        time=duration_text(run_seconds),
        is_shortened=run_seconds < seconds,
        allowed=duration_text(float(seconds)),
        fraction=fraction,
        is_measured=text.is_chinese or text.language == "en",
        expected=expected,
        pairs=pairs,
        pair_accuracy=TASKS.get(pairs, TASKS["nsp"])[1],
        held_out=_held_out_fraction(read, best, 2 if pairs == "nsp" else 1),
        masked_share=MASKED_SHARE,
        copies=1 if best.epochs < 1.5 else min(5, math.ceil(best.epochs / 2)),
        dropout=law.REPEATED_DROPOUT if best.epochs >= law.DROPOUT_FROM_EPOCHS else 0.0,
        weight_decay=law.WEIGHT_DECAY if best.epochs <= law.REPEATED_FROM_EPOCHS else law.REPEATED_WEIGHT_DECAY,
        model=best.size.model_config(best.positions, architecture),
        is_offset_measured=best.size in law.MODERN_SIZES,
        phases=_phases(best),
        rounded=rounded,
        **_intervals(best, run_seconds),
    )
    return RunPlan(page, run_seconds, best, expected)


def vocab_size_for(text: TextFacts) -> int:
    """Return the vocabulary size for a text."""
    return next(size for limit, size in VOCAB_SIZES[text.is_chinese] if text.num_bytes < limit)


def _data_seconds(text: TextFacts, machine: MachineFacts, fraction: float) -> float:
    """Return the time of `vocab` and `make-data` for a fraction of the text, including the start of all stages."""
    fixed_share = VOCAB_TIME_SHARE if text.vocab_reads_all else 0.0  # of the time, for any fraction
    share = fixed_share + (1.0 - fixed_share) * fraction if text.is_divisible else 1.0
    return START_SECONDS + share * text.num_bytes / (DATA_BYTES_PER_CORE_SECOND * machine.cores)


def _affordable_fraction(text: TextFacts, machine: MachineFacts, seconds: float) -> float:
    """Return the largest fraction of the text for which vocabulary and data take at most `MAX_DATA_SHARE` of the time.

    Raises ConfigError if no fraction of the text meets this limit.
    """
    least = _data_seconds(text, machine, 0.0)
    needed = _data_seconds(text, machine, 1.0)
    allowed = MAX_DATA_SHARE * seconds
    if needed <= allowed:
        return 1.0
    if least < allowed:
        return (allowed - least) / (needed - least)
    reason = "vocab reads all text that is compressed or not in UTF-8" if text.is_divisible else "all text is read"
    raise ConfigError(
        f"vocabulary and data of {text.num_bytes / 1e6:,.0f} MB would take at least {least:,.0f} of {seconds:,.0f} "
        f"seconds, above the limit of {MAX_DATA_SHARE:.0%}: {reason}",
        where="--time",
        remedy=f"allow {math.ceil(needed / MAX_DATA_SHARE / 60)} minutes or more, or name fewer files",
    )


def _useful_fraction(text: TextFacts, tokens: float) -> float:
    """Return the fraction of the text that the vocabulary, the pairs and `tokens` million training tokens need."""
    for_tokens = READ_TOKENS_PER_TRAINED * 1e6 * tokens / text.tokens
    wanted = max(for_tokens, MIN_TEXT_BYTES / text.num_bytes, MIN_DOCUMENTS / text.documents)
    return wanted if text.is_divisible and wanted < 0.8 else 1.0  # from 80 % on, all of it


def _suitable_trainings(
    text: TextFacts,
    machine: MachineFacts,
    seconds: float,
    fraction: float,
) -> list[Training]:
    """Return the candidates that suit the text and the time, the smallest network first."""
    train_seconds = (1.0 - EVALUATION_SHARE) * (seconds - _data_seconds(text, machine, fraction))
    part = text.part(fraction)

    def is_suitable(training: Training) -> bool:
        size = training.size
        worth = 1e6 * law.effective_tokens(training.tokens, training.epochs)
        is_trained = law.min_tokens_per_weight(size) * size.weights <= worth
        return is_trained and size.weights <= MAX_WEIGHTS_PER_TOKEN * part.tokens

    trainings = [_training(size, machine, train_seconds, part) for size in machine.sizes]
    return list(filter(is_suitable, trainings)) or trainings[:1]


def _best_size(trainings: list[Training]) -> Training:
    """Return the training with the lowest loss. A size that was not measured must be clearly better."""
    best = trainings[0]
    for training in trainings[1:]:
        tie = 0.0 if training.size in law.MEASURED_SIZES else law.TIE
        if training.loss < (1.0 - tie) * best.loss:
            best = training
    return best


def _training(
    size: Size,
    machine: MachineFacts,
    train_seconds: float,
    text: TextFacts,
) -> Training:
    """Return the candidate for a network, with its best batch size. A training on few tokens gets short examples."""
    short = _best_batch(
        [
            _candidate(
                size,
                machine,
                train_seconds,
                text,
                SHORT_LENGTH,
                batch,
            )
            for batch in law.BATCHES
        ]
    )
    if short.tokens <= law.SHORT_UP_TO_TOKENS:
        return short
    return _best_batch(
        [
            _candidate(
                size,
                machine,
                train_seconds,
                text,
                LENGTH,
                batch,
            )
            for batch in law.BATCHES
        ]
    )


def _candidate(
    size: Size,
    machine: MachineFacts,
    train_seconds: float,
    text: TextFacts,
    length: int,
    batch_tokens: int,
) -> Training:
    vocab_size = vocab_size_for(text)
    text_tokens = 1e-6 * text.tokens
    possible = 1e-6 * train_seconds * machine.tokens_per_second(size, vocab_size, length, batch_tokens)
    tokens = min(possible, law.MAX_EPOCHS * text_tokens)
    epochs = tokens / text_tokens
    time_share = tokens / possible
    has_long_phase = tokens > law.LONG_FROM_TOKENS and time_share * train_seconds > LONG_FROM_SECONDS
    return Training(
        size=size,
        vocab_size=vocab_size,
        num_outputs=num_outputs(machine.device, vocab_size),
        length=length,
        positions=LONG_LENGTH if has_long_phase else length,
        batch_tokens=batch_tokens,
        tokens=tokens,
        epochs=epochs,
        time_share=time_share,
        forecast=law.forecast(
            size,
            vocab_size,
            tokens,
            epochs,
            text.is_chinese,
            batch_tokens,
        ),
    )


def _best_batch(trainings: list[Training]) -> Training:
    """Return the smallest batch that is fast and close to the lowest loss, or else the batch with the lowest loss."""
    best = min(trainings, key=lambda training: training.loss)
    fastest = max(training.relative_speed for training in trainings)
    for training in trainings:
        is_fast = training.relative_speed >= FAST_SHARE * fastest
        if is_fast and training.loss <= (1.0 + law.TIE) * best.loss:
            return training
    return best


def _pairs(text: TextFacts) -> str:
    """Return `data.next_sentence`."""
    if text.single_sentence_share > 0.5:
        return "none"
    return "sop" if text.documents < MIN_CORPUS_DOCUMENTS else "nsp"


def _expected(forecast: Forecast, pairs: str, offset: float) -> dict[str, tuple[float, float]]:
    """Return ranges of nats per masked token, shifted by `offset`, and of accuracy."""
    low, high = forecast.mlm_loss
    ranges = {"mlm_loss": (low + offset, high + offset)}
    if pairs != "none":
        ranges["nsp_accuracy"] = forecast.nsp_accuracy
    return {name: (round(low, 2), round(high, 2)) for name, (low, high) in ranges.items()}


def _held_out_fraction(text: TextFacts, best: Training, needed: int) -> float:
    """Return the fraction of the documents to hold out: at least `needed` documents, or 0 if the text has too few."""
    if needed / text.documents > MAX_HELD_OUT_SHARE:
        return 0.0
    affordable = best.evaluated_tokens
    held_out = max(
        min(affordable, 0.01 * text.tokens, MAX_HELD_OUT_TOKENS),
        min(EVALUATIONS * affordable, MIN_HELD_OUT_DOCUMENTS / text.documents * text.tokens),
        MIN_HELD_OUT_EXAMPLES * best.length,
    )
    share = min(MAX_HELD_OUT_SHARE, max(held_out / text.tokens, (needed + 0.5) / text.documents))
    return float(f"{share:.2g}")


def _intervals(best: Training, seconds: float) -> dict[str, float]:
    """Return the number of steps, and the intervals and sizes of what happens between them."""
    steps = max(1.0, best.steps / 0.97)  # the mean length of an example is 97 % of the maximum
    examples = best.evaluated_tokens / best.length
    evaluations = min(EVALUATIONS, max(MIN_EVALUATIONS, int(EVALUATIONS * examples / MIN_HELD_OUT_EXAMPLES)))
    every = max(20, int(steps / evaluations))
    return {
        "steps": steps,
        "num_evaluations": evaluations,
        "log_every": max(10, every // 10),
        "eval_every": every,
        "eval_examples": min(10_000, max(MIN_HELD_OUT_EXAMPLES, int(examples))),
        "save_every": max(20, min(every, int(steps * 600.0 / seconds))),  # in long trainings, about every ten minutes
    }


def _phases(best: Training) -> list[dict[str, object]]:
    """Return two phases, the second with long examples; none if the training is too short for them."""
    if best.positions == best.length:
        return []
    short = {"name": str(best.length), "time_share": 1.0 - LONG_TIME_SHARE}
    long = {
        "name": str(best.positions),
        "time_share": LONG_TIME_SHARE,
        "data": {"max_seq_length": best.positions},
        "train": {
            "global_batch_size": best.batch_tokens // best.positions,
            "peak_lr": float(f"{LONG_LR_SHARE * best.peak_lr:.1g}"),
        },
    }
    return [short, long]
