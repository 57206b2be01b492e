"""Parquet: rows in batches of bounded memory, and the byte offsets at which a large file can be cut into parts."""

import contextlib
import io
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bert_pretrain.io.inputs import open_input
from bert_pretrain.text.sources import READ_ERRORS, Source, damaged, is_compressed
from bert_pretrain.text.text_files import ByteRange, Position, present_columns, record_too_large

_MAX_BATCH_ROWS = 64  # large rows are decoded in smaller batches
_MAX_PARTS_PER_ROW_GROUP = 16  # each part also decodes the earlier rows of its first row group


def read_rows(part: ByteRange, columns: Sequence[str], max_bytes: int) -> Iterator[tuple[dict[str, Any], Position]]:
    """Yield the rows that begin in a part, with their positions."""
    with _open(part.source) as (table, size):
        columns = present_columns(part, columns, table.schema_arrow.names)
        rows_before, bytes_before = _row_group_starts(table, size)
        first = _row_at(part.start, rows_before, bytes_before) if part.start else 0
        last = rows_before[-1] if part.stop is None else _row_at(part.stop, rows_before, bytes_before)
        for group, (row, end) in enumerate(itertools.pairwise(rows_before)):
            if end <= first or row >= last:
                continue
            mean_bytes = table.metadata.row_group(group).total_byte_size // max(1, end - row)
            batch_rows = min(_MAX_BATCH_ROWS, max(1, max_bytes // max(1, mean_bytes)))
            for batch in table.iter_batches(batch_rows, row_groups=[group], columns=list(columns) or None):
                in_part = batch.slice(max(0, first - row), max(0, last - max(first, row)))
                yield from _records_of(in_part, max_bytes, Position(part, "row", max(first, row) + 1))
                row += batch.num_rows
                if row >= last:
                    break


def _records_of(batch: Any, max_bytes: int, first: Position) -> Iterator[tuple[dict[str, Any], Position]]:
    """Yield the rows of an Arrow batch with their positions."""
    # A large batch is converted row by row, so that a row above the limit raises before it becomes a Python object.
    step = max(1, batch.num_rows) if batch.nbytes <= max_bytes else 1
    for begin in range(0, batch.num_rows, step):
        position = first._replace(in_part=first.in_part + begin)
        rows = batch.slice(begin, step)
        if step == 1 and rows.nbytes > max_bytes:
            raise record_too_large(max_bytes, position)
        for index, record in enumerate(rows.to_pylist()):
            yield record, position._replace(in_part=position.in_part + index)


def _row_at(position: int, rows_before: list[int], bytes_before: np.ndarray) -> int:
    return round(float(np.interp(position, bytes_before, rows_before)))


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
