"""Reading of text files in blocks or lines, decompressed and decoded, with positions for messages."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bert_pretrain.config import MAX_RECORD_BYTES
from bert_pretrain.errors import InputError
from bert_pretrain.io.inputs import open_input
from bert_pretrain.text.encodings import UTF8, as_utf8
from bert_pretrain.text.sources import READ_ERRORS, Source, damaged

BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class ByteRange:
    """The bytes [start, stop) of a source, which contain complete documents. `stop` is None for the end of the source.

    For Parquet, the range is the rows that begin in these bytes. For a dataset, `start` and `stop` are row indices.
    """

    source: Source
    start: int = 0
    stop: int | None = None
    unpacked: Path | None = None  # a decompressed copy in UTF-8, read instead of the source

    @property
    def name(self) -> str:
        return self.source.location if self.stop is None else f"{self.source.location}[{self.start}:{self.stop}]"

    @property
    def num_bytes(self) -> int:
        """The number of bytes to read, or 1 if the size is unknown."""
        return (self.stop or self.source.size or 1) - self.start

    def open(self) -> BinaryIO:
        """Open the source for reading, decompressed and converted to UTF-8."""
        if self.unpacked is not None:
            return open_input(str(self.unpacked))
        return as_utf8(open_input(self.source.location), self.source.encoding)


class Position(NamedTuple):
    """The position of a record, for messages."""

    part: ByteRange
    unit: str  # line, record or row
    in_part: int  # 1-based number of the line in the part, or of the record or row in the source

    @property
    def number(self) -> int:
        """The 1-based number of the record in the source. For lines, this reads the text before the part."""
        number, remaining = self.in_part, self.part.start if self.unit == "line" else 0
        if remaining:
            with self.part.open() as file:
                while block := file.read(min(BLOCK_BYTES, remaining)):
                    number += block.count(b"\n")
                    remaining -= len(block)
        return number

    @property
    def in_range(self) -> str:
        """The position as text. Lines are numbered within the byte range, so that the source is not read."""
        is_line = self.unit == "line" and self.part.start
        return f"{self.part.name if is_line else self.part.source.location}: {self.unit} {self.in_part}"

    def __str__(self) -> str:
        return f"{self.part.source.location}: {self.unit} {self.number}"


def record_too_large(max_bytes: int, position: object) -> InputError:
    return InputError(
        f"the record has more than {max_bytes:,} bytes",
        where=str(position),
        remedy="fix a missing quote, bracket or comma, split the record, or raise data.max_record_bytes (make-data)",
    )


def present_columns(part: ByteRange, columns: Sequence[str], table_columns: Sequence[str]) -> Sequence[str]:
    """Return the given columns that a table has; raise an InputError if it has none of them."""
    present = [name for name in columns if name in table_columns]
    if columns and not present:
        names = " or ".join(f"'{name}'" for name in columns)
        raise no_field(f"there is no column {names}", table_columns, part.source.location)
    return present


def no_field(what: str, names: Sequence[str], where: str) -> InputError:
    remedy = "name the field of the text: --set data.text_field=NAME, or NAME,NAME if inputs differ (embed and "
    remedy += "evaluate: --text-field NAME); decode bytes to strings, and join lists"
    return InputError(f"{what} (it has: {', '.join(list(names)[:8])})", where=where, remedy=remedy)


def text_blocks(part: ByteRange, counts: Counter[str], *, strict: bool = True) -> Iterator[str]:
    """Yield the text of a part in blocks. A block ends at a line end, or inside a line that is longer than a block."""
    num_lines, rest = 0, b""
    remaining = float("inf") if part.stop is None else part.stop - part.start
    with part.open() as file:
        try:
            if part.start:
                file.seek(part.start)
            while block := file.read(int(min(BLOCK_BYTES, remaining))):
                remaining -= len(block)
                end = block.rfind(b"\n") + 1 or block.rfind(b" ") + 1 or last_character(block)
                if not end:  # the block is only a part of a character
                    rest += block
                    continue
                yield _decoded(rest + block[:end], Position(part, "line", 1 + num_lines), counts, strict=strict)
                num_lines += block.count(b"\n", 0, end)
                rest = block[end:]
            if rest:
                yield _decoded(rest, Position(part, "line", 1 + num_lines), counts, strict=strict)
        except READ_ERRORS as error:
            raise damaged(part.source, error) from error


def last_character(block: bytes) -> int:
    """Return the index of the first byte of the last UTF-8 character, which may be incomplete."""
    begin = len(block) - 1
    while begin > 0 and begin > len(block) - 4 and block[begin] & 0xC0 == 0x80:
        begin -= 1
    return begin


def _decoded(
    block: bytes,
    position: Position,
    counts: Counter[str],
    *,
    strict: bool,
) -> str:
    try:
        text = block.decode("utf-8")
    except UnicodeDecodeError as error:
        encoding = position.part.source.encoding
        if strict:
            byte = f": {error.reason}, byte 0x{block[error.start]:02x}" if encoding == UTF8 else ""
            where = position._replace(in_part=position.in_part + block.count(b"\n", 0, error.start))
            remedy = "convert it to UTF-8 (iconv); vocab and make-data without --strict replace and count such bytes"
            raise InputError(f"the text is not {encoding.upper()}{byte}", where=str(where), remedy=remedy) from error
        text = block.decode("utf-8", errors="replace")
        invalid = text.count("\ufffd") - block.count("\ufffd".encode())
        counts[f"invalid_{encoding.replace('-', '')}_characters"] += invalid
    # Joined files have byte order marks inside. Only before very long lines, `block` may begin inside a line.
    return text.removeprefix("\ufeff").replace("\n\ufeff", "\n")


def read_lines(
    part: ByteRange,
    counts: Counter[str],
    *,
    strict: bool,
    max_line_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[tuple[str, Position]]:
    """Yield the lines of a text file without their `\\n`, each with its position."""
    rest, number = "", 1
    for text in text_blocks(part, counts, strict=strict):
        *lines, rest = (rest + text).split("\n")
        first = lines[0] if lines else rest  # only the first line can be longer than a block
        if len(first) > max_line_bytes or len(first.encode()) > max_line_bytes:
            raise record_too_large(max_line_bytes, Position(part, "line", number))
        del text, first  # frees memory: a line can have hundreds of megabytes
        lines.reverse()  # so that `pop` frees each line once it is used
        while lines:
            yield lines.pop(), Position(part, "line", number)
            number += 1
    if rest:
        yield rest, Position(part, "line", number)
