"""`report`: the curves of one or several runs as a picture and as a page, from their `metrics.jsonl`.

The page is one file without links to anything: the pictures are inside. Beside the curves it says what is normal to
expect, and which figures of these runs are not.
"""

import base64
import html
import math
import statistics
from pathlib import Path

from bert_pretrain.curves import MORE_PANELS, PANELS, Table, as_png, draw_curves, read_metrics, write_file

EXPECTATIONS = (
    ("The first loss", "about the logarithm of the vocabulary's size: 10.3 nats for 30,522 tokens, 8.3 for 4,096."),
    (
        "The plateau",
        "the loss falls to 6–7 nats within the warm-up, when the model has learnt how frequent words are, and stays "
        "there for hundreds to thousands of steps, longer for deep models; then it falls again, when context is used.",
    ),
    ("The end", "BERT-Base on Wikipedia and books ends near 1.4 nats held out; small models on small corpora at 2–5."),
    (
        "Next sentence",
        "50 % for hundreds to thousands of steps, often until the other loss has left its plateau; BERT-Base ends at "
        "97–98 %. If it never moves, look whether half of the pairs are real ones, and documents are documents.",
    ),
    ("The gradient's norm", "high at first, then between 0.3 and 3, slowly changing; peaks now and then are normal."),
    ("Held out against training", "training has dropout, so the held-out loss may be the lower one for long."),
    ("Waiting for data", "below 2 % of the time."),
)
COLUMNS = ("run", "step", "examples", "MLM loss", "perplexity", "MLM accuracy", "NSP accuracy", "tokens/s", "MFU")
STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
img{width:100%} table{border-collapse:collapse;margin:1rem 0} td,th{padding:.3rem .8rem;border-bottom:1px solid #ddd;
text-align:right} td:first-child,th:first-child{text-align:left} dt{font-weight:600} .odd{color:#a40000}"""


def write_report(runs: list[Path], output: Path) -> tuple[Path, Path]:
    """Draw the curves of run folders, and write a page about them beside the picture; returns both paths.

    Args:
        runs: run folders, finished or not.
        output: the picture; the page has its name with the ending `.html`.

    Raises:
        ConfigError: when matplotlib is not installed or does not know the ending.
        DataError: when a run has no readable metrics.
        OutputError: when the files cannot be written.
    """
    page = output.with_suffix(".html")
    if page == output:
        output = output.with_suffix(".png")
    draw_curves(runs, output)
    tables = [read_metrics(run) for run in runs]
    curves = [as_png(runs, tables, PANELS), as_png(runs, tables, MORE_PANELS)]
    write_file(page, _page(runs, tables, curves).encode())
    return output, page


def oddities(table: Table) -> list[str]:
    """Return what of a run's figures is not as it normally is, in words."""
    training = [line for line in table if "skipped_steps" in line]
    validation = [line for line in table if line.get("validation_mlm_loss") is not None]
    found = []
    skipped = sum(line["skipped_steps"] for line in training)
    if skipped:
        found.append(f"{skipped} steps were skipped because their gradients were not finite")
    waits = [line["data_wait_share"] for line in training if line.get("data_wait_share") is not None]
    if waits and statistics.median(waits) > 0.02:
        found.append(f"{statistics.median(waits):.1%} of the time went into waiting for data")
    losses = [line["validation_mlm_loss"] for line in validation]
    if len(losses) > 2 and losses[-1] > min(losses) + 0.1:
        found.append(f"the held-out loss rose again: from {min(losses):.2f} to {losses[-1]:.2f} nats")
    accuracies = [line.get("validation_nsp_accuracy") for line in validation]
    last = training[-1]["step"] if training else 0
    if accuracies and accuracies[-1] is not None and last >= 10_000 and accuracies[-1] < 0.55:
        found.append(f"next sentence is still at {accuracies[-1]:.1%} after {last:,} steps")
    return found


def _page(runs: list[Path], tables: list[Table], curves: list[bytes]) -> str:
    names = [html.escape(str(run)) for run in runs]
    rows = "".join(_row(name, table) for name, table in zip(names, tables, strict=True))
    head = "".join(
        f"<th>{title}</th>"
        for title in (
            "run",
            "step",
            "examples",
            "MLM loss",
            "perplexity",
            "MLM accuracy",
            "NSP accuracy",
            "tokens/s",
            "MFU",
        )
    )
    notes = "".join(
        f'<li class="odd">{name}: {html.escape(note)}</li>'
        for name, table in zip(names, tables, strict=True)
        for note in oddities(table)
    )
    expected = "".join(f"<dt>{title}</dt><dd>{text}</dd>" for title, text in EXPECTATIONS)
    pictures = "".join(
        f'<img alt="curves" src="data:image/png;base64,{base64.b64encode(picture).decode()}">' for picture in curves
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{", ".join(names)}</title><style>{STYLE}</style>'
        f"<h1>Pretraining</h1><table><tr>{head}</tr>{rows}</table>"
        f"<h2>What is odd here</h2><ul>{notes or '<li>nothing that this page looks at</li>'}</ul>"
        f"<h2>Curves</h2>{pictures}<h2>What is normal to expect</h2><dl>{expected}</dl>"
        "<p>Losses are in nats; held-out figures are over the whole validation split with its stored masks. "
        "Speed leaves out evaluations, checkpoints and the first step after a start.</p></html>\n"
    )


def _row(name: str, table: Table) -> str:
    """Return a run's line of the page's table: its last held-out figures, and its median speed."""
    training = [line for line in table if "skipped_steps" in line] or [{}]
    validation = ([line for line in table if "validation_mlm_loss" in line] or [{}])[-1]
    loss = validation.get("validation_mlm_loss")
    speeds, utilisations = (
        [line[key] for line in training if line.get(key) is not None] for key in ("tokens_per_second", "mfu")
    )
    cells = [
        _cell(training[-1].get("step", validation.get("step")), ",.0f"),
        _cell(training[-1].get("examples"), ",.0f"),
        _cell(loss, ".3f"),
        _cell(None if loss is None else math.exp(min(loss, 700.0)), ",.1f"),
        _cell(validation.get("validation_mlm_accuracy"), ".1%"),
        _cell(validation.get("validation_nsp_accuracy"), ".1%"),
        _cell(statistics.median(speeds) if speeds else None, ",.0f"),
        _cell(statistics.median(utilisations) if utilisations else None, ".1%"),
    ]
    return f"<tr><td>{name}</td>{''.join(cells)}</tr>"


def _cell(value: float | None, form: str) -> str:
    return f"<td>{'–' if value is None else format(value, form)}</td>"
