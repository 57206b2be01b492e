"""Commands for the outputs of the stages: data folders, models and runs."""

from pathlib import Path
from typing import Annotated

import typer

from bert_pretrain.cli.loading import bert_folder, importing, inference_config
from bert_pretrain.cli.options import BatchTokens, Device, Encoding, Model, Precision, SkipEmpty, TextField, Workers
from bert_pretrain.storage.paths import local_path


def inspect(
    data: Annotated[Path, typer.Argument(metavar="DATA_DIR", help="A folder that make-data has written.")],
    split: Annotated[str, typer.Option("--split", help="The split of the examples: train or validation.")] = "train",
    rows: Annotated[int | None, typer.Option("--rows", min=0, help="How many examples to show.")] = None,
    row: Annotated[list[int] | None, typer.Option("--row", help="Show this row; may be repeated.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed for drawing rows.")] = 0,
    stats: Annotated[bool, typer.Option("--stats", help="Read all shards: statistics and checks.")] = False,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write everything to this HTML file.")
    ] = None,
    workers: Workers = None,
) -> None:
    """Show and check a data folder.

    The exit code is 1 if it does not match its configuration.

    Example: bert-pretrain inspect data --stats --html data.html
    """
    with importing():
        from bert_pretrain.inspect.inspect import inspect as run_inspect
    is_sound = run_inspect(
        data,
        split=split,
        rows=rows,
        chosen=row or (),
        seed=seed,
        stats=stats,
        html=None if html is None else local_path(html, "--html"),
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
        str | None, typer.Option("--json", metavar="FILE", help="Also write the metrics to this file.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", help="Of texts and pairs: original (default) or word-l2r.")
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="FIELD", help="Report accuracy by this field; UID if present.")
    ] = None,
    prefix_field: Annotated[
        str | None, typer.Option("--prefix-field", metavar="FIELD", help="Score given the text in this field before.")
    ] = None,
    per_token: Annotated[bool, typer.Option("--per-token", help="Also write the score of every token.")] = False,
    bits: Annotated[bool, typer.Option("--bits", help="Scores in bits instead of nats.")] = False,
    batch_tokens: BatchTokens = None,
    text_field: TextField = None,
    encoding: Encoding = None,
    skip_empty: SkipEmpty = False,
    device: Device = "auto",
    precision: Annotated[
        str | None, typer.Option("--precision", help="fp32, bf16, fp16 or auto; default auto with --data, else fp32.")
    ] = None,
) -> None:
    """Evaluate a model on a data folder, texts or minimal pairs.

    Example: bert-pretrain evaluate run/model --data data

    Example: bert-pretrain evaluate run/model --text a.txt --output scores.jsonl

    Example: bert-pretrain evaluate run/model --pairs blimp/
    """
    config = inference_config(device, precision or ("auto" if data else "fp32"), text_field, encoding)
    scores_file = None if output is None else local_path(output, "--output")
    json_file = None if json is None else local_path(json, "--json")
    folder = bert_folder(model)
    with importing():
        from bert_pretrain.tools.evaluate import evaluate as run_evaluate
    run_evaluate(
        folder,
        config=config,
        data=data,
        texts=text or (),
        pairs=pairs or (),
        json=json_file,
        metric=metric,
        batch_tokens=batch_tokens,
        output=scores_file,
        skip_empty=skip_empty,
        by=by,
        prefix_field=prefix_field,
        per_token=per_token,
        bits=bits,
    )


def fill_mask(
    model: Model,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Text with one or more [MASK].")],
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Number of answers for each [MASK].")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    device: Device = "auto",
) -> None:
    """Predict the masked tokens of a text.

    Example: bert-pretrain fill-mask run/model "Paris is in [MASK]."
    """
    config, folder = inference_config(device, "fp32"), bert_folder(model)
    with importing():
        from bert_pretrain.tools import fill_mask
    answers = fill_mask.fill_mask(folder, text, top_k=top_k, config=config.train)
    print(fill_mask.as_json(text, answers) if as_json else fill_mask.as_table(text, answers))


def embed(
    model: Model,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT", help="Files, globs, folders, URLs, or dataset:NAME; each line of .txt is a text."
        ),
    ],
    output: Annotated[str, typer.Option("--output", metavar="FILE", help="The file to write: .parquet or .npy.")],
    level: Annotated[str, typer.Option("--level", help="A vector per sentence or per token.")] = "sentence",
    pooling: Annotated[
        str | None,
        typer.Option(
            "--pooling",
            help="mean (default), cls, pooler, last4-mean or last4-concat; tokens: last, last4-mean or -concat.",
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option("--max-length", help="Truncate texts to this length; the model's positions by default."),
    ] = None,
    batch_tokens: BatchTokens = None,
    text_field: TextField = None,
    encoding: Encoding = None,
    skip_empty: SkipEmpty = False,
    device: Device = "auto",
    precision: Precision = "fp32",
) -> None:
    """Turn texts into vectors, one per sentence or per token.

    Example: bert-pretrain embed run/model texts.txt --output vectors.parquet
    """
    loaded = inference_config(device, precision, text_field, encoding)
    file, folder = local_path(output, "--output"), bert_folder(model)
    with importing():
        from bert_pretrain.tools.embed import embed as run_embed
    run_embed(
        folder,
        inputs,
        file,
        config=loaded.train,
        level=level,
        pooling=pooling,
        max_length=max_length,
        batch_tokens=batch_tokens,
        text_field=loaded.data.text_field,
        encoding=loaded.data.encoding,
        skip_empty=skip_empty,
    )


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders.")],
    output: Annotated[
        str, typer.Option("--output", metavar="FILE", help="The PNG file to write; the page is next to it.")
    ],
) -> None:
    """Plot the curves of runs, next to values that are normal.

    Example: bert-pretrain report runs/a/train runs/b/train --output curves.png
    """
    with importing():
        from bert_pretrain.report.report import write_report
    picture, page = write_report(runs, local_path(output, "--output"))
    print(f"curves: {picture}\npage:   {page}")
