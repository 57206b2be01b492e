"""Files of rows, written whole or not at all: JSON lines, CSV, TSV or Parquet by the file's ending."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bert_pretrain.errors import ConfigError, OutputError
from bert_pretrain.io.files import atomic_path, write_text

Rows = Sequence[dict[str, Any]]
_JSONL, _CSV, _TSV, _PARQUET = ".jsonl", ".csv", ".tsv", ".parquet"
OF_TASKS = {".conll": "tag", ".json": "answer"}
"""The forms of evaluation scripts, by the ending of the file, and their tasks."""
FORMATS = {
    _JSONL: "JSON lines, UTF-8",
    _CSV: "comma-separated, UTF-8; beyond ASCII with a byte order mark, for Excel",
    _TSV: "tab-separated, UTF-8",
    _PARQUET: "Parquet",
    ".conll": "a word and its tag per line",
    ".json": "SQuAD's form, an answer by id",
}
"""By the ending of the file."""


def check_output(output: Path) -> None:
    """Refuse an output that is a folder, or whose ending is no format."""
    if output.suffix not in FORMATS:
        what, remedy = f"the ending of '{output.name}' is not a format for rows", f"end it in {', '.join(FORMATS)}"
        raise ConfigError(what, where="--output", remedy=remedy)
    if output.is_dir():
        raise OutputError(f"{output} is a folder", where="--output", remedy="name a file")


def check_rows(output: Path, rows: Rows) -> None:
    """Refuse rows that the format cannot hold: values of several kinds in Parquet, tabs and line ends in TSV."""
    if output.suffix == _PARQUET:
        _parquet_table(rows)
    if output.suffix == _TSV:
        for row in rows:
            _tsv_line([*row, *row.values()])


def write_rows(output: Path, rows: Rows) -> None:
    """Write rows with the columns of all of them, in order."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(output) as temporary:
        if output.suffix == _PARQUET:
            pq.write_table(_parquet_table(rows), temporary, compression="zstd")
            return
        names = list(dict.fromkeys(name for row in rows for name in row))
        # Excel takes CSV for the system's encoding, unless a byte order mark tells.
        encoding = "utf-8-sig" if output.suffix == _CSV and not _json(rows).isascii() else "utf-8"
        with temporary.open("w", encoding=encoding, newline="") as file:
            if output.suffix == _JSONL:
                file.writelines(_json(row) + "\n" for row in rows)
            elif output.suffix == _TSV:
                file.write(_tsv_line(names))
                file.writelines(_tsv_line([row.get(name) for name in names]) for row in rows)
            else:
                lines = csv.writer(file, lineterminator="\n")
                lines.writerow(names)
                lines.writerows([_cell(row.get(name)) for name in names] for row in rows)


def write_task_form(output: Path, rows: Rows, examples: Sequence[Any], added: Rows) -> None:
    """Write tags as CoNLL's lines, or answers by the ids of their questions, as evaluation scripts read them."""
    if output.suffix == ".conll":
        pairs = ((example.words, each["tags"]) for example, each in zip(examples, added, strict=True))
        text = "\n".join("".join(f"{word}\t{tag}\n" for word, tag in zip(*pair, strict=True)) for pair in pairs)
    else:
        ids = [str(row.get("id", number)) for number, row in enumerate(rows)]
        text = _json(dict(zip(ids, (each["answer"] for each in added), strict=True))) + "\n"
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, text)


def _parquet_table(rows: Rows) -> pa.Table:
    try:
        table = pa.Table.from_struct_array(pa.array(rows))
        pq.ParquetWriter(pa.BufferOutputStream(), table.schema).close()  # it refuses objects without fields
    except (pa.ArrowException, OverflowError) as error:
        what = f"Parquet cannot hold a column: {str(error).partition(chr(10))[0]}"
        remedy = f"write {_JSONL}, which keeps each value as it is"
        raise OutputError(what, where="--output", remedy=remedy) from error
    return table


def _tsv_line(values: Sequence[Any]) -> str:
    """Return a line of TSV, in which quotes have no meaning."""
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
