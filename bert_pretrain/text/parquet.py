"""Parquet: rows in batches of bounded memory, and the byte offsets at which a large file can be cut into parts."""

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

_MAX_BATCH_ROWS = 64  # large rows are decoded in smaller batches
_MAX_PARTS_PER_ROW_GROUP = 16  # each part also decodes the earlier rows of its first row group
_MAX_EXPANSION = 1000  # decoded size / file size: 2 to 20 for text, thousands for a file of repeated rows


def read_rows(part: ByteRange, columns: Sequence[str], max_bytes: int) -> Iterator[tuple[dict[str, Any], Position]]:
    """Yield the rows that begin in a part, with their positions."""
    with _open(part.source) as (table, size):
        num_bytes, max_decoded_bytes = 0, max(max_bytes, _MAX_EXPANSION * size)
        columns = present_columns(part, columns, table.schema_arrow.names)
        rows_before, bytes_before = _row_group_starts(table, size)
        first = _row_at(part.start, rows_before, bytes_before) if part.start else 0
        last = rows_before[-1] if part.stop is None else _row_at(part.stop, rows_before, bytes_before)
        for group, (row, end) in enumerate(itertools.pairwise(rows_before)):
            if end <= first or row >= last:
                continue
            rows = batch_rows(table.metadata.row_group(group), columns, max_bytes, Position(part, "row", row + 1))
            for batch in table.iter_batches(rows, row_groups=[group], columns=list(columns) or None):
                skipped = min(max(0, first - row), batch.num_rows)
                in_part = batch.slice(skipped, max(0, last - row - skipped))
                yield from _records_of(in_part, max_bytes, Position(part, "row", row + skipped + 1))
                row += batch.num_rows
                num_bytes += batch.nbytes
                if num_bytes > max_decoded_bytes:
                    what = f"the file has {size:,} bytes, but its rows have more than {num_bytes:,}"
                    remedy = "leave the file out; it seems to repeat the same rows very often"
                    raise InputError(what, where=part.source.location, remedy=remedy)
                if row >= last:
                    break


def num_rows(source: Source) -> int:
    with _open(source) as (table, _):
        return int(table.metadata.num_rows)


def features(source: Source) -> Any:
    """Return the features that `datasets` wrote to a file, or None if another program wrote the file."""
    with _open(source) as (table, _):
        if b"huggingface" not in (table.schema_arrow.metadata or {}):
            return None
        import datasets

        return datasets.Features.from_arrow_schema(table.schema_arrow)


def _row_group_starts(table: Any, size: int) -> tuple[list[int], np.ndarray]:
    """Return the first row and the estimated first byte of each row group, and at the end the totals of the file.

    The bytes are cumulative uncompressed sizes, scaled to the file size.
    """
    groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
    bytes_before = np.cumsum([0.0, *(max(0, group.total_byte_size) for group in groups)])
    rows_before = [0, *itertools.accumulate(group.num_rows for group in groups)]
    return rows_before, bytes_before * (size / max(1.0, bytes_before[-1]))


def _row_at(position: int, rows_before: list[int], bytes_before: np.ndarray) -> int:
    return round(float(np.interp(position, bytes_before, rows_before)))


def cuts(source: Source, part_bytes: int) -> list[int]:
    """Return the byte offset of each part. Merge small row groups into one part, and divide large row groups."""
    with _open(source) as (table, size):
        _, bytes_before = _row_group_starts(table, size)
    starts = [0]
    for begin, end in itertools.pairwise(bytes_before):
        num_parts = min(_MAX_PARTS_PER_ROW_GROUP, max(1, int((end - begin) / part_bytes)))
        for cut in np.linspace(begin, end, num_parts + 1)[1:]:
            if part_bytes <= cut - starts[-1] and cut + part_bytes // 2 <= size:
                starts.append(round(cut))
    return starts


@contextlib.contextmanager
def _open(source: Source) -> Iterator[tuple[Any, int]]:
    """Open a Parquet file, and yield it with its size in bytes.

    Raises an InputError if the file is damaged, also if the damage is found while rows are read in this context.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_input(source.location) as file, tempfile.TemporaryFile() as copy:
        try:
            if is_compressed(source.location) or not file.seekable():  # some servers only send complete files
                shutil.copyfileobj(file, copy, 1 << 20)
                yield pq.ParquetFile(copy), copy.tell()
            else:
                size = file.seek(0, io.SEEK_END)
                yield pq.ParquetFile(file, buffer_size=1 << 20), size  # without a buffer, row groups are read whole
        except (pa.ArrowException, *READ_ERRORS) as error:
            raise damaged(source, error) from error


def batch_rows(group: Any, columns: Sequence[str], max_bytes: int, position: object) -> int:
    """Return the number of rows to decode in one batch, from the metadata of a row group."""
    size = group.total_byte_size
    if size > max_bytes and columns:  # pyarrow aborts the process on damaged chunk metadata, so read it only if needed
        chunks = (group.column(index) for index in range(group.num_columns))
        size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema in columns)
    mean_bytes = size // max(1, group.num_rows)
    check_record_size(mean_bytes, max_bytes, position)
    return min(_MAX_BATCH_ROWS, max(1, max_bytes // max(1, mean_bytes)))


def _records_of(batch: Any, max_bytes: int, first: Position) -> Iterator[tuple[dict[str, Any], Position]]:
    """Yield the rows of an Arrow batch with their positions."""
    # A large batch is converted row by row, so that a row above the limit raises before it becomes a Python object.
    size = max(1, batch.num_rows) if batch.nbytes <= max_bytes else 1
    for begin in range(0, batch.num_rows, size):
        position = first._replace(in_part=first.in_part + begin)
        rows = batch.slice(begin, size)
        if size == 1:
            check_record_size(rows.nbytes, max_bytes, position)
        for index, record in enumerate(rows.to_pylist()):
            yield record, position._replace(in_part=position.in_part + index)
