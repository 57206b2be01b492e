"""Parquet: rows in batches of bounded memory, and where a large file can be cut for several cores."""

import contextlib
import io
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bert_pretrain.errors import InputError
from bert_pretrain.io.inputs import open_input
from bert_pretrain.text.sources import READ_ERRORS, Source, damaged, is_compressed
from bert_pretrain.text.text_files import ByteRange, Position, check_record_size, present_columns

_ROWS_AT_ONCE = 64  # unless they are large
_PARTS_PER_ROW_GROUP = 16  # at most: each part decodes the rows of its first row group that are before it, too
_MAX_UNFOLDING = 1000
"""Times the size of a file that its rows may have; text has 2 to 20, and one row may stand for thousands."""


def read_rows(part: ByteRange, columns: Sequence[str], max_bytes: int) -> Iterator[tuple[dict[str, Any], Position]]:
    """Yield the rows that begin in a part, with their positions."""
    with _open(part.source) as (table, size):
        num_bytes, most = 0, max(max_bytes, _MAX_UNFOLDING * size)
        columns = present_columns(part, columns, table.schema_arrow.names)
        rows_before, bytes_before = _layout(table, size)
        first = _row_at(part.start, rows_before, bytes_before) if part.start else 0
        last = rows_before[-1] if part.stop is None else _row_at(part.stop, rows_before, bytes_before)
        for group, (row, end) in enumerate(itertools.pairwise(rows_before)):
            if end <= first or row >= last:
                continue
            rows = rows_at_once(table.metadata.row_group(group), columns, max_bytes, Position(part, "row", row + 1))
            for batch in table.iter_batches(rows, row_groups=[group], columns=list(columns) or None):
                skipped = min(max(0, first - row), batch.num_rows)
                taken = batch.slice(skipped, max(0, last - row - skipped))
                yield from _records_of(taken, max_bytes, Position(part, "row", row + skipped + 1))
                row += batch.num_rows
                num_bytes += batch.nbytes
                if num_bytes > most:
                    what = f"the file of {size:,} bytes unfolds to more than {num_bytes:,}"
                    remedy = "leave it out, or write it again without rows that repeat one another"
                    raise InputError(what, where=part.source.location, remedy=remedy)
                if row >= last:
                    break


def num_rows(source: Source) -> int:
    with _open(source) as (table, _):
        return int(table.metadata.num_rows)


def features(source: Source) -> Any:
    """Return the features that `datasets` has written into a file; None where another program wrote it."""
    with _open(source) as (table, _):
        if b"huggingface" not in (table.schema_arrow.metadata or {}):
            return None
        import datasets

        return datasets.Features.from_arrow_schema(table.schema_arrow)


def _layout(table: Any, size: int) -> tuple[list[int], np.ndarray]:
    """Return how many rows, and how many of the bytes of a file, are before each row group and after the last."""
    groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
    num_bytes = np.cumsum([0.0, *(max(0, group.total_byte_size) for group in groups)])
    rows = [0, *itertools.accumulate(group.num_rows for group in groups)]
    return rows, num_bytes * (size / max(1.0, num_bytes[-1]))


def _row_at(position: int, rows_before: list[int], bytes_before: np.ndarray) -> int:
    return round(float(np.interp(position, bytes_before, rows_before)))


def cuts(source: Source, part_bytes: int) -> list[int]:
    """Return the bytes at which parts begin: at row groups, and within those that are large."""
    with _open(source) as (table, size):
        _, before = _layout(table, size)
    found = [0]
    for begin, end in itertools.pairwise(before):
        number = min(_PARTS_PER_ROW_GROUP, max(1, int((end - begin) / part_bytes)))
        for cut in np.linspace(begin, end, number + 1)[1:]:
            if part_bytes <= cut - found[-1] and cut + part_bytes // 2 <= size:
                found.append(round(cut))
    return found


@contextlib.contextmanager
def _open(source: Source) -> Iterator[tuple[Any, int]]:
    """Open a Parquet file; yields its size, too. Damage is one message, also when it is found while rows are read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_input(source.location) as file, tempfile.TemporaryFile() as copy:
        try:
            if is_compressed(source.location) or not file.seekable():  # or sent by a simple server
                shutil.copyfileobj(file, copy, 1 << 20)
                yield pq.ParquetFile(copy), copy.tell()
            else:
                size = file.seek(0, io.SEEK_END)
                yield pq.ParquetFile(file, buffer_size=1 << 20), size  # otherwise whole row groups are in memory
        except (pa.ArrowException, *READ_ERRORS) as error:
            raise damaged(source, error) from error


def rows_at_once(group: Any, columns: Sequence[str], max_bytes: int, position: object) -> int:
    """Return how many rows of a row group to decode at once, by its own metrics."""
    size = group.total_byte_size
    if size > max_bytes and columns:  # only then, because pyarrow ends the process where a chunk's metadata are damaged
        chunks = (group.column(index) for index in range(group.num_columns))
        size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema in columns)
    mean = size // max(1, group.num_rows)
    check_record_size(mean, max_bytes, position)
    return min(_ROWS_AT_ONCE, max(1, max_bytes // max(1, mean)))


def _records_of(batch: Any, max_bytes: int, first: Position) -> Iterator[tuple[dict[str, Any], Position]]:
    """Yield the rows of an Arrow batch, one by one where they are large, so that one too large is refused before."""
    size = max(1, batch.num_rows) if batch.nbytes <= max_bytes else 1
    for begin in range(0, batch.num_rows, size):
        position = first._replace(in_part=first.in_part + begin)
        rows = batch.slice(begin, size)
        if size == 1:
            check_record_size(rows.nbytes, max_bytes, position)
        for index, record in enumerate(rows.to_pylist()):
            yield record, position._replace(in_part=position.in_part + index)
