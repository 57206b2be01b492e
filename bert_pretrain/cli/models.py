"""Commands on what the stages have written: data folders, models and runs."""

from pathlib import Path
from typing import Annotated

import typer

from bert_pretrain.cli.loading import load, load_config
from bert_pretrain.cli.options import Device, Workers


def inspect(
    data: Annotated[Path, typer.Argument(metavar="DATA_DIR", help="A folder that make-data has written.")],
    split: Annotated[str, typer.Option("--split", help="Where the examples come from: train or validation.")] = "train",
    rows: Annotated[int | None, typer.Option("--rows", min=0, help="How many examples to show.")] = None,
    row: Annotated[list[int] | None, typer.Option("--row", help="Show this row; may be repeated.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Draws the rows.")] = 0,
    stats: Annotated[bool, typer.Option("--stats", help="Read all shards: figures, histograms, checks.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write all of it as one page to this file.")] = None,
    workers: Workers = None,
) -> None:
    """Look at a data folder; exit code 1 if it breaks what its configuration promises.

    Example: bert-pretrain inspect data --stats --html data.html
    """
    run_inspect = load("bert_pretrain.tools.inspect", "inspect")
    is_sound = run_inspect(
        data, split=split, rows=rows, chosen=row or (), seed=seed, stats=stats, html=html, workers=workers
    )
    if not is_sound:
        raise typer.Exit(1)


def evaluate(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    data: Annotated[Path, typer.Option("--data", help="The data folder.")],
    device: Device = "auto",
) -> None:
    """Measure held-out loss and accuracy of a model on a data folder.

    Example: bert-pretrain evaluate run/model --data data
    """
    run_evaluate = load("bert_pretrain.train.evaluate", "evaluate")
    loaded = load_config(None, None, {"train.device": ("--device", device)})
    for name, value in run_evaluate(model, data, config=loaded.train).items():
        print(f"{name:<24}{value:>12.4f}")


def fill_mask(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    text: Annotated[str, typer.Argument(help="Text with one or several [MASK].")],
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="How many answers for each blank.")] = 5,
    device: Device = "auto",
) -> None:
    """Fill the blanks of a text.

    Example: bert-pretrain fill-mask run/model "The capital of France is [MASK]."
    """
    run_fill_mask = load("bert_pretrain.tools.fill_mask", "fill_mask")
    for answers in run_fill_mask(model, text, top_k=top_k, device=device):
        print("  ".join(f"{token} {probability:.1%}" for token, probability in answers))


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    output: Annotated[Path, typer.Option("--output", help="The PNG file to write; the page lies beside it.")],
) -> None:
    """Draw the curves of one or several runs, and write a page that says what is normal to expect.

    Example: bert-pretrain report runs/a/train runs/b/train --output curves.png
    """
    write_report = load("bert_pretrain.tools.report", "write_report")
    picture, page = write_report(runs, output)
    print(f"curves: {picture}\npage:   {page}")
