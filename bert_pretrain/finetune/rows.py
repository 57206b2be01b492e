"""Labelled rows from CSV, TSV, JSON, Parquet and `datasets`, each with its position for messages.

Values are read as they are written: "NA" stays a word, and digits stay digits. All rows are held in memory. Files of
benchmarks have flaws: rows that cannot be used are left out and counted by reason.
"""

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert_pretrain.config import MAX_RECORD_BYTES, DataConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.finetune.settings import FORMATS
from bert_pretrain.io.files import is_url
from bert_pretrain.io.inputs import COMPRESSIONS
from bert_pretrain.text import parquet
from bert_pretrain.text.encodings import AUTO, UTF8
from bert_pretrain.text.hub_datasets import TRAIN, VALIDATION, choices, is_dataset, open_dataset
from bert_pretrain.text.readers import SURPLUS, Record, dataset_records, named_records, read_records, repair_surrogates
from bert_pretrain.text.sources import Source, examined, sample_text
from bert_pretrain.text.text_files import ByteRange, check_record_size, read_lines, text_blocks

NEW = "INPUT"
"""The flag of rows without labels, to be predicted."""
_BY_ENDING = {f".{name}": name for name in FORMATS} | {".ndjson": "jsonl", ".txt": "txt"}
_SPLITS = {"--train": (TRAIN,), "--validation": VALIDATION, "--test": ("test",), NEW: ("test",)}


class UnusableRow(InputError):
    """A row that cannot be used: it is left out and counted, or refused by `predict`."""


@dataclass
class Example:
    """A row as it was read, and what a task makes of it."""

    row: int
    """Its number in the input, from 0."""
    where: str
    values: dict[str, Any]
    """Values by column."""
    inputs: dict[str, Any] = field(default_factory=dict)
    """`text` and perhaps `pair`; `tokens`; or `id`, `question` and `context`."""
    label: Any = None
    """A class or number; tags; or answers, each with its first character in the context. None if it is not known."""
    is_cut: bool = False
    """Whether it is longer than a window."""

    def get(self, column: str, flag: str = "") -> Any:
        """Return a value; `flag` names the column, if there is such a flag."""
        if column in self.values:
            return self.values[column]
        names = [str(name) for name in self.values]
        near = difflib.get_close_matches(column, names, n=1)
        how = f"name one of them by {flag}" if flag else f"rename one of them to '{column}'"
        raise InputError(
            f"there is no column '{column}'{f'; did you mean {near[0]!r}?' if near else ''}",
            where=self.where,
            remedy=f"its columns are {', '.join(names)}: {how}; a table without a header needs --columns NAME,NAME,...",
        )


@dataclass
class LabelledInput:
    """What to read and how; counts what was repaired or left out."""

    location: str
    """A file, a URL, a folder saved by `datasets`, or `dataset:NAME[:config][@split]`."""
    flag: str
    """It named the input. It chooses the split of a dataset with several, and rows of `--test` may have no label."""
    format: str | None = None
    """One of `FORMATS`; None: as the ending says."""
    columns: Sequence[str] = ()
    """The columns of CSV or TSV without a header; further fields of TSV are ignored."""
    encoding: str = "utf-8"
    skips: bool = True
    """Whether a row that cannot be used is left out."""
    notes: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Positions by reason of a repair or omission."""
    errors: list[UnusableRow] = field(default_factory=list)
    """Errors of the rows left out."""

    def __post_init__(self) -> None:
        if self.format not in (None, *FORMATS):
            what, remedy = f"there is no format '{self.format}'", f"choose one of {', '.join(FORMATS)}"
            raise ConfigError(what, where="--format", remedy=remedy)

    @property
    def kind(self) -> str:
        """The format: "dataset", the one given or that of the ending; "txt", or "" if the ending tells none."""
        if is_dataset(self.location) or Path(self.location).is_dir():
            return "dataset"
        compression = next((ending for ending in COMPRESSIONS if self.location.endswith(ending)), "")
        ending = Path(self.location.removesuffix(compression)).suffix.lower()
        return self.format or _BY_ENDING.get(ending, "")

    def note(self, what: str, where: str) -> None:
        """Count something repaired or left out, at a position."""
        self.notes[what].append(where.removeprefix(f"{self.location}: "))

    def leave_out(self, error: UnusableRow) -> None:
        """Count a row that cannot be used, or refuse it."""
        if not self.skips:
            remedy = f"{error.remedy}; --skip-empty leaves out all rows that cannot be predicted"
            raise InputError(error.what, where=error.where, remedy=remedy) from error
        self.errors.append(error)
        self.note(f"left out, since {error.what}", error.where)


def read_rows(source: LabelledInput, text_field: str | None = None) -> list[Example]:
    """Return the rows of a table, or with `text_field` the lines of a `.txt`, each as a row of that column."""
    is_delimited = source.kind in ("csv", "tsv")
    if source.columns and not is_delimited:
        raise InputError(
            "only CSV and TSV have columns without names",
            where=f"{source.flag} {source.location}",
            remedy="leave out --columns, or say by --format csv or tsv that it is such a table",
        )
    rows: list[Example] = []
    for number, (record, position) in enumerate(_records(source, text_field)):
        if number == 0 and any(name == record[name] for name in source.columns):
            what, remedy = "the first line is a header", "leave out --columns, or remove the line"
            raise InputError(what, where=str(position), remedy=remedy)
        surplus = record.pop(SURPLUS, [])
        num_fields = sum(value is not None for value in record.values()) + len(surplus)
        if is_delimited and num_fields != len(record) and not (surplus and source.columns):
            what = f"the row has {num_fields} fields, the header {len(record)}"
            source.leave_out(
                UnusableRow(what, where=str(position), remedy="give each column a value, or remove the row")
            )
        else:
            if surplus:
                source.note("rows whose further fields were ignored", str(position))
            rows.append(Example(number, str(position), repair_surrogates(record)))
    return rows


def _records(source: LabelledInput, text_field: str | None) -> Iterable[Record]:
    location, kind = source.location, source.kind
    if kind == "dataset":
        part = ByteRange(Source(location, "dataset", None, ""))
        return dataset_records(part, [_split_of(open_dataset(location), location, source.flag)])
    if kind in ("", "conll") or (kind == "txt" and text_field is None):
        is_conll = kind == "conll"
        what = "a tag per word is for the task tag" if is_conll else f"the ending of '{location}' tells no format"
        remedy = f"name the format by --format ({', '.join(FORMATS)}); see docs/finetuning.md"
        raise InputError(what, where=f"{source.flag} {location}", remedy=remedy)
    file = _file(source, "jsonl" if kind == "json" else kind)
    if kind == "txt" and text_field is not None:
        lines = read_lines(ByteRange(file), Counter(), strict=True)
        return (({text_field: line.removesuffix("\r")}, position) for line, position in lines)
    if file.format == "json" and re.match(r"\s*\[\s*\[", sample_text(file)):
        what = "an array of arrays, such as the choices of C3, is not supported"
        remedy = "for classify, write each choice as a row: text (question and choice), pair (context), label (1 or 0)"
        raise InputError(what, where=f"{source.flag} {location}", remedy=remedy)
    # In CSV a surplus field is refused: an unquoted comma may have cut many texts.
    records = read_records(ByteRange(file), Counter(), header=source.columns, any_width=kind == "tsv")
    return named_records(records, parquet.features(file)) if kind == "parquet" else records


def first_lines(source: LabelledInput) -> list[str]:
    """Return the first lines of a text file that are not blank, a hundred at most."""
    return [line for line in sample_text(_file(source, "txt")).splitlines()[:100] if line.strip()]


def read_text(source: LabelledInput) -> str:
    """Return a whole text file, decompressed, without a byte order mark."""
    texts: list[str] = []
    for text in text_blocks(ByteRange(_file(source, "txt")), Counter()):
        texts.append(text)
        check_record_size(sum(map(len, texts)), MAX_RECORD_BYTES, source.location)
    return "".join(texts)


def _file(source: LabelledInput, format_: str) -> Source:
    if not is_url(source.location) and not Path(source.location).is_file():
        raise InputError("there is no such file or folder", where=source.location, remedy="check the path")
    reading = DataConfig(encoding=source.encoding, sentence_splitter="lines")
    found = examined(Source(source.location, format_, None, "", boundary="file"), reading)
    if source.encoding == AUTO:
        source.encoding = found.encoding  # detected and said once
        if found.encoding != UTF8:
            print(f"{source.flag} {source.location}: its encoding is {found.encoding}")
    return found


def _split_of(splits: dict[str, Any], location: str, flag: str) -> Any:
    """Return the split of a dataset that a flag means."""
    for name in ("", *_SPLITS[flag]):  # "": it has no splits, or its name chose one
        if name in splits:
            return splits[name]
    what = f"it has the splits {', '.join(splits)}"
    raise InputError(what, where=f"{flag} {location}", remedy=f"choose one: {choices(location, list(splits))}")
