"""`predict`: a fine-tuned model on new rows, which are written with what it predicts, in the order of the input.

All rows are read and checked first, so that a broken row stops the command at once. They are predicted in batches
sorted by length, without padding.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import ConfigError, DataError, InputError
from bert_pretrain.finetune import row_files
from bert_pretrain.finetune.finetuned_bert import FinetunedBert
from bert_pretrain.finetune.rows import LabelledInput, Row, UnusableRow
from bert_pretrain.finetune.run import HEADS, KIND
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.task import Example, Task, report_counts
from bert_pretrain.io.manifest import MANIFEST, read_record
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.tools.texts import refuse_input_as_output

ROWS_AT_ONCE = 1024
"""Rows encoded and sorted by length at once."""


def predict(
    model: Path,
    location: str,
    output: Path,
    *,
    config: TrainConfig,
    format: str | None = None,
    columns: Sequence[str] = (),
    encoding: str = "utf-8",
    batch_tokens: int | None = None,
    allow_no_answer: bool | None = None,
    skip_empty: bool = False,
    **changes: Any,
) -> None:
    """Write the rows of an input with what a fine-tuned model predicts for them.

    `model` is a folder that `finetune` has written, or one of `transformers` with the same head. `location`, `format`,
    `columns` and `encoding` say what to read, as for fine-tuning; labels are not needed. If `output` exists, it is
    replaced at the end. `changes` are `text_field`, `pair_field`, `tokens_field` and `max_length`; they and
    `allow_no_answer` are those of the fine-tuning if None.
    """
    row_files.check_output(output)
    refuse_input_as_output(output, [location])
    finetuned = FinetunedBert.open(model, config)
    if (needed := row_files.OF_TASKS.get(output.suffix, finetuned.task)) != finetuned.task:
        what = f"{output.suffix} is for the task '{needed}', this is '{finetuned.task}'"
        raise ConfigError(what, where="--output", remedy="write .jsonl")
    task = _open_task(model, finetuned, {name: value for name, value in changes.items() if value is not None})
    if allow_no_answer is not None:
        task.may_be_none = allow_no_answer
    names_text = changes.get("text_field") is not None
    source = LabelledInput(location, "INPUT", format, columns, encoding, names_text=names_text)
    rows, examples = read_unlabelled(task, source, skip_empty)
    row_files.check_rows(output, rows)
    source.print_notes()
    added: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    with progress_bar(total=len(rows), unit=" rows", unit_scale=True, desc="predict") as bar:
        for begin in range(0, len(rows), ROWS_AT_ONCE):
            some = examples[begin : begin + ROWS_AT_ONCE]
            predictions = _predictions(finetuned, task, some, batch_tokens, counts, bar.update)
            added += map(task.columns, predictions)
    names = _free_names(added[0], {name for row in rows for name in row})
    if output.suffix in row_files.OF_TASKS:
        written = [{**row, **example.inputs, **new} for row, example, new in zip(rows, examples, added, strict=True)]
    else:
        renamed = ({names[name]: value for name, value in each.items()} for each in added)
        written = [row | new for row, new in zip(rows, renamed, strict=True)]
    row_files.write_rows(output, written)
    report_counts(counts, len(rows), "input")
    print(
        f"written    {output}: {len(rows):,} rows ({row_files.FORMATS[output.suffix]}) with {', '.join(names.values())}"
    )


def _predictions(
    finetuned: FinetunedBert,
    task: Task,
    examples: list[Example],
    batch_tokens: int | None,
    counts: Counter[str],
    done: Callable[[float], object],
) -> list[Any]:
    """Return a prediction for each example; `done` is called with numbers of examples, as fractions."""
    windows = task.encode(examples, "input", counts)
    share = len(examples) / len(windows)
    size = batch_tokens or finetuned.bert.batch_tokens
    logits = finetuned.logits(windows, size, lambda number: done(number * share))
    return task.decode(examples, windows, logits)


def read_unlabelled(task: Task, source: LabelledInput, skip_empty: bool) -> tuple[list[dict[str, Any]], list[Example]]:
    """Return the rows of an input and their examples; those that cannot be predicted are refused or left out."""
    kept: list[tuple[Row, Example]] = []
    for row in task.rows(source):
        try:
            kept.append((row, Example(len(kept), row.where, task.inputs_of(row, source))))
        except UnusableRow as error:
            if not skip_empty:
                remedy = f"{error.remedy}; --skip-empty leaves out all rows that cannot be predicted"
                raise InputError(error.what, where=error.where, remedy=remedy) from error
            source.note(f"left out, since {error.what}", error)
    if not kept:
        raise source.no_rows()
    return [row.values for row, _ in kept], [example for _, example in kept]


def _free_names(names: Iterable[str], taken: set[str]) -> dict[str, str]:
    """Return the columns for what is predicted; the name of one that the input has already gets a prefix."""
    renamed = {}
    for name in names:
        renamed[name] = name
        while renamed[name] in taken:
            renamed[name] = f"predicted_{renamed[name]}"
    return renamed


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
    changes = changes | ({"stride": None} if "max_length" in changes else {})
    is_regression = finetuned.task == "classify" and not finetuned.labels
    settings = dataclasses.replace(settings, **changes, regression=is_regression)
    settings = settings.resolve(finetuned.task, finetuned.bert.max_length)
    task = HEADS[finetuned.task](settings, finetuned.bert.tokenizer)
    task.labels, task.may_be_none = finetuned.labels, manifest.get("may_be_none") is True
    return task
