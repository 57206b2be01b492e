"""Fit the law of `bert_pretrain/plan/law.py` to measured runs, print its constants, test it, and draw it.

    python scripts/fit_law.py [RUNS.jsonl] [--picture docs/law.png]

`scripts/bench_learning.py` writes such runs. The test forecasts the runs of each network, and of each batch, from a fit
that has not seen them.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from bert_pretrain.plan import law
from bert_pretrain.plan.facts import Size
from bert_pretrain.plan.law import Curve
from bert_pretrain.report.use import VOCAB_POWER, VOCAB_SIZE

RUNS = Path(__file__).resolve().parents[1] / "docs" / "measured_runs.jsonl"
START = Curve(2.4, 0.3, 0.25, 50.0, 0.0)
LEAST_FLOOR = 2.0
"""The losses of Devlin et al. (2018, table 6) give 2.5. Fewer long runs than theirs leave the floor open to below."""
LANGUAGES = {"en": "English", "zh": "Chinese"}
Row = dict[str, Any]


def size_of(row: Row) -> Size:
    layers, hidden = map(int, row["size"].split("x"))
    return Size(layers, hidden)


def batch_of(row: Row) -> int:
    """Return the batch in tokens, as a power of two."""
    return 1 << round(math.log2(row["tokens"] / row["steps"]))


def loss_of(curve: Curve, row: Row) -> float:
    """Return the loss of a run by the law."""
    weights, tokens = size_of(row).weights / 1e6, row["tokens"] / 1e6
    loss = curve.loss(weights, tokens, row["steps"], row["tokens"] / row["steps"])
    return loss * (row["vocab_size"] / VOCAB_SIZE) ** VOCAB_POWER


def fits(rows: Sequence[Row]) -> dict[str, Curve]:
    """Return the curve of each language; that of Chinese, with fewer runs, shares the powers of the English one."""
    english = fit(_of(rows, "en"), START, ("floor", "first", "power", "lost_steps"))
    return {"en": english, "zh": fit(_of(rows, "zh"), english, ("first",))}


def fit(rows: Sequence[Row], start: Curve, names: tuple[str, ...]) -> Curve:
    """Fit the named constants, beginning with those of another curve; the others stay."""

    def curve(parameters: np.ndarray, spread: float = 0.0) -> Curve:
        fitted = {name: round(float(value), 4) for name, value in zip(names, np.exp(parameters), strict=True)}
        return Curve(**{**start._asdict(), **fitted, "spread": spread})

    def ratios(parameters: np.ndarray) -> np.ndarray:
        found = curve(parameters)
        return np.log([loss_of(found, row) / row["mlm_loss"] for row in rows])

    first = np.log([getattr(start, name) for name in names])
    least = [math.log(LEAST_FLOOR) if name == "floor" else -np.inf for name in names]
    found = least_squares(ratios, first, diff_step=1e-3, bounds=(least, np.inf)).x
    return curve(found, spread=round(float(np.abs(np.expm1(ratios(found))).max()), 4))


def vocab_power(rows: Sequence[Row], curve: Curve) -> float:
    """Return the power of the vocabulary's size by which the losses of other vocabularies are as the curve says."""
    found = []
    for row in rows:
        if row["vocab_size"] != VOCAB_SIZE:
            size = math.log(row["vocab_size"] / VOCAB_SIZE)
            found.append(VOCAB_POWER + math.log(row["mlm_loss"] / loss_of(curve, row)) / size)
    return float(np.mean(found))


def left_out(rows: Sequence[Row]) -> list[tuple[str, Row, float, bool]]:
    """Forecast each English run from a fit without its network, and one without its batch or larger ones.

    Returns what was left out, the run, the forecast, and whether the range of runs outside the fit contains the run.
    """
    english = _of(rows, "en")
    below, above = law.MARGINS_BEYOND
    found = []
    groups: list[tuple[Callable[[Row], Any], str]] = [(size_of, ""), (batch_of, "batches of {:,} tokens")]
    for key, name in groups:
        for value in sorted({key(row) for row in english}):
            curve = fit([row for row in english if key(row) != value], START, ("floor", "first", "power", "lost_steps"))
            for row in english:
                if key(row) == value:
                    loss = loss_of(curve, row)
                    low, high = loss * (1.0 - curve.spread - below), loss * (1.0 + curve.spread + above)
                    inside = low <= row["mlm_loss"] <= high
                    found.append((name.format(value) or str(value), row, loss, inside))
    return found


def _of(rows: Sequence[Row], language: str) -> list[Row]:
    return [row for row in rows if (row["language"] == "zh") == (language == "zh")]


def read(path: Path = RUNS) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="?", default=RUNS)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    rows = read(options.runs)
    curves = fits(rows)
    for language, curve in curves.items():
        print(f'"{language}": {curve}')
    print(f"power of the vocabulary's size: {vocab_power(_of(rows, 'en'), curves['en']):.3f}")
    forecasts = left_out(rows)
    for name, row, loss, inside in forecasts:
        verdict = "inside" if inside else "OUTSIDE"
        run = f"{size_of(row)}, {row['steps']:,} steps of {row['batch']}"
        deviation = row["mlm_loss"] / loss - 1.0
        print(f"without {name}: {run}: measured {row['mlm_loss']:.3f}, law {loss:.3f} ({deviation:+.1%}), {verdict}")
    number = sum(inside for *_, inside in forecasts)
    print(f"forecast contains the outcome, networks and batches outside the fit: {number} of {len(forecasts)}")
    if options.picture:
        draw(rows, curves, options.picture)


def draw(rows: Sequence[Row], curves: dict[str, Curve], path: Path) -> None:
    """Draw measured runs, and fitted curves for small batches, a colour for each size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    colours = {size: f"C{number}" for number, size in enumerate(sorted({size_of(row) for row in rows}))}
    for axes, (language, title) in zip(figure.subplots(1, 2, sharey=True), LANGUAGES.items(), strict=True):
        own = _of(rows, language)
        tokens = np.geomspace(min(row["tokens"] for row in rows), 100e6, 80)
        for size in sorted({size_of(row) for row in own}):
            losses = [
                curves[language].loss(size.weights / 1e6, each / 1e6, each / law.BATCHES[0], law.BATCHES[0])
                for each in tokens
            ]
            axes.plot(tokens, losses, color=colours[size], linewidth=1, label=f"{size}, fitted")
            measured = [(row["tokens"], row["mlm_loss"]) for row in own if size_of(row) == size]
            axes.scatter(*zip(*measured, strict=True), color=colours[size], label=f"{size}, measured")
        axes.set(xscale="log", xlabel="tokens seen", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.axes[0].set_ylabel("held-out loss, nats per masked token")
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
