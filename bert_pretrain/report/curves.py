"""The curves of runs, from their `metrics.jsonl`: losses and accuracies as one picture of panels.

Drawn for `report`, for `run`, and for the card of a finished model. Matplotlib is an extra, imported only here.
"""

import hashlib
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_pretrain.errors import ConfigError, DataError, OutputError, needs_extra
from bert_pretrain.io import manifest
from bert_pretrain.io.files import atomic_path, did_you_mean, parse_json

Metrics = list[dict[str, Any]]  # the lines of a run's metrics.jsonl

WRITTEN = ("time", "host", "job")  # of a line of metrics: when, and where
TASKS = {"nsp": ("next sentence", "NSP accuracy"), "sop": ("sentence order", "sentence-order accuracy")}
"""Metrics of both have the names of `nsp`."""


class Panel(NamedTuple):
    """One diagram: a metric of training and of evaluations, by step."""

    title: str
    unit: str
    training: str  # name in a line of training; empty for none
    validation: str = ""  # name in a line of an evaluation
    axis: tuple[float, ...] = (0.0,)  # values that the axis reaches at least, so that noise does not fill it
    chance: float | None = None  # what guessing gives
    is_share: bool = False


_MLM_LOSS = "mlm_loss"
PANELS = (
    Panel("masked tokens: loss", "nats per token", _MLM_LOSS, "validation_mlm_loss", axis=()),
    Panel("masked tokens: accuracy", "", "mlm_accuracy", "validation_mlm_accuracy", (0.0, 0.2), is_share=True),
    Panel("{pairs}: loss", "nats per pair", "nsp_loss", "validation_nsp_loss", (0.0, 0.75), math.log(2)),
    Panel("{pairs}: accuracy", "", "nsp_accuracy", "validation_nsp_accuracy", (0.4, 0.8), 0.5, is_share=True),
)
MORE_PANELS = (
    Panel("learning rate", "", "learning_rate"),
    Panel("gradient norm", "before clipping", "grad_norm"),
    Panel("speed", "tokens/s, without padding", "tokens_per_second"),
    Panel("waiting for data", "of the time", "data_wait_share", axis=(0.0, 0.05), is_share=True),
)


def run_folders(folder: Path) -> list[Path]:
    """Return a run folder, or those that `run` has written into a folder, in their order."""
    found = [path.parent for pattern in ("train", "train/*") for path in folder.glob(f"{pattern}/metrics.jsonl")]
    if not found or (folder / "metrics.jsonl").is_file():
        return [folder]
    return sorted(found, key=lambda run: (run / "metrics.jsonl").stat().st_mtime)


def draw_curves(runs: list[Path], output: Path) -> Path:
    """Draw losses and accuracies, in training and held out, of run folders into one picture and return its path."""
    figure = figure_of(runs, [manifest.read_record(run) for run in runs], [read_metrics(run) for run in runs], PANELS)
    return write_figure(figure, output)


def write_figure(figure: Any, output: Path) -> Path:
    """Write a picture, whose ending decides the format, and return its path."""
    ending = output.suffix.lstrip(".").lower()
    if ending not in figure.canvas.get_supported_filetypes():
        what = f"'{output.name}' does not end like a picture"
        raise ConfigError(what, where="--output", remedy="name it .png, .svg or .pdf")
    write_file(output, encoded(figure, ending))
    return output


def value_of(record: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path such as `length.steps`, None where there is none."""
    value: Any = record
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def number_of(record: Mapping[str, Any], path: str) -> float | None:
    """Return the number at a path, None where there is none, or none that a run writes."""
    value = value_of(record, path)
    return value if type(value) in (int, float) and (value == 0 or 1e-9 <= value <= 1e15) else None


def names_of_pairs(records: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """Return what the task of these runs' pairs is called, and its accuracy."""
    return TASKS["sop" if {value_of(each, "data.statistics.next_sentence") for each in records} == {"sop"} else "nsp"]


def read_metrics(run: Path) -> Metrics:
    """Return the lines of a run's `metrics.jsonl`."""
    path = run / "metrics.jsonl"
    remedy = "name a folder that 'bert-pretrain train' has written"
    if not path.is_file():
        remedy = did_you_mean(run, ("train", "train/*"), path.name) or remedy
        raise DataError(f"{run} has no metrics.jsonl", where="RUN_DIR", remedy=remedy)
    content = path.read_bytes()
    is_finished = (run / manifest.MANIFEST).is_file()
    written = value_of(manifest.read_record(run), "metrics.sha256") if is_finished else None
    if written is not None and hashlib.sha256(content).hexdigest() != written:
        raise DataError(
            "the metrics were changed after the run had finished",
            where=str(path),
            remedy="restore the file from a copy; alone in another folder it is read as it is",
        )
    lines = content.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # a run is writing it, or was killed while it did
    if not lines:
        raise DataError("there are no metrics yet", where=str(path), remedy="wait for the first line")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            found = parse_json(line.decode())
            if not isinstance(found, dict) or type(found.get("step")) is not int:
                raise ValueError("it has no step")
            record = {name: value for name, value in found.items() if name not in WRITTEN}
            for name, value in record.items():
                if not (value is None or (isinstance(value, int | float) and math.isfinite(value))):
                    raise ValueError(f"{name} is {str(value)[:40]}")
            records.append(record)
        except ValueError as error:
            raise DataError(f"not a line of metrics: {error}", where=f"{path}:{number}", remedy=remedy) from error
    return records


def encoded(figure: Any, form: str = "png") -> bytes:
    """Return a picture as the content of a file."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format=form)
    return picture.getvalue()


def figure_of(
    runs: list[Path], records: Sequence[Mapping[str, Any]], metrics: list[Metrics], panels: tuple[Panel, ...]
) -> Any:
    """Draw panels of run folders, whose manifests and metrics have been read."""
    drawn = {name for lines in metrics for line in lines for name, value in line.items() if value is not None}
    panels = tuple(panel for panel in panels if drawn & {panel.training, panel.validation})
    num_rows = max(1, math.ceil(len(panels) / 2))
    # Without pyplot, matplotlib needs no display and leaves no global state.
    with needs_extra("plot", "pictures", where="the extra 'plot'"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(10, 3 * num_rows))
    # Fixed margins: a layout by matplotlib would take as long as the drawing, at the end of every run.
    edge = 0.54 / (3 * num_rows)
    figure.subplots_adjust(left=0.1, right=0.98, bottom=edge, top=1 - edge * 2 / 3, wspace=0.3, hspace=0.35)
    pairs, names = names_of_pairs(records)[0], run_names(runs)
    for axes, panel in zip(figure.subplots(num_rows, 2).flat, panels, strict=False):
        _draw_panel(axes, panel._replace(title=panel.title.format(pairs=pairs)), names, metrics)
        _draw_references(axes, panel, records)
    for axes in figure.axes[len(panels) :]:
        axes.remove()
    return figure


def _draw_references(axes: Any, panel: Panel, records: Sequence[Mapping[str, Any]]) -> None:
    """Draw what a model would reach without learning: by chance, or by the frequencies of the tokens."""
    lines = [("chance", panel.chance)]
    if panel.training == _MLM_LOSS:
        sizes = {number_of(record, "data.statistics.vocab_size") for record in records}
        entropies = {frequency_loss(record) for record in records}
        # Runs on different data have no common line.
        size, entropy = (values.pop() if len(values) == 1 else None for values in (sizes, entropies))
        lines = [("all tokens equally likely", math.log(size) if size else None), ("token frequencies", entropy)]
    for (label, value), style in zip(lines, ("--", ":"), strict=False):
        if value is not None:
            axes.axhline(value, linestyle=style, color="black", linewidth=0.9, alpha=0.6, label=label)
    axes.legend(fontsize="x-small" if len(records) > 1 else "small", framealpha=0.6)


def frequency_loss(record: Mapping[str, Any]) -> float | None:
    """Return the held-out loss of a model that knows only how frequent each token is in training."""
    losses = [number_of(record, f"data.statistics.unigram_entropy.{split}") for split in ("validation", "train")]
    return next((loss for loss in losses if loss is not None), None)


def perplexity(loss: float) -> float:
    """Return e to the power of a loss in nats; finite for any loss."""
    return math.exp(min(loss, 700.0))


def run_names(runs: Sequence[Path]) -> list[str]:
    """Return the paths from the folder on that holds all of them."""
    paths = [run.resolve() for run in runs]
    base = Path(os.path.commonpath([path.parent for path in paths]))
    if len(paths) == 1 and paths[0].name == "train":  # of `run`, in whose folder it tells nothing
        base = base.parent
    return [str(path.relative_to(base)) for path in paths]


def _draw_panel(axes: Any, panel: Panel, names: list[str], metrics: list[Metrics]) -> None:
    for number, (run, lines) in enumerate(zip(names, metrics, strict=True)):
        # A dollar sign would begin a formula, an underscore hides a label.
        run = f"{' ' if run.startswith('_') else ''}{run}".replace("$", r"\$")
        prefix = f"{run}: " if len(names) > 1 else ""
        for name, label, style in ((panel.training, "training", "-"), (panel.validation, "held out", "o--")):
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            if points:
                width = 1.0 if name == panel.training else 1.6
                colour = f"C{number}" if len(names) > 1 else ("C0" if name == panel.training else "C1")
                steps, values = zip(*points, strict=True)
                style = style if len(points) > 1 else "o"  # a line has two points
                axes.plot(steps, values, style, label=prefix + label, color=colour, linewidth=width, markersize=4)
    axes.set(title=panel.title, xlabel="step", ylabel=panel.unit)
    axes.update_datalim([(axes.dataLim.x0, value) for value in panel.axis])
    axes.autoscale_view()
    if panel.is_share:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    axes.grid(alpha=0.3)


def write_file(path: Path, content: bytes) -> None:
    """Write a file that the user has asked for, atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        what = f"cannot write there: {error.strerror}"
        raise OutputError(what, where=str(path), remedy="name a file that you may write") from error
