"""Fit the law of `bert_pretrain/plan/law.py` to measured runs, print its constants, and draw it.

    python scripts/fit_law.py [RUNS.jsonl] [--picture docs/law.png]

`scripts/bench_learning.py` writes such runs.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from bert_pretrain.plan.law import Curve
from bert_pretrain.plan.machine_facts import Size

RUNS = Path(__file__).with_name("measured_runs.jsonl")
START = Curve(2.4, 0.3, 0.25, 0.0)
LEAST_FLOOR = 2.0
"""The losses of Devlin et al. (2018, table 6) give 2.5. Fewer long runs than theirs leave the floor open to below."""
LANGUAGES = {"en": "English", "zh": "Chinese"}


def size_of(row: dict[str, Any]) -> Size:
    layers, hidden = map(int, row["size"].split("x"))
    return Size(layers, hidden)


def fits(rows: Sequence[dict[str, Any]]) -> dict[str, Curve]:
    """Return the curve of each language; that of Chinese, with fewer runs, shares the powers of the English one."""
    english = fit(_of(rows, "en"), START, ("floor", "first", "power"))
    return {"en": english, "zh": fit(_of(rows, "zh"), english, ("first",))}


def fit(rows: Sequence[dict[str, Any]], start: Curve, names: tuple[str, ...]) -> Curve:
    """Fit the named constants, beginning with those of another curve; the others stay."""

    def curve(parameters: np.ndarray, spread: float = 0.0) -> Curve:
        fitted = {name: round(float(value), 4) for name, value in zip(names, np.exp(parameters), strict=True)}
        return Curve(**{**start._asdict(), **fitted, "spread": spread})

    def ratios(parameters: np.ndarray) -> np.ndarray:
        found = curve(parameters)
        losses = [found.loss(size_of(row).weights / 1e6, row["tokens"] / 1e6) for row in rows]
        return np.log(np.array(losses) / np.array([row["mlm_loss"] for row in rows]))

    first = np.log([getattr(start, name) for name in names])
    least = [math.log(LEAST_FLOOR) if name == "floor" else -np.inf for name in names]
    found = least_squares(ratios, first, diff_step=1e-3, bounds=(least, np.inf)).x
    return curve(found, spread=round(float(np.abs(np.expm1(ratios(found))).max()), 4))


def _of(rows: Sequence[dict[str, Any]], language: str) -> list[dict[str, Any]]:
    return [row for row in rows if (row["language"] == "zh") == (language == "zh")]


def read(path: Path = RUNS) -> list[dict[str, Any]]:
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
    if options.picture:
        draw(rows, curves, options.picture)


def draw(rows: Sequence[dict[str, Any]], curves: dict[str, Curve], path: Path) -> None:
    """Draw measured runs and fitted curves, a colour for each size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    colours = {size: f"C{number}" for number, size in enumerate(sorted({size_of(row) for row in rows}))}
    for axes, (language, title) in zip(figure.subplots(1, 2, sharey=True), LANGUAGES.items(), strict=True):
        own = _of(rows, language)
        tokens = np.geomspace(min(row["tokens"] for row in rows), 100e6, 80)
        for size in sorted({size_of(row) for row in own}):
            losses = [curves[language].loss(size.weights / 1e6, each / 1e6) for each in tokens]
            label = f"L{size.layers}-H{size.hidden}"
            axes.plot(tokens, losses, color=colours[size], linewidth=1, label=f"{label}, fitted")
            measured = [(row["tokens"], row["mlm_loss"]) for row in own if size_of(row) == size]
            axes.scatter(*zip(*measured, strict=True), color=colours[size], label=f"{label}, measured")
        axes.set(xscale="log", xlabel="tokens seen", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.axes[0].set_ylabel("held-out loss, nats per masked token")
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
