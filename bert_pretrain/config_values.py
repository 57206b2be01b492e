"""Types of configuration values: how people write them (`1e5`, `500k`, `2 hours`), and how to say what they may be."""

import codecs
import contextlib
import math
import re
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, WithJsonSchema
from pydantic.fields import FieldInfo


class Expects(str):
    """In the metadata of a type: what a value may be, in words, in place of those made from the type."""


def _whole_number(value: object) -> object:
    """Accept `1e5` and `30_522` where a whole number is expected."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return int(value)  # before float, which rounds above 2**53
        try:
            number = float(value)
        except ValueError:
            return value
        if number.is_integer():
            return int(number)
    return value


_DURATION_UNITS = {"d(?:ays?)?": 86400, "h(?:(?:ou)?rs?)?": 3600, "m(?:in(?:ute)?s?)?": 60, "s(?:ec(?:ond)?s?)?": 1}
_DURATION = re.compile(
    r"\s*" + "".join(rf"(?:([\d.]+(?:e-?\d+)?)\s*{unit}\s*)?" for unit in _DURATION_UNITS), re.IGNORECASE
)


def _seconds(value: object) -> object:
    """Accept `24h`, `1h30m`, `2 hours`, `90 min` where a duration is expected; a bare number is seconds."""
    if isinstance(value, str) and (found := _DURATION.fullmatch(value)) and any(found.groups()):
        with contextlib.suppress(ValueError):
            sizes = _DURATION_UNITS.values()
            return sum(float(part) * size for part, size in zip(found.groups(), sizes, strict=True) if part)
    return value


def duration_text(seconds: float) -> str:
    """Write a duration so that it reads back to the same number: `1h30m`, `2.5s`."""
    if not seconds.is_integer() or not seconds:
        return f"{seconds!r}s"
    minutes, rest = divmod(int(seconds), 60)
    parts = zip((*divmod(minutes, 60), rest), "hms", strict=True)
    return "".join(f"{number}{unit}" for number, unit in parts if number)


def _count(value: object) -> object:
    """Accept `500k`, `1.5M`, `2G` and plain whole numbers where a count is expected."""
    if isinstance(value, str) and value.strip()[-1:] in UNITS:
        with contextlib.suppress(ValueError, OverflowError):  # 1e999M is infinite
            number = float(value.strip()[:-1]) * UNITS[value.strip()[-1]]
            return round(number) if math.isclose(number, round(number), rel_tol=1e-12) else value
    return _whole_number(value)


def _device(value: object) -> object:
    """Accept `gpu` for `cuda`, in any case."""
    return re.sub("^gpu", "cuda", value.strip().lower()) if isinstance(value, str) else value


def _fields(value: object) -> object:
    """Accept `subject,body` for a list; a name with a comma is a list of one."""
    if not isinstance(value, str) or "," not in value:
        return value
    return [name.strip() for name in value.strip().removeprefix("[").removesuffix("]").split(",")]


def is_encoding(name: str) -> bool:
    """Whether a name is that of an encoding of text that Python knows, or `auto`."""
    with contextlib.suppress(LookupError, ValueError):
        if name != "auto":
            "".encode(name)  # refuses encodings of bytes
            codecs.getincrementaldecoder(name)("replace")
        return True
    return False


def _text_or(number: dict[str, Any]) -> WithJsonSchema:
    """Let editors accept a text such as `24h` beside a number."""
    return WithJsonSchema({"anyOf": [number, {"type": "string"}]})


UNITS = {"k": 10**3, "M": 10**6, "G": 10**9}
Int = Annotated[int, BeforeValidator(_whole_number)]
PositiveInt = Annotated[Int, Field(gt=0)]
Float = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
NonEmpty = Annotated[str, Field(min_length=1)]
Seconds = Annotated[
    float,
    Field(gt=0),
    BeforeValidator(_seconds),
    _text_or({"type": "number", "exclusiveMinimum": 0}),
    Expects("a duration such as 90s, 30m, 1h30m or 2 days"),
]
Count = Annotated[int, BeforeValidator(_count), _text_or({"type": "integer"})]
Device = Annotated[
    str,
    StringConstraints(pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$"),
    BeforeValidator(_device),
    Expects("auto, cpu, cuda, cuda:N (such as cuda:1) or mps"),
]
Name = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"),
    Expects("a name of letters, digits, '.', '_' and '-', which begins with a letter or digit"),
]


Encoding = Annotated[
    str,
    annotated_types.Predicate(is_encoding),
    Expects("auto, or an encoding such as gb18030, big5, cp1252 or shift_jis"),
]
TextField = Annotated[
    NonEmpty | Annotated[tuple[NonEmpty, ...], Field(min_length=1)],
    BeforeValidator(_fields),
    Expects("a name, or several such as subject,body"),
]


def names_of(field: TextField) -> tuple[str, ...]:
    """Return the names of the fields whose texts are joined, in order."""
    return (field,) if isinstance(field, str) else field


def expected(kind: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Say in words which values a type takes; of `PositiveInt | None`, `a whole number greater than 0, or null`.

    `metadata` is that of a pydantic field, which keeps it apart from its annotation.
    """
    words = _alternatives(kind, metadata)
    return ", ".join(words[:-1]) + (", or " if " " in words[0] else " or ") + words[-1] if words[1:] else words[0]


def _alternatives(kind: Any, metadata: tuple[Any, ...] = ()) -> list[str]:
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        return _alternatives(kind, (*more, *metadata))
    flat = [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
    if own := [item for item in flat if isinstance(item, Expects)]:
        return list(map(str, own[-1:]))
    if get_origin(kind) in (Union, UnionType):
        return [word for member in get_args(kind) for word in _alternatives(member)]
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    if kind in (bool, NoneType):
        return ["true", "false"] if kind is bool else ["null"]
    return [" ".join([_plain(kind), *_limits(flat)])]


def _plain(kind: Any) -> str:
    if get_origin(kind) is tuple:
        item, *others = get_args(kind)
        number = "" if others == [...] else f"of {1 + len(others)} values "
        return f"a list {number}in brackets, each {expected(item)}"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "a section with keys"
    return {int: "a whole number", float: "a number", str: "a text"}.get(kind, "keys with values, such as {seed: 1}")


def _limits(metadata: list[Any]) -> list[str]:
    """Return the limits of a number in words, such as `of at least 0 and less than 1`, or an empty list."""
    if any(isinstance(item, annotated_types.MinLen) for item in metadata):
        return ["that is not empty"]
    words = {"gt": "greater than", "ge": "of at least", "lt": "less than", "le": "at most"}
    limits = [f"{words[name]} {getattr(item, name):,g}" for item in metadata for name in words if hasattr(item, name)]
    return [" and ".join(limits)] if limits else []
