"""`predict`: a fine-tuned model on new rows, which are written with what it predicts, in the order of the input.

The input is read twice: the first pass checks and counts the rows and finds their columns, so that a broken row stops
the command at once; the second predicts them in groups of bounded size, sorted by length, without padding.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bert_pretrain.config import TrainConfig
from bert_pretrain.config_values import TextField
from bert_pretrain.errors import DataError, InputError, first_problem
from bert_pretrain.finetune.finetuned_bert import FinetunedBert, are_finite
from bert_pretrain.finetune.inputs import LabelledInput, UnusableRow
from bert_pretrain.finetune.row_files import FORMATS, Columns, check_output, row_writer
from bert_pretrain.finetune.run import HEADS, KIND
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tables import Row, no_rows
from bert_pretrain.finetune.task import HeadTask, report_counts
from bert_pretrain.parallel.progress import progress_bar
from bert_pretrain.storage.manifest import MANIFEST, read_record
from bert_pretrain.tools.texts import GROUP_CHARACTERS, GROUP_TEXTS, refuse_input_as_output


@dataclass(frozen=True)
class Options:
    """What the user may set; None means as in fine-tuning."""

    text_field: TextField | None = None
    pair_field: str | None = None
    tokens_field: str | None = None
    max_length: int | None = None
    batch_tokens: int | None = None
    allow_no_answer: bool | None = None
    skip_empty: bool = False


_Group = list[tuple[Row, Any]]
"""Some consecutive rows with their examples."""


@dataclass(frozen=True)
class Input:
    """The rows of an input."""

    task: HeadTask
    source: LabelledInput
    skip_empty: bool

    def __iter__(self) -> Iterator[tuple[Row, Any]]:
        """Yield the rows with their examples; empty ones are left out if they may be.

        Raises:
            InputError: when a row cannot be predicted.
        """
        for row in self.task.rows(self.source):
            try:
                example = self.task.unlabelled(row, self.source)
            except UnusableRow as error:
                if self.skip_empty:
                    self.source.leave_out(error)
                    continue
                remedy = f"{error.remedy}; --skip-empty leaves out all rows that cannot be predicted"
                raise InputError(error.what, where=error.where, remedy=remedy) from error
            yield row, example

    def groups(self) -> Iterator[_Group]:
        """Yield consecutive rows in groups of bounded size."""
        group: _Group = []
        characters = 0
        for row, example in self:
            group.append((row, example))
            characters += len(str(row.values))
            if len(group) == GROUP_TEXTS or characters >= GROUP_CHARACTERS:
                yield group
                group, characters = [], 0
        if group:
            yield group


@dataclass(frozen=True)
class _Predictor:
    """A model with its task, and the names of the columns that it adds."""

    finetuned: FinetunedBert
    task: HeadTask
    batch_tokens: int
    counts: Counter[str]

    def columns(self, group: _Group, done: Callable[[float], object]) -> list[dict[str, Any]]:
        """Return what is added to each row of a group; `done` is called with numbers of rows, as fractions.

        Raises:
            DataError: when the outputs of the network are not finite.
        """
        examples = [example for _, example in group]
        windows = self.task.encode(examples, "input", self.counts)
        share = len(group) / len(windows)
        logits = self.finetuned.logits(windows, self.batch_tokens, lambda number: done(number * share))
        if not are_finite(logits):
            what = "the outputs of the network are not finite"
            raise DataError(what, where="MODEL", remedy="give another model, or --precision fp32")
        predictions = self.task.decode(examples, windows, logits)
        return [self.task.columns(*each) for each in zip(examples, predictions, strict=True)]


def predict(
    model: Path,
    location: str,
    output: Path,
    *,
    config: TrainConfig,
    format: str | None = None,
    columns: Sequence[str] = (),
    encoding: str = "utf-8",
    options: Options | None = None,
) -> None:
    """Write the rows of an input with what a fine-tuned model predicts for them.

    Args:
        model: a folder that `finetune` has written, or one of `transformers` with the same head.
        location: a table as for fine-tuning; labels are not needed. Each line of `.txt` is a text.
        output: `.jsonl`, `.csv`, `.tsv` or `.parquet`; one that exists is replaced at the end.
        config: device, precision and attention.
        format: of the input, one of `settings.FORMATS`, where its ending does not tell it.
        columns: names of the columns, for CSV and TSV without a header.
        encoding: of text files, or `auto`, as `data.encoding`.
        options: all else.

    Raises:
        UserError: for everything that the user can correct.
    """
    options = options or Options()
    check_output(output)
    refuse_input_as_output(output, [location])
    finetuned = FinetunedBert.open(model, config)
    task = _open_task(model, finetuned, options)
    rows = Input(task, LabelledInput(location, "INPUT", format, tuple(columns), encoding), options.skip_empty)
    predictor = _Predictor(finetuned, task, options.batch_tokens or finetuned.bert.batch_tokens, Counter())
    table, names, total = _scan(rows, predictor, output)
    if found := rows.source.summary(remark=""):
        print(found)
    rows.source.warn_of_markup()
    print(f"predict    {total:,} rows; adds {', '.join(names.values())}")
    predictor.counts.clear()  # of the first row
    with (
        progress_bar(total=total, unit=" rows", unit_scale=True, desc="predict") as bar,
        row_writer(output, table) as write,
    ):
        num_written = 0
        for group in rows.groups():
            added = predictor.columns(group, bar.update)
            renamed = ({names[name]: value for name, value in each.items()} for each in added)
            write([row.values | each for (row, _), each in zip(group, renamed, strict=True)])
            num_written += len(group)
        if num_written != total:
            what = f"the input had {total:,} rows at first and {num_written:,} now"
            raise InputError(what, where=location, remedy="run the command again once it no longer changes")
    report_counts(predictor.counts, total, "input")
    print(f"written    {output}: {total:,} rows ({FORMATS[output.suffix]})")


def _scan(rows: Input, predictor: _Predictor, output: Path) -> tuple[Columns, dict[str, str], int]:
    """Read all rows, and predict the first.

    Returns:
        The columns of the output, the names in it of those that are added, and the number of rows.

    Raises:
        InputError: when a row cannot be predicted, or there is none.
    """
    table, total = Columns(output), 0
    sample: dict[str, Any] = {}
    with progress_bar(unit=" rows", desc="reading", leave=False) as bar:
        for group in rows.groups():
            sample = sample or predictor.columns(group[:1], lambda number: None)[0]
            for _, example in group:
                rows.source.look_for_markup(rows.task.texts(example))
            table.add([row.values for row, _ in group])
            total += len(group)
            bar.update(len(group))
    if not total:
        raise no_rows(rows.source)
    names = {name: _free(name, table.names) for name in sample}
    table.add([{names[name]: value for name, value in sample.items()}])
    return table, names, total


def _free(name: str, taken: Sequence[str]) -> str:
    """Return a name for a column that the input does not have."""
    return next(free for count in itertools.count() if (free := count * "predicted_" + name) not in taken)


def _open_task(model: Path, finetuned: FinetunedBert, options: Options) -> HeadTask:
    """Return the task of a model, with the settings of its fine-tuning where the folder has them.

    Raises:
        ConfigError: when a length does not fit the model.
        DataError: when the folder's manifest is broken.
    """
    manifest = read_record(model)
    settings, may_be_none = Settings(), False
    if manifest.get("kind") == KIND:
        identity = manifest.get("identity")
        try:
            found = TypeAdapter(dict[str, Any]).validate_python(identity)["settings"]
            settings = TypeAdapter(Settings).validate_python(found)
        except (KeyError, ValidationError) as error:
            what = first_problem(error) if isinstance(error, ValidationError) else "it has no settings"
            remedy = "restore it from a copy, or remove it to predict with the default settings"
            raise DataError(what, where=str(model / MANIFEST), remedy=remedy) from error
        may_be_none = manifest.get("may_be_none") is True
    given = {name: value for name in _OF_SETTINGS if (value := getattr(options, name)) is not None}
    settings = dataclasses.replace(settings, **given, stride=None if options.max_length else settings.stride)
    if finetuned.task == "classify":
        settings = dataclasses.replace(settings, regression=not finetuned.labels)
    settings.check_ranges()
    settings = settings.resolve(finetuned.task, finetuned.bert.max_length)
    task: HeadTask = HEADS[finetuned.task](settings, finetuned.bert.tokenizer)
    task.use(finetuned.labels, may_be_none if options.allow_no_answer is None else options.allow_no_answer)
    return task


_OF_SETTINGS = ("text_field", "pair_field", "tokens_field", "max_length")
