"""Minimal pairs: JSON lines with `sentence_good` and `sentence_bad`, as BLiMP's (Warstadt et al., 2020)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import InputError
from bert_pretrain.text.readers import read_records, repair_surrogates
from bert_pretrain.text.sources import resolve
from bert_pretrain.text.text_files import ByteRange, Position
from bert_pretrain.tools.texts import Text

GOOD, BAD = "sentence_good", "sentence_bad"
DEFAULT_FIELD = "UID"
"""BLiMP's name of a phenomenon."""


@dataclass(frozen=True)
class Pair:
    """Two sentences, the first of which is acceptable."""

    good: Text
    bad: Text
    field: str
    group: str | None
    """The field's value, if the record has it."""


def read_pairs(
    inputs: Sequence[str], by: str | None, prefix_field: str | None = None, *, encoding: str = "utf-8"
) -> list[Pair]:
    """Read all pairs of `.jsonl` inputs.

    `by` is the field that groups pairs, required in every record; if None, `UID` where a record has it.
    `prefix_field` is the field of text before both sentences, required if given.
    """
    sources = resolve(inputs, DataConfig(encoding=encoding))
    for source in sources:
        if source.format not in ("json", "jsonl"):
            raise InputError("pairs are read from .jsonl", where=source.location, remedy=f"give {GOOD} and {BAD} there")
    pairs = [
        _pair(*found, by, prefix_field) for source in sources for found in read_records(ByteRange(source), Counter())
    ]
    if not pairs:
        raise InputError("there is no pair", where=", ".join(inputs), remedy=f"give records with {GOOD} and {BAD}")
    return pairs


def _pair(record: dict[str, Any], position: Position, by: str | None, prefix_field: str | None) -> Pair:
    for field in (GOOD, BAD, *filter(None, (by, prefix_field))):
        if not isinstance(record.get(field), str | int if field == by else str):
            what = f"the record has no text in '{field}' (it has: {', '.join(list(record)[:8])})"
            raise InputError(what, where=str(position), remedy="add it")
        if not str(record[field]).strip() and field != prefix_field:
            raise InputError(f"'{field}' is empty", where=str(position), remedy="fill it, or remove the pair")
    location = position.part.source.location
    prefix = repair_surrogates(record[prefix_field]) if prefix_field else None
    sentences = (repair_surrogates(record[field]) for field in (GOOD, BAD))
    good, bad = (Text(sentence, location, position.number, "line", prefix) for sentence in sentences)
    group = record.get(by or DEFAULT_FIELD)
    return Pair(good, bad, by or DEFAULT_FIELD, None if group is None else str(group))
