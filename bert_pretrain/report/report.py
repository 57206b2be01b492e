"""`report`: draw the curves of runs into a picture and write a page with metrics, hints and values to expect.

The page is a single file that contains its pictures and loads nothing.
"""

import base64
import math
import statistics
from pathlib import Path
from typing import Any

from bert_pretrain.errors import OutputError
from bert_pretrain.examples.examples import with_error
from bert_pretrain.metrics import Metrics, frequency_loss, number_of, perplexity, value_of
from bert_pretrain.report import curves
from bert_pretrain.report.curves import Run
from bert_pretrain.report.diagnosis import diagnose
from bert_pretrain.report.render import write_page
from bert_pretrain.report.use import use_of


def write_report(folders: list[Path], output: Path) -> tuple[Path, Path]:
    """Draw the curves of run folders, write a page with the same name and the suffix `.html`, return both paths."""
    folders = [run for folder in folders for run in curves.run_folders(folder)]
    if not output.name:
        raise OutputError(f"'{output}' is not a file name", where="--output", remedy="give one, such as curves.png")
    page = output.with_suffix(".html")
    if page == output:
        output = output.with_suffix(".png")
    runs = list(map(curves.read_run, folders))
    figures = [curves.make_figure(runs, panels) for panels in (curves.PANELS, curves.MORE_PANELS)]
    _, pair_accuracy = curves.pair_task_names(run.record for run in runs)
    summaries = []
    for name, run in zip(curves.run_names(folders), runs, strict=True):
        hints = diagnose(run.record, run.lines)
        for hint in hints:
            print(hint if len(runs) == 1 else f"{name}: {hint}")
        use = use_of(run.record, run.lines)
        summaries.append({"name": name, "hints": hints, "use": use, **_metrics(run), **_normal_values(run)})
    pictures = [base64.b64encode(curves.image_bytes(figure)).decode() for figure in figures]
    curves.write_figure(figures[0], output)
    write_page(
        page,
        "report.html",
        runs=summaries,
        pair_accuracy=pair_accuracy,
        pictures=pictures,
    )
    return output, page


def _normal_values(run: Run) -> dict[str, Any]:
    """Return the values to expect of a run's metrics, None if unknown."""
    vocab_size = number_of(run.record, "data.statistics.vocab_size")
    return {
        "uniform_loss": math.log(vocab_size) if vocab_size else None,
        "frequency_loss": frequency_loss(run.record),
        "starts_from_frequencies": value_of(run.record, "config.train.mlm_bias") == "unigram",
        "pairs": value_of(run.record, "data.statistics.next_sentence"),
        "max_grad_norm": number_of(run.record, "config.train.max_grad_norm"),
        "dropout": number_of(run.record, "config.model.hidden_dropout_prob"),
    }


def _metrics(run: Run) -> dict[str, Any]:
    """Return the last metrics and the median speed of a run, None if there are none."""
    training = [line for line in run.lines if "skipped_steps" in line]
    evaluations = [line for line in run.lines if "validation_mlm_loss" in line]
    last: dict[str, Any] = {**evaluations[-1]} if evaluations else {}
    if training:
        last |= training[-1]
    loss = last.get("validation_mlm_loss")
    accuracy = last.get("validation_nsp_accuracy")
    if accuracy is not None:
        accuracy = with_error(accuracy, last.get("validation_examples"), last.get("validation_documents"))
    names = ("step", "examples", "validation_mlm_loss", "validation_mlm_accuracy")
    return {
        **{name: last.get(name) for name in names},
        "perplexity": None if loss is None else perplexity(loss),
        "pair_accuracy": accuracy,
        "tokens_per_second": _median(training, "tokens_per_second"),
        "mfu": _median(training, "mfu"),
    }


def _median(lines: Metrics, name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return statistics.median(values) if values else None
