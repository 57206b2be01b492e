"""Commands for fine-tuning and prediction; the flags of `finetune` are the fields of `Settings`."""

import dataclasses
from typing import Annotated, Any

from bert_pretrain.cli import options as cli
from bert_pretrain.cli.loading import bert_folder, importing, inference_config
from bert_pretrain.cli.options import argument, option, switch
from bert_pretrain.errors import ConfigError
from bert_pretrain.finetune.settings import FORMATS, Settings
from bert_pretrain.io.files import local_path

FileFormat = Annotated[str | None, option(f"{', '.join(FORMATS)}; default: from the extension.", "FORMAT", "--format")]
_COLUMNS = "Column names for CSV or TSV without a header; more fields of TSV are ignored."
ColumnNames = Annotated[str | None, option(_COLUMNS, "NAME,...")]
_RATES = "Learning rate; auto: computed from the weights; with several, the best one on the validation rows is kept."
_ANSWER = "Maximum answer length in tokens; default: the 99th percentile of the training answers."


def finetune(
    task: Annotated[str, argument("TASK", "classify, tag or answer.")],
    model: cli.Model,
    train: Annotated[list[str], option("Labeled rows: a file, or dataset:NAME.", "INPUT")],
    output: cli.Output,
    validation: Annotated[list[str] | None, option("To select the epoch; default: 10 % of --train.", "INPUT")] = None,
    test: Annotated[list[str] | None, option("Rows to predict at the end; labels are optional.", "INPUT")] = None,
    learning_rate: Annotated[str, option(_RATES, "auto|RATE,...")] = "auto",
    epochs: Annotated[int | None, option("Number of epochs; default: enough for 1,000 steps, 3 to 10.")] = None,
    batch_size: Annotated[int, option("Windows of text per step.")] = Settings.batch_size,
    warmup_ratio: Annotated[float, option("Warm-up of the learning rate, as a share of all steps.")] = 0.1,
    weight_decay: Annotated[float, option("Weight decay of matrices (not biases, LayerNorm).")] = Settings.weight_decay,
    max_length: Annotated[
        int | None, option("Tokens per window; default: 128 (answer: 384), or fewer as trained.")
    ] = None,
    dropout: Annotated[float, option("Dropout of hidden states and attention.")] = Settings.dropout,
    baselines: Annotated[bool, switch("--baselines", "Also fine-tune an untrained network of the same size.")] = False,
    no_baseline: Annotated[bool, switch("--no-baseline", "Skip the baseline of words alone.")] = False,
    seed: Annotated[int, option("Seed for head, data order and split.")] = Settings.seed,
    text_field: Annotated[str, option("Column of the text.", panel="classify")] = Settings.text_field,
    pair_field: Annotated[str | None, option("Column of a second text.", panel="classify")] = None,
    label_field: Annotated[str, option("Column of the label.", panel="classify")] = Settings.label_field,
    regression: Annotated[bool, switch("--regression", "Predict numbers instead of classes.", "classify")] = False,
    tokens_field: Annotated[str, option("Column of the words.", panel="tag")] = Settings.tokens_field,
    tags_field: Annotated[str, option("Column of the BIO tags.", panel="tag")] = Settings.tags_field,
    tag_names: Annotated[str | None, option("Names of numeric tags, from 0 on.", "O,B-KIND,...", panel="tag")] = None,
    stride: Annotated[int | None, option("Tokens shared by adjacent windows of a context.", panel="answer")] = None,
    max_answer_length: Annotated[int | None, option(_ANSWER, panel="answer")] = None,
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
    names = tuple(tag_names.split(",")) if tag_names else ()
    values = {**locals(), "learning_rate": _rates(learning_rate), "tag_names": names}
    settings = Settings(**{field.name: values[field.name] for field in dataclasses.fields(Settings)})
    settings.check(task)
    output_folder, folder = local_path(output, "--output"), bert_folder(model)
    with importing():
        from bert_pretrain.finetune.run import finetune as run_finetune
    run_finetune(
        task,
        folder,
        train=_only("--train", train),
        validation=_only("--validation", validation) if validation else None,
        test=_only("--test", test) if test else None,
        output=output_folder,
        settings=settings,
        device="cuda" if device == "gpu" else device,
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
    config = inference_config(device, precision)
    file, folder = local_path(output, "--output"), bert_folder(model)
    with importing():
        from bert_pretrain.finetune.predict import predict as run_predict
    changes = {"text_field": text_field, "pair_field": pair_field, "tokens_field": tokens_field}
    run_predict(
        folder,
        input,
        file,
        config=config.train,
        batch_tokens=batch_tokens,
        skip_empty=skip_empty,
        changes={**changes, "max_length": max_length},
        **_reader_options(file_format, columns, encoding),
    )


def _only(flag: str, values: list[str]) -> str:
    """Return the value of an option. Raise `ConfigError` if it is given twice; click would use the last value."""
    if len(values) > 1:
        remedy = "join the files, or save them as one dataset"
        raise ConfigError(f"{flag} is given {len(values)} times", where=f"{flag} {values[1]}", remedy=remedy)
    return values[0]


def _rates(text: str) -> tuple[float, ...]:
    """Parse `--learning-rate`; return no rates for `auto`."""
    try:
        return () if text == "auto" else tuple(float(rate) for rate in text.split(","))
    except ValueError as error:
        remedy = "give auto, or numbers joined by commas, such as 1e-4,3e-4"
        raise ConfigError(f"'{text}' is not a number", where="--learning-rate", remedy=remedy) from error


def _reader_options(file_format: str | None, columns: str | None, encoding: str | None) -> dict[str, Any]:
    """Return the options for reading inputs, as both commands expect them."""
    checked = inference_config("auto", "auto", encoding=encoding).data.encoding
    return {"format": file_format, "columns": columns.split(",") if columns else (), "encoding": checked}
