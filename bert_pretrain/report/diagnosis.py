"""Find problems in the metrics of a run and name each cause once, with a remedy: the hints of `train` and `report`.

The hints depend only on the run's manifest and the lines of `metrics.jsonl` so far, so `report` repeats the hints of
`train`, except that of `too_large`. Lines are averaged into a fixed number of points, so memory does not grow with the
run. Healthy runs get no hint: `tests/report/test_diagnosis.py` checks some.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from bert_pretrain.metrics import frequency_loss, number_of, value_of

DIAGNOSED = ("mlm_loss", "nsp_accuracy", "grad_norm")  # metrics of training
MAX_POINTS = 400
WINDOW_SHARE = 0.1  # share of the run over which metrics are averaged
PLATEAU_NATS = 0.1  # minimum distance below the loss of token frequencies that counts as progress
FAR_NATS = 0.5  # a difference of losses that is not noise
RATE_TOO_HIGH = "learning rate too high"
MAX_WEIGHTS_PER_TOKEN = 10.0  # encoder weights per token of text: the largest ratio of a run that learned; limits plans
# Layers and hidden size of the presets that `too_large` advises, the smallest first.
PRESETS = {"tiny": (2, 128), "mini": (4, 256), "small": (4, 512), "medium": (8, 512), "base": (12, 768)}


class Hint(NamedTuple):
    """A problem of a run: cause, observation and remedy."""

    cause: str
    observed: str
    remedy: str

    def __str__(self) -> str:
        return f"hint: {self.cause} ({self.observed}): {self.remedy}"


class Diagnosis:
    """Holds the hints of one run; lines of metrics are added one at a time."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        """Start with the manifest of a finished or unfinished run; rules that need a missing value are skipped."""
        self.hints: dict[str, Hint] = {}  # by cause
        self._total_steps = number_of(record, "length.steps")
        self._total_seconds = number_of(record, "length.seconds")
        self._warmup_share = _warmup_share(record)
        self._max_grad_norm = number_of(record, "config.train.max_grad_norm") or 1.0
        self._uses_muon = value_of(record, "config.train.optimizer") == "muon"
        self._entropy = number_of(record, "data.statistics.unigram_entropy.train")
        self._has_next_sentence = value_of(record, "data.statistics.next_sentence") == "nsp"
        self._first_step: int | None = None
        self._first_loss: float | None = None
        self._num_lines = 0  # of training
        self._num_steps = 0
        self._share = 0.0  # of the run
        self._points = 0  # begun so far
        self._means: dict[str, list[float]] = {name: [] for name in DIAGNOSED}  # one of each finished point
        self._newest: dict[str, list[float]] = {}  # values of the newest point

    def add(self, line: Mapping[str, Any]) -> list[Hint]:
        """Add a line of metrics, of training or of an evaluation, and return the new hints."""
        if self._first_step is None:
            self._first_step = line["step"]
        self._first_loss = self._first_loss or _number(line, "validation_mlm_loss") or _number(line, "mlm_loss")
        num_known = len(self.hints)
        if line.get("validation_mlm_loss", 0.0) is None:
            self._keep(_too_high("the held-out loss is not finite"))
        if "mlm_loss" in line and self._starts_point(line) and self._num_lines >= 10:  # fewer lines are too noisy
            self._keep(self._rate_too_high())
            self._keep(self._plateau())
            self._keep(self._no_next_sentence())
        return list(self.hints.values())[num_known:]

    def _keep(self, hint: Hint | None) -> None:
        if hint is not None:
            self.hints.setdefault(hint.cause, hint)

    def _starts_point(self, line: Mapping[str, Any]) -> bool:
        """Add a training line to the points and return whether it starts a new one."""
        self._num_lines += 1
        first_step = self._first_step or 0
        self._num_steps = line["step"] - first_step
        before = int(self._share * MAX_POINTS)
        if self._total_steps:
            self._share = self._num_steps / max(self._total_steps - first_step, 1)
        elif self._total_seconds:
            self._share = (_number(line, "elapsed_seconds") or 0.0) / self._total_seconds
        else:
            return False
        is_new = self._points == 0 or int(self._share * MAX_POINTS) > before
        if is_new:
            self._points += 1
            self._means = {name: self._values(name) for name in DIAGNOSED}
            self._newest = {}
        for name in DIAGNOSED:
            value = _number(line, name)
            if value is not None:
                self._newest.setdefault(name, []).append(value)
        return is_new

    def _values(self, name: str) -> list[float]:
        """Return a metric's mean in every point that has it."""
        newest = [fmean(self._newest[name])] if name in self._newest else []
        return self._means[name] + newest

    def _num_points(self, share: float, minimum: int) -> int:
        """Return the number of points in a share of the run, at least `minimum`."""
        return max(minimum, round(share * self._points / max(self._share, 1 / MAX_POINTS)))

    def _patience_share(self) -> float:
        """Return the share of the run that a plateau may last: 20,000 steps, limited to 10 % to 50 % of the run."""
        return min(0.5, max(0.1, 20_000 * self._share / max(self._num_steps, 1)))

    def _rate_too_high(self) -> Hint | None:
        """Return a hint if the loss or the gradient norm has risen far above earlier values."""
        n = self._num_points(0.02, 3)
        losses = self._values("mlm_loss")
        norms = self._values("grad_norm")
        if self._share < self._warmup_share or len(losses) < 2 * n:
            return None
        means_of_n = np.convolve(losses, np.full(n, 1 / n), "valid")
        best = min(float(means_of_n.min()), self._first_loss or math.inf)
        now = fmean(losses[-n:])
        if now > best + FAR_NATS:
            return _too_high(f"the loss of masked tokens rose from {best:.2f} to {now:.2f} nats")
        before = median(norms[:-n] or norms or [0.0])
        norm = min(norms[-n:], default=0.0)
        if norm > 10.0 * max(before, self._max_grad_norm):
            return _too_high(f"the gradient norm rose from {before:.2g} to {norm:.2g}")
        return None

    def _plateau(self) -> Hint | None:
        """Return a hint if the loss no longer falls but is not below that of token frequencies."""
        n = self._num_points(WINDOW_SHARE, 2)
        losses = self._values("mlm_loss")
        # In the last tenth the learning rate is too small for progress; `nothing_learned` judges the end.
        is_due = self._warmup_share + self._patience_share() <= self._share <= 1 - WINDOW_SHARE
        if self._entropy is None or len(losses) < 2 * n or not is_due:
            return None
        now = fmean(losses[-n:])
        is_falling = fmean(losses[-2 * n : -n]) - now > 0.03
        if now < self._entropy - PLATEAU_NATS or is_falling or self.hints.keys() & {"plateau", RATE_TOO_HIGH}:
            return None
        observed = (
            f"after {self._share:.0%} of the run the loss of masked tokens is {now:.2f} nats; token frequencies alone "
            f"give {self._entropy:.2f}"
        )
        if now > self._entropy + 0.2:  # no healthy loss stays so far above token frequencies
            return _too_high(observed)
        advice = "train for more steps" if self._uses_muon else "train for more steps, use train.optimizer=muon"
        return Hint(
            "plateau",
            observed,
            f"{advice}, or change train.peak_lr (tiny models need a higher one, deep models a lower one and a longer "
            "warm-up)",
        )

    def _no_next_sentence(self) -> Hint | None:
        """Return a hint if masked tokens are learned but next sentences are not."""
        n = self._num_points(self._patience_share(), 3)
        accuracies = self._values("nsp_accuracy")
        losses = self._values("mlm_loss")
        if self._entropy is None or not self._has_next_sentence or min(len(accuracies), len(losses)) < n:
            return None
        if self._num_steps < 3000:  # a healthy run may stay at chance for this long
            return None
        accuracy = max(fmean(accuracies[-n:]), fmean(accuracies[-self._num_points(WINDOW_SHARE, 3) :]))
        # Masked tokens count as learned 1 nat below token frequencies, and an accuracy up to 53 % as chance.
        if max(losses[-n:]) > self._entropy - 1.0 or accuracy > 0.53:
            return None
        return Hint(
            "next sentence not learned",
            f"its accuracy is {accuracy:.1%} although masked tokens are learned",
            "check with 'bert-pretrain inspect' that B continues A; if lines are shuffled or documents have no "
            "boundaries, fix the text or set data.next_sentence=none",
        )


def _warmup_share(record: Mapping[str, Any]) -> float:
    """Return the share of the run in which the learning rate rises."""
    share = number_of(record, "config.train.warmup_ratio") or 0.0
    steps = number_of(record, "length.steps")
    if not steps:
        return share
    warmup_steps = number_of(record, "config.train.warmup_steps")
    if warmup_steps is None:  # the learning rate schedule may be longer than the run, where phases share one
        warmup_steps = share * max(steps, number_of(record, "config.train.schedule_steps") or 0)
    return min(1.0, warmup_steps / steps)


def diagnose(record: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> list[Hint]:
    """Return the hints of a run from its manifest and its lines of `metrics.jsonl`, in the order they appear."""
    diagnosis = Diagnosis(record)
    for line in lines:
        diagnosis.add(line)
    final = nothing_learned(record, lines) if "progress" in record else None  # only after the end of the run
    hints = diagnosis.hints | ({final.cause: final} if final else {})
    return list(hints.values())


def nothing_learned(record: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Hint | None:
    """Return a hint if the final loss is no better than that of token frequencies.

    The last held-out loss is compared with the loss of the training frequencies on the held-out rows. Without held-out
    data, the last training loss is compared with the entropy of the training split.
    """
    references = (
        ("held-out", "validation_mlm_loss", frequency_loss(record)),
        ("training", "mlm_loss", number_of(record, "data.statistics.unigram_entropy.train")),
    )
    for kind, name, reference in references:
        losses = [_number(line, name) for line in lines if name in line]
        finite = [loss for loss in losses if loss is not None]
        if not finite or reference is None:
            continue
        if losses[-1] is None:
            return _too_high(f"at the end the {kind} loss of masked tokens is not finite")
        first = finite[0]
        last = finite[-1]
        if last < reference - PLATEAU_NATS:
            return None
        return Hint(
            "only token frequencies learned" if last < first - FAR_NATS else "nothing learned",
            f"the {kind} loss of masked tokens started at {first:.2f} and ended at {last:.2f} nats; the token "
            f"frequencies of the training data alone give {reference:.2f}",
            "train for more steps or with another train.peak_lr; check the data with 'bert-pretrain inspect'",
        )
    return None


def too_large(weights: int, tokens: float) -> Hint | None:
    """Return a hint if the encoder has far too many weights (in matrices) for a text of `tokens` tokens.

    The hint advises the largest smaller preset for which the text is enough, or else the smallest preset. The limit is
    twice that of `run auto`, which plans from an estimate of the tokens.
    """
    if weights <= 2 * MAX_WEIGHTS_PER_TOKEN * tokens:
        return None
    remedy = "add more text"
    sizes = {name: 12 * layers * hidden**2 for name, (layers, hidden) in PRESETS.items()}
    smaller = [name for name, size in sizes.items() if size < weights]
    enough = [name for name in smaller if sizes[name] <= MAX_WEIGHTS_PER_TOKEN * tokens]
    if smaller:
        remedy += f", or use a smaller model, such as --config {enough[-1] if enough else smaller[0]}"
    return Hint("little text for the model", f"{weights:,} encoder weights for {tokens:,.0f} tokens", remedy)


def _too_high(observed: str) -> Hint:
    return Hint(RATE_TOO_HIGH, observed, "lower train.peak_lr, or lengthen train.warmup_ratio")


def _number(line: Mapping[str, Any], name: str) -> float | None:
    """Return a metric of a line; None if it is missing or not finite."""
    value = line.get(name)
    return float(value) if value is not None and math.isfinite(value) else None
