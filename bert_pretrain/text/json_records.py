"""JSON of inputs: one object per line, or one array of objects, which is read element by element."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from bert_pretrain.errors import InputError
from bert_pretrain.storage import files
from bert_pretrain.text.text_files import ByteRange, Position, check_record_size, read_lines, text_blocks

_STRUCTURE = re.compile(r'["\[\]{},]')
_STRING_END = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
Record = tuple[dict[str, Any], Position]


def repair_surrogates(value: Any) -> Any:
    """Replace half surrogate pairs, which JSON can spell but UTF-8 cannot hold, by question marks in a JSON value."""
    if isinstance(value, str):
        try:
            value.isascii() or value.encode()
            return value
        except UnicodeEncodeError:
            return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [repair_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {repair_surrogates(key): repair_surrogates(item) for key, item in value.items()}
    return value


def read_jsonl(part: ByteRange, counts: Counter[str], strict: bool, max_bytes: int) -> Iterator[Record]:
    """Yield the object on each line, as `records.read_records`."""
    for line, position in read_lines(part, counts, strict=strict, max_line_bytes=max_bytes):
        if not line or line.isspace():
            counts["blank_lines"] += 1
            continue
        value = parse_json(line, position)
        del line
        yield as_record(value, position), position


def read_array(part: ByteRange, counts: Counter[str], strict: bool, max_bytes: int) -> Iterator[Record]:
    """Yield each object of an array, as `records.read_records`."""
    blocks = (text for _, text in text_blocks(part, counts, whole_lines=False, strict=strict))
    for element, position in array_elements(blocks, part, max_bytes):
        yield as_record(parse_json(element, position), position), position


def array_elements(blocks: Iterable[str], part: ByteRange, max_bytes: int) -> Iterator[tuple[str, Position]]:
    """Yield the text of each element of a JSON array, which comes in blocks; one element is held in memory."""
    position, depth, in_string, carry = Position(part, "record", 1), 0, False, ""
    held: list[str] = []
    num_bytes = 0
    for block in blocks:
        text = carry + block
        carry = text[len(text.rstrip("\\")) :]  # what a backslash at the end escapes is in the next block
        text = text[: len(text) - len(carry)]
        begin = end = 0
        while mark := (_STRING_END.match if in_string else _STRUCTURE.search)(text, end):
            end = mark.end()
            character = text[end - 1]
            if character == '"':
                in_string = not in_string
                continue
            depth += (character in "[{") - (character in "]}")
            if depth > 1 or (depth == 1 and character in "]}"):
                continue  # within an element
            element = "".join([*held, text[begin : end - 1]])
            held, num_bytes, begin = [], 0, end
            is_begin = depth == 1 and character == "[" and not element.strip()
            if not is_begin and (depth, character) not in ((1, ","), (0, "]")):
                raise _not_array(f"unexpected {character!r}", position)
            if not is_begin and (element.strip() or depth or position.in_part > 1):
                yield element, position
                position = position._replace(in_part=position.in_part + 1)
        held.append(text[begin:] if held else text[begin:].lstrip())
        num_bytes += len(held[-1]) if held[-1].isascii() else len(held[-1].encode())
        check_record_size(num_bytes + len(carry), max_bytes, position)
    rest = "".join([*held, carry]).strip()
    if depth or rest:
        raise _not_array("it has no end" if depth else f"unexpected {rest[:20]!r}", position)


def _not_array(what: str, position: Position) -> InputError:
    remedy = "fetch it again if it is cut off; records without an array around them are one per line"
    return InputError(f"it is not a JSON array: {what}", where=str(position), remedy=remedy)


def parse_json(text: str, where: object) -> Any:
    try:
        return files.parse_json(text)
    except ValueError as error:
        remedy = "fix it; .jsonl holds one object per line"
        raise InputError(f"it is not JSON: {error}", where=str(where), remedy=remedy) from error


def as_record(value: Any, position: Position) -> dict[str, Any]:
    """Return a JSON value, which must be an object."""
    if not isinstance(value, dict):
        what = f"the record is not an object but {type(value).__name__}"
        remedy = "write {...} with a field for each column, such as text"
        raise InputError(what, where=str(position), remedy=remedy)
    return value
