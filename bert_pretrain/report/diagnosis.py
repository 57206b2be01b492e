"""What goes wrong in a run, each cause named once with its remedy: hints, for `train` and `report` alike.

A pure function of the run's record (length, configuration and statistics of the data, as its manifest holds them) and
of the lines of `metrics.jsonl` so far, so that `report` finds the hints that `train` printed. Lines are summed up by
their place in the run, so that the work and the memory do not grow with its length. Thresholds are chosen such that
healthy runs give no hint: `tests/report/test_diagnosis.py` has some.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from bert_pretrain.report.data_hints import Hint, data_hints
from bert_pretrain.report.run_record import data_statistics_of

NUM_POINTS = 400
"""Points that the lines of a run are summed up to, at most."""
MIN_LINES = 10
"""Lines of training before which nothing is said of how it goes."""
SHORT, LONG = 0.05, 0.1
"""Shares of the run over which figures are averaged."""

PATIENCE_STEPS, PATIENCE_SHARES = 20_000, (0.1, 0.5)
"""Steps, within shares of the run: healthy runs have left the loss of token frequencies so long after the warm-up, and
chance at next sentences so long after masked tokens are learnt."""
PLATEAU_NATS, STEADY_NATS = 0.1, 0.03
"""Distance from the loss of token frequencies that is no progress yet; and the fall in a tenth that is some."""
FAR_NATS = 0.5
"""Distance from a loss that is not noise."""
ABOVE_START_NATS, ABOVE_PLATEAU_NATS = 0.3, 0.2
"""Where no healthy loss is after the warm-up: above the first one, or for long above that of token frequencies."""
STUCK_SHARE = 0.05
"""Of what a loss has fallen so far: it no longer falls."""
ABOUT_LOSS = ("learning rate too high", "learning rate too low", "plateau")
"""After one of these causes no other is given for a loss that does not fall."""
NSP_NATS, NSP_CHANCE = 1.0, 0.53
"""How far masked tokens are learnt before next sentences must be, and the accuracy that is chance."""
NORM_FACTOR = 10.0
OVERFIT_NATS, OVERFIT_EVALUATIONS = 0.1, 3
SLOW_FACTOR, SLOW_SECONDS = 7.0, 5.0
"""An interval so many times slower than the median, and so long that it matters. Busy machines reach a factor of 6."""
_LOSSES = {"validation_mlm_loss": ("validation", "held-out"), "mlm_loss": ("train", "training")}
"""The figures that tell whether a model has learnt anything, the better one first."""
MEMORY_SHARE, MEMORY_BYTES, MEMORY_POINTS = 0.1, 64 << 20, 10
"""Growth within a tenth of the run."""


@dataclass
class _Point:
    """Figures of training over a short stretch of the run: means, but of memory the last."""

    share: float
    lines: int
    means: dict[str, float]
    memory: float

    def add(self, figures: Mapping[str, float], memory: float) -> None:
        self.lines += 1
        self.memory = memory
        for name, value in figures.items():
            mean = self.means.setdefault(name, value)
            self.means[name] = mean + (value - mean) / self.lines


class _Evaluation(NamedTuple):
    share: float
    loss: float


class Diagnosis:
    """The hints of one run, from its lines of metrics one after the other."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        """Begin a run.

        Args:
            record: of its manifest, finished or partial: `length`, `config` and `data`. What is not there, as in the
                folders of older versions, is not judged.
        """
        self.hints: list[Hint] = []
        length, train = record.get("length") or {}, (record.get("config") or {}).get("train", {})
        data = data_statistics_of(record)
        self._data, self._steps, self._seconds = data, length.get("steps"), length.get("seconds")
        self._warmup = train.get("warmup_ratio") or 0.0
        if self._steps:  # of which the schedule may span more, where phases share one
            of_schedule = self._warmup * max(self._steps, train.get("schedule_steps") or 0)
            warmup_steps = train.get("warmup_steps")
            self._warmup = min(1.0, (of_schedule if warmup_steps is None else warmup_steps) / self._steps)
        self._max_grad_norm = train.get("max_grad_norm") or 1.0
        self._first_step: int | None = None
        self._start: float | None = None  # the first loss
        self._num_lines, self._num_steps, self._elapsed, self._share = 0, 0, 0.0, 0.0
        self._points: list[_Point] = []
        self._evaluations: list[_Evaluation] = []

    def add(self, line: Mapping[str, Any]) -> list[Hint]:
        """Take a line of metrics, of training or of an evaluation, and return the hints that it gives rise to."""
        found = data_hints(self._data) if self._first_step is None else []
        self._first_step = line["step"] if self._first_step is None else self._first_step
        if self._start is None:
            self._start = _number(line, "validation_mlm_loss") or _number(line, "mlm_loss")
        rules: list[Callable[[], Hint | None]] = []
        if "validation_mlm_loss" in line:
            loss = _number(line, "validation_mlm_loss")
            if loss is not None:
                self._evaluations.append(_Evaluation(self._share, loss))
                rules = [self._overfits]
        elif "mlm_loss" in line:
            slow = self._is_slow(line)
            found += [slow] if slow else []
            if self._take(line) and self._num_lines >= MIN_LINES:
                rules = [self._rate_too_high, self._rate_unfit, self._plateau, self._no_next_sentence, self._memory]
        for rule in rules:
            hint = rule()
            found += [hint] if hint else []
        given = {hint.cause for hint in self.hints}
        new = [hint for hint in found if hint.cause not in given]
        self.hints += new
        return new

    def _take(self, line: Mapping[str, Any]) -> bool:
        """Add a line of training to the points; returns whether it begins one."""
        self._num_lines += 1
        self._elapsed = _number(line, "elapsed_seconds") or 0.0
        first = self._first_step or 0
        self._num_steps = line["step"] - first
        if self._steps:
            self._share = self._num_steps / max(self._steps - first, 1)
        elif self._seconds:
            self._share = self._elapsed / self._seconds
        else:
            return False
        names = ("mlm_loss", "nsp_accuracy", "grad_norm", "tokens_per_second")
        figures = {name: value for name in names if (value := _number(line, name)) is not None}
        memory = _number(line, "peak_memory_bytes") or 0.0
        is_new = not self._points or int(self._share * NUM_POINTS) > int(self._points[-1].share * NUM_POINTS)
        if is_new:
            self._points.append(_Point(self._share, 0, {}, 0.0))
        self._points[-1].add(figures, memory)
        return is_new

    def _number_of_points(self, share: float, at_least: int) -> int:
        """Return how many points a share of the run has."""
        return max(at_least, round(share * len(self._points) / max(self._share, 1 / NUM_POINTS)))

    def _has(self, *causes: str) -> bool:
        return any(hint.cause in causes for hint in self.hints)

    def _values(self, name: str, since: float = 0.0, until: float = math.inf) -> list[float]:
        """Return a figure of every point that has it, between two shares of the run."""
        return [point.means[name] for point in self._points if name in point.means and since <= point.share <= until]

    def _losses(self, share: float) -> tuple[float, float] | None:
        """Return the loss of masked tokens over the last share of the run, and over the share before it."""
        number, losses = self._number_of_points(share, 2), self._values("mlm_loss")
        if len(losses) < 2 * number:
            return None
        return _mean(losses[-number:]), _mean(losses[-2 * number : -number])

    def _entropy(self, split: str = "train") -> float | None:
        entropy: float | None = (self._data.get("unigram_entropy") or {}).get(split)
        return entropy

    def _rate_too_high(self) -> Hint | None:
        """The loss is far above what it was, or the gradients are."""
        number, losses, norms = self._number_of_points(0.02, 3), self._values("mlm_loss"), self._values("grad_norm")
        if self._share < self._warmup or len(losses) < 2 * number:
            return None
        held_out = [each.loss for each in self._evaluations if each.share >= self._warmup]
        peak = max([*self._values("mlm_loss", since=self._warmup), *held_out], default=0.0)
        if self._start is not None and peak > self._start + ABOVE_START_NATS:
            return _too_high(f"the loss of masked tokens rose from {self._start:.2f} to {peak:.2f} nats")
        sums = [0.0, *itertools.accumulate(losses)]
        best = min(after - before for before, after in zip(sums, sums[number:], strict=False)) / number
        now = _mean(losses[-number:])
        if now > best + FAR_NATS:
            return _too_high(f"the loss of masked tokens rose from {best:.2f} to {now:.2f} nats")
        before, norm = statistics.median(norms[:-number] or norms), min(norms[-number:], default=0.0)
        if norm > NORM_FACTOR * max(before, self._max_grad_norm):
            return _too_high(f"the gradient norm rose from {before:.2g} to {norm:.2g}")
        return None

    def _rate_unfit(self) -> Hint | None:
        """After the warm-up, the loss will not even come near to that of token frequencies."""
        entropy, losses = self._entropy(), self._losses(SHORT)
        if entropy is None or losses is None or self._has(*ABOUT_LOSS):
            return None
        if self._share < max(0.1, self._warmup) + SHORT:
            return None
        now, before = losses
        # The learning rate falls, too: half of what is left at the present speed.
        possible = (before - now) * (1 - self._share) / SHORT / 2
        if now < entropy + FAR_NATS or now - possible < entropy or now > before + STEADY_NATS:
            return None
        where = f"the loss of masked tokens is {now:.2f} nats, that of token frequencies alone {entropy:.2f}"
        fallen = (self._start or now) - now
        if fallen > FAR_NATS and before - now < STUCK_SHARE * fallen:
            return _too_high(where)
        return Hint("learning rate too low", where, f"raise train.peak_lr ({self._share:.0%} of the run is done)")

    def _expected_share(self) -> float:
        """Return the share of the run that a model needs for its first steps away from chance."""
        least, most = PATIENCE_SHARES
        return min(most, max(least, PATIENCE_STEPS * self._share / max(self._num_steps, 1)))

    def _plateau(self) -> Hint | None:
        """The loss stays that of token frequencies."""
        entropy, losses = self._entropy(), self._losses(LONG)
        if entropy is None or losses is None or self._has(*ABOUT_LOSS):
            return None
        if self._share < self._warmup + self._expected_share():
            return None
        now, before = losses
        if not entropy - PLATEAU_NATS < now < entropy + FAR_NATS or before - now > STEADY_NATS:
            return None
        observed = f"after {self._share:.0%} of the run the loss of masked tokens is {now:.2f} nats, that of token "
        observed += f"frequencies {entropy:.2f}"
        if now > entropy + ABOVE_PLATEAU_NATS:
            return _too_high(observed)
        return Hint(
            "plateau",
            observed,
            "train for more steps, use train.optimizer=muon, or change train.peak_lr (tiny models need more, deep ones "
            "less and a longer warm-up)",
        )

    def _no_next_sentence(self) -> Hint | None:
        """Masked tokens are learnt, next sentences are not."""
        entropy, number = self._entropy(), self._number_of_points(self._expected_share(), 3)
        accuracies, losses = self._values("nsp_accuracy"), self._values("mlm_loss")
        if entropy is None or len(accuracies) < number or self._data.get("next_sentence") != "nsp":
            return None
        accuracy = max(_mean(accuracies[-number:]), _mean(accuracies[-self._number_of_points(LONG, 3) :]))
        if max(losses[-number:]) > entropy - NSP_NATS or accuracy > NSP_CHANCE:
            return None
        return Hint(
            "next sentence not learnt",
            f"its accuracy is {accuracy:.1%} while masked tokens are learnt",
            "check with 'bert-pretrain inspect' that B continues A; if lines are shuffled or documents have no "
            "boundaries, fix the text, or set data.next_sentence=none",
        )

    def _overfits(self) -> Hint | None:
        """The held-out loss rises while the training loss falls."""
        best = min(self._evaluations, key=lambda evaluation: evaluation.loss)
        last, since = self._evaluations[-1], [each for each in self._evaluations if each.share > best.share]
        if len(since) < OVERFIT_EVALUATIONS or last.loss < best.loss + OVERFIT_NATS:
            return None
        if min(each.loss for each in since[-OVERFIT_EVALUATIONS:]) < best.loss + OVERFIT_NATS / 4:
            return None
        number = self._number_of_points(SHORT, 2)
        losses, until_best = self._values("mlm_loss"), self._values("mlm_loss", until=best.share)
        if not until_best or _mean(losses[-number:]) > _mean(until_best[-number:]) - STEADY_NATS:
            return None
        return Hint(
            "overfitting",
            f"the held-out loss rose from {best.loss:.2f} to {last.loss:.2f} nats while the training loss fell",
            "use more text, fewer steps, data.masking=dynamic, train.weight_decay=1, or a smaller model",
        )

    def _is_slow(self, line: Mapping[str, Any]) -> Hint | None:
        """An interval is far slower than those before it."""
        speeds, speed = self._values("tokens_per_second"), _number(line, "tokens_per_second")
        seconds = (_number(line, "elapsed_seconds") or 0.0) - self._elapsed
        if len(speeds) < MIN_LINES // 2 or not speed or seconds < SLOW_SECONDS:
            return None
        usual = statistics.median(speeds)
        if speed > usual / SLOW_FACTOR:
            return None
        return Hint(
            "slow machine",
            f"{speed:,.0f} tokens/s, a {usual / speed:.0f}th of the {usual:,.0f} before",
            "look for another process on this machine, a device that throttles, or a slow disk (data_wait_share)",
        )

    def _memory(self) -> Hint | None:
        """Memory grows steadily."""
        number = min(self._number_of_points(LONG, MEMORY_POINTS), max(len(self._points) - 2, 0))
        memory = [point.memory for point in self._points[-number:]]
        if number < MEMORY_POINTS or not memory[0]:
            return None
        marks = [memory[round(quarter * (number - 1) / 4)] for quarter in range(5)]
        growth = marks[-1] - marks[0]
        steps = [after - before for before, after in itertools.pairwise(marks)]
        if growth < max(MEMORY_SHARE * marks[0], MEMORY_BYTES) or min(steps) < 0.6 * growth / 4:
            return None
        return Hint(
            "memory grows",
            f"from {marks[0] / 1e9:.2f} to {marks[-1] / 1e9:.2f} GB in {number} intervals, and steadily",
            "stop and resume before it is used up (the same command continues), and report it with these metrics",
        )


def diagnose(record: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> list[Hint]:
    """Return the hints of a run, in the order in which its lines give rise to them.

    Args:
        record: as for `Diagnosis`.
        lines: of its `metrics.jsonl`.
    """
    diagnosis, lines = Diagnosis(record), list(lines)
    for line in lines:
        diagnosis.add(line)
    final = nothing_learnt(record, lines) if "progress" in record else None  # else the run is not finished
    return diagnosis.hints + ([final] if final else [])


def nothing_learnt(record: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> Hint | None:
    """Return a hint if a model is no better than the frequencies of the tokens, which need no network.

    It compares the last held-out loss, or that of training where nothing is held out, with the entropy of the split.

    Args:
        record: as for `Diagnosis`.
        lines: of its `metrics.jsonl`, at least the last ones.
    """
    entropies = data_statistics_of(record).get("unigram_entropy") or {}
    last = {name: value for line in lines for name in _LOSSES if (value := _number(line, name)) is not None}
    for name, (split, what) in _LOSSES.items():
        if name in last and entropies.get(split) is not None:
            if last[name] < entropies[split] - PLATEAU_NATS:
                return None
            return Hint(
                "nothing learnt",
                f"the {what} loss of masked tokens ended at {last[name]:.2f} nats; the frequencies of the tokens alone "
                f"give {entropies[split]:.2f}",
                "train for more steps or with another train.peak_lr; check the data with 'bert-pretrain inspect'",
            )
    return None


def _too_high(observed: str) -> Hint:
    return Hint("learning rate too high", observed, "lower train.peak_lr, or lengthen train.warmup_ratio")


_mean = statistics.fmean


def _number(line: Mapping[str, Any], name: str) -> float | None:
    """Return a figure of a line, None where it is not there or not finite."""
    value = line.get(name)
    return float(value) if value is not None and math.isfinite(value) else None
