"""Files of rows, written as a stream, whole or not at all: JSON lines, CSV or Parquet by the file's ending.

CSV needs the names of all columns before its first row, and Parquet their types too: `Columns` finds them.
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
_JSONL, _CSV, _PARQUET = ENDINGS = (".jsonl", ".csv", ".parquet")


def check_output(output: Path) -> None:
    """Refuse an output that exists, or whose ending is no format.

    Raises:
        ConfigError: naming the formats.
        OutputError: when it exists.
    """
    if output.suffix not in ENDINGS:
        what, remedy = f"the ending of '{output.name}' is not a format for rows", f"end it in {', '.join(ENDINGS)}"
        raise ConfigError(what, where="--output", remedy=remedy)
    if output.exists():
        raise OutputError(f"{output} exists", where="--output", remedy="name another file, or remove it")


class Columns:
    """The names of all columns of some rows, in order, and their types if the output is Parquet."""

    def __init__(self, output: Path) -> None:
        self.names: list[str] = []
        self.type = pa.struct([])
        self._needs_types = output.suffix == _PARQUET

    def add(self, rows: Rows) -> None:
        """Look at some rows.

        Raises:
            OutputError: when a column has values of several kinds, which Parquet cannot hold.
        """
        self.names = list(dict.fromkeys([*self.names, *(name for row in rows for name in row)]))
        if self._needs_types and rows:
            try:
                schemas = [pa.schema(list(each)) for each in (self.type, pa.array(rows).type)]
                self.type = pa.struct(list(pa.unify_schemas(schemas, promote_options="permissive")))
            except (pa.ArrowException, OverflowError) as error:
                raise _no_type(error) from error


@contextlib.contextmanager
def row_writer(output: Path, columns: Columns) -> Iterator[Callable[[Rows], None]]:
    """Yield a function that writes some rows; the file appears when all are written."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(output) as temporary, contextlib.ExitStack() as stack:
        if output.suffix == _PARQUET:
            table = stack.enter_context(pq.ParquetWriter(temporary, pa.schema(list(columns.type)), compression="zstd"))
            yield lambda rows: table.write_table(pa.Table.from_struct_array(pa.array(rows, type=columns.type)))
            return
        file = stack.enter_context(temporary.open("w", encoding="utf-8", newline=""))
        if output.suffix == _JSONL:
            yield lambda rows: file.writelines(_json(row) + "\n" for row in rows)
            return
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(columns.names)
        yield lambda rows: lines.writerows([_cell(row.get(name)) for name in columns.names] for row in rows)


def _cell(value: Any) -> Any:
    """Return a value for CSV: lists and objects as JSON."""
    return _json(value) if isinstance(value, list | dict) else value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)  # dates and decimals of Parquet, as text


def _no_type(error: Exception) -> OutputError:
    what = f"a column has values of several kinds: {str(error).partition(chr(10))[0]}"
    return OutputError(what, where="--output", remedy=f"write {_JSONL}, which keeps each value as it is")
