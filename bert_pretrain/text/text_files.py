"""Text files in blocks and lines: decompressed and decoded, each with its position for messages.

Memory is bounded by a block, or by a line where lines must be whole. Repaired characters are counted, never silent.
"""

import codecs
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bert_pretrain.config import MAX_RECORD_BYTES
from bert_pretrain.errors import InputError
from bert_pretrain.io.inputs import open_input
from bert_pretrain.text.encodings import UTF8, as_utf8
from bert_pretrain.text.sources import READ_ERRORS, Source, damaged

BLOCK_BYTES = 4 << 20
FIRST = " (first: "
"""Between a reason for which records are counted and the position of the first."""


@dataclass(frozen=True)
class ByteRange:
    """The bytes [start, stop) of a source, which are whole documents; all of it when `stop` is None.

    Of Parquet, the rows that begin in such a share of its bytes; of a dataset, the rows [start, stop).
    """

    source: Source
    start: int = 0
    stop: int | None = None
    unpacked: Path | None = None
    """The file to read, decompressed and in UTF-8, if not the source itself."""

    @property
    def name(self) -> str:
        return self.source.location if self.stop is None else f"{self.source.location}[{self.start}:{self.stop}]"

    @property
    def num_bytes(self) -> int:
        """The bytes to read, 1 if the size is not known."""
        return (self.stop or self.source.size or 1) - self.start

    def open(self) -> BinaryIO:
        """Open the text, decompressed and in UTF-8."""
        if self.unpacked is not None:
            return open_input(str(self.unpacked))
        return as_utf8(open_input(self.source.location), self.source.encoding)


class Position(NamedTuple):
    """The position of a record: a line of a text file, otherwise a record or a row; formatted only for messages."""

    part: ByteRange
    unit: str
    in_part: int
    """Number from 1: of the line in the part, or of the record or row in the source."""

    @property
    def number(self) -> int:
        """Number in the source, from 1. Lines before a part that is not the first are counted now."""
        number, remaining = self.in_part, self.part.start if self.unit == "line" else 0
        if remaining:
            with self.part.open() as file:
                while block := file.read(min(BLOCK_BYTES, remaining)):
                    number += block.count(b"\n")
                    remaining -= len(block)
        return number

    @property
    def in_range(self) -> str:
        """The position without reading anything: a line by its number in a range of bytes."""
        is_line = self.unit == "line" and self.part.start
        return f"{self.part.name if is_line else self.part.source.location}: {self.unit} {self.in_part}"

    def __str__(self) -> str:
        return f"{self.part.source.location}: {self.unit} {self.number}"


def join_reasons(counts: Mapping[str, int]) -> dict[str, int]:
    """Add the counts of reasons that differ only in the position of the first record; keep the first position."""
    names: dict[str, str] = {}
    joined: Counter[str] = Counter()
    for reason, count in counts.items():
        joined[names.setdefault(reason.partition(FIRST)[0], reason)] += count
    return dict(sorted((+joined).items()))


def describe_reasons(counts: Mapping[str, int]) -> list[str]:
    """Return the counts by reason as text."""
    parts = [(count, *reason.partition(FIRST)) for reason, count in counts.items()]
    return [f"{count:,} {what.replace('_', ' ')}{mark}{place}" for count, what, mark, place in parts]


def check_record_size(num_bytes: int, max_bytes: int, position: object) -> None:
    """Refuse a record larger than a limit, as it is held in memory."""
    if num_bytes > max_bytes:
        raise InputError(
            f"the record has more than {max_bytes:,} bytes",
            where=str(position),
            remedy="fix a missing quote, bracket or comma, or split it; or raise data.max_record_bytes (make-data)",
        )


def present_columns(part: ByteRange, columns: Sequence[str], found: Sequence[str]) -> Sequence[str]:
    """Return those of some columns that a table has, at least one."""
    present = [name for name in columns if name in found]
    if columns and not present:
        names = " or ".join(f"'{name}'" for name in columns)
        raise no_field(f"there is no column {names}", found, part.source.location)
    return present


def no_field(what: str, names: Sequence[str], where: str) -> InputError:
    remedy = "name the field of the text: --set data.text_field=NAME, or NAME,NAME where inputs differ (embed and "
    remedy += "evaluate: --text-field NAME)"
    return InputError(f"{what} (it has: {', '.join(list(names)[:8])})", where=where, remedy=remedy)


def text_blocks(part: ByteRange, counts: Counter[str], *, strict: bool = True) -> Iterator[str]:
    """Yield the text of a part in blocks that end with a line, or inside one that is longer than a block."""
    num_lines, held = 0, b""
    remaining = float("inf") if part.stop is None else part.stop - part.start
    mark = b"" if part.start else codecs.BOM_UTF8
    with part.open() as file:
        try:
            if part.start:
                file.seek(part.start)
            while block := file.read(int(min(BLOCK_BYTES, remaining))):
                remaining -= len(block)
                block, mark = block.removeprefix(mark), b""
                end = block.rfind(b"\n") + 1 or block.rfind(b" ") + 1 or last_character(block)
                if not end:  # a few bytes of a character
                    held += block
                    continue
                yield _decoded(held + block[:end], Position(part, "line", 1 + num_lines), counts, strict=strict)
                num_lines += block.count(b"\n", 0, end)
                held = block[end:]
            if held:
                yield _decoded(held, Position(part, "line", 1 + num_lines), counts, strict=strict)
        except READ_ERRORS as error:
            raise damaged(part.source, error) from error


def last_character(block: bytes) -> int:
    """Return where the last character of UTF-8 begins, which may be incomplete."""
    begin = len(block) - 1
    while begin > 0 and begin > len(block) - 4 and block[begin] & 0xC0 == 0x80:
        begin -= 1
    return begin


def _decoded(block: bytes, position: Position, counts: Counter[str], *, strict: bool) -> str:
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        encoding = position.part.source.encoding
        if strict:
            byte = f": {error.reason}, byte 0x{block[error.start]:02x}" if encoding == UTF8 else ""
            raise InputError(
                f"the text is not {encoding.upper()}{byte}",
                where=str(position._replace(in_part=position.in_part + block.count(b"\n", 0, error.start))),
                remedy="convert it to UTF-8 (iconv); vocab and make-data without --strict replace and count such bytes",
            ) from error
        text = block.decode("utf-8", errors="replace")
        invalid = text.count("\ufffd") - block.count("\ufffd".encode())
        counts[f"invalid_{encoding.replace('-', '')}_characters"] += invalid
        return text


def read_lines(
    part: ByteRange, counts: Counter[str], *, strict: bool, max_line_bytes: int = MAX_RECORD_BYTES
) -> Iterator[tuple[str, Position]]:
    """Yield the lines of a text file without their `\\n`, each with its position; only one is held in memory."""
    held: list[str] = []  # the beginning of a line
    number, num_bytes = 1, 0
    for text in text_blocks(part, counts, strict=strict):
        first, *lines = text.split("\n")
        num_bytes += len(first.encode())
        check_record_size(num_bytes, max_line_bytes, Position(part, "line", number))
        held.append(first)
        if lines:
            lines[0:0] = ["".join(held)]
            held = [lines.pop()]
            num_bytes = len(held[0].encode())
            lines.reverse()
            del text, first  # a single line can have hundreds of megabytes
            while lines:
                yield lines.pop(), Position(part, "line", number)
                number += 1
    if held and held != [""]:
        yield "".join(held), Position(part, "line", number)
