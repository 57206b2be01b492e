"""Commands that use the outputs of the stages: data folders, models and runs."""

from pathlib import Path
from typing import Annotated

import typer

from bert_pretrain.cli import options as cli
from bert_pretrain.cli.options import argument, bert_folder, inference_config, option, switch
from bert_pretrain.io.files import local_path


def inspect(
    data: Annotated[Path, argument("DATA_DIR", "A data folder, written by make-data.")],
    split: Annotated[str, option("Split to show: train or validation.")] = "train",
    rows: Annotated[int | None, option("Examples to show; default: 3 (0 with --stats, 24 with --html).", min=0)] = None,
    row: Annotated[list[int] | None, option("Show this row; may be repeated.")] = None,
    seed: Annotated[int, option("Seed of the random choice of rows.")] = 0,
    stats: Annotated[bool, switch("--stats", "Read all shards and print statistics and checks.")] = False,
    html: Annotated[str | None, option("Also write a page with examples, statistics and checks.", "FILE")] = None,
    workers: cli.Workers = None,
) -> None:
    """Show and check examples of a data folder.

    --stats and --html check all shards. The exit code is 1 if a check fails.

    Example: bert-pretrain inspect data --stats --html data.html
    """
    from bert_pretrain.inspect.inspect import inspect as run_inspect

    passed = run_inspect(
        data,
        split=split,
        rows=rows,
        chosen=row or (),
        seed=seed,
        stats=stats,
        html=None if html is None else local_path(html, "--html"),
        workers=workers,
    )
    if not passed:
        raise typer.Exit(1)


def evaluate(
    model: cli.Model,
    data: Annotated[Path | None, option("A data folder, for losses and accuracies.")] = None,
    text: Annotated[list[str] | None, option("Texts, for pseudo-log-likelihoods.", "INPUT")] = None,
    pairs: Annotated[list[str] | None, option("Minimal pairs in .jsonl, for accuracy.", "INPUT")] = None,
    output: Annotated[str | None, option("Write the score of each text or pair to this .jsonl.", "FILE")] = None,
    json: Annotated[str | None, option("Also write the metrics to this file.", "FILE")] = None,
    metric: Annotated[str | None, option("Score of texts and pairs: original (default) or word-l2r.")] = None,
    by: Annotated[str | None, option("Also report accuracy per value of this field; default: UID.", "FIELD")] = None,
    per_token: Annotated[bool, switch("--per-token", "Also write the score of every token.")] = False,
    max_length: cli.MaxLength = None,
    batch_tokens: cli.BatchTokens = None,
    text_field: cli.TextField = None,
    encoding: cli.Encoding = None,
    skip_empty: cli.SkipEmpty = False,
    device: cli.Device = "auto",
    precision: Annotated[str | None, option("fp32, bf16, fp16 or auto; default: auto with --data, else fp32.")] = None,
) -> None:
    """Evaluate a model on a data folder, texts or minimal pairs.

    Example: bert-pretrain evaluate run/model --data data

    Example: bert-pretrain evaluate run/model --text a.txt --output scores.jsonl

    Example: bert-pretrain evaluate run/model --pairs blimp/
    """
    if precision is None:
        precision = "auto" if data else "fp32"
    config = inference_config(device=device, precision=precision, text_field=text_field, encoding=encoding)
    scores_file = None if output is None else local_path(output, "--output")
    json_file = None if json is None else local_path(json, "--json")
    folder = bert_folder(model)
    from bert_pretrain.tools.evaluate import evaluate as run_evaluate

    run_evaluate(
        folder,
        config=config,
        data=data,
        texts=text or (),
        pairs=pairs or (),
        json=json_file,
        metric=metric,
        max_length=max_length,
        batch_tokens=batch_tokens,
        output=scores_file,
        skip_empty=skip_empty,
        text_field=text_field,
        encoding=encoding,
        by=by,
        per_token=per_token,
    )


def fill_mask(
    model: cli.Model,
    text: Annotated[str, argument("TEXT", "Text with one or more [MASK].")],
    top_k: Annotated[int, option("Number of answers for each [MASK].", min=1)] = 5,
    as_json: Annotated[bool, switch("--json", "Print JSON instead of a table.")] = False,
    device: cli.Device = "auto",
) -> None:
    """Predict the masked tokens of a text.

    Example: bert-pretrain fill-mask run/model "Paris is in [MASK]."
    """
    config, folder = inference_config(device=device, precision="fp32"), bert_folder(model)
    from bert_pretrain.text.readers import repair_surrogates
    from bert_pretrain.tools import fill_mask

    text = repair_surrogates(text)  # of an argument that is not UTF-8
    answers = fill_mask.fill_mask(folder, text, top_k=top_k, config=config.train)
    print(fill_mask.as_json(text, answers) if as_json else fill_mask.as_table(text, answers))


_POOLING = (
    "For sentences: mean (default), cls, pooler, last4-mean, last4-concat. "
    "For tokens: last (default), last4-mean, last4-concat."
)


def embed(
    model: cli.Model,
    inputs: cli.Texts,
    output: Annotated[str, option("The file to write: .parquet, or .npy for sentences.", "FILE")],
    level: Annotated[str, option("sentence (one vector per text) or token.")] = "sentence",
    pooling: Annotated[str | None, option(_POOLING)] = None,
    max_length: cli.MaxLength = None,
    batch_tokens: cli.BatchTokens = None,
    text_field: cli.TextField = None,
    encoding: cli.Encoding = None,
    skip_empty: cli.SkipEmpty = False,
    device: cli.Device = "auto",
    precision: cli.Precision = "fp32",
) -> None:
    """Turn texts into vectors, one per text or per token.

    Example: bert-pretrain embed run/model texts.txt --output vectors.parquet
    """
    config = inference_config(device=device, precision=precision, text_field=text_field, encoding=encoding)
    file, folder = local_path(output, "--output"), bert_folder(model)
    from bert_pretrain.tools.embed import embed as run_embed

    run_embed(
        folder,
        inputs,
        file,
        config=config,
        level=level,
        pooling=pooling,
        max_length=max_length,
        batch_tokens=batch_tokens,
        skip_empty=skip_empty,
    )


def report(
    runs: Annotated[list[Path], argument("RUN", "Run folders.")],
    output: Annotated[str, option("Picture to write; an HTML page goes next to it.", "FILE")],
) -> None:
    """Plot the curves of runs, and write a page of their metrics.

    The page also has hints, and the values that are normal for such runs.

    Example: bert-pretrain report runs/a/train runs/b/train --output curves.png
    """
    from bert_pretrain.report.report import write_report

    picture, page = write_report(runs, local_path(output, "--output"))
    print(f"curves: {picture}\npage:   {page}")
