"""Minimal pairs: JSON lines with `sentence_good` and `sentence_bad`, as BLiMP's (Warstadt et al., 2020)."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import InputError
from bert_pretrain.files import open_input
from bert_pretrain.sources import READ_ERRORS, Source, damaged, resolve
from bert_pretrain.tools.texts import Text

GOOD, BAD = "sentence_good", "sentence_bad"
USUAL_FIELD = "UID"
"""What BLiMP calls the name of a phenomenon's data set."""


@dataclass(frozen=True)
class Pair:
    """Two sentences of which the first is acceptable."""

    good: Text
    bad: Text
    field: str
    group: str | None
    """The field's value, where the record has it."""


def read_pairs(inputs: Sequence[str], by: str | None) -> list[Pair]:
    """Read all pairs of some files.

    Args:
        inputs: files, globs, folders or URLs of `.jsonl`.
        by: the field that groups pairs and must be in every record; None takes `UID` where it is there.

    Raises:
        InputError: naming file and line, when a line is no such record or a sentence is empty.
    """
    sources = resolve(inputs, DataConfig())
    for source in sources:
        if source.format != "jsonl":
            raise InputError("pairs are read from .jsonl", where=source.location, remedy=f"give {GOOD} and {BAD} there")
    pairs = [pair for source in sources for pair in _read(source, by)]
    if not pairs:
        raise InputError("there is no pair", where=", ".join(inputs), remedy=f"give records with {GOOD} and {BAD}")
    return pairs


def _read(source: Source, by: str | None) -> Iterator[Pair]:
    with open_input(source.location) as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _pair(line, source.location, number, by)
        except READ_ERRORS as error:
            raise damaged(source, error) from error


def _pair(line: bytes, location: str, number: int, by: str | None) -> Pair:
    where = f"{location}: line {number}"
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the line is not JSON: {error}", where=where, remedy="mend the line") from error
    if not isinstance(record, dict):
        raise InputError(f"the line is no object: {record!r:.60}", where=where, remedy="mend the line")
    for field in (GOOD, BAD, *([by] if by else [])):
        if not isinstance(record.get(field), str | int if field == by else str):
            has = ", ".join(list(record)[:8])
            raise InputError(f"the record has no text in '{field}' (it has: {has})", where=where, remedy="give it one")
        if not str(record[field]).strip():
            raise InputError(f"'{field}' is empty", where=where, remedy="give it a text, or take the pair out")
    # JSON can spell half of a surrogate pair, which no UTF-8 can hold.
    good, bad = (
        Text(record[field].encode("utf-8", "replace").decode(), location, number, is_line=True) for field in (GOOD, BAD)
    )
    group = record.get(by or USUAL_FIELD)
    return Pair(good, bad, by or USUAL_FIELD, None if group is None else str(group))
