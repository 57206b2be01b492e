"""Reads labelled rows from CSV, TSV, JSON, Parquet and `datasets`, with their positions for messages.

Values are not converted: "NA" stays a word, and "007" stays text. All rows are kept in memory. Benchmark files have
flaws, so unusable rows are skipped and counted by reason.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.finetune.settings import FORMATS
from bert_pretrain.io.files import is_url
from bert_pretrain.io.inputs import COMPRESSIONS
from bert_pretrain.text import parquet
from bert_pretrain.text.encodings import AUTO, UTF8
from bert_pretrain.text.hub_datasets import TRAIN, VALIDATION, choices, is_dataset, open_dataset
from bert_pretrain.text.readers import SURPLUS, Record, check_texts, dataset_records, named_records, read_records
from bert_pretrain.text.reasons import count_reason, describe_reasons
from bert_pretrain.text.sources import Source, examined, sample_text
from bert_pretrain.text.text_files import ByteRange, read_lines, text_blocks

INPUT = "INPUT"  # the argument of `predict`, which is not an option
_BY_ENDING = {f".{name}": name for name in FORMATS} | {".ndjson": "jsonl"}
_SPLITS = {"--train": (TRAIN,), "--validation": VALIDATION, "--test": ("test",), INPUT: ("test",)}


class UnusableRow(InputError):
    """A row that cannot be used. `finetune` skips and counts it; `predict` stops unless --skip-empty is given."""


@dataclass
class Example:
    """A row of an input, and the fields that a task reads from it."""

    row: int  # number in the input, from 0
    where: str
    values: dict[str, Any]  # by column
    inputs: dict[str, Any] = field(default_factory=dict)  # `text`, `pair`; `tokens`; or `id`, `question`, `context`
    label: Any = None  # a class, classes, a number, tags, or answers and where they start; None: unknown
    exceeds_window: bool = False

    def get(self, column: str, flag: str = "") -> Any:
        """Return the value of a column. `flag` is the option that names the column, if there is one."""
        if column not in self.values:
            how = f"choose one with {flag}" if flag else f"rename one to '{column}'"
            names = ", ".join(map(str, self.values))
            remedy = f"the columns are {names}: {how}; a table without a header needs --columns NAME,NAME,..."
            raise self.unusable(f"there is no column '{column}'", remedy)
        return self.values[column]

    def unusable(self, what: str, remedy: str = "fix the row, or remove it") -> UnusableRow:
        """Return the error that the row cannot be used."""
        return UnusableRow(what, where=self.where, remedy=remedy)


@dataclass
class LabelledInput:
    """An input of labelled rows, the options for reading it, and notes on repaired and skipped rows."""

    location: str  # a file, a URL, a folder saved by `datasets`, or `dataset:NAME[:config][@split]`
    flag: str  # "--train", "--validation", "--test" or INPUT; also selects the split of a dataset
    format: str | None = None  # one of `FORMATS`; None: from the file name
    columns: Sequence[str] = ()  # column names of CSV or TSV without a header; more fields are ignored
    encoding: str = "utf-8"
    skip_unusable: bool = True
    notes: Counter[str] = field(default_factory=Counter)  # see `count_reason`
    errors: list[UnusableRow] = field(default_factory=list)  # of the skipped rows

    def __post_init__(self) -> None:
        if self.format not in (None, *FORMATS):
            raise ConfigError(
                f"unknown format '{self.format}'",
                where="--format",
                remedy=f"choose one of {', '.join(FORMATS)}",
            )
        if self.columns and not self.is_delimited:
            raise InputError(
                "--columns is only for CSV and TSV",
                where=self.name,
                remedy="remove --columns, or pass --format csv or --format tsv",
            )

    @property
    def name(self) -> str:
        """The input in messages."""
        return f"{self.flag} {self.location}"

    @property
    def kind(self) -> str:
        """The format: "dataset", one of `FORMATS`, or "" if it is unknown."""
        if is_dataset(self.location) or Path(self.location).is_dir():
            return "dataset"
        compression = next((ending for ending in COMPRESSIONS if self.location.endswith(ending)), "")
        ending = Path(self.location.removesuffix(compression)).suffix.lower()
        return self.format or _BY_ENDING.get(ending, "")

    @property
    def is_delimited(self) -> bool:
        return self.kind in ("csv", "tsv")

    def note(self, what: str, where: str) -> None:
        """Count a repaired or skipped row under the reason `what`."""
        count_reason(self.notes, what, where.removeprefix(f"{self.location}: "))

    def normalized(self, label: str, where: str) -> str:
        """Return a label in NFC and without blanks at its ends, because labels that look equal are equal."""
        name = unicodedata.normalize("NFC", label).strip()
        if name != label:
            self.note("labels with blanks at the ends or not in NFC, which were changed", where)
        return name

    def skip_row(self, error: UnusableRow) -> None:
        """Record an unusable row if `skip_unusable` is set. Otherwise raise InputError."""
        if not self.skip_unusable:
            raise InputError(
                error.what,
                where=error.where,
                remedy=f"{error.remedy}; or skip all unusable rows with --skip-empty",
            ) from error
        self.errors.append(error)
        self.note(f"rows skipped because {error.what}", error.where)

    def report(self, num_usable: int) -> None:
        """Print the notes. Raise InputError if no row is usable or, in `finetune`, if more than half are unusable."""
        num_errors = len(self.errors)
        if self.flag != INPUT and num_errors > num_usable:
            first = self.errors[0]
            raise InputError(
                f"{first.what}; {num_errors:,} of {num_errors + num_usable:,} rows cannot be used",
                where=first.where,
                remedy=first.remedy,
            )
        if self.notes:
            print(f"{self.name}: {'; '.join(describe_reasons(self.notes))}")
        if not num_usable:
            raise InputError("the input has no rows", where=self.name, remedy="provide a table with rows")

    def open(self, format_: str) -> Source:
        """Examine the file and return it as a source in a format of `read_records` or as "txt"."""
        if not is_url(self.location) and not Path(self.location).is_file():
            raise InputError("no such file or folder", where=self.location, remedy="check the path; pipes are not read")
        config = DataConfig(encoding=self.encoding, sentence_splitter="lines")
        (file,) = examined(
            [
                Source(
                    self.location,
                    format_,
                    None,
                    "",
                    boundary="file",
                )
            ],
            config,
        )
        if self.encoding == AUTO:
            self.encoding = file.encoding  # an input may be opened twice: print the encoding once
            if file.encoding != UTF8:
                print(f"{self.name}: encoding {file.encoding}")
        return file

    def read_text(self) -> str:
        """Return the content of a text file, decompressed and without a byte order mark."""
        return "".join(text_blocks(ByteRange(self.open("txt")), Counter()))


def read_rows(source: LabelledInput, text_field: str | None = None) -> list[Example]:
    """Read the rows of a table. With `text_field`, a `.txt` file is read as a table with this one column."""
    rows: list[Example] = []
    counts: Counter[str] = Counter()
    for number, (record, position) in enumerate(_records(source, text_field, counts)):
        row = Example(number, str(position), record)
        surplus = record.pop(SURPLUS, [])
        if source.is_delimited:
            if len(record) > 1 and all(name == value for name, value in record.items()):
                source.note("header lines inside the file, which were skipped", row.where)
                continue
            num_fields = sum(value is not None for value in record.values())
            if num_fields < len(record) or (surplus and not source.columns):
                what = f"the row has {num_fields + len(surplus)} fields but the header has {len(record)}"
                source.skip_row(row.unusable(what, "write one value per column, or remove the row"))
                continue
        rows.append(row)
    check_texts(counts, len(rows))
    return rows


def _records(source: LabelledInput, text_field: str | None, counts: Counter[str]) -> Iterable[Record]:
    kind = source.kind
    if kind == "dataset":
        return _dataset_records(source)
    if kind == "txt" and text_field is not None:
        return _text_records(source, text_field)
    if kind in ("", "conll", "txt"):
        raise InputError(
            f"'{source.location}' has an unknown file format, or one that is not for this task",
            where=source.name,
            remedy=f"pass --format ({', '.join(FORMATS)}); see docs/finetuning.md",
        )
    file = source.open("jsonl" if kind == "json" else kind)
    # CSV rows with extra fields are refused: an unquoted comma may have split many texts.
    records = read_records(ByteRange(file), counts, header=source.columns, any_width=kind == "tsv")
    return named_records(records, parquet.features(file)) if kind == "parquet" else records


def _dataset_records(source: LabelledInput) -> Iterable[Record]:
    splits = open_dataset(source.location)
    names = [name for name in ("", *_SPLITS[source.flag]) if name in splits]  # "": no splits, or a named one
    if not names:
        raise InputError(
            f"the dataset has the splits {', '.join(splits)}",
            where=source.name,
            remedy=f"choose one: {choices(source.location, list(splits))}",
        )
    return dataset_records(ByteRange(Source(source.location, "dataset", None, "")), splits[names[0]])


def _text_records(source: LabelledInput, text_field: str) -> Iterable[Record]:
    file = source.open("txt")
    if sample_text(file).startswith("__label__"):
        command = r"sed -E 's/^__label__([^ ]+) /\1\t/' FILE > FILE.tsv"
        raise InputError(
            "the format of fastText is not supported",
            where=source.name,
            remedy=f"make a table with {command}, and pass --columns label,{text_field}",
        )
    for line, position in read_lines(ByteRange(file), Counter(), strict=True):
        yield {text_field: line.removesuffix("\r")}, position
