"""Where an output lies: a path of this machine, or a folder of an object store that fsspec reaches by its URL.

`RemotePath` answers to those names of `Path` that the stages use, so they need not ask which of the two they write to;
what differs by nature is in `files.py`. An object is put whole; there is no lock, no rename and nothing half-written.
Nothing is asked of a store but that what was put is there, and is found.
"""

import contextlib
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from bert_pretrain.errors import ConfigError, OutputError

_REACHING = "check the address, and that this machine may read and write there"


@dataclass(frozen=True)
class Size:
    """What is asked of a remote file's `stat`."""

    st_size: int


@dataclass(frozen=True)
class RemotePath:
    """A file or folder by URL, such as `s3://bucket/data/train`; folders are but the beginnings of names."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.url.rstrip("/").rsplit("/", 1)[-1]

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.url.rstrip("/").rsplit("/", 1)[0])

    def with_name(self, name: str) -> "RemotePath":
        return self.parent / name

    def absolute(self) -> "RemotePath":
        return self

    def resolve(self) -> "RemotePath":
        return self

    def exists(self) -> bool:
        with self._reached() as (filesystem, path):
            return bool(filesystem.exists(path))

    def is_file(self) -> bool:
        with self._reached() as (filesystem, path):
            return bool(filesystem.isfile(path))

    def is_dir(self) -> bool:
        with self._reached() as (filesystem, path):
            return bool(filesystem.isdir(path))

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a folder is there as soon as a file in it is."""

    def iterdir(self) -> Iterator["RemotePath"]:
        with self._reached() as (filesystem, path):
            names = [entry.rstrip("/").rsplit("/", 1)[-1] for entry in filesystem.ls(path, detail=False)]
            if names == [self.name] and not filesystem.isdir(path):
                names = []
        yield from (self / name for name in names if name)  # some stores keep an empty object for a folder

    def stat(self) -> Size:
        with self._reached() as (filesystem, path):
            return Size(int(filesystem.info(path)["size"]))

    def open(self, mode: str = "rb") -> io.BufferedReader:
        with self._reached() as (filesystem, path):
            return cast(io.BufferedReader, filesystem.open(path, mode))

    def read_text(self, encoding: str = "utf-8") -> str:
        with self._reached() as (filesystem, path):
            return bytes(filesystem.cat_file(path)).decode(encoding)

    def unlink(self, *, missing_ok: bool = False) -> None:
        with self._reached() as (filesystem, path):
            try:
                filesystem.rm_file(path)
            except FileNotFoundError:
                if not missing_ok:
                    raise

    def put(self, file: Path) -> None:
        """Make this the content of a local file, whole."""
        with self._reached() as (filesystem, path):
            filesystem.put_file(str(file), path)

    def remove_tree(self) -> None:
        """Remove everything below, if there is anything."""
        with self._reached() as (filesystem, path):
            if filesystem.exists(path):
                filesystem.rm(path, recursive=True)

    def move_aside(self) -> "RemotePath":
        """Move everything below to a new folder beside this one and return that, one object after another."""
        aside = self.with_name(f"{self.name}.old-{time.strftime('%Y%m%d-%H%M%S')}")
        number, stem = 1, aside.name
        while aside.exists():
            number += 1
            aside = self.with_name(f"{stem}-{number}")
        with self._reached() as (filesystem, path):
            target = aside._path()
            files = [str(file) for file in filesystem.find(path)]
            for file in sorted(files, key=lambda file: (not file.rsplit("/", 1)[-1].startswith("manifest"), file)):
                filesystem.mv(file, target + file.removeprefix(path.rstrip("/")))
        return aside

    def _path(self) -> str:
        with self._reached() as (_, path):
            return path.rstrip("/")

    @contextlib.contextmanager
    def _reached(self) -> Iterator[tuple[Any, str]]:
        """Yield the file system and the path in it; that a file is not there stays what it is, all else is told.

        Raises:
            OutputError: when the store cannot be reached or refuses.
        """
        import fsspec

        try:
            # Others write there too, so nothing that was listed before is believed.
            filesystem, path = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
            yield filesystem, path
        except FileNotFoundError:
            raise
        except ImportError as error:
            raise OutputError(
                f"cannot reach such URLs: {error}", where=self.url, remedy="install the package it names"
            ) from error
        except Exception as error:  # each file system has errors of its own
            what = f"cannot use that URL: {str(error) or type(error).__name__}"
            raise OutputError(what, where=self.url, remedy=_REACHING) from error


Place = Path | RemotePath
AnyPlace = TypeVar("AnyPlace", bound=Place)
"""One of the two, the same throughout a signature."""


def is_url(location: str) -> bool:
    """Whether a location is for fsspec rather than the local file system."""
    return "://" in location


def place(location: str) -> Place:
    """Return what a person means by a path or URL; `file://` is a path like any other."""
    if location.startswith("file://"):
        return Path(location.removeprefix("file://"))
    return RemotePath(location.rstrip("/")) if is_url(location) else Path(location)


def local_place(location: str, flag: str, *, remedy: str) -> Path:
    """Return the path that a person means where only a folder of this machine will do.

    Raises:
        ConfigError: for a URL.
    """
    found = place(location)
    if isinstance(found, RemotePath):
        raise ConfigError(f"{location} is a URL, and this must be a local folder", where=flag, remedy=remedy)
    return found
