"""Files of rows with predictions, written whole or not at all, in the format of the file's ending."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bert_pretrain.errors import ConfigError, OutputError
from bert_pretrain.io.files import atomic_path

Rows = Sequence[dict[str, Any]]
FORMATS = {
    ".jsonl": "JSON lines, UTF-8",
    ".csv": "comma-separated, UTF-8; beyond ASCII with a byte order mark, for Excel",
    ".tsv": "tab-separated, UTF-8",
    ".parquet": "Parquet",
    ".conll": "a word and its tag per line",
    ".json": "SQuAD's form, an answer by id",
}
"""Formats by the ending of the file."""
OF_TASKS = {".conll": "tag", ".json": "answer"}
"""The forms of evaluation scripts, and their tasks."""


def check_output(output: Path) -> None:
    """Refuse an output that is a folder, or whose ending is no format."""
    if output.suffix not in FORMATS:
        what, remedy = f"the ending of '{output.name}' is not a format for rows", f"end it in {', '.join(FORMATS)}"
        raise ConfigError(what, where="--output", remedy=remedy)
    if output.is_dir():
        raise OutputError(f"{output} is a folder", where="--output", remedy="name a file")


def check_rows(output: Path, rows: Rows) -> None:
    """Refuse rows that the format cannot hold: values of several kinds in Parquet, tabs and line ends in TSV."""
    if output.suffix == ".parquet":
        _parquet_table(rows)
    if output.suffix == ".tsv":
        for row in rows:
            _tsv_line([*row, *row.values()])


def write_rows(output: Path, rows: Rows) -> None:
    """Write rows with the columns of all of them, in order.

    `.conll` holds the columns `tokens` and `tags` alone, `.json` an object with every `answer` by its `id`.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    # Excel takes CSV for the system's encoding, unless a byte order mark tells.
    encoding = "utf-8-sig" if output.suffix == ".csv" and not _json(rows).isascii() else "utf-8"
    with atomic_path(output) as temporary:
        if output.suffix == ".parquet":
            pq.write_table(_parquet_table(rows), temporary, compression="zstd")
            return
        with temporary.open("w", encoding=encoding, newline="") as file:
            if output.suffix == ".jsonl":
                file.writelines(_json(row) + "\n" for row in rows)
            elif output.suffix == ".tsv":
                file.write(_tsv_line(names))
                file.writelines(_tsv_line([row.get(name) for name in names]) for row in rows)
            elif output.suffix == ".csv":
                lines = csv.writer(file, lineterminator="\n")
                lines.writerow(names)
                lines.writerows([_cell(row.get(name)) for name in names] for row in rows)
            elif output.suffix == ".conll":
                pairs = (zip(row["tokens"], row["tags"], strict=True) for row in rows)
                file.write("\n".join("".join(f"{word}\t{tag}\n" for word, tag in pair) for pair in pairs))
            else:
                file.write(_json({str(row.get("id", number)): row["answer"] for number, row in enumerate(rows)}) + "\n")


def _parquet_table(rows: Rows) -> pa.Table:
    try:
        table = pa.Table.from_struct_array(pa.array(rows))
        pq.ParquetWriter(pa.BufferOutputStream(), table.schema).close()  # it refuses objects without fields
    except (pa.ArrowException, OverflowError) as error:
        what = f"Parquet cannot hold a column: {str(error).partition(chr(10))[0]}"
        raise OutputError(what, where="--output", remedy="write .jsonl, which keeps each value as it is") from error
    return table


def _tsv_line(values: Sequence[Any]) -> str:
    """Return a line of TSV, in which quotes have no meaning."""
    texts = ["" if value is None else str(_cell(value)) for value in values]
    for text in texts:
        if not set("\t\r\n").isdisjoint(text):
            what = f"a tab or line end cannot be written in TSV: {text[:60]!r}"
            raise OutputError(what, where="--output", remedy="write .csv or .jsonl")
    return "\t".join(texts) + "\n"


def _cell(value: Any) -> Any:
    """Return a value for CSV and TSV: lists and objects as JSON."""
    return _json(value) if isinstance(value, list | dict) else value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)  # dates and decimals of Parquet, as text
