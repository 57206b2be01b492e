"""Sources to documents: text of every supported format and compression.

`cut` divides large plain files into parts at document boundaries; `read` streams the documents of a part, long ones in
several passages, so that memory is bounded whatever a document's length. Every drop and repair is counted by reason,
never silent.
"""

import codecs
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import InputError
from bert_pretrain.files import open_input
from bert_pretrain.sources import READ_ERRORS, Source, damaged, is_compressed

BLOCK_BYTES = 4 << 20
PASSAGE_CHARACTERS = 4 << 20
PART_BYTES = 8 << 20
MOST_PARTS = 4096  # about; a part is a folder of the token store, whose files are all mapped at once
_BLANK = b" \t\r\n"  # what a blank line may hold; not the form feed, which ends pages rather than documents
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")
_NAME_THE_FIELD = "name what holds the text: --set data.text_field=NAME (embed and evaluate: --text-field NAME)"
_FOREIGN_MARKS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32"} | {
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


@dataclass(frozen=True)
class Part:
    """A run of whole documents of one source: the bytes [start, stop), or all of it when `stop` is None."""

    source: Source
    start: int = 0
    stop: int | None = None
    unpacked: Path | None = None
    """Where the bytes lie, if not at the source."""

    @property
    def name(self) -> str:
        return self.source.location if self.stop is None else f"{self.source.location}[{self.start}:{self.stop}]"

    @property
    def num_bytes(self) -> int:
        """How much there is to read, for progress bars; 1 where the size is not known beforehand."""
        return (self.stop or self.source.size or 1) - self.start

    @property
    def location(self) -> str:
        return self.source.location if self.unpacked is None else str(self.unpacked)


def part_bytes_of(sources: Sequence[Source]) -> int:
    """Return how large a part of these inputs should be: large corpora are read in larger parts."""
    return max(PART_BYTES, sum(source.size or 0 for source in sources) // MOST_PARTS)


def cut(source: Source, part_bytes: int, unpacked: Path | None = None) -> list[Part]:
    """Cut a large local file, plain or unpacked, into parts at document boundaries; anything else is one part."""
    is_seekable = unpacked is not None or source.is_plain_local
    size = unpacked.stat().st_size if unpacked is not None else source.size
    if not is_seekable or source.boundary == "file" or (size or 0) <= 2 * part_bytes:
        return [Part(source, unpacked=unpacked)]
    assert size is not None
    cuts = [0]
    with open(unpacked or source.location, "rb") as file:
        while cuts[-1] + 2 * part_bytes < size:
            file.seek(cuts[-1] + part_bytes)
            position = _next_boundary(file, source)
            if position is None:
                break
            cuts.append(position)
    return [Part(source, start, stop, unpacked) for start, stop in itertools.pairwise([*cuts, size])]


def group(parts: Iterable[Part], part_bytes: int) -> list[tuple[Part, ...]]:
    """Put small parts together, in order, so that a folder of many small files is not as many tasks."""
    groups: list[list[Part]] = []
    filled = part_bytes
    for part in parts:
        size = part.num_bytes if part.source.size is not None else part_bytes
        if filled + size > part_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(part)
        filled += size
    return [tuple(parts) for parts in groups]


def check_unchanged(parts: Iterable[Part]) -> None:
    """Make sure that the sources of parts still are what they were when they were resolved.

    Raises:
        InputError: when one is not.
    """
    for source in dict.fromkeys(part.source for part in parts):
        source.check_unchanged()


def _next_boundary(file: BinaryIO, source: Source) -> int | None:
    """Return the next byte at which a document begins, None at the end of the file."""
    file.readline()
    if source.format == "txt":
        while (line := file.readline()) and line.strip(_BLANK):
            pass
    position = file.tell()
    return position if file.read(1) else None


@dataclass(frozen=True)
class Passage:
    """A run of a document's text: all of it, or some megabytes of a long one, cut where a line or word ends."""

    text: str
    ends_document: bool


def read(part: Part, config: DataConfig, counts: Counter[str]) -> Iterator[Passage]:
    """Yield the documents of a part, passage by passage; what is repaired or dropped is counted by reason.

    Raises:
        InputError: naming file and line, when a record cannot be parsed or, with `strict`, text is not UTF-8.
    """
    if part.source.format == "txt":
        passages = _read_txt(part, config, counts)
    else:
        passages = (passage for text in _read_records(part, config, counts) for passage in _cut_long(text))
    counts_empty = part.source.boundary != "blank_line"  # there, several blank lines on end are one boundary
    blanks, is_begun = "", False
    for passage in passages:
        if is_begun or (not passage.text.isspace() and passage.text):
            yield Passage(blanks + passage.text, passage.ends_document)
            blanks, is_begun = "", not passage.ends_document
        else:
            blanks += passage.text
            if passage.ends_document:
                counts["empty_documents"] += counts_empty or bool(blanks.strip(" \t\r\n"))
                blanks = ""


def read_rows(source: Source, config: DataConfig, counts: Counter[str]) -> Iterator[str]:
    """Yield the text of every row of a source, empty ones too: each line of `.txt`, else the field of each record.

    Raises:
        InputError: as `read` does.
    """
    part = Part(source)
    if source.format != "txt":
        yield from _read_records(part, config, counts)
        return
    for position, block in _blocks(part, whole_lines=True):
        lines = _decode(block, position, part, config, counts).split("\n")
        yield from (line.removesuffix("\r") for line in lines[: len(lines) - (not lines[-1])])


def _read_records(part: Part, config: DataConfig, counts: Counter[str]) -> Iterator[str]:
    readers = {"jsonl": _read_jsonl, "parquet": _read_parquet, "csv": _read_csv, "dataset": _read_dataset}
    return readers[part.source.format](part, config, counts)


def _cut_long(text: str) -> Iterator[Passage]:
    begin = 0
    while len(text) - begin > PASSAGE_CHARACTERS:
        end = begin + PASSAGE_CHARACTERS
        cut_at = text.rfind("\n", begin, end) + 1 or text.rfind(" ", begin, end) + 1 or end
        yield Passage(text[begin:cut_at], ends_document=False)
        begin = cut_at
    yield Passage(text[begin:], ends_document=True)


def _blocks(part: Part, *, whole_lines: bool) -> Iterator[tuple[int, bytes]]:
    """Yield (position, bytes) blocks of a part that end where a line does.

    A line that is longer than a block is cut after a blank or a character, unless lines must be whole.
    """
    with open_input(part.location) as file:
        try:
            if part.start:
                file.seek(part.start)
            position, held = part.start, [b""]
            while True:
                read_to = position + sum(map(len, held))
                block = file.read(BLOCK_BYTES if part.stop is None else min(BLOCK_BYTES, part.stop - read_to))
                if not block:
                    break
                end = block.rfind(b"\n") + 1
                if not end and not whole_lines:
                    end = block.rfind(b" ") + 1 or last_character(block)
                held.append(block[:end] if end else block)
                if end:
                    ready, held = [b"".join(held)], [block[end:]]
                    begin, position = position, position + len(ready[0])
                    yield begin, ready.pop()
            if rest := b"".join(held):
                yield position, rest
        except READ_ERRORS as error:
            raise damaged(part.source, error) from error


def last_character(block: bytes) -> int:
    """Return where the last character of UTF-8 begins, which may be cut off."""
    begin = len(block) - 1
    while begin > 0 and begin > len(block) - 4 and block[begin] & 0xC0 == 0x80:
        begin -= 1
    return begin


def _read_txt(part: Part, config: DataConfig, counts: Counter[str]) -> Iterator[Passage]:
    line_end = ""
    for position, block in _blocks(part, whole_lines=False):
        text = _decode(block, position, part, config, counts)
        if part.source.boundary == "file":
            yield Passage(text, ends_document=False)
            continue
        *documents, rest = _BLANK_LINE.split(line_end + text)
        for document in documents:
            yield Passage(document, ends_document=True)
        # A blank line may begin with the line end that closes this block, so that is looked at with the next one.
        line_end = "\n" if text.endswith("\n") else ""
        yield Passage(rest.removesuffix("\n"), ends_document=False)
    yield Passage("", ends_document=True)


def _read_jsonl(part: Part, config: DataConfig, counts: Counter[str]) -> Iterator[str]:
    for position, block in _blocks(part, whole_lines=True):
        lines = _decode(block, position, part, config, counts).split("\n")
        del block  # what is needed no more is let go at once: a record can have hundreds of megabytes
        if not lines[-1]:
            lines.pop()  # behind the last line end
        lines.reverse()
        for index in range(len(lines)):
            if lines[-1].isspace() or not lines[-1]:
                counts["blank_lines"] += 1
                lines.pop()
            else:
                yield _text_of_json(lines.pop(), config.text_field, partial(_line_at, part, position, index), counts)


def _line_at(part: Part, position: int, index: int = 0) -> str:
    """Name the line `index` lines after a byte; only a mistake is worth the reading that finds its number."""
    lines = 1 + index
    with open_input(part.location) as file:
        while position > 0 and (block := file.read(min(BLOCK_BYTES, position))):
            lines += block.count(b"\n")
            position -= len(block)
    return f"{part.source.location}: line {lines}"


def _text_of_json(line: str, field: str, where: Callable[[], str], counts: Counter[str]) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"the line is not JSON: {error}",
            where=where(),
            remedy="mend the line; .jsonl and .json hold one object a line",
        ) from error
    if not isinstance(record, dict) or field not in record:
        keys = ", ".join(list(record)[:8]) if isinstance(record, dict) else type(record).__name__
        raise InputError(
            f"the record has no field '{field}' (it has: {keys})",
            where=where(),
            remedy=_NAME_THE_FIELD,
        )
    return _text_of_value(record[field], where, counts)


def _text_of_value(value: Any, where: Callable[[], str], counts: Counter[str]) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(
            f"the text is {type(value).__name__}, not a string", where=where(), remedy="choose another data.text_field"
        )
    # JSON can spell half of a surrogate pair, which no UTF-8 can hold.
    try:
        value.isascii() or value.encode()
        return value
    except UnicodeEncodeError:
        counts["documents_with_lone_surrogates"] += 1
        return value.encode("utf-8", "replace").decode()


def _row_at(location: str, row: int) -> str:
    return f"{location}: row {row}"


def _read_parquet(part: Part, config: DataConfig, counts: Counter[str]) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_input(part.source.location) as file:
        try:
            # What cannot be sought in, compressed or sent by a simple server, is read whole.
            is_whole = is_compressed(part.source.location) or not file.seekable()
            data = pa.BufferReader(file.read()) if is_whole else file
            table = pq.ParquetFile(data)
            if config.text_field not in table.schema_arrow.names:
                raise _no_column(part.source.location, config.text_field, table.schema_arrow.names)
            row = 0
            for batch in table.iter_batches(batch_size=64, columns=[config.text_field]):
                for value in batch.column(0).to_pylist():
                    yield _text_of_value(value, partial(_row_at, part.source.location, row), counts)
                    row += 1
        except (pa.ArrowException, *READ_ERRORS) as error:
            raise damaged(part.source, error) from error


def _read_csv(part: Part, config: DataConfig, counts: Counter[str]) -> Iterator[str]:
    import csv

    csv.field_size_limit(1 << 30)
    with open_input(part.location) as file:
        # Strict: otherwise a quote that is never closed would make one text of all lines that follow.
        reader = csv.reader(_csv_lines(file, part, config, counts), strict=True)
        line = 1
        try:
            names = next(reader, [])
            if config.text_field not in names:
                raise _no_column(part.source.location, config.text_field, names)
            place, line = names.index(config.text_field), reader.line_num + 1
            for row in reader:
                if len(row) > len(names):  # a comma in a text without quotes would cut the text
                    raise _not_csv(part, line, f"the row has {len(row)} fields, the header {len(names)}")
                if row:
                    yield row[place] if place < len(row) else ""
                else:
                    counts["blank_lines"] += 1
                line = reader.line_num + 1
        except csv.Error as error:
            raise _not_csv(part, line, str(error)) from error


def _not_csv(part: Part, line: int, what: str) -> InputError:
    return InputError(
        f"the record is not CSV: {what}",
        where=f"{part.source.location}: line {line}",
        remedy='mend it; a text with commas, quotes or line ends stands in "quotes", quotes within it twice',
    )


def _csv_lines(file: BinaryIO, part: Part, config: DataConfig, counts: Counter[str]) -> Iterator[str]:
    position = 0
    try:
        for line in file:
            yield _decode(line, position, part, config, counts)
            position += len(line)
    except READ_ERRORS as error:
        raise damaged(part.source, error) from error


def _read_dataset(part: Part, config: DataConfig, counts: Counter[str]) -> Iterator[str]:
    location = part.source.location
    for rows in _open_dataset(location):
        if config.text_field not in rows.column_names:
            raise _no_column(location, config.text_field, rows.column_names)
        for index, value in enumerate(rows[config.text_field]):
            yield _text_of_value(value, partial(_row_at, location, index), counts)


def _open_dataset(location: str) -> list[Any]:
    """Open a `datasets` name (`dataset:NAME[:config][@split]`) or a folder of `save_to_disk`, all splits in order."""
    import datasets

    split: str | None = None
    try:
        if location.startswith("dataset:"):
            name, _, split = location.removeprefix("dataset:").partition("@")
            name, _, subset = name.partition(":")
            data: Any = datasets.load_dataset(name, subset or None, split=split or None)
        else:
            data = datasets.load_from_disk(location)
    except Exception as error:  # `datasets` raises whatever its readers raise
        raise InputError(f"datasets cannot open it: {error}", where=location, remedy="check the name") from error
    return list(data.values()) if isinstance(data, dict) else [data]


def num_rows(source: Source) -> int:
    """Return how many records a Parquet file or dataset has."""
    if source.format == "dataset":
        return sum(len(rows) for rows in _open_dataset(source.location))
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_input(source.location) as file:
        return int(
            pq.ParquetFile(pa.BufferReader(file.read()) if is_compressed(source.location) else file).metadata.num_rows
        )


def _decode(block: bytes, position: int, part: Part, config: DataConfig, counts: Counter[str]) -> str:
    if position == 0:
        for mark, encoding in _FOREIGN_MARKS.items():
            if block.startswith(mark):
                raise InputError(
                    f"the file is {encoding}, not UTF-8",
                    where=part.source.location,
                    remedy=f"convert it: iconv -f {encoding} -t UTF-8",
                )
        block = block.removeprefix(codecs.BOM_UTF8)
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        if config.strict:
            raise _not_utf8(_line_at(part, position, block[: error.start].count(b"\n")), error) from error
        text = block.decode("utf-8", errors="replace")
        counts["invalid_utf8_characters"] += text.count("\ufffd") - block.count("\ufffd".encode())
        return text


def _not_utf8(where: str, error: UnicodeDecodeError) -> InputError:
    return InputError(
        f"the text is not UTF-8: {error.reason}, byte 0x{error.object[error.start]:02x}",
        where=where,
        remedy="convert it to UTF-8 (iconv), or leave out --strict to have such bytes replaced and counted",
    )


def _no_column(location: str, field: str, columns: Sequence[str]) -> InputError:
    return InputError(
        f"there is no column '{field}' (there are: {', '.join(list(columns)[:8])})",
        where=location,
        remedy=_NAME_THE_FIELD,
    )
