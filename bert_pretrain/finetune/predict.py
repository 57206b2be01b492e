"""`predict`: a fine-tuned model on new rows, which are written with what it predicts, in the order of the input.

All rows are read and checked first, so that a broken row stops the command at once. They are predicted in batches
sorted by length, without padding.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bert_pretrain.config import TextField, TrainConfig
from bert_pretrain.errors import ConfigError, DataError, InputError
from bert_pretrain.finetune import row_files
from bert_pretrain.finetune.finetuned_bert import FinetunedBert, are_finite
from bert_pretrain.finetune.inputs import LabelledInput, UnusableRow
from bert_pretrain.finetune.run import HEADS, KIND
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tables import Row, no_rows
from bert_pretrain.finetune.task import Task, report_counts
from bert_pretrain.io.manifest import MANIFEST, read_record
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.tools.texts import refuse_input_as_output

ROWS_AT_ONCE = 1024
"""Encoded and sorted by length at once."""


def predict(
    model: Path,
    location: str,
    output: Path,
    *,
    config: TrainConfig,
    format: str | None = None,
    columns: Sequence[str] = (),
    encoding: str = "utf-8",
    text_field: TextField | None = None,
    pair_field: str | None = None,
    tokens_field: str | None = None,
    max_length: int | None = None,
    batch_tokens: int | None = None,
    allow_no_answer: bool | None = None,
    skip_empty: bool = False,
) -> None:
    """Write the rows of an input with what a fine-tuned model predicts for them.

    `model` is a folder that `finetune` has written, or one of `transformers` with the same head. `location`, `format`,
    `columns` and `encoding` say what to read, as for fine-tuning; labels are not needed. If `output` exists, it is
    replaced at the end. The names of columns, `max_length` and `allow_no_answer` are those of the fine-tuning if None.
    """
    row_files.check_output(output)
    refuse_input_as_output(output, [location])
    finetuned = FinetunedBert.open(model, config)
    given = {"text_field": text_field, "pair_field": pair_field, "tokens_field": tokens_field, "max_length": max_length}
    task = _open_task(model, finetuned, given, allow_no_answer)
    needed = row_files.OF_TASKS.get(output.suffix, finetuned.task)
    if needed != finetuned.task:
        what, remedy = f"{output.suffix} is for the task '{needed}', this is '{finetuned.task}'", "write .jsonl"
        raise ConfigError(what, where="--output", remedy=remedy)
    source = LabelledInput(location, "INPUT", format, tuple(columns), encoding, names_text=text_field is not None)
    rows = read_unlabelled(task, source, skip_empty)
    if not rows:
        raise no_rows(source)
    row_files.check_rows(output, [row.values for row, _ in rows])
    if found := source.summary(remark=""):
        print(found)
    batch_tokens = batch_tokens or finetuned.bert.batch_tokens
    added: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    with progress_bar(total=len(rows), unit=" rows", unit_scale=True, desc="predict") as bar:
        for begin in range(0, len(rows), ROWS_AT_ONCE):
            examples = [example for _, example in rows[begin : begin + ROWS_AT_ONCE]]
            added += _columns(finetuned, task, examples, batch_tokens, counts, bar.update)
    taken = {name for row, _ in rows for name in row.values}
    prefixes = ["predicted_" * count for count in range(len(taken) + 1)]
    names = {name: next(f"{each}{name}" for each in prefixes if f"{each}{name}" not in taken) for name in added[0]}
    renamed = ({names[name]: value for name, value in each.items()} for each in added)
    if output.suffix in row_files.OF_TASKS:
        row_files.write_task_form(output, [row.values for row, _ in rows], [example for _, example in rows], added)
    else:
        row_files.write_rows(output, [row.values | each for (row, _), each in zip(rows, renamed, strict=True)])
    report_counts(counts, len(rows), "input")
    print(
        f"written    {output}: {len(rows):,} rows ({row_files.FORMATS[output.suffix]}) with {', '.join(names.values())}"
    )


def read_unlabelled(task: Task, source: LabelledInput, skip_empty: bool) -> list[tuple[Row, Any]]:
    """Return the rows of an input with their examples; those that cannot be predicted are refused or left out."""
    found = []
    for row in task.rows(source):
        try:
            found.append((row, task.unlabelled(row, source)))
        except UnusableRow as error:
            if not skip_empty:
                remedy = f"{error.remedy}; --skip-empty leaves out all rows that cannot be predicted"
                raise InputError(error.what, where=error.where, remedy=remedy) from error
            source.leave_out(error)
    return found


def _columns(
    finetuned: FinetunedBert,
    task: Task,
    examples: list[Any],
    batch_tokens: int,
    counts: Counter[str],
    done: Callable[[float], object],
) -> list[dict[str, Any]]:
    """Return what is added to the row of each example; `done` is called with numbers of rows, as fractions."""
    windows = task.encode(examples, "input", counts)
    share = len(examples) / len(windows)
    logits = finetuned.logits(windows, batch_tokens, lambda number: done(number * share))
    if not are_finite(logits):
        what = "the outputs of the network are not finite"
        raise DataError(what, where="MODEL", remedy="give another model, or --precision fp32")
    return [task.columns(*each) for each in zip(examples, task.decode(examples, windows, logits), strict=True)]


def _open_task(model: Path, finetuned: FinetunedBert, given: dict[str, Any], allow_no_answer: bool | None) -> Task:
    """Return the task of a model, with the settings of its fine-tuning where the folder has them."""
    manifest, settings = read_record(model), Settings()
    if manifest.get("kind") == KIND:
        try:
            settings = TypeAdapter(Settings).validate_python(manifest["identity"]["settings"])
        except (KeyError, TypeError, ValidationError) as error:
            what = f"it does not have the settings of a fine-tuning: {error}"
            remedy = "restore it from a copy, or remove it to predict with the default settings"
            raise DataError(what, where=str(model / MANIFEST), remedy=remedy) from error
    given = {name: value for name, value in given.items() if value is not None}
    settings = dataclasses.replace(settings, **given, stride=None if "max_length" in given else settings.stride)
    if finetuned.task == "classify":
        settings = dataclasses.replace(settings, regression=not finetuned.labels)
    settings.check_ranges()
    settings = settings.resolve(finetuned.task, finetuned.bert.max_length)
    task: Task = HEADS[finetuned.task](settings, finetuned.bert.tokenizer)
    task.use(finetuned.labels, manifest.get("may_be_none") is True if allow_no_answer is None else allow_no_answer)
    return task
