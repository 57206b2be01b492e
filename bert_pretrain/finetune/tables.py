"""Labelled rows from CSV, TSV, JSON, Parquet and `datasets`, each with its position for messages.

Values are read as they are written: "NA" stays a word, and digits stay digits. All rows are held in memory.
"""

import codecs
import difflib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_pretrain.config import MAX_RECORD_BYTES
from bert_pretrain.errors import InputError
from bert_pretrain.storage.files import COMPRESSIONS, open_input
from bert_pretrain.storage.paths import is_url
from bert_pretrain.text.records import (
    Record,
    as_record,
    dataset_records,
    open_dataset,
    parse_json,
    read_records,
    repair_surrogates,
)
from bert_pretrain.text.sources import DATASET, FORMATS, READ_ERRORS, Source, damaged
from bert_pretrain.text.text_files import ByteRange, Position, check_record_size, text_blocks

ENDINGS = (".csv", ".tsv", ".txt", ".conll", ".json", ".jsonl", ".ndjson", ".parquet")
_FORMATS = {**FORMATS, ".tsv": "tsv"}
_SPLITS = {"--train": ("train",), "--validation": ("validation", "dev"), "--test": ("test",)}


@dataclass(frozen=True)
class Row:
    """One record and its position."""

    values: dict[str, Any]
    where: str

    def get(self, column: str) -> Any:
        """Return a value.

        Raises:
            InputError: when there is no such column, naming the nearest.
        """
        if column in self.values:
            return self.values[column]
        names = ", ".join(map(str, self.values)) or "none"
        near = difflib.get_close_matches(column, [str(name) for name in self.values], n=1)
        raise InputError(
            f"there is no column '{column}'{f'; did you mean {near[0]!r}?' if near else ''}",
            where=self.where,
            remedy=f"name one of its columns ({names}) by the flags that end in -field",
        )


def ending_of(location: str) -> str:
    """Return the ending that tells the format, without that of a compression."""
    name = location.removesuffix(next((each for each in COMPRESSIONS if location.endswith(each)), ""))
    return Path(name).suffix.lower()


def read_rows(location: str, flag: str) -> list[Row]:
    """Return the rows of a table.

    Args:
        location: a file, a URL, a folder saved by `datasets`, or `dataset:NAME[:config][@split]`.
        flag: that named it; it chooses the split of a dataset with several.

    Raises:
        InputError: when it cannot be read or holds no row.
    """
    rows = [Row(repair_surrogates(record), str(position)) for record, position in _records(location, flag)]
    if not rows:
        raise InputError("it holds no row", where=f"{flag} {location}", remedy="give a table with rows")
    return rows


def _records(location: str, flag: str) -> Iterable[Record]:
    if location.startswith(DATASET) or Path(location).is_dir():
        part = ByteRange(Source(location, "dataset", None, ""))
        return dataset_records(part, [_split_of(open_dataset(location), location, flag)])
    format_ = _FORMATS.get(ending_of(location))
    if format_ is None or format_ == "txt":
        raise InputError(
            f"the ending of '{location}' is unknown here",
            where=f"{flag} {location}",
            remedy=f"supported: {', '.join(ENDINGS)} (each also {', '.join(COMPRESSIONS)}), {DATASET}NAME, depending "
            "on the task; see docs/finetuning.md",
        )
    source = _source(location, format_)
    if format_ == "jsonl" and _begins_array(source):
        return _array_records(source)
    records = read_records(ByteRange(source), Counter())
    return _whole_rows(records) if format_ in ("csv", "tsv") else records


def read_text(location: str) -> str:
    """Return a whole text file, decompressed, without a byte order mark.

    Raises:
        InputError: when it cannot be opened, is larger than a record may be, or is not UTF-8.
    """
    texts: list[str] = []
    for _, text in text_blocks(ByteRange(_source(location, "txt")), Counter(), whole_lines=True):
        texts.append(text)
        check_record_size(sum(map(len, texts)), MAX_RECORD_BYTES, location)
    return "".join(texts)


def _source(location: str, format_: str) -> Source:
    if not is_url(location) and not Path(location).is_file():
        raise InputError("there is no such file or folder", where=location, remedy="check the path")
    return Source(location, format_, None, "")


def _begins_array(source: Source) -> bool:
    """Whether a JSON file is one array of objects, rather than one object per line."""
    with open_input(source.location) as file:
        try:
            return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
        except READ_ERRORS as error:
            raise damaged(source, error) from error


def _array_records(source: Source) -> Iterator[Record]:
    for number, value in enumerate(parse_json(read_text(source.location), source.location), start=1):
        position = Position(ByteRange(source), "record", number)
        yield as_record(value, position), position


def _whole_rows(records: Iterable[Record]) -> Iterator[Record]:
    """Refuse rows of CSV or TSV that lack fields."""
    for record, position in records:
        if missing := sum(value is None for value in record.values()):
            raise InputError(
                f"the row has {len(record) - missing} fields, the header {len(record)}",
                where=str(position),
                remedy='fix it; in CSV, put text with commas, quotes or line ends in "quotes"',
            )
        yield record, position


def _split_of(splits: dict[str, Any], location: str, flag: str) -> Any:
    """Return the split of a dataset that a flag means: the one named so, or the only one if it is no other flag's."""
    chosen = next((name for name in ("", *_SPLITS[flag]) if name in splits), None)
    if chosen is None and len(splits) == 1 and not any(name in splits for names in _SPLITS.values() for name in names):
        chosen = next(iter(splits))
    if chosen is None:
        what = f"it has the splits {', '.join(splits)}"
        raise InputError(what, where=f"{flag} {location}", remedy="choose one: NAME@SPLIT")
    return splits[chosen]
