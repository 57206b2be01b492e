"""The one reader of records: JSON, CSV, TSV, Parquet and `datasets`, local or remote, compressed or not.

`read_records` yields each record with its position, which is formatted only for an error message. `read_texts` yields
one text per record, or per line of `.txt`. Memory is bounded by a block of a file and the limit of a record; every
repair is counted by reason.
"""

import contextlib
import csv
import io
import itertools
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from bert_pretrain.config import MAX_RECORD_BYTES, DataConfig
from bert_pretrain.config_values import names_of
from bert_pretrain.errors import InputError
from bert_pretrain.storage.files import open_input
from bert_pretrain.text.hub_datasets import open_dataset, open_version, rows_or_files
from bert_pretrain.text.json_records import Record, read_array, read_jsonl, repair_surrogates
from bert_pretrain.text.sources import FEW_SOURCES, READ_ERRORS, Source, damaged, evenly_spaced, is_compressed
from bert_pretrain.text.text_files import ByteRange, Position, check_record_size, read_lines, text_blocks
from bert_pretrain.text.urls import size_and_version

_PARQUET_ROWS = 64
"""Rows that are decoded at once, unless they are large."""
_PARTS_PER_ROW_GROUP = 16
"""At most: each part decodes the rows of its first row group that are before it, too."""
_MAX_UNFOLDING = 1000
"""Times the size of a Parquet file that its rows may have; text has 2 to 20, and one row may stand for thousands."""
SURPLUS: Any = None
"""The key of a list of the fields that a row has beyond the header's, as in `csv.DictReader`."""
# CSV is read strictly: otherwise an unclosed quote would join all following lines into one text. In TSV, as registered
# at IANA and used by GLUE, a tab always separates and a quote is an ordinary character.
_TSV: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
_NAME_THE_FIELD = (
    "name the field of the text: --set data.text_field=NAME, or NAME,NAME where inputs differ (embed and evaluate: "
    "--text-field NAME)"
)
_MAX_WITHOUT_FIELD = 1000
"""Records at the beginning of a source after which a field that none of them has is taken for a mistake."""


def read_records(
    part: ByteRange,
    counts: Counter[str],
    *,
    columns: Sequence[str] = (),
    strict: bool = True,
    max_bytes: int = MAX_RECORD_BYTES,
    header: Sequence[str] = (),
    any_width: bool = False,
) -> Iterator[Record]:
    """Yield each record of a source that is not `.txt`, with its position; anything but JSON lines is one part.

    Of a table, which must have one of them, `columns` are read, all if there are none. Unless `strict`, text that is
    not UTF-8 is repaired. CSV and TSV may have a `header` from elsewhere, and with `any_width` more fields than that.
    A record has at most `max_bytes`; those of `datasets` may be larger.
    """
    if part.source.format == "jsonl":
        return read_jsonl(part, counts, strict, max_bytes)
    if part.source.format == "json":
        return read_array(part, counts, strict, max_bytes)
    if part.source.format in ("csv", "tsv"):
        return _read_csv(part, counts, columns, strict, max_bytes, header, any_width)
    if part.source.format == "parquet":
        return _read_parquet(part, columns, max_bytes)
    if part.source.format == "stream":
        return dataset_records(part, open_dataset(part.source.location, streaming=True).values(), columns)
    return dataset_records(part, open_version(part.source.location, part.source.version).values(), columns)


def read_texts(part: ByteRange, config: DataConfig, counts: Counter[str]) -> Iterator[str | None]:
    """Yield each line of `.txt`, or the text of each record; empty ones too, None if a record has no field of text."""
    limit = config.max_record_bytes
    if part.source.format == "txt":
        for line, _ in read_lines(part, counts, strict=config.strict, max_line_bytes=limit):
            yield line.removesuffix("\r")
        return
    fields, has_text = names_of(config.text_field), part.start > 0
    num_without = 0
    first: Record | None = None
    for record, position in read_records(part, counts, columns=fields, strict=config.strict, max_bytes=limit):
        texts = [_text_of(record[field], position, counts) for field in fields if field in record]
        if texts:
            if not has_text:
                has_text = True
                yield from [None] * num_without
            yield join_fields(texts)
            continue
        counts["records_without_text_field"] += 1
        if has_text:
            yield None
            continue
        first = first or (record, position)
        num_without += 1
        if num_without == _MAX_WITHOUT_FIELD:
            break
    if first and not has_text:
        names = " or ".join(f"'{field}'" for field in fields)
        many = f"none of the first {num_without:,} records has a field {names}"
        what = many if num_without > 1 else f"the record has no field {names}"
        raise _no_field(what, list(first[0]), str(first[1]))


def join_fields(texts: Iterable[str | None]) -> str:
    """Return the texts of the fields of a record as one, with blank lines between; empty ones are left out."""
    return "\n\n".join(filter(None, texts))


def _text_of(value: Any, position: Position, counts: Counter[str]) -> str:
    """Return the text of a field, "" for null; repairs are counted."""
    if value is None:
        return ""
    if not isinstance(value, str):
        what = f"the text is {type(value).__name__}, not a string"
        raise InputError(what, where=str(position), remedy="choose another data.text_field")
    text: str = repair_surrogates(value)
    if text is not value:
        counts["documents_with_lone_surrogates"] += 1
    return text


def _read_csv(
    part: ByteRange,
    counts: Counter[str],
    columns: Sequence[str],
    strict: bool,
    max_bytes: int,
    header: Sequence[str],
    any_width: bool,
) -> Iterator[Record]:
    """Yield the rows of CSV or TSV; the fields that a short row lacks are None."""
    position, num_bytes = Position(part, "line", 1), 0

    def lines() -> Iterator[str]:
        nonlocal num_bytes
        for _, text in text_blocks(part, counts, whole_lines=True, strict=strict, max_line_bytes=max_bytes):
            for line in io.StringIO(text, newline=""):
                num_bytes += len(line) if line.isascii() else len(line.encode())
                check_record_size(num_bytes, max_bytes, position)
                yield line

    dialect = _TSV if part.source.format == "tsv" else {"strict": True, "delimiter": part.source.delimiter}
    reader = csv.reader(lines(), **dialect)
    rows = _rows(reader, max_bytes)
    try:
        names = list(header) or next(filter(None, rows), [])
        _present(part, columns, names)
        position, num_bytes = Position(part, "line", reader.line_num + 1), 0
        for row in rows:
            surplus = row[len(names) :]
            if surplus and not any_width:  # a delimiter in an unquoted text would cut the text
                raise _not_csv(f"the row has {len(row)} fields, the header {len(names)}", position)
            if row:
                record = dict(itertools.zip_longest(names, row[: len(names)]))
                yield record | ({SURPLUS: surplus} if surplus else {}), position
            else:
                counts["blank_lines"] += 1
            position, num_bytes = Position(part, "line", reader.line_num + 1), 0
    except csv.Error as error:
        raise _not_csv(str(error), position) from error


def _rows(reader: Iterator[list[str]], max_bytes: int) -> Iterator[list[str]]:
    """Yield the rows of a CSV reader under a limit of fields, which is the process's and so set only while it reads."""
    while True:
        limit = csv.field_size_limit(max_bytes)
        try:
            row = next(reader)
        except StopIteration:
            return
        finally:
            csv.field_size_limit(limit)
        yield row


def _not_csv(what: str, position: Position) -> InputError:
    return InputError(
        f"the record is not {position.part.source.format.upper()}: {what}",
        where=str(position),
        remedy='fix it; in CSV, put text with commas, quotes or line ends in "quotes", and double the quotes within it',
    )


def _read_parquet(part: ByteRange, columns: Sequence[str], max_bytes: int) -> Iterator[Record]:
    import pyarrow as pa

    try:
        with _open_parquet(part.source.location) as (table, size):
            num_bytes, most = 0, max(max_bytes, _MAX_UNFOLDING * size)
            columns = _present(part, columns, table.schema_arrow.names)
            rows_before, bytes_before = _layout(table, size)
            first = _row_at(part.start, rows_before, bytes_before) if part.start else 0
            last = rows_before[-1] if part.stop is None else _row_at(part.stop, rows_before, bytes_before)
            for group, (row, end) in enumerate(itertools.pairwise(rows_before)):
                if end <= first or row >= last:
                    continue
                rows = _rows_at_once(
                    table.metadata.row_group(group), columns, max_bytes, Position(part, "row", row + 1)
                )
                for batch in table.iter_batches(rows, row_groups=[group], columns=list(columns) or None):
                    skipped = min(max(0, first - row), batch.num_rows)
                    taken = batch.slice(skipped, max(0, last - row - skipped))
                    next_row = Position(part, "row", row + skipped + 1)
                    for record in _records_of(taken, max_bytes, next_row):
                        yield record, next_row
                        next_row = next_row._replace(in_part=next_row.in_part + 1)
                    row += batch.num_rows
                    num_bytes += batch.nbytes
                    if num_bytes > most:
                        raise _unfolds(part, size, num_bytes)
                    if row >= last:
                        break
    except (pa.ArrowException, *READ_ERRORS) as error:
        raise damaged(part.source, error) from error


def _layout(table: Any, size: int) -> tuple[list[int], np.ndarray]:
    """Return how many rows, and how many of the bytes of a file, are before each row group and after the last."""
    groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
    num_bytes = np.cumsum([0.0, *(max(0, group.total_byte_size) for group in groups)])
    rows = [0, *itertools.accumulate(group.num_rows for group in groups)]
    return rows, num_bytes * (size / max(1.0, num_bytes[-1]))


def _row_at(position: int, rows_before: list[int], bytes_before: np.ndarray) -> int:
    return round(float(np.interp(position, bytes_before, rows_before)))


def cuts_of_parquet(source: Source, part_bytes: int) -> list[int]:
    """Return the bytes at which parts of a Parquet file begin: at row groups, and within those that are large."""
    import pyarrow as pa

    try:
        with _open_parquet(source.location) as (table, size):
            _, before = _layout(table, size)
    except (pa.ArrowException, *READ_ERRORS) as error:
        raise damaged(source, error) from error
    cuts = [0]
    for begin, end in itertools.pairwise(before):
        number = min(_PARTS_PER_ROW_GROUP, max(1, int((end - begin) / part_bytes)))
        for cut in np.linspace(begin, end, number + 1)[1:]:
            if part_bytes <= cut - cuts[-1] and cut + part_bytes // 2 <= size:
                cuts.append(round(cut))
    return cuts


def _unfolds(part: ByteRange, size: int, num_bytes: int) -> InputError:
    return InputError(
        f"the file of {size:,} bytes unfolds to more than {num_bytes:,}",
        where=part.source.location,
        remedy="leave it out, or write it again without rows that repeat one another",
    )


@contextlib.contextmanager
def _open_parquet(location: str) -> Iterator[tuple[Any, int]]:
    """Open a Parquet file; yields its size, too."""
    import pyarrow.parquet as pq

    with open_input(location) as file, tempfile.TemporaryFile() as copy:
        if is_compressed(location) or not file.seekable():  # or sent by a simple server
            shutil.copyfileobj(file, copy, 1 << 20)
            yield pq.ParquetFile(copy), copy.tell()
        else:
            size = file.seek(0, io.SEEK_END)
            yield pq.ParquetFile(file, buffer_size=1 << 20), size  # otherwise whole row groups are in memory


def _rows_at_once(group: Any, columns: Sequence[str], max_bytes: int, position: object) -> int:
    """Return how many rows of a row group to decode at once, by its own figures."""
    size = group.total_byte_size
    if size > max_bytes and columns:  # only then, because pyarrow ends the process where a chunk's metadata are damaged
        chunks = (group.column(index) for index in range(group.num_columns))
        size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema in columns)
    mean = size // max(1, group.num_rows)
    check_record_size(mean, max_bytes, position)
    return min(_PARQUET_ROWS, max(1, max_bytes // max(1, mean)))


def _records_of(batch: Any, max_bytes: int, first: Position) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow batch, one by one where they are large, so that one too large is refused before."""
    if batch.nbytes <= max_bytes:
        yield from batch.to_pylist()
        return
    for index in range(batch.num_rows):
        row = batch.slice(index, 1)
        check_record_size(row.nbytes, max_bytes, first._replace(in_part=first.in_part + index))
        yield from row.to_pylist()


def num_rows(source: Source) -> float:
    """Return the records of a Parquet file or dataset; where only building it would tell, by the size of the first."""
    if source.format == "dataset":
        known, files = rows_or_files(source.location)
        if files and all(file.endswith(".parquet") for file in files):
            some = evenly_spaced(files, min(len(files), FEW_SOURCES))
            return sum(num_rows(Source(file, "parquet", None, "")) for file in some) * len(files) / len(some)
        if known:
            return known
        (rows,) = open_dataset(source.location, streaming=True).values()
        lengths = [len(json.dumps(row, default=str)) + 1 for row in itertools.islice(rows, 1000)]
        return len(lengths) / max(1, sum(lengths)) * sum(size_and_version(file)[0] or 0 for file in files)
    with _open_parquet(source.location) as (table, _):
        return int(table.metadata.num_rows)


def dataset_records(part: ByteRange, splits: Iterable[Any], columns: Sequence[str] = ()) -> Iterator[Record]:
    """Yield the rows of splits of a dataset; the numbers of a `ClassLabel` become their names."""
    for rows in splits:
        present = _present(part, columns, rows.column_names or list(next(iter(rows), {})))
        selected = rows.select_columns(list(present)) if present else rows
        selected = selected if part.stop is None else selected.select(range(part.start, part.stop))
        namers = {name: namer for name, feature in (selected.features or {}).items() if (namer := _namer(feature))}
        for index, record in enumerate(selected, start=part.start + 1):
            named = {name: namer(record[name]) for name, namer in namers.items()}
            yield record | named, Position(part, "row", index)


class ClassName(str):
    """The name of a class, with the number `datasets` has given it."""

    number: int

    def __new__(cls, name: str, number: int) -> "ClassName":
        made = super().__new__(cls, name)
        made.number = number
        return made


def _namer(feature: Any) -> Callable[[Any], Any] | None:
    """Return what replaces the numbers of a `ClassLabel`, alone or in a list, by names; -1 means no label."""
    import datasets

    inner = getattr(feature, "feature", None)
    if isinstance(feature, datasets.ClassLabel):
        return lambda value: None if value is None or value < 0 else ClassName(feature.int2str(value), value)
    if isinstance(inner, datasets.ClassLabel):
        return lambda values: None if values is None else [inner.int2str(value) for value in values]
    return None


def _present(part: ByteRange, columns: Sequence[str], found: Sequence[str]) -> Sequence[str]:
    """Return those of some columns that a table has, at least one."""
    present = [name for name in columns if name in found]
    if columns and not present:
        names = " or ".join(f"'{name}'" for name in columns)
        raise _no_field(f"there is no column {names}", found, part.source.location)
    return present


def _no_field(what: str, names: Sequence[str], where: str) -> InputError:
    return InputError(f"{what} (it has: {', '.join(list(names)[:8])})", where=where, remedy=_NAME_THE_FIELD)
