"""Any input to documents: files of every supported ending and compression, globs, folders, URLs, `datasets` names.

`resolve` turns what a user typed into sources; `cut` divides large plain files into parts at document boundaries;
`read` streams the documents of a part. Every drop and repair is counted by reason, never silent.
"""

import codecs
import glob
import hashlib
import itertools
import json
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import InputError
from bert_pretrain.files import COMPRESSIONS, is_url, open_input

FORMATS = {".txt": "txt", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".csv": "csv"}
SUPPORTED = f"{', '.join(FORMATS)}, each also {', '.join(COMPRESSIONS)}, or a folder saved by datasets"
BLOCK_BYTES = 8 << 20
PART_BYTES = 32 << 20
_BLANK = b" \t\r\n"  # what a blank line may hold; not the form feed, which ends pages rather than documents
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
_LINE_END = re.compile(rb"\n")
# What reading damaged files raises; not all decompressors keep to OSError.
_READ_ERRORS = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
_FOREIGN_MARKS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32"} | {
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


@dataclass(frozen=True)
class Source:
    """One input file, URL, saved dataset or dataset name."""

    location: str
    format: str
    """txt, jsonl, parquet, csv, or dataset."""
    size: int | None
    version: str
    """Changes when the content does: modification time, ETag or fingerprint."""
    boundary: str = "blank_line"
    """For txt: where documents end, `blank_line` or `file`."""
    splitter: str = "sentencex"
    """How its documents become sentences: `lines` or `sentencex`."""

    @property
    def identity(self) -> dict[str, Any]:
        """What identifies the content without reading it: a file may move, but not change."""
        name = self.location if self.format == "dataset" else self.location.rsplit("/", 1)[-1]
        layout = {"boundary": self.boundary, "splitter": self.splitter}
        return {"name": name, "size": self.size, "version": self.version, **layout}

    @property
    def is_local(self) -> bool:
        """Whether it is a file on this machine."""
        return self.format != "dataset" and not is_url(self.location)

    @property
    def is_plain_local(self) -> bool:
        """Whether it can be read from any byte on."""
        return self.is_local and self.format in ("txt", "jsonl") and not _is_compressed(self.location)


@dataclass(frozen=True)
class Part:
    """A run of whole documents of one source: the bytes [start, stop), or all of it when `stop` is None."""

    source: Source
    start: int = 0
    stop: int | None = None

    @property
    def name(self) -> str:
        return self.source.location if self.stop is None else f"{self.source.location}[{self.start}:{self.stop}]"


def resolve(inputs: Sequence[str], config: DataConfig) -> list[Source]:
    """Turn files, globs, folders, URLs and `dataset:` names into sources, in a fixed order.

    Raises:
        InputError: when nothing is given or found, an ending is unknown, or a file is empty.
    """
    if not inputs:
        raise InputError("no input is given", where="INPUT", remedy="name files, folders, globs or dataset:NAME")
    sources = [source for item in inputs for source in _resolve_one(item)]
    seen: set[str] = set()
    for source in sources:
        name = os.path.realpath(source.location) if source.is_local else source.location
        if name in seen:
            raise InputError("an input is given twice", where=source.location, remedy="name it once")
        seen.add(name)
    return [_with_layout(source, config) for source in sources]


def _resolve_one(item: str) -> list[Source]:
    if item.startswith("dataset:"):
        return [_dataset_source(item)]
    if is_url(item):
        return _resolve_url(item)
    path = Path(item).expanduser()
    if path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            return [_dataset_source(str(path))]
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and _format_of(file.name)]
        # Hidden files and folders are somebody's own business, our token store among them.
        files = [file for file in files if not any(name.startswith(".") for name in file.relative_to(path).parts)]
        if not files:
            raise InputError("the folder holds no readable file", where=item, remedy=f"supported: {SUPPORTED}")
        return [_file_source(file) for file in files]
    if path.is_file():
        return [_file_source(path)]
    matches = [match for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
    if not matches:
        raise InputError("there is no such file or folder", where=item, remedy="check the path; no file matches it")
    return [_file_source(Path(match)) for match in matches]


def _file_source(path: Path) -> Source:
    kind = _format_of(path.name)
    if kind is None:
        raise InputError(f"the ending of '{path.name}' is unknown", where=str(path), remedy=f"supported: {SUPPORTED}")
    status = path.stat()
    if status.st_size == 0:
        raise InputError("the file is empty", where=str(path), remedy="leave it out, or write it again")
    return Source(str(path), kind, status.st_size, f"mtime:{status.st_mtime_ns}")


def _resolve_url(url: str) -> list[Source]:
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(url)
        paths = sorted(filesystem.glob(path)) if any(character in url for character in "*?[") else [path]
        found = [(filesystem.unstrip_protocol(entry), filesystem.info(entry)) for entry in paths]
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"cannot reach the URL: {error}", where=url, remedy="check the address and access") from error
    if not found:
        raise InputError("no file matches the URL", where=url, remedy="check the pattern")
    sources = []
    for location, info in found:
        kind = _format_of(location)
        if kind is None:
            raise InputError("the ending of the URL is unknown", where=location, remedy=f"supported: {SUPPORTED}")
        version = next((f"{key}:{info[key]}" for key in ("ETag", "etag", "mtime", "LastModified") if info.get(key)), "")
        sources.append(Source(location, kind, info.get("size"), version))
    return sources


def _dataset_source(item: str) -> Source:
    folder = Path(item.removeprefix("dataset:").partition("@")[0])
    return Source(item, "dataset", None, _folder_version(folder) if folder.is_dir() else "")


def _folder_version(folder: Path) -> str:
    """Return what changes when a file of the folder does."""
    files = [(str(file.relative_to(folder)), file.stat()) for file in sorted(folder.rglob("*")) if file.is_file()]
    content = [(name, status.st_size, status.st_mtime_ns) for name, status in files]
    return "files:" + hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _format_of(name: str) -> str | None:
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    return FORMATS.get(Path(name.removesuffix(compression)).suffix)


def _is_compressed(location: str) -> bool:
    return location.endswith(COMPRESSIONS)


def _with_layout(source: Source, config: DataConfig) -> Source:
    """Settle where documents and sentences of a source end, by the configuration or by looking at it."""
    boundary: str = config.document_boundary
    splitter: str = config.sentence_splitter
    if source.format == "txt" and "auto" in (boundary, splitter):
        one_a_line = has_one_sentence_a_line(_sample(source), config.language)
        if boundary == "auto":
            boundary = "blank_line" if one_a_line else "file"
        if splitter == "auto":
            splitter = "lines" if one_a_line else "sentencex"
    elif splitter == "auto":
        splitter = "sentencex"
    boundary = boundary if source.format == "txt" else "record"
    return Source(source.location, source.format, source.size, source.version, boundary, splitter)


def _sample(source: Source, size: int = 1 << 18) -> str:
    with open_input(source.location) as file:
        try:
            return file.read(size).decode("utf-8", errors="ignore")
        except _READ_ERRORS as error:
            raise _damaged(source, error) from error


def has_one_sentence_a_line(sample: str, language: str) -> bool:
    """Tell text with one sentence a line from running paragraphs (hard-wrapped ones too), by a sample.

    One sentence a line: most lines end as sentences do, and few hold more than one.
    """
    import sentencex

    lines = [line.strip() for line in sample.split("\n")[:-1] or [sample]]
    lines = [line for line in lines if line][:2000]
    if len(lines) < 3:
        return False
    ended = sum(line[-1] in ".!?。！？…;；:：\"'”’」』）)]》" for line in lines)
    several = sum(len(sentencex.segment(language, line[:2000])) > 1 for line in lines[:500])
    return ended >= 0.5 * len(lines) and several <= 0.35 * len(lines[:500])


def cut(source: Source) -> list[Part]:
    """Cut a large plain local file into parts at document boundaries; anything else is one part."""
    if not source.is_plain_local or source.boundary == "file" or (source.size or 0) <= 2 * PART_BYTES:
        return [Part(source)]
    assert source.size is not None
    cuts = [0]
    with open(source.location, "rb") as file:
        while cuts[-1] + 2 * PART_BYTES < source.size:
            file.seek(cuts[-1] + PART_BYTES)
            position = _next_boundary(file, source)
            if position is None:
                break
            cuts.append(position)
    cuts.append(source.size)
    return [Part(source, start, stop) for start, stop in itertools.pairwise(cuts)]


def _next_boundary(file: BinaryIO, source: Source) -> int | None:
    """Return the next byte at which a document begins, None at the end of the file."""
    file.readline()
    if source.format == "txt":
        while (line := file.readline()) and line.strip(_BLANK):
            pass
    position = file.tell()
    return position if file.read(1) else None


def read(part: Part, config: DataConfig, counts: Counter[str]) -> Iterator[str]:
    """Yield the text of each document of a part; what is repaired or dropped is counted by reason.

    Raises:
        InputError: naming file and line, when a record cannot be parsed or, with `strict`, text is not UTF-8.
    """
    readers = {
        "txt": _read_txt,
        "jsonl": _read_jsonl,
        "parquet": _read_parquet,
        "csv": _read_csv,
        "dataset": _read_dataset,
    }
    for text in readers[part.source.format](part, config, counts):
        if text and not text.isspace():
            yield text
        else:
            counts["empty_documents"] += 1


def _blocks(part: Part, boundary: re.Pattern[bytes] | None) -> Iterator[tuple[int, bytes]]:
    """Yield (position, bytes) blocks of a part that end at a boundary; the whole part when `boundary` is None."""
    stop = part.stop
    with open_input(part.source.location) as file:
        try:
            if part.start:
                file.seek(part.start)
            position, held = part.start, b""
            while True:
                size = BLOCK_BYTES if stop is None else min(BLOCK_BYTES, stop - position - len(held))
                block = file.read(size)
                held = held + block if held else block
                if not block:
                    break
                if boundary is None:
                    continue
                last = _last_boundary(held, boundary, len(held) - len(block))
                if last:
                    yield position, held[:last]
                    position, held = position + last, held[last:]
            if held:
                yield position, held
        except _READ_ERRORS as error:
            raise _damaged(part.source, error) from error


def _last_boundary(held: bytes, boundary: re.Pattern[bytes], start: int) -> int:
    """Return the end of the last boundary in `held`, searching from a little before `start`; 0 if there is none."""
    window = 1 << 16
    for begin in (max(start, len(held) - window), max(0, start - 1024)):
        last = 0
        for match in boundary.finditer(held, begin):
            last = match.end()
        if last:
            return last
    return 0


def _read_txt(part: Part, config: DataConfig, counts: Counter[str]) -> Iterator[str]:
    boundary = _BLANK_LINE if part.source.boundary == "blank_line" else None
    for position, block in _blocks(part, boundary):
        text = _decode(block, position, part, config, counts)
        if boundary is None:
            yield text
        else:
            # Several blank lines on end are one boundary, wherever a block or part begins among them.
            yield from filter(None, (document.strip(" \t\r\n") for document in re.split(r"\n[ \t\r]*\n", text)))


def _read_jsonl(part: Part, config: DataConfig, counts: Counter[str]) -> Iterator[str]:
    for position, block in _blocks(part, _LINE_END):
        for index, line in enumerate(_decode(block, position, part, config, counts).split("\n")):
            if line and not line.isspace():
                yield _text_of_json(line, config.text_field, partial(_line_at, part.source, position, index), counts)


def _line_at(source: Source, position: int, index: int = 0) -> str:
    """Name the line `index` lines after a byte; only a mistake is worth the reading that finds its number."""
    lines = 1 + index
    with open_input(source.location) as file:
        while position > 0 and (block := file.read(min(BLOCK_BYTES, position))):
            lines += block.count(b"\n")
            position -= len(block)
    return f"{source.location}: line {lines}"


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
            remedy="name the field that holds the text with --set data.text_field=NAME",
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
    cleaned = value.encode("utf-8", "replace").decode() if not value.isascii() else value
    if cleaned != value:
        counts["documents_with_lone_surrogates"] += 1
    return cleaned


def _row_at(location: str, row: int) -> str:
    return f"{location}: row {row}"


def _read_parquet(part: Part, config: DataConfig, counts: Counter[str]) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_input(part.source.location) as file:
        try:
            # A compressed Parquet file cannot be sought in, so it is read whole.
            data = pa.BufferReader(file.read()) if _is_compressed(part.source.location) else file
            table = pq.ParquetFile(data)
            if config.text_field not in table.schema_arrow.names:
                raise _no_column(part.source.location, config.text_field, table.schema_arrow.names)
            row = 0
            for batch in table.iter_batches(batch_size=1024, columns=[config.text_field]):
                for value in batch.column(0).to_pylist():
                    yield _text_of_value(value, partial(_row_at, part.source.location, row), counts)
                    row += 1
        except (pa.ArrowException, *_READ_ERRORS) as error:
            raise _damaged(part.source, error) from error


def _read_csv(part: Part, config: DataConfig, counts: Counter[str]) -> Iterator[str]:
    import csv

    csv.field_size_limit(1 << 30)
    with open_input(part.source.location) as file:
        reader = csv.DictReader(_csv_lines(file, part, config, counts))
        try:
            if config.text_field not in (reader.fieldnames or []):
                raise _no_column(part.source.location, config.text_field, reader.fieldnames or [])
            for row in reader:
                yield row[config.text_field] or ""
        except csv.Error as error:
            raise InputError(
                f"the file is not CSV: {error}",
                where=f"{part.source.location}: line {reader.line_num}",
                remedy="mend it",
            ) from error


def _csv_lines(file: BinaryIO, part: Part, config: DataConfig, counts: Counter[str]) -> Iterator[str]:
    position = 0
    try:
        for line in file:
            yield _decode(line, position, part, config, counts)
            position += len(line)
    except _READ_ERRORS as error:
        raise _damaged(part.source, error) from error


def _read_dataset(part: Part, config: DataConfig, counts: Counter[str]) -> Iterator[str]:
    """Stream a `datasets` name (`dataset:NAME[:config][@split]`) or a folder of `save_to_disk`, all splits in order."""
    import datasets

    location = part.source.location
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
    for rows in data.values() if isinstance(data, dict) else [data]:
        if config.text_field not in rows.column_names:
            raise _no_column(location, config.text_field, rows.column_names)
        for index, value in enumerate(rows[config.text_field]):
            yield _text_of_value(value, partial(_row_at, location, index), counts)


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
            raise _not_utf8(_line_at(part.source, position, block[: error.start].count(b"\n")), error) from error
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
        remedy="name the column that holds the text with --set data.text_field=NAME",
    )


def _damaged(source: Source, error: Exception) -> InputError:
    return InputError(f"cannot read on: {error}", where=source.location, remedy="the file is damaged; fetch it again")
