"""Draw the curves of runs from their `metrics.jsonl`: one picture with a panel per metric.

`report`, `run` and the model card use it. Matplotlib is an optional dependency, imported only here.
"""

import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_pretrain.errors import ConfigError, OutputError, needs_extra
from bert_pretrain.io import manifest
from bert_pretrain.io.files import atomic_path
from bert_pretrain.metrics import Metrics, frequency_loss, number_of, read_metrics, value_of

IMAGE_FORMATS = ("png", "svg", "pdf", "jpg", "jpeg", "webp", "tif", "tiff")
# The name of each sentence-pair task and of its accuracy; metrics.jsonl uses the prefix `nsp` for both.
TASKS = {"nsp": ("next sentence", "NSP accuracy"), "sop": ("sentence order", "sentence-order accuracy")}


class Panel(NamedTuple):
    """One diagram: a metric by step, in training and in evaluations."""

    title: str
    unit: str
    training: str  # metric in training lines
    validation: str = ""  # metric in evaluation lines
    axis: tuple[float, ...] = (0.0,)  # values that the axis always includes, so that noise does not fill the panel
    chance: float | None = None  # value of random guesses
    is_share: bool = False


PANELS = (
    Panel("masked tokens: loss", "nats per token", "mlm_loss", "validation_mlm_loss", axis=()),
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
    """Return the folders with metrics in an output of the command `run`, oldest first, or else the folder alone."""
    files = [path for pattern in ("train", "train/*") for path in folder.glob(f"{pattern}/metrics.jsonl")]
    if not files or (folder / "metrics.jsonl").is_file():
        return [folder]
    return [file.parent for file in sorted(files, key=lambda file: file.stat().st_mtime)]


def draw_curves(runs: Sequence[Path], output: Path) -> bool:
    """Draw the losses and accuracies of run folders into one picture. Return whether this succeeded.

    Print errors instead of raising them. Raise only if memory or disk runs out: the same command can draw later.
    """
    try:
        records, metrics = [manifest.read_record(run) for run in runs], [read_metrics(run) for run in runs]
        write_figure(make_figure(runs, records, metrics, PANELS), output)
    except (MemoryError, OutputError):
        raise
    except Exception as error:
        print(f"no curves were drawn: {error or type(error).__name__}")
        return False
    return True


def write_figure(figure: Any, output: Path) -> None:
    """Write a figure in the format of the file's ending."""
    file_format = output.suffix.lstrip(".").lower()
    if file_format not in IMAGE_FORMATS:
        what = f"'{output.name}' does not end in an image format"
        raise ConfigError(what, where="--output", remedy="use .png, .svg or .pdf")
    write_file(output, image_bytes(figure, file_format))


def pair_task_names(records: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the name of the runs' sentence-pair task and the name of its accuracy."""
    tasks = {value_of(record, "data.statistics.next_sentence") for record in records}
    return TASKS["sop" if tasks == {"sop"} else "nsp"]


def image_bytes(figure: Any, file_format: str = "png") -> bytes:
    """Return a figure as the bytes of an image file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120, format=file_format)
    return buffer.getvalue()


def make_figure(
    runs: Sequence[Path], records: Sequence[Mapping[str, Any]], metrics: list[Metrics], panels: tuple[Panel, ...]
) -> Any:
    """Draw the panels that have metrics, given the manifests and the metrics of run folders."""
    names = {name for lines in metrics for line in lines for name, value in line.items() if value is not None}
    panels = tuple(panel for panel in panels if names & {panel.training, panel.validation})
    num_rows = max(1, math.ceil(len(panels) / 2))
    with needs_extra("plot", "pictures", where="the extra 'plot'"):
        from matplotlib.figure import Figure  # unlike pyplot, it needs no display and leaves no global state
    height = 3 * num_rows  # inches
    figure = Figure(figsize=(10, height))
    # Fixed margins of 0.54 and 0.36 inches: matplotlib's automatic layout takes as long as the drawing.
    figure.subplots_adjust(left=0.1, right=0.98, bottom=0.54 / height, top=1 - 0.36 / height, wspace=0.3, hspace=0.35)
    pairs, labels = pair_task_names(records)[0], run_names(runs)
    for axes, panel in zip(figure.subplots(num_rows, 2).flat, panels, strict=False):
        _draw_panel(axes, panel._replace(title=panel.title.format(pairs=pairs)), labels, metrics)
        _draw_references(axes, panel, records)
    for axes in figure.axes[len(panels) :]:
        axes.remove()
    return figure


def _draw_references(axes: Any, panel: Panel, records: Sequence[Mapping[str, Any]]) -> None:
    """Draw the legend, and lines for random guesses and for a model that knows only the token frequencies."""
    lines = [("chance", panel.chance)]
    if panel.training == "mlm_loss":
        sizes = {number_of(record, "data.statistics.vocab_size") for record in records}
        entropies = {frequency_loss(record) for record in records}
        # Runs on different data have no common value, and so no line.
        size, entropy = (values.pop() if len(values) == 1 else None for values in (sizes, entropies))
        lines = [("all tokens equally likely", math.log(size) if size else None), ("token frequencies", entropy)]
    for (label, value), style in zip(lines, ("--", ":"), strict=False):
        if value is not None:
            axes.axhline(value, linestyle=style, color="black", linewidth=0.9, alpha=0.6, label=label)
    axes.legend(fontsize="x-small" if len(records) > 1 else "small", framealpha=0.6)


def run_names(runs: Sequence[Path]) -> list[str]:
    """Return the paths of runs relative to their common folder."""
    paths = [run.resolve() for run in runs]
    base = Path(os.path.commonpath([path.parent for path in paths]))
    if len(paths) == 1 and paths[0].name == "train":  # the usual name in an output of `run`, so add its parent
        base = base.parent
    return [str(path.relative_to(base)) for path in paths]


def _draw_panel(axes: Any, panel: Panel, labels: list[str], metrics: list[Metrics]) -> None:
    for number, (run, lines) in enumerate(zip(labels, metrics, strict=True)):
        # In matplotlib a dollar sign starts a formula, and a leading underscore hides a label.
        run = f"{' ' if run.startswith('_') else ''}{run}".replace("$", r"\$")
        prefix = f"{run}: " if len(labels) > 1 else ""
        series = ((panel.training, "training", "-", 1.0), (panel.validation, "held out", "o--", 1.6))
        for name, label, style, width in series:
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            if points:
                color = f"C{number}" if len(labels) > 1 else ("C0" if name == panel.training else "C1")
                steps, values = zip(*points, strict=True)
                style = style if len(points) > 1 else "o"  # a line needs two points
                axes.plot(steps, values, style, label=prefix + label, color=color, linewidth=width, markersize=4)
    axes.set(title=panel.title, xlabel="step", ylabel=panel.unit)
    axes.update_datalim([(axes.dataLim.x0, value) for value in panel.axis])
    axes.autoscale_view()
    if panel.is_share:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    axes.grid(alpha=0.3)


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        what = f"cannot write the file: {error.strerror}"
        raise OutputError(what, where=str(path), remedy="choose a path that you may write to") from error
