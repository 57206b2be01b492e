"""`predict`: a fine-tuned model on new rows, which are written with what it predicts, in the order of the input.

All rows are read and checked first, so that a broken row stops the command at once. They are predicted in batches
sorted by length, without padding.
"""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import ConfigError, DataError, OutputError
from bert_pretrain.finetune.finetuned_bert import FinetunedBert
from bert_pretrain.finetune.multi_label import MultiLabel
from bert_pretrain.finetune.rows import NEW, LabelledInput
from bert_pretrain.finetune.run import HEADS, KIND
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.task import Task
from bert_pretrain.io.files import atomic_path
from bert_pretrain.io.manifest import MANIFEST, read_record
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.tools.texts import refuse_input_as_output

ROWS_AT_ONCE = 1024
"""Rows encoded and sorted by length at once."""
TASK_OF_ENDING = {".jsonl": "", ".csv": "", ".conll": "tag", ".json": "answer"}
"""The endings of outputs; those of evaluation scripts are for one task."""


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
    """Write the rows of an input with what a fine-tuned model predicts for them.

    `model` is a folder that `finetune` has written, or one of `transformers` with the same head. `reading` are
    `format`, `columns` and `encoding` of the input; labels are not needed. If `output` exists, it is replaced at the
    end. `changes` are `text_field`, `pair_field`, `tokens_field` and `max_length`; they are those of the fine-tuning if
    not given.
    """
    if output.suffix not in TASK_OF_ENDING:
        what, remedy = f"the ending of '{output.name}' is not a format for rows", "end it in .jsonl or .csv"
        raise ConfigError(what, where="--output", remedy=remedy)
    if output.is_dir():
        raise OutputError(f"{output} is a folder", where="--output", remedy="name a file")
    refuse_input_as_output(output, [location])
    finetuned = FinetunedBert.open(model, config)
    if TASK_OF_ENDING[output.suffix] not in ("", finetuned.task):
        what = f"{output.suffix} is for the task '{TASK_OF_ENDING[output.suffix]}', this is '{finetuned.task}'"
        raise ConfigError(what, where="--output", remedy="write .jsonl")
    task = _open_task(model, finetuned, changes or {})
    examples = task.read(LabelledInput(location, NEW, **reading, skips=skip_empty))
    added: list[dict[str, Any]] = []
    with progress_bar(total=len(examples), unit=" rows", unit_scale=True, desc="predict") as bar:
        for begin in range(0, len(examples), ROWS_AT_ONCE):
            some = examples[begin : begin + ROWS_AT_ONCE]
            windows = task.encode(some, "input")
            logits = finetuned.logits(windows, bar, len(some), batch_tokens)
            added += map(task.columns, task.decode(some, windows, logits))
    taken = {name for example in examples for name in example.values}
    names = {name: name for name in added[0]}
    for name in names:
        while names[name] in taken:
            names[name] = f"predicted_{names[name]}"
    if output.suffix == ".conll":
        rows = [{"tokens": each.inputs["tokens"], **new} for each, new in zip(examples, added, strict=True)]
    elif output.suffix == ".json":
        rows = [{"id": each.inputs.get("id", number), **added[number]} for number, each in enumerate(examples)]
    else:
        renamed = [{names[name]: value for name, value in new.items()} for new in added]
        rows = [each.values | new for each, new in zip(examples, renamed, strict=True)]
    write_rows(output, rows)
    task.report_cut(examples, "input")
    print(f"written    {output}: {len(examples):,} rows with {', '.join(names.values())}")


def _open_task(model: Path, finetuned: FinetunedBert, changes: dict[str, Any]) -> Task:
    """Return the task of a model, with the settings of its fine-tuning where the folder has them."""
    manifest, settings = read_record(model), Settings()
    if manifest.get("kind") == KIND:
        try:
            settings = TypeAdapter(Settings).validate_python(manifest["identity"]["settings"])
        except (KeyError, TypeError, ValidationError) as error:
            what = f"it does not have the settings of a fine-tuning: {error}"
            remedy = "restore it from a copy, or remove it to predict with the default settings"
            raise DataError(what, where=str(model / MANIFEST), remedy=remedy) from error
    changes = {name: value for name, value in changes.items() if value is not None}
    changes |= {"stride": None} if "max_length" in changes else {}
    is_regression = finetuned.task == "classify" and not finetuned.labels
    settings = dataclasses.replace(settings, **changes, regression=is_regression)
    settings = settings.resolve(finetuned.task, finetuned.bert.max_length)
    head = MultiLabel if finetuned.has_lists else HEADS[finetuned.task]
    task = head(settings, finetuned.bert.tokenizer)
    task.labels, task.may_be_none = finetuned.labels, manifest.get("may_be_none") is True
    return task


def write_rows(output: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows in the format of the ending, whole or not at all.

    `.jsonl` and `.csv` hold all columns, `.conll` a word and its tag per line, `.json` an object with every `answer` by
    its `id`.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    # Excel takes CSV for the system's encoding, unless a byte order mark tells.
    encoding = "utf-8-sig" if output.suffix == ".csv" and not _json(rows).isascii() else "utf-8"
    with atomic_path(output) as temporary, temporary.open("w", encoding=encoding, newline="") as file:
        if output.suffix == ".jsonl":
            file.writelines(_json(row) + "\n" for row in rows)
        elif output.suffix == ".csv":
            lines = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
            lines.writeheader()
            for row in rows:
                nested = {name: _json(value) for name, value in row.items() if isinstance(value, list | dict)}
                lines.writerow(row | nested)
        elif output.suffix == ".conll":
            pairs = (zip(row["tokens"], row["tags"], strict=True) for row in rows)
            file.write("\n".join("".join(f"{word}\t{tag}\n" for word, tag in pair) for pair in pairs))
        else:
            file.write(_json({str(row["id"]): row["answer"] for row in rows}) + "\n")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)  # dates and decimals of Parquet, as text
