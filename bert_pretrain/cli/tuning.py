"""The commands that fine-tune and predict; the flags of `finetune` are the fields of `Settings`."""

import dataclasses
from typing import Annotated, Any

import typer

from bert_pretrain.cli.loading import bert_folder, importing, inference_config
from bert_pretrain.cli.options import BatchTokens, Device, Encoding, Model, Output, Overwrite, Precision, SkipEmpty
from bert_pretrain.errors import ConfigError
from bert_pretrain.finetune.settings import FORMATS, Settings
from bert_pretrain.storage.paths import local_path

_DEFAULTS = Settings()
FileFormat = Annotated[
    str | None, typer.Option("--format", metavar="FORMAT", help=f"{', '.join(FORMATS)}; by default by the ending.")
]
ColumnNames = Annotated[
    str | None,
    typer.Option("--columns", metavar="NAME,...", help="Of CSV or TSV without a header; a last ... for others."),
]


def finetune(
    task: Annotated[str, typer.Argument(metavar="TASK", help="classify, tag or answer.")],
    model: Model,
    train: Annotated[str, typer.Option("--train", metavar="INPUT", help="Labelled rows: a file, or dataset:NAME.")],
    output: Output,
    validation: Annotated[
        str | None, typer.Option("--validation", metavar="INPUT", help="Selects the epoch; by default 10 % of --train.")
    ] = None,
    test: Annotated[
        str | None, typer.Option("--test", metavar="INPUT", help="Rows to predict at the end; labels are optional.")
    ] = None,
    learning_rate: Annotated[
        str,
        typer.Option(
            "--learning-rate",
            metavar="auto|RATE,...",
            help="By width and scale of the model, or the best of these.",
        ),
    ] = "auto",
    epochs: Annotated[
        int | None, typer.Option("--epochs", help="Passes over the rows; by default by their number.")
    ] = _DEFAULTS.epochs,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Windows of text per step.")] = _DEFAULTS.batch_size,
    warmup_ratio: Annotated[float, typer.Option("--warmup-ratio", help="Share of all steps.")] = _DEFAULTS.warmup_ratio,
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="Of matrices.")] = _DEFAULTS.weight_decay,
    max_length: Annotated[
        int | None, typer.Option("--max-length", help="Tokens per window; 128 by default, 384 for answer.")
    ] = _DEFAULTS.max_length,
    dropout: Annotated[
        float | None, typer.Option("--dropout", help="By default the better of 0.1 and 0.")
    ] = _DEFAULTS.dropout,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Also fine-tune the same network untrained, to compare.")
    ] = _DEFAULTS.baselines,
    seed: Annotated[int, typer.Option("--seed", help="Of the head, the order and what is held out.")] = _DEFAULTS.seed,
    text_field: Annotated[
        str,
        typer.Option(
            "--text-field", metavar="NAME,...", help="Column of the text, or several.", rich_help_panel="classify"
        ),
    ] = "text",
    pair_field: Annotated[
        str | None, typer.Option("--pair-field", help="Column of a second text.", rich_help_panel="classify")
    ] = _DEFAULTS.pair_field,
    label_field: Annotated[
        str, typer.Option("--label-field", help="Column of the label.", rich_help_panel="classify")
    ] = _DEFAULTS.label_field,
    regression: Annotated[
        bool, typer.Option("--regression", help="Predict numbers instead of classes.", rich_help_panel="classify")
    ] = _DEFAULTS.regression,
    tokens_field: Annotated[
        str, typer.Option("--tokens-field", help="Column of the words.", rich_help_panel="tag")
    ] = _DEFAULTS.tokens_field,
    tags_field: Annotated[
        str, typer.Option("--tags-field", help="Column of the BIO tags.", rich_help_panel="tag")
    ] = _DEFAULTS.tags_field,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride", help="Tokens shared by neighbouring windows of a long context.", rich_help_panel="answer"
        ),
    ] = _DEFAULTS.stride,
    max_answer_length: Annotated[
        int | None,
        typer.Option(
            "--max-answer-length", help="Most tokens; default: 99 % of the training answers.", rich_help_panel="answer"
        ),
    ] = _DEFAULTS.max_answer_length,
    file_format: FileFormat = None,
    columns: ColumnNames = None,
    encoding: Encoding = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse rows that would be repaired or left out.")] = False,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu or cuda.")] = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Fine-tune a model to classify, tag or answer.

    It classifies texts or pairs of texts, tags words, or answers questions from a context.

    Example: bert-pretrain finetune classify run/model --train a.csv --output o

    Example: bert-pretrain finetune tag run/model --train a.conll --output o
    """
    given = dict(locals())
    given["text_field"] = inference_config("auto", "auto", text_field).data.text_field
    given["learning_rate"] = _rates(learning_rate)
    chosen = Settings(**{field.name: given[field.name] for field in dataclasses.fields(Settings)})
    chosen.check(task)
    place = local_path(output, "--output")
    folder = bert_folder(model)
    with importing():
        from bert_pretrain.finetune.run import finetune as run_finetune
    run_finetune(
        task,
        folder,
        train=train,
        output=place,
        validation=validation,
        test=test,
        settings=chosen,
        **_reading(file_format, columns, encoding),
        strict=strict,
        device="cuda" if device == "gpu" else device,
        overwrite=overwrite,
    )


def predict(
    model: Model,
    input: Annotated[str, typer.Argument(metavar="INPUT", help="Rows without labels: a file, or dataset:NAME.")],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            metavar="FILE",
            help="The file to write: .jsonl, .csv, .tsv or .parquet; .conll for tags, .json for answers.",
        ),
    ],
    text_field: Annotated[
        str | None, typer.Option("--text-field", metavar="NAME,...", help="Column of the text, or several.")
    ] = None,
    pair_field: Annotated[str | None, typer.Option("--pair-field", help="Column of a second text.")] = None,
    tokens_field: Annotated[str | None, typer.Option("--tokens-field", help="Taggers: column of the words.")] = None,
    max_length: Annotated[int | None, typer.Option("--max-length", help="Tokens per window.")] = None,
    allow_no_answer: Annotated[
        bool | None,
        typer.Option("--allow-no-answer/--always-answer", help="Whether a question may have no answer."),
    ] = None,
    skip_empty: SkipEmpty = False,
    file_format: FileFormat = None,
    columns: ColumnNames = None,
    encoding: Encoding = None,
    batch_tokens: BatchTokens = None,
    device: Device = "auto",
    precision: Precision = "fp32",
) -> None:
    """Predict labels, tags or answers by a fine-tuned model.

    Columns, lengths and the like are those of the fine-tuning, unless flags say otherwise.

    Example: bert-pretrain predict classifier unseen.csv --output new.jsonl
    """
    config = inference_config(device, precision, text_field)
    file, folder = local_path(output, "--output"), bert_folder(model)
    with importing():
        from bert_pretrain.finetune.predict import predict as run_predict
    run_predict(
        folder,
        input,
        file,
        config=config.train,
        **_reading(file_format, columns, encoding),
        text_field=text_field and config.data.text_field,
        pair_field=pair_field,
        tokens_field=tokens_field,
        max_length=max_length,
        batch_tokens=batch_tokens,
        allow_no_answer=allow_no_answer,
        skip_empty=skip_empty,
    )


def _rates(text: str) -> tuple[float, ...]:
    """Return the learning rates of `--learning-rate`, none for `auto`."""
    try:
        return () if text == "auto" else tuple(float(rate) for rate in text.split(","))
    except ValueError as error:
        remedy = "give auto, or numbers joined by commas, such as 1e-4,3e-4"
        raise ConfigError(f"'{text}' is not a number", where="--learning-rate", remedy=remedy) from error


def _reading(file_format: str | None, columns: str | None, encoding: str | None) -> dict[str, Any]:
    """Return how the inputs are read, as both tools take it."""
    return {
        "format": file_format,
        "columns": columns.split(",") if columns else (),
        "encoding": encoding or "utf-8",
    }
