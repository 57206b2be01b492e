"""Datasets of the library `datasets`: folders of `save_to_disk`, and names `dataset:NAME[:config][@split]`.

Training reads the split `train` and holds out `validation`; other splits are read only if they are named.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bert_pretrain.errors import InputError
from bert_pretrain.io.files import json_digest, read_json

DATASET = "dataset:"
TRAIN, VALIDATION = "train", ("validation", "valid", "val", "dev")
T = TypeVar("T")
_NAME = re.compile(r"(.+?)(?::([^:/@]+))?(?:@([^/@]+))?")


class _Name(NamedTuple):
    """The parts of a location. A missing part is an empty string."""

    name: str  # a local folder or a name on the hub
    config: str = ""
    split: str = ""

    @property
    def is_saved(self) -> bool:
        """Whether the name is a folder of `save_to_disk`."""
        return any(Path(self.name, file).is_file() for file in ("dataset_info.json", "dataset_dict.json"))

    @property
    def saved_splits(self) -> list[str]:
        """The names of the splits of a saved `DatasetDict`. Empty for a saved `Dataset`."""
        file = Path(self.name, "dataset_dict.json")
        return [str(name) for name in read_json(file)["splits"]] if file.is_file() else []


def _parse(location: str) -> _Name:
    location = location.removeprefix(DATASET)
    match = _NAME.fullmatch(location)
    if os.path.isdir(location) or match is None:  # the name of a folder may contain ":" or "@"
        return _Name(location)
    return _Name(*match.groups(default=""))


def absolute(location: str) -> str:
    """Make the path in a location absolute if it is a local folder."""
    name = _parse(location).name
    return location.replace(name, os.path.abspath(name), 1) if os.path.isdir(name) else location


def is_dataset(location: str) -> bool:
    """Return whether an input is a `dataset:` name or a folder of `save_to_disk`, with or without `@split`."""
    return location.startswith(DATASET) or _parse(location).is_saved


def version_of(location: str) -> str:
    """Return a hash of the names, sizes and modification times of a local dataset's files, or "" for a hub name."""
    folder = Path(_parse(location).name)
    if not folder.is_dir():
        return ""
    content = []
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            status = file.stat()
            content.append((str(file.relative_to(folder)), status.st_size, status.st_mtime_ns))
    return "files:" + json_digest(content)[:16]


def split_names(location: str) -> list[str]:
    """Return the names of a dataset's splits. Empty if the location has a split, or a saved dataset has only one."""
    import datasets

    parsed = _parse(location)
    if parsed.split:
        return []
    if parsed.is_saved:
        names = parsed.saved_splits
        return names if len(names) > 1 else []
    return _call(lambda: list(datasets.get_dataset_split_names(parsed.name, parsed.config or None)), location)


def _no_split(split: str, location: str, names: Sequence[str]) -> InputError:
    return InputError(
        f"the dataset has no split '{split}'",
        where=location,
        remedy=f"choose one: {choices(location, names)}" if names else "name the folder without a split",
    )


def choices(location: str, names: Sequence[str]) -> str:
    """Format the first splits of a dataset as input names."""
    name = DATASET + location.removeprefix(DATASET).removesuffix(f"@{_parse(location).split}")
    return " or ".join(f"{name}@{split}" for split in names[:4])


def held_out_split(location: str, names: Sequence[str], *, holds_out: bool) -> str | None:
    """Return the split to hold out for validation, or None, and print the use of each split."""
    if TRAIN not in names:
        raise _no_split(TRAIN, location, names)
    held_out = next((name for name in VALIDATION if holds_out and name in names), None)
    uses = {TRAIN: "trained on", held_out: "held out"}
    print(f"{location}: " + ", ".join(f"{name!r} is {uses.get(name, 'not read')}" for name in names))
    return held_out


def open_dataset(location: str) -> dict[str, Any]:
    """Return the splits of a dataset by name. The key is "" if the location has a split, or the only split has no name.

    The first call downloads and builds a dataset of the hub.
    """
    import datasets

    parsed = _parse(location)
    name, config, split = parsed
    if not parsed.is_saved:
        data = _call(lambda: datasets.load_dataset(name, config or None, split=split or None), location)
        return dict(data) if isinstance(data, dict) else {"": data}
    # Each split is opened separately because `datasets` fails on a split without rows.
    names = parsed.saved_splits
    if split and split not in names:
        raise _no_split(split, location, names)
    keys = names if names and not split else [""]
    folders = {key: str(Path(name, key or split)) for key in keys}
    remedy = "write it again: splits without rows cannot be read, and a file may be damaged"
    return _call(lambda: {key: datasets.load_from_disk(path) for key, path in folders.items()}, location, remedy)


@lru_cache(maxsize=1)
def cached_dataset(location: str, _version: str) -> Any:
    """Return the only split of `open_dataset(location)`. A process opens it once for all parts that it reads."""
    (rows,) = open_dataset(location).values()
    return rows


def rows_of(rows: Iterable[dict[str, Any]], location: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a split. Raise InputError for a row that cannot be read."""
    iterator = iter(rows)
    while (row := _call(lambda: next(iterator, None), location, "fix the file, or get it again")) is not None:
        yield row


def _call(function: Callable[[], T], location: str, remedy: str = "check the name") -> T:
    try:
        return function()
    except Exception as error:  # `datasets` passes on the errors of all its readers
        raise InputError(f"datasets cannot read it: {error}", where=location, remedy=remedy) from error
