"""Documents from sources of every supported format and compression.

`cut` divides large inputs into parts at document boundaries. `read` streams the documents of a part, and splits long
ones into pieces to bound memory. Every dropped or repaired record is counted by reason.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from bert_pretrain.config import DataConfig
from bert_pretrain.io.inputs import open_input
from bert_pretrain.text import parquet
from bert_pretrain.text.hub_datasets import cached_dataset
from bert_pretrain.text.readers import read_texts
from bert_pretrain.text.sources import MIN_PART_BYTES, Source, evenly_spaced
from bert_pretrain.text.text_files import ByteRange, text_blocks

MAX_CHARACTERS = 4 << 20  # of one `DocumentPiece`
PART_BYTES = 8 << 20
MAX_PARTS = 4096  # approximate maximum; each group of parts is one task and one store shard
_BLANKS = " \t\r\u00a0\u3000"  # of a blank line; a form feed ends a page, not a document
_SEPARATORS = {  # by boundary
    "file": None,
    "line": re.compile("\n"),
    "blank_line": re.compile(f"\n[{_BLANKS}]*\n"),
}


def part_bytes_of(sources: Sequence[Source]) -> int:
    """Return the size of a part in bytes, which is larger for large corpora."""
    return max(PART_BYTES, sum(source.size or 0 for source in sources) // MAX_PARTS)


def cut(source: Source, part_bytes: int, unpacked: Path | None = None) -> list[ByteRange]:
    """Cut an input into parts at document boundaries.

    An input that is small or has no random access is one part. If `source.fraction` is below 1, the input is cut into
    smaller parts of at least 64 KiB (about 16 or more from 1 MiB on), and this share of them is returned, evenly spaced
    and at least one part.
    """
    if source.fraction < 1.0:
        wanted = int(min(1 / 16, source.fraction) * (source.size or part_bytes))
        part_bytes = min(part_bytes, max(MIN_PART_BYTES, wanted))
    bounds = _bounds(source, part_bytes, unpacked)
    parts = [ByteRange(source, start, stop, unpacked) for start, stop in bounds]
    return evenly_spaced(parts, max(1, round(source.fraction * len(parts))))


def _bounds(source: Source, part_bytes: int, unpacked: Path | None) -> list[tuple[int, int | None]]:
    if source.format == "dataset":
        return _bounds_of_rows(source, part_bytes)
    size = unpacked.stat().st_size if unpacked is not None else source.size or 0
    if not source.is_local:
        part_bytes *= 8  # a cut in a remote file downloads megabytes
    if not (unpacked or source.is_divisible) or size <= 2 * part_bytes:
        return [(0, None)]
    with open_input(str(unpacked or source.location)) as file:
        if not file.seekable():  # the server only sends whole files
            return [(0, None)]
        if source.format == "parquet":
            cuts = parquet.cuts(source, part_bytes)
        else:
            cuts = _cuts_of_text(file, source.boundary == "blank_line", size, part_bytes)
    return list(itertools.pairwise([*cuts, size]))


def _bounds_of_rows(source: Source, part_bytes: int) -> list[tuple[int, int | None]]:
    rows = cached_dataset(source.location, source.version)
    num_parts = min(MAX_PARTS, rows.data.nbytes // part_bytes)
    if num_parts < 2:
        return [(0, None)]
    return list(itertools.pairwise(index * len(rows) // num_parts for index in range(num_parts + 1)))


def _cuts_of_text(
    file: BinaryIO,
    at_blank_lines: bool,
    size: int,
    part_bytes: int,
) -> list[int]:
    """Return the byte offset of each part. A part ends at the first document boundary after `part_bytes` bytes."""
    cuts = [0]
    while cuts[-1] + 2 * part_bytes < size:
        file.seek(cuts[-1] + part_bytes)
        _skip_line(file)
        while at_blank_lines and not _skip_line(file):
            pass
        if file.tell() >= size:
            break
        cuts.append(file.tell())
    return cuts


def _skip_line(file: BinaryIO) -> bool:
    """Skip a line of any length and return whether it is blank. At the end of the file, return True."""
    is_blank = True
    while True:
        piece = file.readline(1 << 20)
        is_blank = is_blank and not piece.decode(errors="replace").strip(f"{_BLANKS}\n")
        if not piece or piece.endswith(b"\n"):
            return is_blank


def group(parts: Iterable[ByteRange], part_bytes: int) -> list[tuple[ByteRange, ...]]:
    """Group small parts, in order, so that many small files become few tasks."""
    groups: list[list[ByteRange]] = []
    group_bytes = part_bytes
    for part in parts:
        size = part.num_bytes if part.source.size is not None else part_bytes
        if group_bytes + size > part_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(part)
        group_bytes += size
    return [tuple(parts) for parts in groups]


def progress_of(groups: Sequence[Sequence[ByteRange]]) -> dict[str, Any]:
    """Return the unit and weights of a progress bar over groups of parts: bytes, or parts if a size is unknown."""
    if any(part.source.size is None for parts in groups for part in parts):
        return {"unit": "part", "weights": [len(parts) for parts in groups]}
    return {"unit": "B", "weights": [sum(part.num_bytes for part in parts) for parts in groups]}


def check_unchanged(parts: Iterable[ByteRange]) -> None:
    """Raise an InputError if a source has changed since it was resolved."""
    for source in dict.fromkeys(part.source for part in parts):
        source.check_unchanged()


class DocumentPiece(NamedTuple):
    """The text of a document, or a piece of a long document that is cut after a line or word if possible."""

    text: str
    ends_document: bool


def read(part: ByteRange, config: DataConfig, counts: Counter[str]) -> Iterator[DocumentPiece]:
    """Yield the documents of a part, long ones in pieces. Count repairs and drops by reason in `counts`."""
    if part.source.format == "txt":
        pieces = _read_txt(part, config, counts)
    else:
        texts = read_texts(part, config, counts)
        pieces = (piece for text in texts if text is not None for piece in _split_long(text))
    # If documents end at lines or blank lines, several blank lines are one boundary, not empty documents.
    counts_blank = part.source.boundary not in ("blank_line", "line")
    pending, is_begun = "", False
    for text, ends_document in pieces:
        pending += text
        if is_begun or text.strip():  # the text before it is blank
            yield DocumentPiece(pending, ends_document)
            pending, is_begun = "", not ends_document
        elif ends_document:
            counts["empty_documents"] += counts_blank or bool(pending.strip(f"\n{_BLANKS}"))
            pending = ""


def _split_long(text: str) -> Iterator[DocumentPiece]:
    begin = 0
    while len(text) - begin > MAX_CHARACTERS:
        end = begin + MAX_CHARACTERS
        cut_at = text.rfind("\n", begin, end) + 1 or text.rfind(" ", begin, end) + 1 or end
        yield DocumentPiece(text[begin:cut_at], ends_document=False)
        begin = cut_at
    yield DocumentPiece(text[begin:], ends_document=True)


def _read_txt(part: ByteRange, config: DataConfig, counts: Counter[str]) -> Iterator[DocumentPiece]:
    separator = _SEPARATORS[part.source.boundary]
    line_end = ""
    for text in text_blocks(part, counts, strict=config.strict):
        *documents, rest = separator.split(line_end + text) if separator else [text]
        for document in documents:
            yield DocumentPiece(document, ends_document=True)
        # A blank line may start with the last line end of a block, so this line end is moved to the next block.
        line_end = "\n" if part.source.boundary == "blank_line" and text.endswith("\n") else ""
        yield DocumentPiece(rest.removesuffix(line_end), ends_document=False)
    yield DocumentPiece("", ends_document=True)
