"""Reads labelled rows from CSV, TSV, JSON, Parquet and `datasets`, with their positions for messages.

Values are not converted: "NA" stays a word, and "007" stays text. All rows are kept in memory. Benchmark files have
flaws, so unusable rows are skipped and counted by reason.
"""

import difflib
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.finetune.settings import FORMATS
from bert_pretrain.io.files import is_url
from bert_pretrain.io.inputs import COMPRESSIONS
from bert_pretrain.text import parquet, readers
from bert_pretrain.text.encodings import AUTO, UTF8
from bert_pretrain.text.hub_datasets import TRAIN, VALIDATION, choices, is_dataset, open_dataset
from bert_pretrain.text.readers import SURPLUS, Record, dataset_records, named_records, read_records, repair_surrogates
from bert_pretrain.text.sources import Source, examined, sample_text
from bert_pretrain.text.text_files import ByteRange, read_lines, text_blocks

INPUT = "INPUT"  # the argument of `predict`, which is not an option
_BY_ENDING = {f".{name}": name for name in FORMATS} | {".ndjson": "jsonl", ".txt": "txt"}
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
        if column in self.values:
            return self.values[column]
        names = [str(name) for name in self.values]
        near = "".join(f"; did you mean {name!r}?" for name in difflib.get_close_matches(column, names, n=1))
        how = f"choose one with {flag}" if flag else f"rename one to '{column}'"
        remedy = f"the columns are {', '.join(names)}: {how}; a table without a header needs --columns NAME,NAME,..."
        raise UnusableRow(f"there is no column '{column}'{near}", where=self.where, remedy=remedy)


@dataclass
class LabelledInput:
    """An input of labelled rows, the options for reading it, and notes on repaired and skipped rows."""

    location: str  # a file, a URL, a folder saved by `datasets`, or `dataset:NAME[:config][@split]`
    flag: str  # "--train", "--validation", "--test" or INPUT; also selects the split of a dataset
    format: str | None = None  # one of `FORMATS`; None: from the file name
    columns: Sequence[str] = ()  # column names of CSV or TSV without a header; more fields of TSV are ignored
    encoding: str = "utf-8"
    skip_unusable: bool = True
    notes: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # positions by reason
    errors: list[UnusableRow] = field(default_factory=list)  # of the skipped rows

    def __post_init__(self) -> None:
        if self.format not in (None, *FORMATS):
            what, remedy = f"unknown format '{self.format}'", f"choose one of {', '.join(FORMATS)}"
            raise ConfigError(what, where="--format", remedy=remedy)

    @property
    def kind(self) -> str:
        """The format: "dataset", one of `FORMATS`, "txt", or "" if it is unknown."""
        if is_dataset(self.location) or Path(self.location).is_dir():
            return "dataset"
        compression = next((ending for ending in COMPRESSIONS if self.location.endswith(ending)), "")
        ending = Path(self.location.removesuffix(compression)).suffix.lower()
        return self.format or _BY_ENDING.get(ending, "")

    @property
    def is_delimited(self) -> bool:
        return self.kind in ("csv", "tsv")

    def note(self, what: str, where: str) -> None:
        """Record the position of a repaired or skipped row under the reason `what`."""
        self.notes[what].append(where.removeprefix(f"{self.location}: "))

    def normalized(self, label: str, where: str) -> str:
        """Return a label in NFC and without blanks at its ends, because labels that look equal are equal."""
        name = unicodedata.normalize("NFC", label).strip()
        if name != label:
            self.note("labels with blanks at the ends or not in NFC, which were changed", where)
        return name

    def skip_row(self, error: UnusableRow) -> None:
        """Record an unusable row if `skip_unusable` is set. Otherwise raise InputError."""
        if not self.skip_unusable:
            remedy = f"{error.remedy}; or skip all unusable rows with --skip-empty"
            raise InputError(error.what, where=error.where, remedy=remedy) from error
        self.errors.append(error)
        self.note(f"skipped because {error.what}", error.where)


def read_rows(source: LabelledInput, text_field: str | None = None) -> list[Example]:
    """Read the rows of a table. With `text_field`, a `.txt` file is read as a table with this one column."""
    check_columns(source)
    rows: list[Example] = []
    counts: Counter[str] = Counter()
    for number, (record, position) in enumerate(_records(source, text_field, counts)):
        if number == 0 and any(name == record[name] for name in source.columns):
            what, remedy = "the first line is a header", "remove --columns, or remove the line"
            raise InputError(what, where=str(position), remedy=remedy)
        if source.is_delimited and len(record) > 1 and all(name == value for name, value in record.items()):
            source.note("header lines inside the file, which were skipped", str(position))
            continue
        surplus = record.pop(SURPLUS, [])
        num_fields = sum(value is not None for value in record.values()) + len(surplus)
        if source.is_delimited and num_fields != len(record) and not (surplus and source.columns):
            what = f"the row has {num_fields} fields but the header has {len(record)}"
            remedy = "write one value per column, or remove the row"
            source.skip_row(UnusableRow(what, where=str(position), remedy=remedy))
        else:
            if surplus:
                source.note("rows with extra fields, which were ignored", str(position))
            rows.append(Example(number, str(position), repair_surrogates(record)))
    readers.check_texts(counts, len(rows))
    return rows


def check_columns(source: LabelledInput) -> None:
    """Raise InputError if --columns is given for an input that names its columns."""
    if source.columns and not source.is_delimited:
        where, remedy = f"{source.flag} {source.location}", "remove --columns, or pass --format csv or --format tsv"
        raise InputError("--columns is only for CSV and TSV", where=where, remedy=remedy)


def _records(source: LabelledInput, text_field: str | None, counts: Counter[str]) -> Iterable[Record]:
    location, kind = source.location, source.kind
    if kind == "dataset":
        splits = open_dataset(location)
        names = [name for name in ("", *_SPLITS[source.flag]) if name in splits]  # "": no splits, or a named one
        if not names:
            what, remedy = f"the dataset has the splits {', '.join(splits)}", choices(location, list(splits))
            raise InputError(what, where=f"{source.flag} {location}", remedy=f"choose one: {remedy}")
        return dataset_records(ByteRange(Source(location, "dataset", None, "")), [splits[names[0]]])
    if kind == "txt" and text_field is not None:
        file = _file(source, kind)
        if sample_text(file).startswith("__label__"):
            what = "lines that start with __label__ (the format of fastText) are not supported"
            command = r"sed -E 's/^__label__([^ ]+) /\1\t/' FILE > FILE.tsv"
            remedy = f"make a table with {command}, and pass --columns label,{text_field}"
            raise InputError(what, where=f"{source.flag} {location}", remedy=remedy)
        lines = read_lines(ByteRange(file), Counter(), strict=True)
        return (({text_field: line.removesuffix("\r")}, position) for line, position in lines)
    if kind in ("", "conll", "txt"):
        is_conll = kind == "conll"
        what = "the format conll is only for the task tag" if is_conll else f"'{location}' has an unknown file format"
        remedy = f"pass --format ({', '.join(FORMATS)}); see docs/finetuning.md"
        raise InputError(what, where=f"{source.flag} {location}", remedy=remedy)
    file = _file(source, "jsonl" if kind == "json" else kind)
    if file.format == "json" and re.match(r"\s*\[\s*\[", sample_text(file)):
        what = "an array of arrays (the format of C3) is not supported"
        remedy = "for classify, write each choice as a row: text (question and choice), pair (context), label (1 or 0)"
        raise InputError(what, where=f"{source.flag} {location}", remedy=remedy)
    # CSV rows with extra fields are refused: an unquoted comma may have split many texts.
    records = read_records(ByteRange(file), counts, header=source.columns, any_width=kind == "tsv")
    return named_records(records, parquet.features(file)) if kind == "parquet" else records


def first_lines(source: LabelledInput) -> list[str]:
    """Return the first 100 lines of a text file."""
    return sample_text(_file(source, "txt")).splitlines()[:100]


def read_text(source: LabelledInput) -> str:
    """Return the content of a text file, decompressed and without a byte order mark."""
    return "".join(text_blocks(ByteRange(_file(source, "txt")), Counter()))


def _file(source: LabelledInput, format_: str) -> Source:
    if not is_url(source.location) and not Path(source.location).is_file():
        raise InputError("no such file or folder", where=source.location, remedy="check the path; pipes are not read")
    config = DataConfig(encoding=source.encoding, sentence_splitter="lines")
    (file,) = examined([Source(source.location, format_, None, "", boundary="file")], config)
    if source.encoding == AUTO:
        source.encoding = file.encoding  # an input may be opened several times: detect and print the encoding once
        if file.encoding != UTF8:
            print(f"{source.flag} {source.location}: encoding {file.encoding}")
    return file
