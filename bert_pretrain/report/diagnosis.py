"""What goes wrong in a run, each cause named once with its remedy: hints, for `train` and `report` alike.

A pure function of the run's record (length, configuration and statistics of the data, as its manifest holds them) and
of the lines of `metrics.jsonl` so far, so that `report` finds the hints that `train` printed. Lines are averaged by
their position in the run, so that the work and the memory do not grow with its length. Thresholds are chosen such that
healthy runs give no hint: `tests/report/test_diagnosis.py` has some.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bert_pretrain.report.curves import frequency_loss, number_of, value_of

NUM_POINTS = 400  # points that the lines of a run are summed up to, at most
MIN_LINES = 10  # lines of training before which nothing is said of how it goes
LONG = 0.1  # share of the run over which metrics are averaged

PATIENCE_STEPS, PATIENCE_SHARES = 20_000, (0.1, 0.5)
"""Steps, within shares of the run: healthy runs have left the loss of token frequencies so long after the warm-up, and
chance at next sentences so long after masked tokens are learned."""
PLATEAU_NATS, STEADY_NATS = 0.1, 0.03
"""Distance from the loss of token frequencies that is no progress yet; and the fall in a tenth that is some."""
FAR_NATS = 0.5  # distance from a loss that is not noise
ABOVE_PLATEAU_NATS = 0.2  # distance above the loss of token frequencies where no healthy loss stays
NSP_NATS, NSP_CHANCE, NSP_STEPS = 1.0, 0.53, 3000
"""How far masked tokens are learned before next sentences must be, the accuracy that is chance, and the steps that a
healthy run may stay at it."""
NORM_FACTOR = 10.0
RATE_TOO_HIGH = "learning rate too high"
MAX_WEIGHTS_PER_TOKEN = 10.0
"""Weights of the encoder's matrices per token of text up to which networks were measured to learn, and are planned."""
PRESETS = {"tiny": (2, 128), "mini": (4, 256), "small": (4, 512), "medium": (8, 512), "base": (12, 768)}
"""Layers and width of presets that can be advised, the smallest first."""
_LOSSES = {"validation_mlm_loss": "held-out", "mlm_loss": "training"}
"""The metrics that show whether a model has learned anything, the better one first."""


class Hint(NamedTuple):
    """A cause, what tells it, and its remedy."""

    cause: str  # a run gives one hint of each
    observed: str
    remedy: str

    def __str__(self) -> str:
        return f"hint: {self.cause} ({self.observed}): {self.remedy}"


class Diagnosis:
    """The hints of one run, from its lines of metrics one after the other."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        """Begin a run, given its manifest, finished or partial; what that does not say is not judged."""
        self.hints: dict[str, Hint] = {}  # by cause
        self._steps, self._seconds = number_of(record, "length.steps"), number_of(record, "length.seconds")
        self._warmup = number_of(record, "config.train.warmup_ratio") or 0.0
        if self._steps:  # the schedule may span more steps, where phases share one
            of_schedule = self._warmup * max(self._steps, number_of(record, "config.train.schedule_steps") or 0)
            warmup_steps = number_of(record, "config.train.warmup_steps")
            self._warmup = min(1.0, (of_schedule if warmup_steps is None else warmup_steps) / self._steps)
        self._max_grad_norm = number_of(record, "config.train.max_grad_norm") or 1.0
        self._has_muon = value_of(record, "config.train.optimizer") == "muon"
        self._entropy: float | None = number_of(record, "data.statistics.unigram_entropy.train")
        self._has_next_sentence = value_of(record, "data.statistics.next_sentence") == "nsp"
        self._first_step: int | None = None
        self._start: float | None = None  # the first loss
        self._num_lines, self._num_steps, self._share = 0, 0, 0.0
        self._points: list[tuple[float, dict[str, tuple[float, int]]]] = []  # share; mean and number of each figure

    def add(self, line: Mapping[str, Any]) -> list[Hint]:
        """Take a line of metrics, of training or of an evaluation, and return the hints that it gives rise to."""
        self._first_step = line["step"] if self._first_step is None else self._first_step
        held_out, loss = _number(line, "validation_mlm_loss"), _number(line, "mlm_loss")
        self._start = self._start or held_out or loss
        known = set(self.hints)
        if "mlm_loss" in line and self._take(line) and self._num_lines >= MIN_LINES:
            for rule in (self._rate_too_high, self._plateau, self._no_next_sentence):
                if hint := rule():
                    self.hints.setdefault(hint.cause, hint)
        return [hint for cause, hint in self.hints.items() if cause not in known]

    def _take(self, line: Mapping[str, Any]) -> bool:
        """Add a line of training to the points; returns whether it begins one."""
        self._num_lines += 1
        first = self._first_step or 0
        self._num_steps = line["step"] - first
        if self._steps:
            self._share = self._num_steps / max(self._steps - first, 1)
        elif self._seconds:
            self._share = (_number(line, "elapsed_seconds") or 0.0) / self._seconds
        else:
            return False
        is_new = not self._points or int(self._share * NUM_POINTS) > int(self._points[-1][0] * NUM_POINTS)
        if is_new:
            self._points.append((self._share, {}))
        means = self._points[-1][1]
        for name in ("mlm_loss", "nsp_accuracy", "grad_norm"):
            if (value := _number(line, name)) is not None:
                mean, number = means.get(name, (0.0, 0))
                means[name] = mean + (value - mean) / (number + 1), number + 1
        return is_new

    def _number_of_points(self, share: float, at_least: int) -> int:
        """Return how many points a share of the run has."""
        return max(at_least, round(share * len(self._points) / max(self._share, 1 / NUM_POINTS)))

    def _values(self, name: str) -> list[float]:
        """Return a metric of every point that has it."""
        return [means[name][0] for _, means in self._points if name in means]

    def _rate_too_high(self) -> Hint | None:
        """The loss is far above what it was, or the gradients are."""
        number, losses, norms = self._number_of_points(0.02, 3), self._values("mlm_loss"), self._values("grad_norm")
        if self._share < self._warmup or len(losses) < 2 * number:
            return None
        sums = [0.0, *itertools.accumulate(losses)]
        best = min(after - before for before, after in zip(sums, sums[number:], strict=False)) / number
        best = min(best, self._start or best)
        now = _mean(losses[-number:])
        if now > best + FAR_NATS:
            return _too_high(f"the loss of masked tokens rose from {best:.2f} to {now:.2f} nats")
        before, norm = statistics.median(norms[:-number] or norms or [0.0]), min(norms[-number:], default=0.0)
        if norm > NORM_FACTOR * max(before, self._max_grad_norm):
            return _too_high(f"the gradient norm rose from {before:.2g} to {norm:.2g}")
        return None

    def _expected_share(self) -> float:
        """Return the share of the run that a model needs for its first steps away from chance."""
        least, most = PATIENCE_SHARES
        return min(most, max(least, PATIENCE_STEPS * self._share / max(self._num_steps, 1)))

    def _plateau(self) -> Hint | None:
        """The loss no longer falls, and is that of token frequencies, or above."""
        entropy, losses, number = self._entropy, self._values("mlm_loss"), self._number_of_points(LONG, 2)
        # Towards the end no loss falls much, as the learning rate is small; `nothing_learned` judges it.
        is_due = self._warmup + self._expected_share() <= self._share <= 1 - LONG
        if entropy is None or len(losses) < 2 * number or not is_due:
            return None
        now, before = _mean(losses[-number:]), _mean(losses[-2 * number : -number])
        if now < entropy - PLATEAU_NATS or before - now > STEADY_NATS or self.hints.keys() & {"plateau", RATE_TOO_HIGH}:
            return None
        observed = f"after {self._share:.0%} of the run the loss of masked tokens is {now:.2f} nats, that of token "
        observed += f"frequencies {entropy:.2f}"
        if now > entropy + ABOVE_PLATEAU_NATS:
            return _too_high(observed)
        return Hint(
            "plateau",
            observed,
            f"train for more steps{'' if self._has_muon else ', use train.optimizer=muon'}, or change train.peak_lr "
            "(tiny models need more, deep ones less and a longer warm-up)",
        )

    def _no_next_sentence(self) -> Hint | None:
        """Masked tokens are learned, next sentences are not."""
        number = self._number_of_points(self._expected_share(), 3)
        accuracies, losses = self._values("nsp_accuracy"), self._values("mlm_loss")
        if self._entropy is None or min(len(accuracies), len(losses)) < number or not self._has_next_sentence:
            return None
        if self._num_steps < NSP_STEPS:
            return None
        accuracy = max(_mean(accuracies[-number:]), _mean(accuracies[-self._number_of_points(LONG, 3) :]))
        if max(losses[-number:]) > self._entropy - NSP_NATS or accuracy > NSP_CHANCE:
            return None
        return Hint(
            "next sentence not learned",
            f"its accuracy is {accuracy:.1%} while masked tokens are learned",
            "check with 'bert-pretrain inspect' that B continues A; if lines are shuffled or documents have no "
            "boundaries, fix the text, or set data.next_sentence=none",
        )


def diagnose(record: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> list[Hint]:
    """Return the hints of a run, from its manifest and `metrics.jsonl`, in the order in which its lines give them."""
    diagnosis, lines = Diagnosis(record), list(lines)
    for line in lines:
        diagnosis.add(line)
    final = nothing_learned(record, lines) if "progress" in record else None  # else the run is not finished
    return [*diagnosis.hints.values(), *([final] if final else [])]


def nothing_learned(record: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> Hint | None:
    """Return a hint if a model is no better than the frequencies of the tokens, which need no network.

    It compares the last held-out loss with that of the training frequencies on the held-out rows; where nothing is
    held out, that of training with the entropy of the training split.
    """
    lines = list(lines)
    references = (frequency_loss(record), number_of(record, "data.statistics.unigram_entropy.train"))
    for (name, what), reference in zip(_LOSSES.items(), references, strict=True):
        losses = [value for line in lines if (value := _number(line, name)) is not None]
        if not losses or reference is None:
            continue
        start, last = losses[0], losses[-1]
        if last < reference - PLATEAU_NATS:
            return None
        return Hint(
            "only token frequencies learned" if last < start - FAR_NATS else "nothing learned",
            f"the {what} loss of masked tokens began at {start:.2f} and ended at {last:.2f} nats; the frequencies of "
            f"the training tokens alone give {reference:.2f}",
            "train for more steps or with another train.peak_lr; check the data with 'bert-pretrain inspect'",
        )
    return None


def too_large(weights: int, tokens: float) -> Hint | None:
    """Return a hint if the matrices of an encoder have far too many weights for a text of `tokens` tokens.

    It names the largest preset that the text is enough for and that is smaller than the model, or else the smallest.
    A plan of `run auto` is made from an estimate of the tokens, which half of them do not contradict.
    """
    if weights <= 2 * MAX_WEIGHTS_PER_TOKEN * tokens:
        return None
    sizes = {name: 12 * layers * hidden**2 for name, (layers, hidden) in PRESETS.items()}
    smaller = [name for name, size in sizes.items() if size < weights]
    enough = [name for name in smaller if sizes[name] <= MAX_WEIGHTS_PER_TOKEN * tokens]
    advised = enough[-1:] or smaller[:1]
    return Hint(
        "little text for the model",
        f"{weights:,} weights inside the encoder for {tokens:,.0f} tokens",
        "give more text" + "".join(f", or take a smaller model, such as --config {name}" for name in advised),
    )


def _too_high(observed: str) -> Hint:
    return Hint(RATE_TOO_HIGH, observed, "lower train.peak_lr, or lengthen train.warmup_ratio")


_mean = statistics.fmean


def _number(line: Mapping[str, Any], name: str) -> float | None:
    """Return a metric of a line, None where it is not there or not finite."""
    value = line.get(name)
    return float(value) if value is not None and math.isfinite(value) else None
