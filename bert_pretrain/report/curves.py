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
from bert_pretrain.io.files import write_file
from bert_pretrain.metrics import Metrics, frequency_loss, number_of, read_metrics, value_of

# The name of each sentence-pair task and of its accuracy; metrics.jsonl uses the prefix `nsp` for both.
TASKS = {"nsp": ("next sentence", "NSP accuracy"), "sop": ("sentence order", "sentence-order accuracy")}


class Run(NamedTuple):
    """What a run folder holds about its run."""

    folder: Path
    record: Mapping[str, Any]  # the manifest
    lines: Metrics


class Panel(NamedTuple):
    """One diagram: a metric by step, in training and in evaluations, where it has the prefix `validation_`."""

    title: str
    unit: str
    metric: str
    axis: tuple[float, ...] = (0.0,)  # values that the axis always includes, so that noise does not fill the panel
    chance: float | None = None  # value of random guesses
    is_share: bool = False


PANELS = (
    Panel("masked tokens: loss", "nats per token", "mlm_loss", axis=()),
    Panel(
        "masked tokens: accuracy",
        "",
        "mlm_accuracy",
        (0.0, 0.2),
        is_share=True,
    ),
    Panel(
        "{pairs}: loss",
        "nats per pair",
        "nsp_loss",
        (0.0, 0.75),
        math.log(2),
    ),
    Panel(
        "{pairs}: accuracy",
        "",
        "nsp_accuracy",
        (0.4, 0.8),
        0.5,
        is_share=True,
    ),
)
MORE_PANELS = (
    Panel("learning rate", "", "learning_rate"),
    Panel("gradient norm", "before clipping", "grad_norm"),
    Panel("speed", "tokens/s, without padding", "tokens_per_second"),
    Panel(
        "waiting for data",
        "of the time",
        "data_wait_share",
        (0.0, 0.05),
        is_share=True,
    ),
)


def run_folders(folder: Path) -> list[Path]:
    """Return the folders with metrics in an output of the command `run`, oldest first, or else the folder alone."""
    files = [*folder.glob("train/metrics.jsonl"), *folder.glob("train/*/metrics.jsonl")]
    if not files or (folder / "metrics.jsonl").is_file():
        return [folder]
    return [file.parent for file in sorted(files, key=lambda file: file.stat().st_mtime)]


def read_run(folder: Path) -> Run:
    """Read the manifest and the metrics of a run. Raises DataError as `read_metrics` does."""
    return Run(folder, manifest.read_record(folder), read_metrics(folder))


def draw_curves(folders: Sequence[Path], output: Path) -> bool:
    """Draw the losses and accuracies of run folders into one picture. Return whether this succeeded.

    Print errors instead of raising them. Raise only if memory or disk runs out: the same command can draw later.
    """
    try:
        write_figure(make_figure(list(map(read_run, folders)), PANELS), output)
    except (MemoryError, OutputError):
        raise
    except Exception as error:
        print(f"no curves were drawn: {error or type(error).__name__}")
        return False
    return True


def write_figure(figure: Any, output: Path) -> None:
    """Write a figure in the format of the file's ending."""
    file_format = output.suffix.lstrip(".").lower()
    if file_format not in figure.canvas.get_supported_filetypes():
        raise ConfigError(
            f"'{output.name}' does not end in an image format",
            where="--output",
            remedy="use .png, .svg or .pdf",
        )
    write_file(output, image_bytes(figure, file_format))


def image_bytes(figure: Any, file_format: str = "png") -> bytes:
    """Return a figure as the bytes of an image file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120, format=file_format)
    return buffer.getvalue()


def pair_task_names(records: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the name of the runs' sentence-pair task and the name of its accuracy."""
    tasks = {value_of(record, "data.statistics.next_sentence") for record in records}
    return TASKS["sop" if tasks == {"sop"} else "nsp"]


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return the paths of runs relative to their common folder."""
    paths = [folder.resolve() for folder in folders]
    base = Path(os.path.commonpath([path.parent for path in paths]))
    if len(paths) == 1 and paths[0].name == "train":  # the usual name in an output of `run`, so add its parent
        base = base.parent
    return [str(path.relative_to(base)) for path in paths]


def make_figure(runs: Sequence[Run], panels: Sequence[Panel]) -> Any:
    """Draw the panels that have metrics."""
    with needs_extra("plot", "pictures", where="the extra 'plot'"):
        from matplotlib.figure import Figure  # unlike pyplot, it needs no display and leaves no global state
    panels = [panel for panel in panels if any(_points(run, panel.metric) for run in runs)]
    num_rows = max(1, math.ceil(len(panels) / 2))
    height = 3 * num_rows  # inches
    figure = Figure(figsize=(10, height))
    # Fixed margins of 0.54 and 0.36 inches: matplotlib's automatic layout takes as long as the drawing.
    figure.subplots_adjust(
        left=0.1,
        right=0.98,
        bottom=0.54 / height,
        top=1 - 0.36 / height,
        wspace=0.3,
        hspace=0.35,
    )
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(num_rows, 2, place)
        _draw_panel(axes, panel, runs)
        _draw_references(axes, panel, [run.record for run in runs])
        axes.legend(fontsize="x-small" if len(runs) > 1 else "small", framealpha=0.6)
    return figure


def _points(run: Run, metric: str, prefixes: Sequence[str] = ("", "validation_")) -> list[tuple[int, float]]:
    """Return the steps and values of a metric, in lines of training or, with its prefix, of evaluations."""
    names = [prefix + metric for prefix in prefixes]
    return [(line["step"], line[name]) for name in names for line in run.lines if line.get(name) is not None]


def _draw_panel(axes: Any, panel: Panel, runs: Sequence[Run]) -> None:
    for number, (run, label) in enumerate(zip(runs, run_names([run.folder for run in runs]), strict=True)):
        # In matplotlib a dollar sign starts a formula, and a leading underscore hides a label.
        label = f"{' ' if label.startswith('_') else ''}{label}: ".replace("$", r"\$")
        for prefix, kind, style, width in (("", "training", "-", 1.0), ("validation_", "held out", "o--", 1.6)):
            points = _points(run, panel.metric, [prefix])
            if points:
                steps, values = zip(*points, strict=True)
                axes.plot(
                    steps,
                    values,
                    style if len(points) > 1 else "o",  # a line needs two points
                    label=label + kind if len(runs) > 1 else kind,
                    color=f"C{number}" if len(runs) > 1 or not prefix else "C1",
                    linewidth=width,
                    markersize=4,
                )
    pairs, _ = pair_task_names(run.record for run in runs)
    axes.set(title=panel.title.format(pairs=pairs), xlabel="step", ylabel=panel.unit)
    axes.update_datalim([(axes.dataLim.x0, value) for value in panel.axis])
    axes.autoscale_view()
    if panel.is_share:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    axes.grid(alpha=0.3)


def _draw_references(axes: Any, panel: Panel, records: Sequence[Mapping[str, Any]]) -> None:
    """Draw lines for random guesses and for a model that knows only the token frequencies."""
    references = {"chance": panel.chance}
    if panel.metric == "mlm_loss":
        sizes = {number_of(record, "data.statistics.vocab_size") for record in records}
        entropies = {frequency_loss(record) for record in records}
        # Runs on different data have no common value, and so no line.
        size = sizes.pop() if len(sizes) == 1 else None
        references = {
            "all tokens equally likely": math.log(size) if size else None,
            "token frequencies": entropies.pop() if len(entropies) == 1 else None,
        }
    for (label, value), style in zip(references.items(), ("--", ":"), strict=False):
        if value is not None:
            axes.axhline(
                value,
                linestyle=style,
                color="black",
                linewidth=0.9,
                alpha=0.6,
                label=label,
            )
