"""Commands for fine-tuning and prediction; most flags of `finetune` are the fields of `Settings`."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from bert_pretrain.cli import options as cli
from bert_pretrain.cli.options import argument, bert_folder, inference_config, option
from bert_pretrain.errors import ConfigError
from bert_pretrain.finetune.settings import FORMATS, OPTIONS_OF_TASKS, Settings, flag_of, meanings
from bert_pretrain.io.files import local_path

FileFormat = Annotated[str | None, option(f"{', '.join(FORMATS)}; default: from the extension.", "FORMAT", "--format")]
_COLUMNS = "Column names for CSV or TSV without a header; more fields of TSV are ignored."
ColumnNames = Annotated[str | None, option(_COLUMNS, "NAME,...")]


def _with_options_of_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `settings` of a command by an option for every setting that has no parameter."""
    signature = inspect.signature(command)
    types = get_type_hints(Settings)
    panels = {name: task for task, names in OPTIONS_OF_TASKS.items() for name in names}
    options: list[inspect.Parameter] = []
    for name, meaning in meanings().items():
        if name not in signature.parameters:
            default = typer.Option(
                getattr(Settings, name),
                flag_of(name),
                help=meaning,
                rich_help_panel=panels.get(name),
            )
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            options.append(inspect.Parameter(name, kind, default=default, annotation=types[name]))
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        parameters += options if parameter.name == "settings" else [parameter]

    @functools.wraps(command)
    def with_settings(**values: Any) -> None:
        settings = {option.name: values.pop(option.name) for option in options}
        command(**values, settings=settings)

    with_settings.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_settings


@_with_options_of_settings
def finetune(
    task: Annotated[str, argument("TASK", "classify, tag or answer.")],
    model: cli.Model,
    train: Annotated[list[str], option("Labeled rows: a file, or dataset:NAME.", "INPUT")],
    output: cli.Output,
    validation: Annotated[list[str] | None, option("To select the epoch; default: 10 % of --train.", "INPUT")] = None,
    test: Annotated[list[str] | None, option("Rows to predict at the end; labels are optional.", "INPUT")] = None,
    settings: Any = None,
    tag_names: Annotated[str | None, option("Names of numeric tags, from 0 on.", "O,B-KIND,...", panel="tag")] = None,
    file_format: FileFormat = None,
    columns: ColumnNames = None,
    encoding: cli.Encoding = None,
    device: Annotated[str, option("auto, cpu or cuda.", "DEVICE")] = "auto",
    overwrite: cli.Overwrite = False,
) -> None:
    """Fine-tune a model to classify, tag or answer.

    The model classifies texts or pairs of texts, tags words, or answers questions from a context.

    Example: bert-pretrain finetune classify run/model --train a.csv --output o

    Example: bert-pretrain finetune tag run/model --train a.conll --output o
    """
    checked = Settings(
        **settings,
        tag_names=tuple(map(str.strip, tag_names.split(","))) if tag_names else (),
    )
    checked.check(task)
    output_folder, folder = local_path(output, "--output"), bert_folder(model)
    from bert_pretrain.finetune.run import finetune as run_finetune

    run_finetune(
        task,
        folder,
        train=_only("--train", train),
        validation=_only("--validation", validation) if validation else None,
        test=_only("--test", test) if test else None,
        output=output_folder,
        settings=checked,
        device=device,
        overwrite=overwrite,
        **_reader_options(file_format, columns, encoding),
    )


def predict(
    model: cli.Model,
    input: Annotated[str, argument("INPUT", "Rows without labels: a file, or dataset:NAME.")],
    output: Annotated[str, option("File to write: .jsonl or .csv; also .conll for tags, .json for answers.", "FILE")],
    text_field: Annotated[str | None, option("Column of the text.")] = None,
    pair_field: Annotated[str | None, option("Column of a second text.")] = None,
    tokens_field: Annotated[str | None, option("Column of the words, for a tagger.")] = None,
    max_length: Annotated[int | None, option("Tokens per window.")] = None,
    skip_empty: cli.SkipEmpty = False,
    file_format: FileFormat = None,
    columns: ColumnNames = None,
    encoding: cli.Encoding = None,
    batch_tokens: cli.BatchTokens = None,
    device: cli.Device = "auto",
    precision: cli.Precision = "fp32",
) -> None:
    """Predict labels, tags or answers with a fine-tuned model.

    By default columns and lengths are those of the fine-tuning.

    Example: bert-pretrain predict classifier unseen.csv --output new.jsonl
    """
    config = inference_config(device=device, precision=precision)
    file, folder = local_path(output, "--output"), bert_folder(model)
    from bert_pretrain.finetune.predict import predict as run_predict

    changes = {
        "text_field": text_field,
        "pair_field": pair_field,
        "tokens_field": tokens_field,
        "max_length": max_length,
    }
    run_predict(
        folder,
        input,
        file,
        config=config.train,
        batch_tokens=batch_tokens,
        skip_empty=skip_empty,
        changes=changes,
        **_reader_options(file_format, columns, encoding),
    )


def _only(flag: str, values: list[str]) -> str:
    """Return the value of an option. Raise `ConfigError` if it is given twice; click would use the last value."""
    if len(values) > 1:
        raise ConfigError(
            f"{flag} is given {len(values)} times",
            where=f"{flag} {values[1]}",
            remedy="join the files, or save them as one dataset",
        )
    return values[0]


def _reader_options(file_format: str | None, columns: str | None, encoding: str | None) -> dict[str, Any]:
    """Return the options for reading inputs, as both commands expect them."""
    checked = inference_config(encoding=encoding).data.encoding
    return {"format": file_format, "columns": columns.split(",") if columns else (), "encoding": checked}
