"""Files of rows, written as a stream, whole or not at all: JSON lines, CSV, TSV or Parquet by the file's ending.

CSV and TSV need the names of all columns before its first row, and Parquet their types too: `Columns` finds them.
"""

import contextlib
import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bert_pretrain.errors import ConfigError, OutputError
from bert_pretrain.storage.files import atomic_path

Rows = Sequence[dict[str, Any]]
_JSONL, _CSV, _TSV, _PARQUET = ".jsonl", ".csv", ".tsv", ".parquet"
FORMATS = {
    _JSONL: "JSON lines, UTF-8",
    _CSV: "comma-separated, UTF-8",
    _TSV: "tab-separated, UTF-8",
    _PARQUET: "Parquet",
}
"""By the ending of the file."""


def check_output(output: Path) -> None:
    """Refuse an output that is a folder, or whose ending is no format.

    Raises:
        ConfigError: naming the formats.
        OutputError: when it is a folder.
    """
    if output.suffix not in FORMATS:
        what, remedy = f"the ending of '{output.name}' is not a format for rows", f"end it in {', '.join(FORMATS)}"
        raise ConfigError(what, where="--output", remedy=remedy)
    if output.is_dir():
        raise OutputError(f"{output} is a folder", where="--output", remedy="name a file")


class Columns:
    """The names of all columns of some rows, in order, and their types if the output is Parquet."""

    def __init__(self, output: Path) -> None:
        self.names: list[str] = []
        self.type = pa.struct([])
        self._needs_types = output.suffix == _PARQUET
        self._is_tsv = output.suffix == _TSV

    def add(self, rows: Rows) -> None:
        """Look at some rows.

        Raises:
            OutputError: when a column has values of several kinds, which Parquet cannot hold, or a value has a tab or a
                line end, which TSV cannot hold.
        """
        if self._is_tsv:
            for row in rows:
                _tsv_line([*row, *row.values()])
        self.names = list(dict.fromkeys([*self.names, *(name for row in rows for name in row)]))
        if self._needs_types and rows:
            try:
                schemas = [pa.schema(list(each)) for each in (self.type, pa.array(rows).type)]
                self.type = pa.struct(list(pa.unify_schemas(schemas, promote_options="permissive")))
            except (pa.ArrowException, OverflowError) as error:
                raise _not_parquet("a column has values of several kinds", error) from error


@contextlib.contextmanager
def row_writer(output: Path, columns: Columns) -> Iterator[Callable[[Rows], None]]:
    """Yield a function that writes some rows; the file appears when all are written."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(output) as temporary, contextlib.ExitStack() as stack:
        if output.suffix == _PARQUET:
            try:
                table = pq.ParquetWriter(temporary, pa.schema(list(columns.type)), compression="zstd")
            except pa.ArrowException as error:  # such as for objects without fields
                raise _not_parquet("Parquet cannot hold a column", error) from error
            stack.enter_context(table)
            yield lambda rows: table.write_table(pa.Table.from_struct_array(pa.array(rows, type=columns.type)))
            return
        file = stack.enter_context(temporary.open("w", encoding="utf-8", newline=""))
        if output.suffix == _JSONL:
            yield lambda rows: file.writelines(_json(row) + "\n" for row in rows)
            return
        if output.suffix == _TSV:
            file.write(_tsv_line(columns.names))
            yield lambda rows: file.writelines(_tsv_line([row.get(name) for name in columns.names]) for row in rows)
            return
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(columns.names)
        yield lambda rows: lines.writerows([_cell(row.get(name)) for name in columns.names] for row in rows)


def _tsv_line(values: Sequence[Any]) -> str:
    """Return a line of TSV, in which quotes have no meaning.

    Raises:
        OutputError: when a value has a tab or a line end.
    """
    texts = ["" if value is None else str(_cell(value)) for value in values]
    for text in texts:
        if not set("\t\r\n").isdisjoint(text):
            what, remedy = f"a tab or line end cannot be written in TSV: {text[:60]!r}", f"write {_CSV} or {_JSONL}"
            raise OutputError(what, where="--output", remedy=remedy)
    return "\t".join(texts) + "\n"


def _cell(value: Any) -> Any:
    """Return a value for CSV and TSV: lists and objects as JSON."""
    return _json(value) if isinstance(value, list | dict) else value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)  # dates and decimals of Parquet, as text


def _not_parquet(what: str, error: Exception) -> OutputError:
    what = f"{what}: {str(error).partition(chr(10))[0]}"
    return OutputError(what, where="--output", remedy=f"write {_JSONL}, which keeps each value as it is")
