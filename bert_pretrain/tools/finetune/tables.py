"""Labelled rows from CSV, TSV, JSONL, JSON, Parquet and `datasets`, each with the place it came from, for messages.

Files are read by what leaves text as it is ("NA" stays a word, digits stay digits), compressed or not, local or by URL;
`dataset:NAME[:config][@split]` and saved folders by `datasets`. All rows are held in memory.
"""

import csv
import difflib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_pretrain.errors import InputError
from bert_pretrain.files import COMPRESSIONS, open_input
from bert_pretrain.places import is_url
from bert_pretrain.sources import DATASET, READ_ERRORS

ENDINGS = (".csv", ".tsv", ".txt", ".conll", ".json", ".jsonl", ".ndjson", ".parquet")
_SPLITS = {"--train": ("train",), "--validation": ("validation", "dev"), "--test": ("test",)}


@dataclass(frozen=True)
class Row:
    """One record, and where it stands."""

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


class ClassName(str):
    """The name of a class, with its number where `datasets` has given it one."""

    number: int

    def __new__(cls, name: str, number: int) -> "ClassName":
        made = super().__new__(cls, name)
        made.number = number
        return made


def ending_of(location: str) -> str:
    """Return the ending that tells the format, that of a compression left off."""
    name = location.removesuffix(next((each for each in COMPRESSIONS if location.endswith(each)), ""))
    return Path(name).suffix.lower()


def read_rows(location: str, flag: str) -> list[Row]:
    """Return the rows of a table.

    Args:
        location: a file, a URL, a folder saved by `datasets`, or `dataset:NAME[:config][@split]`.
        flag: that named it; of a dataset with several splits it chooses one.

    Raises:
        InputError: when it cannot be read or holds no row.
    """
    if location.startswith(DATASET) or Path(location).is_dir():
        rows = list(_read_dataset(location, flag))
    else:
        readers: dict[str, Callable[[str], Iterator[Row]]] = {
            ".csv": _read_csv,
            ".tsv": _read_tsv,
            ".json": _read_json,
            ".jsonl": _read_json,
            ".ndjson": _read_json,
            ".parquet": _read_parquet,
        }
        reader = readers.get(ending_of(location))
        if reader is None:
            raise unknown_ending(location, flag)
        rows = list(reader(location))
    if not rows:
        raise InputError("it holds no row", where=f"{flag} {location}", remedy="give a table with rows")
    return rows


def unknown_ending(location: str, flag: str) -> InputError:
    return InputError(
        f"the ending of '{location}' is unknown here",
        where=f"{flag} {location}",
        remedy=f"supported: {', '.join(ENDINGS)} (each also {', '.join(COMPRESSIONS)}), {DATASET}NAME, as the task "
        "takes them; see docs/finetuning.md",
    )


def read_text(location: str) -> str:
    """Return a whole text file, decompressed, without a byte order mark.

    Raises:
        InputError: when it cannot be opened, or is not UTF-8.
    """
    data = _read_bytes(location)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"it is not UTF-8: byte {data[error.start]:#04x}", where=f"{location}: line {line}", remedy="convert it"
        ) from error


def _read_bytes(location: str) -> bytes:
    if not is_url(location) and not Path(location).is_file():
        raise InputError("there is no such file or folder", where=location, remedy="check the path")
    with open_input(location) as file:
        try:
            return file.read()
        except READ_ERRORS as error:
            raise InputError(
                f"cannot read on: {error}", where=location, remedy="the file is damaged; fetch it again"
            ) from error


def _read_csv(location: str) -> Iterator[Row]:
    # Strict: otherwise a quote that is never closed would make one text of all lines that follow.
    yield from _delimited(location, {"delimiter": ",", "strict": True})


def _read_tsv(location: str) -> Iterator[Row]:
    # As registered at IANA and as GLUE has it: a tab always divides, and a quote is a quote.
    yield from _delimited(location, {"delimiter": "\t", "quoting": csv.QUOTE_NONE})


def _delimited(location: str, dialect: dict[str, Any]) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)
    reader = csv.reader(io.StringIO(read_text(location), newline=""), **dialect)
    line = 1
    try:
        names = next(reader, [])
        line = reader.line_num + 1
        for fields in reader:
            where = f"{location}: line {line}"
            if fields and len(fields) != len(names):
                raise InputError(
                    f"the row has {len(fields)} fields, the header {len(names)}",
                    where=where,
                    remedy='mend it; in CSV a text with commas, quotes or line ends stands in "quotes"',
                )
            if fields:
                yield Row(dict(zip(names, fields, strict=True)), where)
            line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(
            f"the record cannot be read: {error}", where=f"{location}: line {line}", remedy="mend it"
        ) from error


def _read_json(location: str) -> Iterator[Row]:
    """Read an object a line, or one array of objects."""
    text = read_text(location)
    if text.lstrip().startswith("["):
        records = parse_json(text, location)
        for number, record in enumerate(records, start=1):
            yield _record(record, f"{location}: record {number}")
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{location}: line {number}"
            yield _record(parse_json(line, where), where)


def parse_json(text: str, where: str) -> Any:
    """Parse JSON; half of a surrogate pair, which no UTF-8 can hold, becomes a question mark.

    Raises:
        InputError: when it is none.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not JSON: {error}", where=where, remedy="mend it") from error
    return _repaired(value) if "\\ud" in text.lower() else value


def _repaired(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_repaired(each) for each in value]
    return {_repaired(key): _repaired(each) for key, each in value.items()} if isinstance(value, dict) else value


def _record(record: Any, where: str) -> Row:
    if not isinstance(record, dict):
        raise InputError(
            f"the record is no object but {type(record).__name__}", where=where, remedy="write {...} for each row"
        )
    return Row(record, where)


def _read_parquet(location: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        records = pq.read_table(io.BytesIO(_read_bytes(location))).to_pylist()
    except pa.ArrowException as error:
        raise InputError(f"it is no Parquet: {error}", where=location, remedy="write it again") from error
    for number, record in enumerate(records, start=1):
        yield Row(record, f"{location}: row {number}")


def _read_dataset(location: str, flag: str) -> Iterator[Row]:
    import datasets

    name, _, split = location.removeprefix(DATASET).partition("@")
    try:
        if location.startswith(DATASET) and not Path(name).is_dir():
            path, _, subset = name.partition(":")
            data: Any = datasets.load_dataset(path, subset or None, split=split or None)
        else:
            data = datasets.load_from_disk(name)
            data = data[split] if split else data
    except Exception as error:  # `datasets` raises whatever its readers raise
        raise InputError(f"datasets cannot open it: {error}", where=f"{flag} {location}", remedy="check it") from error
    if isinstance(data, dict):
        chosen = next((each for each in _SPLITS[flag] if each in data), None)
        if chosen is None and len(data) == 1 and not any(each in data for names in _SPLITS.values() for each in names):
            chosen = next(iter(data))
        if chosen is None:
            raise InputError(
                f"it has the splits {', '.join(data)}", where=f"{flag} {location}", remedy="choose one: NAME@SPLIT"
            )
        data = data[chosen]
    namers = {column: _namer(feature) for column, feature in data.features.items()}
    for number, record in enumerate(data, start=1):
        yield Row({name: namers[name](value) for name, value in record.items()}, f"{location}: row {number}")


def _namer(feature: Any) -> Callable[[Any], Any]:
    """Return what turns the numbers of a `ClassLabel`, alone or in a list, into their names; -1 is no label."""
    import datasets

    inner = getattr(feature, "feature", None)
    if isinstance(feature, datasets.ClassLabel):
        return lambda value: None if value is None or value < 0 else ClassName(feature.int2str(value), value)
    if isinstance(inner, datasets.ClassLabel):
        return lambda values: None if values is None else [inner.int2str(value) for value in values]
    return lambda value: value
