"""Fit the loss curve of `bert_pretrain/plan/law.py` to measured runs, print its constants, validate and plot it.

    python scripts/fit_law.py [RUNS.jsonl] [--picture docs/law.png]

`scripts/bench_learning.py` writes the runs. The validation is leave-one-out: the runs of each network size, and of each
batch size, are forecast from a fit without them.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from measure import ROOT, Row, parser_of, read_rows
from scipy.optimize import least_squares

from bert_pretrain.plan import law
from bert_pretrain.plan.facts import Size
from bert_pretrain.plan.law import Curve
from bert_pretrain.report.use import VOCAB_POWER, VOCAB_SIZE

RUNS = ROOT / "docs" / "measured_runs.jsonl"
START = Curve(
    2.4,
    0.3,
    0.25,
    50.0,
    0.0,
)
# A lower bound: without long runs the fit does not determine the floor. Devlin et al. (2018, table 6) imply 2.5.
MIN_FLOOR = 2.0
ENGLISH_CONSTANTS = ("floor", "first", "power", "lost_steps")


def size_of(row: Row) -> Size:
    layers, hidden = map(int, row["size"].split("x"))
    return Size(layers, hidden)


def batch_of(row: Row) -> int:
    """Return the batch in tokens, rounded to a power of two."""
    return 1 << round(math.log2(row["tokens"] / row["steps"]))


def effective_tokens(row: Row) -> float:
    """Return the million tokens of a run, where repeated text counts less. Runs without `epochs` repeat no text."""
    return law.effective_tokens(row["tokens"] / 1e6, row.get("epochs", 1.0))


def start_of(row: Row) -> float:
    """Return the million tokens that the initial weights of a run are worth."""
    return law.worth_of_start(effective_tokens(row)) if row.get("init") == "cooccurrences" else 0.0


def loss_of(curve: Curve, row: Row) -> float:
    """Return the loss that a curve predicts for a run."""
    weights, tokens = size_of(row).weights / 1e6, effective_tokens(row)
    loss = curve.loss(
        weights,
        tokens,
        row["steps"],
        row["tokens"] / row["steps"],
        start=start_of(row),
    )
    return loss * (row["vocab_size"] / VOCAB_SIZE) ** VOCAB_POWER


def fits(rows: Sequence[Row]) -> dict[str, Curve]:
    """Return the curve of each language. Chinese has few runs: `first` and `power` are fitted to its runs."""
    english = fit(_of_language(rows, "en"), START, ENGLISH_CONSTANTS)
    return {"en": english, "zh": fit(_of_language(rows, "zh"), english, ("first", "power"))}


def fit(rows: Sequence[Row], start: Curve, names: tuple[str, ...]) -> Curve:
    """Fit the named constants of a curve, starting from their values in `start`."""

    def curve(parameters: np.ndarray, spread: float = 0.0) -> Curve:
        fitted = {name: round(float(value), 4) for name, value in zip(names, np.exp(parameters), strict=True)}
        return Curve(**{**start._asdict(), **fitted, "spread": spread})

    def log_ratios(parameters: np.ndarray) -> np.ndarray:
        candidate = curve(parameters)
        return np.log([loss_of(candidate, row) / row["mlm_loss"] for row in rows])

    first = np.log([getattr(start, name) for name in names])
    minimum = [math.log(MIN_FLOOR if name == "floor" else 1e-3) for name in names]
    parameters = least_squares(log_ratios, first, diff_step=1e-3, bounds=(minimum, np.inf)).x
    return curve(parameters, spread=round(float(np.abs(np.expm1(log_ratios(parameters))).max()), 4))


def vocab_power(rows: Sequence[Row], curve: Curve) -> float:
    """Return the power of the vocabulary size at which the curve matches the runs with other vocabulary sizes."""
    powers = []
    for row in rows:
        if row["vocab_size"] != VOCAB_SIZE:
            log_size = math.log(row["vocab_size"] / VOCAB_SIZE)
            powers.append(VOCAB_POWER + math.log(row["mlm_loss"] / loss_of(curve, row)) / log_size)
    return float(np.mean(powers))


def half_life(rows: Sequence[Row], curve: Curve) -> float:
    """Return the half-life of repeated text, in epochs, at which the curve matches the runs of ten epochs or more."""

    def log_ratios(half_lives: np.ndarray) -> np.ndarray:
        with mock.patch.object(law, "REPETITION_HALF_LIFE", float(half_lives[0])):
            return np.log([loss_of(curve, row) / row["mlm_loss"] for row in rows if row.get("epochs", 1.0) >= 10.0])

    return float(least_squares(log_ratios, [law.REPETITION_HALF_LIFE], diff_step=1e-3).x[0])


def nsp_curve(rows: Sequence[Row]) -> dict[str, float]:
    """Return the middle of the next-sentence curve of each language, in million tokens, and the power of both."""
    measured = [row for row in rows if row["nsp_accuracy"] is not None]
    tokens = np.array([effective_tokens(row) for row in measured])
    accuracies = np.array([row["nsp_accuracy"] for row in measured])
    is_chinese = np.array([row["language"] == "zh" for row in measured])

    def differences(parameters: np.ndarray) -> np.ndarray:
        english, chinese, power = np.exp(parameters)
        odds = (tokens / np.where(is_chinese, chinese, english)) ** power
        return 0.5 + (law.NSP_MAX - 0.5) * odds / (1.0 + odds) - accuracies

    return dict(zip(("en", "zh", "power"), np.exp(least_squares(differences, [1.0, 0.0, 0.0]).x).tolist(), strict=True))


def left_out(rows: Sequence[Row]) -> list[tuple[str, Row, float, bool]]:
    """Forecast each English run from a fit without its network size, and from a fit without its batch size.

    Returns the group that was left out, the run, the forecast loss, and whether the measured loss is in its range.
    """
    english = _of_language(rows, "en")
    below, above = law.MARGINS_BEYOND
    forecasts = []
    groups: dict[str, Callable[[Row], Any]] = {"size": size_of, "batch": batch_of}
    for name, key in groups.items():
        for value in sorted(set(map(key, english))):
            curve = fit([row for row in english if key(row) != value], START, ENGLISH_CONSTANTS)
            for row in (row for row in english if key(row) == value):
                loss = loss_of(curve, row)
                is_inside = -curve.spread - below <= row["mlm_loss"] / loss - 1.0 <= curve.spread + above
                forecasts.append((f"{name} {value}", row, loss, is_inside))
    return forecasts


def _of_language(rows: Sequence[Row], language: str) -> list[Row]:
    return [row for row in rows if row["language"] == language]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("runs", type=Path, nargs="?", default=RUNS)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    rows = read_rows(options.runs)
    curves = fits(rows)
    for language, curve in curves.items():
        print(f'"{language}": {curve}')
    english = _of_language(rows, "en")
    print(f"power of the vocabulary size: {vocab_power(english, curves['en']):.3f}")
    print(f"half-life of repeated text: {half_life(english, curves['en']):.1f} epochs")
    print("next sentence:", ", ".join(f"{name} {value:.2f}" for name, value in nsp_curve(rows).items()))
    forecasts = left_out(rows)
    for name, row, loss, is_inside in forecasts:
        verdict = "inside" if is_inside else "OUTSIDE"
        run = f"{size_of(row)}, {row['steps']:,} steps of {row['batch']}"
        deviation = row["mlm_loss"] / loss - 1.0
        print(f"without {name}: {run}: measured {row['mlm_loss']:.3f}, law {loss:.3f} ({deviation:+.1%}), {verdict}")
    num_inside = sum(is_inside for *_, is_inside in forecasts)
    print(f"measured losses inside the range of a forecast from other runs: {num_inside} of {len(forecasts)}")
    if options.picture:
        draw(rows, curves, options.picture)


def draw(rows: Sequence[Row], curves: dict[str, Curve], path: Path) -> None:
    """Plot the measured runs, and the fitted curves for the smallest batch, in one colour per network size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    colours = {size: f"C{number}" for number, size in enumerate(sorted({size_of(row) for row in rows}))}
    batch = law.BATCHES[0]
    tokens = np.geomspace(min(row["tokens"] for row in rows), 100e6, 80)
    for axes, language in zip(figure.subplots(1, 2, sharey=True), curves, strict=True):
        runs = [row for row in _of_language(rows, language) if not start_of(row)]
        for size in sorted({size_of(row) for row in runs}):
            losses = [curves[language].loss(size.weights / 1e6, each / 1e6, each / batch, batch) for each in tokens]
            axes.plot(
                tokens,
                losses,
                color=colours[size],
                linewidth=1,
                label=f"{size}, fitted",
            )
            measured = [(row["tokens"], row["mlm_loss"]) for row in runs if size_of(row) == size]
            axes.scatter(*zip(*measured, strict=True), color=colours[size], label=f"{size}, measured")
        axes.set(xscale="log", xlabel="tokens seen", title={"en": "English", "zh": "Chinese"}[language])
        axes.grid(alpha=0.3)
        axes.legend()
    figure.axes[0].set_ylabel("held-out loss, nats per masked token")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
