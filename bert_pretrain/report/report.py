"""`report`: draw the curves of runs into a picture and write a page with metrics, hints and values to expect.

The page is a single file that contains its pictures and loads nothing.
"""

import base64
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_pretrain.errors import OutputError
from bert_pretrain.examples.examples import with_error
from bert_pretrain.io import manifest
from bert_pretrain.metrics import Metrics, frequency_loss, number_of, perplexity, read_metrics, value_of
from bert_pretrain.report import curves
from bert_pretrain.report.diagnosis import diagnose
from bert_pretrain.report.render import render
from bert_pretrain.report.use import use_of


def write_report(runs: list[Path], output: Path) -> tuple[Path, Path]:
    """Draw the curves of run folders, write a page with the same name and the suffix `.html`, return both paths."""
    runs = [run for folder in runs for run in curves.run_folders(folder)]
    if not output.name:
        raise OutputError(f"'{output}' is not a file name", where="--output", remedy="give one, such as curves.png")
    page = output.with_suffix(".html")
    if page == output:
        output = output.with_suffix(".png")
    records, metrics = [manifest.read_record(run) for run in runs], [read_metrics(run) for run in runs]
    figures = [curves.make_figure(runs, records, metrics, panels) for panels in (curves.PANELS, curves.MORE_PANELS)]
    pictures = [base64.b64encode(curves.image_bytes(figure)).decode() for figure in figures]
    rows = [_cells(lines, curves.pair_task_names(records)[1]) for lines in metrics]
    summaries: list[dict[str, Any]] = []
    for name, record, lines, cells in zip(curves.run_names(runs), records, metrics, rows, strict=True):
        hints = diagnose(record, lines)
        for hint in hints:
            print(hint if len(runs) == 1 else f"{name}: {hint}")
        details = {"use": use_of(record, lines), "normal": normal_values(record)}
        summaries.append({"name": name, "hints": hints, "cells": list(cells.values()), **details})
    text = render("report.html", runs=summaries, columns=["run", *rows[0]], pictures=pictures)
    curves.write_figure(figures[0], output)
    curves.write_file(page, text.encode())
    return output, page


def normal_values(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the expected values of a run's metrics, as pairs of a title and a text."""
    size, frequencies = number_of(record, "data.statistics.vocab_size"), frequency_loss(record)
    first, why = math.log(size) if size else None, "the logarithm of the vocabulary size"
    if value_of(record, "config.train.mlm_bias") == "unigram":
        first, why = frequencies, "token frequencies, as mlm_bias is unigram"
    duration = "for hundreds to thousands of steps"
    plateau = f"near {{:.1f}} nats (token frequencies) {duration}, longer for deep models; only with train.init=normal."
    pairs = {"nsp": "Next sentence", "sop": "Sentence order"}.get(value_of(record, "data.statistics.next_sentence"), "")
    values = (
        ("First loss", first, f"about {{:.1f}} nats: {why}; lower with train.init=cooccurrences or loaded weights."),
        ("Plateau", frequencies, plateau),
        (pairs, pairs, f"50 % {duration}, often until the other loss leaves its plateau."),
        ("Gradient norm", number_of(record, "config.train.max_grad_norm"), "slowly falling; clipped above {:g}."),
        ("Held out", number_of(record, "config.model.hidden_dropout_prob"), "may be below training, due to dropout."),
    )
    return [(title, text.format(value)) for title, value, text in values if value]


def _cells(metrics: Metrics, pair_accuracy: str) -> dict[str, str]:
    """Return the cells of a run in the table of metrics, by column title. `pair_accuracy` is a title."""
    training = [line for line in metrics if "skipped_steps" in line]
    validation = next((line for line in reversed(metrics) if "validation_mlm_loss" in line), {})
    last = {**validation, **(training[-1] if training else {})}
    loss, accuracy = validation.get("validation_mlm_loss"), validation.get("validation_nsp_accuracy")
    counts = validation.get("validation_examples"), validation.get("validation_documents")
    medians = []
    for name in ("tokens_per_second", "mfu"):
        values = [line[name] for line in training if line.get(name) is not None]
        medians.append(statistics.median(values) if values else None)
    cells = {
        "step": (last.get("step"), ",.0f"),
        "examples": (last.get("examples"), ",.0f"),
        "held-out MLM loss": (loss, ".3f"),
        "held-out perplexity": (None if loss is None else perplexity(loss), ",.1f"),
        "held-out MLM accuracy": (validation.get("validation_mlm_accuracy"), ".1%"),
        f"held-out {pair_accuracy}": (None if accuracy is None else with_error(accuracy, *counts), ""),
        "tokens/s": (medians[0], ",.0f"),
        "MFU": (medians[1], ".1%"),
    }
    return {title: "–" if value is None else format(value, form) for title, (value, form) in cells.items()}
