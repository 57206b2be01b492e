"""Commands on what the stages have written: data folders, models and runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bert_pretrain.cli.loading import load, load_config
from bert_pretrain.cli.options import Device, Workers
from bert_pretrain.places import local_place

if TYPE_CHECKING:
    from bert_pretrain.config import Config

Model = Annotated[Path, typer.Argument(help="A model folder.")]
BatchTokens = Annotated[int | None, typer.Option("--batch-tokens", min=1, help="Tokens that run at once.")]
TextField = Annotated[str | None, typer.Option("--text-field", help="Where records have their text; text by default.")]
SkipEmpty = Annotated[bool, typer.Option("--skip-empty", help="Leave empty texts out instead of refusing them.")]


def inspect(
    data: Annotated[Path, typer.Argument(metavar="DATA_DIR", help="A folder that make-data has written.")],
    split: Annotated[str, typer.Option("--split", help="Where the examples come from: train or validation.")] = "train",
    rows: Annotated[int | None, typer.Option("--rows", min=0, help="How many examples to show.")] = None,
    row: Annotated[list[int] | None, typer.Option("--row", help="Show this row; may be repeated.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Draws the rows.")] = 0,
    stats: Annotated[bool, typer.Option("--stats", help="Read all shards: figures, histograms, checks.")] = False,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write all of it as one page to this file.")
    ] = None,
    workers: Workers = None,
) -> None:
    """Look at a data folder; exit code 1 if it breaks what its configuration promises.

    Example: bert-pretrain inspect data --stats --html data.html
    """
    run_inspect = load("bert_pretrain.tools.inspect", "inspect")
    is_sound = run_inspect(
        data,
        split=split,
        rows=rows,
        chosen=row or (),
        seed=seed,
        stats=stats,
        html=_file(html, "--html"),
        workers=workers,
    )
    if not is_sound:
        raise typer.Exit(1)


def evaluate(
    model: Model,
    data: Annotated[Path | None, typer.Option("--data", help="A data folder: losses and accuracies.")] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", metavar="INPUT", help="Texts: pseudo-log-likelihoods.")
    ] = None,
    pairs: Annotated[
        list[str] | None, typer.Option("--pairs", metavar="INPUT", help="Minimal pairs in .jsonl: accuracy.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", metavar="FILE", help="Write the score of each text or pair to this .jsonl."),
    ] = None,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file as well.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", help="Of texts and pairs: original (default) or word-l2r.")
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="FIELD", help="Accuracy on pairs by this field; UID where there.")
    ] = None,
    batch_tokens: BatchTokens = None,
    text_field: TextField = None,
    skip_empty: SkipEmpty = False,
    device: Device = "auto",
    precision: Annotated[
        str | None, typer.Option("--precision", help="fp32, bf16, fp16 or auto; for a data folder auto, else fp32.")
    ] = None,
) -> None:
    """Measure a model on a data folder, on texts, or on minimal pairs.

    Example: bert-pretrain evaluate run/model --data data

    Example: bert-pretrain evaluate run/model --text sentences.txt --output scores.jsonl

    Example: bert-pretrain evaluate run/model --pairs blimp/
    """
    run_evaluate = load("bert_pretrain.tools.evaluate", "evaluate")
    scores = load("bert_pretrain.tools.evaluate", "Scores")
    run_evaluate(
        model,
        config=_inference_config(device, precision or ("auto" if data else "fp32"), text_field),
        data=data,
        texts=text or (),
        pairs=pairs or (),
        scores=scores(metric, batch_tokens, _file(output, "--output"), skip_empty, by),
        json=_file(json, "--json"),
    )


def fill_mask(
    model: Model,
    text: Annotated[str, typer.Argument(help="Text with one or several [MASK].")],
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="How many answers for each blank.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    device: Device = "auto",
) -> None:
    """Fill the blanks of a text.

    Example: bert-pretrain fill-mask run/model "The capital of France is [MASK]."
    """
    run_fill_mask = load("bert_pretrain.tools.fill_mask", "fill_mask")
    describe = load("bert_pretrain.tools.fill_mask", "as_json" if as_json else "as_table")
    config = _inference_config(device, "fp32", None).train
    print(describe(text, run_fill_mask(model, text, top_k=top_k, config=config)))


def embed(
    model: Model,
    inputs: Annotated[
        list[str], typer.Argument(help="Files, globs, folders, URLs, or dataset:NAME; each line of .txt is a text.")
    ],
    output: Annotated[
        str, typer.Option("--output", metavar="FILE", help="The file to write: .parquet, .npy or .jsonl.")
    ],
    level: Annotated[str, typer.Option("--level", help="A vector for each sentence or token.")] = "sentence",
    pooling: Annotated[
        str | None,
        typer.Option(
            "--pooling", help="mean (default), cls, pooler, last4-mean or last4-concat; tokens: last, last4-…."
        ),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", help="Truncate texts to so many tokens; the model's positions.")
    ] = None,
    batch_tokens: BatchTokens = None,
    text_field: TextField = None,
    skip_empty: SkipEmpty = False,
    device: Device = "auto",
    precision: Annotated[
        str, typer.Option("--precision", help="Of the matrix products: fp32, bf16, fp16 or auto.")
    ] = "fp32",
) -> None:
    """Turn texts into vectors, one a sentence or a token.

    Example: bert-pretrain embed run/model sentences.txt --output vectors.parquet --pooling mean
    """
    run_embed = load("bert_pretrain.tools.embed", "embed")
    loaded = _inference_config(device, precision, text_field)
    run_embed(
        model,
        inputs,
        _file(output, "--output"),
        config=loaded.train,
        level=level,
        pooling=pooling,
        max_length=max_length,
        batch_tokens=batch_tokens,
        text_field=loaded.data.text_field,
        skip_empty=skip_empty,
    )


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    output: Annotated[
        str, typer.Option("--output", metavar="FILE", help="The PNG file to write; the page lies beside it.")
    ],
) -> None:
    """Draw the curves of one or several runs, and write a page that says what is normal to expect.

    Example: bert-pretrain report runs/a/train runs/b/train --output curves.png
    """
    write_report = load("bert_pretrain.tools.report", "write_report")
    picture, page = write_report(runs, _file(output, "--output"))
    print(f"curves: {picture}\npage:   {page}")


def _file(location: str | None, flag: str) -> Path | None:
    return None if location is None else local_place(location, flag, remedy="write a local file, and copy it there")


def _inference_config(device: str, precision: str, text_field: str | None) -> "Config":
    flags = {
        "train.device": ("--device", device),
        "train.precision": ("--precision", precision),
        "data.text_field": ("--text-field", text_field),
    }
    return load_config(None, None, flags)
