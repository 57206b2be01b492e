"""`predict`: applies a fine-tuned model to new rows and writes them with the predictions, in the order of the input.

All rows are read and checked first, so that an invalid row stops the command before any computation.
"""

import csv
import dataclasses
import json
import re
from pathlib import Path
from typing import Any, TextIO

from pydantic import TypeAdapter, ValidationError

from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import ConfigError, DataError, InputError, first_problem
from bert_pretrain.finetune.classify import MultiLabel
from bert_pretrain.finetune.finetuned_bert import FinetunedBert
from bert_pretrain.finetune.rows import INPUT, Example, LabelledInput
from bert_pretrain.finetune.run import KIND, TASK_CLASSES
from bert_pretrain.finetune.settings import OPTIONS_OF_TASKS, Settings, flag_of
from bert_pretrain.finetune.task import Task
from bert_pretrain.io.files import atomic_path
from bert_pretrain.io.manifest import MANIFEST, read_record
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.tools.texts import check_output_file

BUFFER_ROWS = 1024  # rows that are encoded and sorted by length together
_TASK_BY_SUFFIX = {".jsonl": "", ".csv": "", ".conll": "tag", ".json": "answer"}  # "": any task
_CHANGEABLE = {  # settings of a fine-tuning that `predict` may change
    "classify": ("text_field", "pair_field", "max_length"),
    "tag": ("text_field", "tokens_field", "max_length"),
    "answer": ("max_length",),
}
_CONLL_WORD = re.compile(r"(?!-DOCSTART-)[^ \t\r\n][^\t\n]*")  # words that `read_conll` reads back
_REMEDY = "use a name that ends in .jsonl"


def predict(
    model: Path,
    location: str,
    output: Path,
    *,
    config: TrainConfig,
    batch_tokens: int | None = None,
    skip_empty: bool = False,
    changes: dict[str, Any] | None = None,
    **reading: Any,
) -> None:
    """Predict the rows of an input and write them with the predictions to `output`, which is replaced if it exists.

    Args:
        model: a folder written by `finetune`, or by `transformers` with a head for one of the tasks.
        location: a file, a URL, a folder of `datasets`, or `dataset:NAME[:config][@split]`.
        output: a file that ends in .jsonl, .csv, .conll (only for `tag`) or .json (only for `answer`).
        config: device, precision and attention.
        batch_tokens: tokens per batch; None: chosen for the device.
        skip_empty: skip rows that cannot be predicted, instead of raising InputError.
        changes: new values of the settings `text_field`, `pair_field`, `tokens_field` and `max_length`; None: as in the
            fine-tuning.
        reading: the `format`, `columns` and `encoding` of the input.

    Raises:
        ConfigError: the ending of `output` does not suit the task, or a setting is invalid.
        InputError: a row cannot be read, predicted, or written in the format of `output`.
        DataError: the model folder is damaged, or has no head for one of the tasks.
    """
    if output.suffix not in _TASK_BY_SUFFIX:
        raise ConfigError(
            f"'{output.name}' has an unknown file format",
            where="--output",
            remedy=f"{_REMEDY} or .csv",
        )
    check_output_file(output, [location])
    changes = {name: value for name, value in (changes or {}).items() if value is not None}
    finetuned = FinetunedBert.open(model, config, changes.get("max_length"))
    if (only_task := _TASK_BY_SUFFIX[output.suffix]) not in ("", finetuned.task):
        raise ConfigError(
            f"{output.suffix} is for the task '{only_task}', but the task of the model is '{finetuned.task}'",
            where="--output",
            remedy=_REMEDY,
        )
    task = _open_task(model, finetuned, changes)
    examples = task.read(LabelledInput(location, INPUT, **reading, skip_unusable=skip_empty))
    _check_rows(examples, output)
    added: list[dict[str, Any]] = []  # new columns of each row
    with progress_bar(total=len(examples), unit=" rows", unit_scale=True, desc="predict") as bar:
        for begin in range(0, len(examples), BUFFER_ROWS):
            buffer = examples[begin : begin + BUFFER_ROWS]
            windows = task.windows_of(buffer, "input")
            logits = finetuned.logits(windows, bar, len(buffer), batch_tokens)
            added += map(task.columns, task.decode(buffer, windows, logits))
    names = write_rows(output, examples, added)
    task.report_long_examples(examples, "input")
    task.unknown_words.warn()
    print(f"written    {output}: {len(examples):,} rows with {', '.join(names)}")


def _id_of(example: Example) -> str:
    return str(example.inputs.get("id", example.row))


def _check_rows(examples: list[Example], output: Path) -> None:
    """Raise InputError if the format of the output cannot hold the rows."""
    ids: set[str] = set()
    for example in examples:
        what = ""
        if output.suffix == ".json" and _id_of(example) in ids:
            what = f"the id '{_id_of(example)}' occurs twice, but .json holds one answer per id"
        elif output.suffix == ".conll":
            wrong = [word for word in example.inputs["tokens"] if not _CONLL_WORD.fullmatch(word)]
            what = f"the word {wrong[0]!r} cannot be written to .conll" if wrong else ""
        if what:
            raise InputError(what, where=example.where, remedy=f"{_REMEDY} for --output")
        ids.add(_id_of(example))


def _open_task(model: Path, finetuned: FinetunedBert, changes: dict[str, Any]) -> Task:
    """Return the task of a model, with the settings of its fine-tuning if the folder has them."""
    for name in changes:
        if name not in _CHANGEABLE[finetuned.task]:
            raise ConfigError(
                f"{flag_of(name)} has no effect for a model of the task '{finetuned.task}'",
                where=flag_of(name),
                remedy="remove it",
            )
    manifest = read_record(model)
    settings = Settings()
    if manifest.get("kind") == KIND:
        try:
            saved = manifest["identity"]["settings"]
            # Other versions may know other settings of the training.
            names = [name for name in ("max_length", *OPTIONS_OF_TASKS[finetuned.task]) if saved.get(name) is not None]
            settings = TypeAdapter(Settings).validate_python({name: saved[name] for name in names})
        except (KeyError, TypeError, AttributeError, ValidationError) as error:
            wrong = first_problem(error) if isinstance(error, ValidationError) else "they are missing"
            raise DataError(
                f"the manifest has no valid settings of a fine-tuning: {wrong}",
                where=str(model / MANIFEST),
                remedy="restore the file from a copy, or remove it to predict with the default settings",
            ) from error
    is_regression = finetuned.task == "classify" and not finetuned.labels
    settings = dataclasses.replace(settings, **changes, regression=is_regression)
    settings = settings.resolve(finetuned.task, finetuned.bert.max_length)
    task_class = MultiLabel if finetuned.is_multi_label else TASK_CLASSES[finetuned.task]
    task = task_class(settings, finetuned.bert.tokenizer)
    task.labels = finetuned.labels
    task.allows_no_answer = manifest.get("may_be_none") is True
    return task


def write_rows(output: Path, examples: list[Example], added: list[dict[str, Any]]) -> list[str]:
    """Write rows with added columns atomically, in the format of the suffix. Return the names of the added columns.

    `.jsonl` and `.csv` contain all columns; an added column gets the prefix `predicted_` if the input has its name.
    `.conll` contains one word and its tag per line. `.json` contains an object that maps each `id` to its `answer`.
    """
    input_columns = {name for example in examples for name in example.values}
    names = {}
    for name in added[0]:
        names[name] = name
        while names[name] in input_columns:
            names[name] = f"predicted_{names[name]}"
    rows = []
    for example, columns in zip(examples, added, strict=True):
        rows.append(example.values | {names[name]: value for name, value in columns.items()})
    output.parent.mkdir(parents=True, exist_ok=True)
    # Without a byte order mark, Excel reads CSV in the system's encoding.
    encoding = "utf-8-sig" if output.suffix == ".csv" and not _json(rows).isascii() else "utf-8"
    with atomic_path(output) as temporary, temporary.open("w", encoding=encoding, newline="") as file:
        if output.suffix == ".jsonl":
            file.writelines(_json(row) + "\n" for row in rows)
        elif output.suffix == ".csv":
            _write_csv(file, rows)
        elif output.suffix == ".conll":
            file.write("\n".join(map(_conll_sentence, examples, added)))
        else:
            answers = zip(map(_id_of, examples), added, strict=True)
            file.write(_json({number: columns["answer"] for number, columns in answers}) + "\n")
    return list(names.values())


def _write_csv(file: TextIO, rows: list[dict[str, Any]]) -> None:
    columns = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(file, list(columns))
    writer.writeheader()
    for row in rows:
        nested = {name: _json(value) for name, value in row.items() if isinstance(value, list | dict)}
        writer.writerow(row | nested)


def _conll_sentence(example: Example, columns: dict[str, Any]) -> str:
    pairs = zip(example.inputs["tokens"], columns["tags"], strict=True)
    return "".join(f"{word}\t{tag}\n" for word, tag in pairs)


def _json(value: Any) -> str:
    """Write a value as JSON. Dates and decimals of Parquet become text, and NaN and infinity become null."""
    try:
        return json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:
        finite = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
        return json.dumps(finite, ensure_ascii=False)
