"""Fit the law of `bert_pretrain/plan/law.py` to measured runs, print its constants, and draw it.

    python scripts/fit_law.py [RUNS.jsonl] [--picture docs/law.png]

`scripts/bench_learning.py` writes such runs.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from bert_pretrain.plan.law import Loss
from bert_pretrain.plan.machine_facts import Size

RUNS = Path(__file__).with_name("learning_runs.jsonl")
FIGURES = ("nats_per_byte", "mlm_loss")


def size_of(row: dict[str, Any]) -> Size:
    layers, hidden = map(int, row["size"].split("x"))
    return Size(layers, hidden)


def fit(rows: Sequence[dict[str, Any]], figure: str, like: Loss | None = None) -> Loss:
    """Fit the form to runs; with `like`, only factors, the powers being those of another fit (few runs)."""
    weights = np.array([size_of(row).weights for row in rows]) / 1e6
    tokens = np.array([row["tokens"] for row in rows]) / 1e6
    values = np.array([row[figure] for row in rows])

    def predicted(parameters: np.ndarray) -> np.ndarray:
        floor, a, alpha, b, beta = full(parameters)
        return floor + a * weights**-alpha + b * tokens**-beta

    def full(parameters: np.ndarray) -> np.ndarray:
        if like is None:
            return np.exp(parameters)
        scale = np.exp(parameters[0])
        return np.array(
            [scale * like.floor, scale * like.size_factor, like.size_power, scale * like.token_factor, like.token_power]
        )

    start = np.log([values.min() / 2, 0.2, 0.3, values.max() / 2, 0.3]) if like is None else np.zeros(1)
    found = least_squares(lambda p: np.log(predicted(p) / values), start, loss="soft_l1", f_scale=0.02)
    floor, a, alpha, b, beta = full(found.x)
    spread = float(np.abs(predicted(found.x) / values - 1.0).max())
    return Loss(*(round(float(value), 4) for value in (floor, a, alpha, b, beta, spread)))


def fits(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Loss]]:
    """Return the fit of each figure for each language."""
    english = [row for row in rows if row["corpus"].startswith("en")]
    chinese = [row for row in rows if row["corpus"].startswith("zh")]
    found = {"en": {figure: fit(english, figure) for figure in FIGURES}}
    found["zh"] = {figure: fit(chinese, figure, like=found["en"][figure]) for figure in FIGURES}
    return found


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="?", default=RUNS)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    rows = read(options.runs)
    found = fits(rows)
    for language, losses in found.items():
        for figure, loss in losses.items():
            print(f"{language} {figure:<14}{loss}")
    if options.picture:
        draw(rows, found, options.picture)


def draw(rows: Sequence[dict[str, Any]], found: dict[str, dict[str, Loss]], path: Path) -> None:
    """Draw measured runs and fitted curves, a colour for each size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, (language, title) in zip(figure.subplots(1, 2), (("en", "English"), ("zh", "Chinese")), strict=True):
        own = [row for row in rows if row["corpus"].startswith(language)]
        for number, size in enumerate(sorted({size_of(row) for row in own})):
            of_size = [row for row in own if size_of(row) == size]
            tokens = np.geomspace(min(row["tokens"] for row in own), max(row["tokens"] for row in own), 50)
            colour = f"C{number}"
            loss = found[language]["nats_per_byte"]
            axes.plot(tokens, [loss.at(size.weights, each) for each in tokens], color=colour, linewidth=1)
            axes.scatter(
                [row["tokens"] for row in of_size],
                [row["nats_per_byte"] for row in of_size],
                color=colour,
                label=f"L{size.layers}-H{size.hidden}",
            )
        axes.set(xscale="log", xlabel="tokens seen", ylabel="nats per byte of masked words", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
