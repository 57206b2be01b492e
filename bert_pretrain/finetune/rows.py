"""Labelled rows from CSV, TSV, JSON, Parquet and `datasets`, each with its position for messages.

Values are read as they are written: "NA" stays a word, and digits stay digits. All rows are held in memory. Files of
benchmarks have flaws: what has one meaning is repaired, other rows are left out, and both are counted by reason.
"""

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bert_pretrain.config import MAX_RECORD_BYTES, DataConfig, TextField, check_encoding, names_of
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.finetune.settings import FORMATS
from bert_pretrain.io.files import is_url
from bert_pretrain.io.inputs import COMPRESSIONS
from bert_pretrain.text.encodings import AUTO, UTF8
from bert_pretrain.text.hub_datasets import TRAIN, VALIDATION, choices, is_dataset, open_dataset
from bert_pretrain.text.readers import SURPLUS, Record, dataset_records, read_records, repair_surrogates
from bert_pretrain.text.sources import Source, examined, sample_text
from bert_pretrain.text.text_files import ByteRange, check_record_size, read_lines, text_blocks

_BY_ENDING = {f".{name}": name for name in FORMATS} | {".ndjson": "jsonl", ".txt": "txt"}
_SPLITS = {"--train": (TRAIN,), "--validation": VALIDATION, "--test": ("test",), "INPUT": ("test",)}
E = TypeVar("E")


class UnusableRow(InputError):
    """A row that cannot be used: it is left out and counted, or refused with `--strict`."""


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
    """The columns of CSV or TSV without a header; after a last `...` rows may have more, which are ignored."""
    encoding: str = "utf-8"
    strict: bool = False
    """Whether a row that would be repaired or left out is refused."""
    names_text: bool = False
    """Whether `--text-field` named the column of the text."""
    notes: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By what was repaired or left out: how often, and the position of the first."""
    said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.format not in (None, *FORMATS):
            what, remedy = f"there is no format '{self.format}'", f"choose one of {', '.join(FORMATS)}"
            raise ConfigError(what, where="--format", remedy=remedy)
        try:
            check_encoding(self.encoding)
        except ValueError as error:
            remedy = "name the encoding of the file, or leave it out for UTF-8"
            raise ConfigError(str(error), where="--encoding", remedy=remedy) from error

    @property
    def kind(self) -> str:
        """The format: "dataset", the one given or that of the ending; "txt", or "" if the ending tells none."""
        if is_dataset(self.location) or Path(self.location).is_dir():
            return "dataset"
        compression = next((ending for ending in COMPRESSIONS if self.location.endswith(ending)), "")
        ending = Path(self.location.removesuffix(compression)).suffix.lower()
        return self.format or _BY_ENDING.get(ending, "")

    def say(self, what: str) -> None:
        """Print a line about the input, once."""
        if what not in self.said:
            self.said.add(what)
            print(f"{self.flag} {self.location}: {what}")

    def note(self, what: str, error: InputError) -> None:
        """Count something repaired or left out; with `strict` raise the error instead."""
        if self.strict:
            raise error
        count, first = self.notes.get(what, (0, error.where.removeprefix(f"{self.location}: ")))
        self.notes[what] = (count + 1, first)

    def usable(self, rows: Iterable["Row"], make: Callable[[int, "Row"], E]) -> list[E]:
        """Return what `make(number, row)` makes of each row; those for which it raises `UnusableRow` are left out."""
        made: list[E] = []
        errors: list[UnusableRow] = []
        for number, row in enumerate(rows):
            try:
                made.append(make(number, row))
            except UnusableRow as error:
                self.note(f"left out, since {error.what}", error)
                errors.append(error)
        if len(errors) > len(made):
            what = f"{errors[0].what}; {len(errors):,} of {len(errors) + len(made):,} rows cannot be used"
            raise InputError(what, where=errors[0].where, remedy=errors[0].remedy)
        return made

    def print_notes(self) -> None:
        """Print all counts in one message."""
        found = [f"{what}: {count:,} (first: {where})" for what, (count, where) in self.notes.items()]
        if found:
            remark = "" if self.flag == "INPUT" else "; --strict refuses this"
            print(f"{self.flag} {self.location}: {'; '.join(found)}{remark}")

    def no_rows(self) -> InputError:
        return InputError("it holds no row", where=f"{self.flag} {self.location}", remedy="give a table with rows")


@dataclass(frozen=True)
class Row:
    """One record and its position."""

    values: dict[str, Any]
    where: str
    flaw: InputError | None = None
    """Why its values cannot be used, such as a wrong number of fields."""
    table: str = ""
    """The table that gives all its rows the same columns; "" where each record has its own."""

    def get(self, column: str, flag: str = "") -> Any:
        """Return a value; `flag` names the column, if there is such a flag."""
        if self.flaw:
            raise self.flaw
        if column in self.values:
            return self.values[column]
        names = [str(name) for name in self.values]
        near = difflib.get_close_matches(column, names, n=1)
        how = f"name one of them by {flag}" if flag else f"rename one of them to '{column}'"
        raise InputError(
            f"there is no column '{column}'{f'; did you mean {near[0]!r}?' if near else ''}",
            where=self.table or self.where,
            remedy=f"its columns are {', '.join(names) or 'none'}: {how}; a table without a header needs --columns "
            "NAME,NAME,...",
        )


def read_rows(source: LabelledInput, text_field: TextField | None = None) -> list[Row]:
    """Return the rows of a table, or with `text_field` the lines of a `.txt`, each as a row of that column.

    Where `text_field` names several columns, a row may lack one, but not all rows.
    """
    names = () if text_field is None else names_of(text_field)
    if names and source.kind == "txt":
        lines = read_lines(ByteRange(_file(source, "txt")), Counter(), strict=True)
        rows = [Row({names[0]: line.removesuffix("\r")}, str(position)) for line, position in lines]
    else:
        rows = _table(source)
    if not rows:
        raise source.no_rows()
    for name in names if len(names) > 1 else ():
        if not any(name in row.values for row in rows):
            Row(rows[0].values, "", table=source.location).get(name, "--text-field")
    return rows


def _table(source: LabelledInput) -> list[Row]:
    is_delimited, is_open = source.kind in ("csv", "tsv"), source.columns[-1:] in (("...",), ["..."])
    header = source.columns[:-1] if is_open else source.columns
    if header and not is_delimited:
        raise InputError(
            "only CSV and TSV have columns without names",
            where=f"{source.flag} {source.location}",
            remedy="leave out --columns, or say by --format csv or tsv that it is such a table",
        )
    rows: list[Row] = []
    for record, position in _records(source, header):
        if not rows and any(name == record[name] for name in header):
            what, remedy = "the first line is a header", "leave out --columns, or remove the line"
            raise InputError(what, where=str(position), remedy=remedy)
        flaw: InputError | None = None
        surplus = [] if is_open else record.get(SURPLUS, [])
        record.pop(SURPLUS, None)
        num_fields = sum(value is not None for value in record.values()) + len(surplus)
        if is_delimited and num_fields != len(record):
            # Where an unquoted comma may have cut a text, the row cannot be left out.
            error = InputError if source.kind == "csv" and surplus else UnusableRow
            remedy = 'fix it; in CSV, put text with commas, quotes or line ends in "quotes"'
            what = f"the row has {num_fields} fields, the header {len(record)}"
            flaw = error(what, where=str(position), remedy=remedy)
        table = "" if source.kind in ("json", "jsonl") else source.location
        rows.append(Row(repair_surrogates(record), str(position), flaw, table))
    return rows


def _records(source: LabelledInput, header: Sequence[str]) -> Iterable[Record]:
    location, kind = source.location, source.kind
    if kind == "dataset":
        part = ByteRange(Source(location, "dataset", None, ""))
        return dataset_records(part, [_split_of(open_dataset(location), location, source.flag)])
    if kind in ("", "txt", "conll"):
        is_conll = kind == "conll"
        what = "a tag per word is for the task tag" if is_conll else f"the ending of '{location}' tells no format"
        remedy = f"name the format by --format ({', '.join(FORMATS)}); see docs/finetuning.md"
        raise InputError(what, where=f"{source.flag} {location}", remedy=remedy)
    file = _file(source, "jsonl" if kind == "json" else kind)
    if file.format == "json" and re.match(r"\s*\[\s*\[", sample_text(file)):
        what = "an array of arrays, such as the choices of C3, is not supported"
        remedy = "for classify, write each choice as a row: text (question and choice), pair (context), label (1 or 0)"
        raise InputError(what, where=f"{source.flag} {location}", remedy=remedy)
    return read_records(ByteRange(file), Counter(), header=header, any_width=True)


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
    if source.encoding == AUTO and found.encoding != UTF8:
        source.say(f"its encoding is {found.encoding}")
    return found


def _split_of(splits: dict[str, Any], location: str, flag: str) -> Any:
    """Return the split of a dataset that a flag means: the one named so, or the only one if it is no other flag's."""
    chosen = next((name for name in ("", *_SPLITS[flag]) if name in splits), None)
    if chosen is None and len(splits) == 1 and not any(name in splits for names in _SPLITS.values() for name in names):
        chosen = next(iter(splits))
    if chosen is None:
        what = f"it has the splits {', '.join(splits)}"
        raise InputError(what, where=f"{flag} {location}", remedy=f"choose one: {choices(location, list(splits))}")
    return splits[chosen]
