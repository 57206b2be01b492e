"""Labelled rows from CSV, TSV, JSON, Parquet and `datasets`, each with its position for messages.

Values are read as they are written: "NA" stays a word, and digits stay digits. All rows are held in memory.
"""

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_pretrain.config import MAX_RECORD_BYTES, DataConfig, TextField, names_of
from bert_pretrain.errors import InputError
from bert_pretrain.finetune.inputs import LabelledInput, UnusableRow
from bert_pretrain.finetune.settings import FORMATS
from bert_pretrain.io.files import is_url
from bert_pretrain.text.encodings import AUTO, UTF8
from bert_pretrain.text.hub_datasets import TRAIN, VALIDATION, choices, open_dataset
from bert_pretrain.text.readers import SURPLUS, Record, dataset_records, read_records, repair_surrogates
from bert_pretrain.text.sources import Source, examined, sample_text
from bert_pretrain.text.text_files import ByteRange, check_record_size, read_lines, text_blocks

_SPLITS = {"--train": (TRAIN,), "--validation": VALIDATION, "--test": ("test",), "INPUT": ("test",)}


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
        raise self.no_column(column, flag)

    def no_column(self, column: str, flag: str = "") -> InputError:
        """Return the error for a column that is not there."""
        names = ", ".join(map(str, self.values)) or "none"
        near = difflib.get_close_matches(column, [str(name) for name in self.values], n=1)
        how = f"name one of them by {flag}" if flag else f"rename one of them to '{column}'"
        return InputError(
            f"there is no column '{column}'{f'; did you mean {near[0]!r}?' if near else ''}",
            where=self.table or self.where,
            remedy=f"its columns are {names}: {how}; a table without a header needs --columns NAME,NAME,...",
        )


def iterate_rows(source: LabelledInput, *, text_field: TextField | None = None) -> Iterator[Row]:
    """Yield the rows of a table, or with `text_field` the lines of a `.txt`, each as a row of that column."""
    if text_field is None or source.kind or source.ending != ".txt":
        return _rows(source, text_field)
    column = names_of(text_field)[0]
    lines = read_lines(ByteRange(_file(source, "txt")), Counter(), strict=True)
    return (Row({column: line.removesuffix("\r")}, str(position)) for line, position in lines)


def read_rows(source: LabelledInput, text_field: TextField | None = None) -> list[Row]:
    """Return the rows of a table."""
    rows = list(_rows(source, text_field))
    if not rows:
        raise no_rows(source)
    return rows


def no_rows(source: LabelledInput) -> InputError:
    where = f"{source.flag} {source.location}"
    return InputError("it holds no row", where=where, remedy="give a table with rows")


def _rows(source: LabelledInput, text_field: TextField | None) -> Iterator[Row]:
    names = () if text_field is None else names_of(text_field)
    missing = set(names) if len(names) > 1 else set()
    row: Row | None = None
    is_delimited = source.kind in ("csv", "tsv")
    if source.columns and not is_delimited:
        raise InputError(
            "only CSV and TSV have columns without names",
            where=f"{source.flag} {source.location}",
            remedy="leave out --columns, or say by --format csv or tsv that it is such a table",
        )
    for number, (record, position) in enumerate(_records(source)):
        if number == 0 and any(name == record[name] for name in source.columns):
            what, remedy = "the first line is a header", "leave out --columns, or remove the line"
            raise InputError(what, where=str(position), remedy=remedy)
        surplus = record.pop(SURPLUS, [])
        surplus = [] if source.has_more_columns else surplus
        empty = [name for name, value in record.items() if value is None] if is_delimited else []
        flaw: InputError | None = None
        if surplus or empty:  # where an unquoted comma may have cut a text, the row cannot be left out
            error = InputError if source.kind == "csv" and surplus else UnusableRow
            what = f"the row has {len(record) - len(empty) + len(surplus)} fields, the header {len(record)}"
            remedy = 'fix it; in CSV, put text with commas, quotes or line ends in "quotes"'
            flaw = error(what, where=str(position), remedy=remedy)
        table = "" if source.kind in ("json", "jsonl") else source.location
        row = Row(repair_surrogates(record), str(position), flaw, table)
        missing.difference_update(row.values)
        yield row
    if row and missing:
        raise dataclasses.replace(row, table=source.location).no_column(min(missing, key=names.index), "--text-field")


def _records(source: LabelledInput) -> Iterable[Record]:
    location, kind = source.location, source.kind
    if kind == "dataset":
        part = ByteRange(Source(location, "dataset", None, ""))
        return dataset_records(part, [_split_of(open_dataset(location), location, source.flag)])
    if kind in ("", "conll"):
        what = "a tag per word is for the task tag" if kind else f"the ending of '{location}' does not tell its format"
        remedy = f"name the format by --format ({', '.join(FORMATS)}); see docs/finetuning.md"
        raise InputError(what, where=f"{source.flag} {location}", remedy=remedy)
    file = _file(source, "jsonl" if kind == "json" else kind)
    if file.format == "json" and re.match(r"\s*\[\s*\[", sample_text(file)):
        what = "an array of arrays, such as the choices of C3, is not supported"
        remedy = "for classify, write each choice as a row: text (question and choice), pair (context), label (1 or 0)"
        raise InputError(what, where=f"{source.flag} {location}", remedy=remedy)
    return read_records(ByteRange(file), Counter(), header=source.columns, any_width=True)


def read_text(source: LabelledInput) -> str:
    """Return a whole text file, decompressed, without a byte order mark."""
    texts: list[str] = []
    for _, text in text_blocks(ByteRange(_file(source, "txt")), Counter(), whole_lines=True):
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
