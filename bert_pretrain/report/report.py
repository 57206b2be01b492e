"""`report`: the curves of one or several runs as a picture and as a page, from their `metrics.jsonl`.

The page is one file that loads nothing: the pictures are inside. It also says which values are normal, and which
figures of these runs are not.
"""

import base64
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bert_pretrain.report.curves import (
    MORE_PANELS,
    PANELS,
    Metrics,
    as_png,
    draw_curves,
    pair_accuracy,
    perplexity,
    read_metrics,
    read_run_record,
    run_names,
    value_of,
    write_file,
)
from bert_pretrain.report.diagnosis import Hint, diagnose
from bert_pretrain.report.render import render

COLUMNS = (
    "run", "step", "examples", "held-out MLM loss", "held-out perplexity", "held-out MLM accuracy",
    "held-out {pair_accuracy}", "tokens/s", "MFU",
)  # fmt: skip
SETTINGS = {
    "model": ("num_hidden_layers", "hidden_size", "num_attention_heads", "hidden_dropout_prob"),
    "train": (
        "global_batch_size", "optimizer", "peak_lr", "schedule", "warmup_ratio", "weight_decay", "init", "mlm_bias",
        "precision", "seed",
    ),
}  # fmt: skip
"""Keys of the configuration that the page shows; `config.yaml` has all."""


@dataclass(frozen=True)
class RunSummary:
    """A run on the page."""

    name: str
    """As in the legends of the pictures."""
    cells: list[str]
    """Its last held-out figures and its median speed, in the order of `COLUMNS`."""
    settings: dict[str, str]
    """What it is, and how it was trained."""
    unusual: list[str]
    hints: list[Hint]


def write_report(runs: list[Path], output: Path) -> tuple[Path, Path]:
    """Draw the curves of run folders, and write a page about them next to the picture; returns both paths.

    Args:
        runs: run folders, finished or not.
        output: the picture; the page has its name with the ending `.html`.
    """
    page = output.with_suffix(".html")
    if page == output:
        output = output.with_suffix(".png")
    records, metrics = [read_run_record(run) for run in runs], [read_metrics(run) for run in runs]
    pictures = [base64.b64encode(as_png(runs, records, metrics, panels)).decode() for panels in (PANELS, MORE_PANELS)]
    summaries = [_summary(*each) for each in zip(run_names(runs), runs, records, metrics, strict=True)]
    for summary in summaries:
        for hint in summary.hints:
            print(hint if len(runs) == 1 else f"{summary.name}: {hint}")
    settings = list(dict.fromkeys(name for summary in summaries for name in summary.settings))
    accuracy = pair_accuracy(records)
    columns = [title.format(pair_accuracy=accuracy) for title in COLUMNS]
    text = render("report.html", runs=summaries, columns=columns, pictures=pictures, settings=settings)
    draw_curves(runs, output)
    write_file(page, text.encode())
    output.stat()  # raises if the picture was removed meanwhile
    return output, page


def _summary(name: str, run: Path, record: Mapping[str, Any], metrics: Metrics) -> RunSummary:
    hints = diagnose(record, metrics)
    return RunSummary(name, _cells(metrics), _settings(run, record), unusual_figures(metrics), hints)


def _settings(run: Path, record: Mapping[str, Any]) -> dict[str, str]:
    """Return what the page says of a run besides its figures; metrics without a manifest say less."""
    written = datetime.fromtimestamp((run / "metrics.jsonl").stat().st_mtime, UTC)
    paths = ["parameters", "device", "length.steps", "length.seconds"]
    paths += [f"config.{section}.{key}" for section, keys in SETTINGS.items() for key in keys]
    found = {
        "folder": str(run),
        "state": "finished" if "progress" in record else "not finished",
        "last figures": f"{written:%Y-%m-%d %H:%M} UTC",
        "data": value_of(record, "data.path"),
        **{path.rpartition(".")[2]: value_of(record, path) for path in paths},
    }
    return {
        name: f"{value:,}" if type(value) is int and name != "seed" else _as_text(value)
        for name, value in found.items()
        if value is not None
    }


def _as_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def unusual_figures(metrics: Metrics) -> list[str]:
    """Return, in words, which of a run's figures are not as they normally are."""
    training = [line for line in metrics if "skipped_steps" in line]
    found = []
    skipped = sum(line.get("skipped_steps") or 0 for line in training)
    if skipped:
        found.append(f"{skipped} steps were skipped because their gradients were not finite")
    waiting = _median(training, "data_wait_share")
    if waiting is not None and waiting > 0.02:
        found.append(f"{waiting:.1%} of the time was spent waiting for data")
    return found


def _cells(metrics: Metrics) -> list[str]:
    training = [line for line in metrics if "skipped_steps" in line]
    validation = next((line for line in reversed(metrics) if "validation_mlm_loss" in line), {})
    last = training[-1] if training else {}
    loss = validation.get("validation_mlm_loss")
    values = (
        (last.get("step", validation.get("step")), ",.0f"),
        (last.get("examples"), ",.0f"),
        (loss, ".3f"),
        (None if loss is None else perplexity(loss), ",.1f"),
        (validation.get("validation_mlm_accuracy"), ".1%"),
        (validation.get("validation_nsp_accuracy"), ".1%"),
        (_median(training, "tokens_per_second"), ",.0f"),
        (_median(training, "mfu"), ".1%"),
    )
    return ["–" if value is None else format(value, form) for value, form in values]


def _median(lines: Metrics, name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return statistics.median(values) if values else None
