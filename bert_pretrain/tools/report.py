"""`report`: the curves of one or several runs as a picture, from their `metrics.jsonl`."""

import json
from pathlib import Path
from typing import Any

from bert_pretrain.errors import ConfigError, DataError, OutputError

# (title, unit, training's name, validation's name) of each panel
PANELS = (
    ("masked words: loss", "nats a word", "mlm_loss", "validation_mlm_loss"),
    ("masked words: accuracy", "share", "mlm_accuracy", "validation_mlm_accuracy"),
    ("next sentence: loss", "nats a pair", "nsp_loss", "validation_nsp_loss"),
    ("next sentence: accuracy", "share", "nsp_accuracy", "validation_nsp_accuracy"),
)


def draw_curves(runs: list[Path], output: Path) -> Path:
    """Draw losses and accuracies, in training and held out, of run folders into one picture and return its path.

    Args:
        runs: run folders, finished or not.
        output: the picture; its ending decides the format.

    Raises:
        ConfigError: when matplotlib is not installed or does not know the ending.
        DataError: when a run has no readable metrics.
    """
    tables = [read_metrics(run) for run in runs]
    figure_type = _matplotlib_figure()
    figure = figure_type(figsize=(11, 7), layout="constrained")
    for axes, panel in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        _draw_panel(axes, panel, runs, tables)
    if output.suffix.lstrip(".").lower() not in figure.canvas.get_supported_filetypes():
        raise ConfigError(
            f"'{output.name}' has no ending of a picture", where="--output", remedy="name it .png, .svg or .pdf"
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=120)
    except OSError as error:
        raise OutputError(
            f"cannot write there: {error.strerror}", where=str(output), remedy="name a file that you may write"
        ) from error
    return output


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's `metrics.jsonl`.

    Raises:
        DataError: when it is missing, empty or broken.
    """
    path = run / "metrics.jsonl"
    remedy = "name a folder that 'bert-pretrain train' has written"
    if not path.is_file():
        raise DataError(f"{run} has no metrics.jsonl", where="RUN_DIR", remedy=remedy)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # a run is just writing it, or was killed while it did
    if not lines:
        raise DataError("there are no figures yet", where=str(path), remedy="wait for the first line")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise DataError(f"not JSON: {error}", where=f"{path}:{number}", remedy=remedy) from error
    return records


def _draw_panel(
    axes: Any, panel: tuple[str, str, str, str], runs: list[Path], tables: list[list[dict[str, Any]]]
) -> None:
    title, unit, training, validation = panel
    for number, (run, table) in enumerate(zip(runs, tables, strict=True)):
        prefix = f"{run.resolve().name}: " if len(runs) > 1 else ""
        for name, label, style in ((training, "training", "-"), (validation, "held out", "o--")):
            points = [(line["step"], line[name]) for line in table if line.get(name) is not None]
            if points:
                width = 1.0 if name == training else 1.6
                colour = f"C{number}" if len(runs) > 1 else ("C0" if name == training else "C1")
                steps, values = zip(*points, strict=True)
                axes.plot(steps, values, style, label=prefix + label, color=colour, linewidth=width, markersize=4)
    if not axes.has_data():  # without pairs there is no next sentence
        axes.set_axis_off()
        return
    axes.set(title=title, xlabel="step", ylabel=unit)
    axes.grid(alpha=0.3)
    axes.legend()


def _matplotlib_figure() -> Any:
    """Return matplotlib's figure class; used without pyplot, it needs no display and leaves no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "matplotlib is not installed, and pictures need it",
            where="the extra 'plot'",
            remedy="pip install 'bert-pretrain[plot]'",
        ) from error
    return Figure
