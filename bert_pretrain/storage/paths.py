"""The path of an output: a local path, or a folder of an object store that fsspec reaches by its URL.

`RemotePath` has the methods of `Path` that the stages use; the real differences are in `storage/files.py`. An object is
uploaded whole: there are no locks, no renames and no half-written files. The store must only find what was uploaded.
"""

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from bert_pretrain.errors import ConfigError, OutputError


class Size(NamedTuple):
    """The part of `stat` that a remote file has."""

    st_size: int


@dataclass(frozen=True)
class RemotePath:
    """A file or folder by URL, such as `s3://bucket/data/train`; folders are only prefixes of names."""

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
        with self._opened() as (filesystem, path):
            return bool(filesystem.exists(path))

    def is_file(self) -> bool:
        with self._opened() as (filesystem, path):
            return bool(filesystem.isfile(path))

    def is_dir(self) -> bool:
        with self._opened() as (filesystem, path):
            return bool(filesystem.isdir(path))

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a folder exists as soon as it contains a file."""

    def iterdir(self) -> Iterator["RemotePath"]:
        with self._opened() as (filesystem, path):
            names = [entry.rstrip("/").rsplit("/", 1)[-1] for entry in filesystem.ls(path, detail=False)]
            if names == [self.name] and not filesystem.isdir(path):
                names = []
        yield from (self / name for name in names if name)  # some stores keep an empty object for a folder

    def stat(self) -> Size:
        with self._opened() as (filesystem, path):
            return Size(int(filesystem.info(path)["size"]))

    def open(self, mode: str = "rb") -> io.BufferedReader:
        with self._opened() as (filesystem, path):
            return cast(io.BufferedReader, filesystem.open(path, mode))

    def read_text(self, encoding: str = "utf-8") -> str:
        with self._opened() as (filesystem, path):
            return bytes(filesystem.cat_file(path)).decode(encoding)

    def unlink(self, *, missing_ok: bool = False) -> None:
        with self._opened() as (filesystem, path):
            try:
                filesystem.rm_file(path)
            except FileNotFoundError:
                if not missing_ok:
                    raise

    def put(self, file: Path) -> None:
        """Upload a local file, whole."""
        with self._opened() as (filesystem, path):
            filesystem.put_file(str(file), path)

    def remove_tree(self) -> None:
        """Remove all objects below, if there are any."""
        with self._opened() as (filesystem, path):
            if filesystem.exists(path):
                filesystem.rm(path, recursive=True)

    def move_objects(self, target: str) -> None:
        """Move all objects below to another URL, one after another, manifests first."""
        with self._opened() as (filesystem, path):
            prefix, target = path.rstrip("/"), filesystem._strip_protocol(target).rstrip("/")
            files = [str(file) for file in filesystem.find(path)]
            for file in sorted(files, key=lambda file: (not file.rsplit("/", 1)[-1].startswith("manifest"), file)):
                filesystem.mv(file, target + file.removeprefix(prefix))

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, str]]:
        """Yield the file system and the path in it; all errors but that of a missing file become ours.

        Raises:
            OutputError: when the store cannot be reached or refuses.
        """
        import fsspec

        try:
            # Others write there too, so earlier listings are not used.
            yield fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except FileNotFoundError:
            raise
        except ImportError as error:
            what = f"cannot reach such URLs: {error}"
            raise OutputError(what, where=self.url, remedy="install the package it names") from error
        except Exception as error:  # each file system has errors of its own
            what = f"cannot use that URL: {str(error) or type(error).__name__}"
            remedy = "check the address, and that this machine may read and write there"
            raise OutputError(what, where=self.url, remedy=remedy) from error


AnyPath = Path | RemotePath
PathT = TypeVar("PathT", bound=AnyPath)
"""One of the two, the same throughout a signature."""


def is_url(location: str) -> bool:
    """Whether a location is for fsspec rather than the local file system."""
    return "://" in location


def parse_path(location: str) -> AnyPath:
    """Return the path that a user's path or URL means; `file://` is a local path."""
    if location.startswith("file://"):
        return Path(location.removeprefix("file://"))
    return RemotePath(location.rstrip("/")) if is_url(location) else Path(location)


def parse_local_path(location: str, flag: str, *, remedy: str) -> Path:
    """Return the path that a user's path means, where it must be local.

    Raises:
        ConfigError: for a URL.
    """
    found = parse_path(location)
    if isinstance(found, RemotePath):
        raise ConfigError(f"{location} is a URL, and this must be a local folder", where=flag, remedy=remedy)
    return found


def did_you_mean(folder: AnyPath, patterns: Sequence[str], file: str) -> str | None:
    """Return a remedy that names the folder that was likely meant, None where there is none.

    Args:
        folder: what was given, such as the folder of a whole run.
        patterns: globs of folders inside of it, the likeliest first; the newest match of the first one that has any.
        file: what makes such a folder the right one.
    """
    if not isinstance(folder, Path):
        return None
    for pattern in patterns:
        if found := [each for each in folder.glob(pattern) if (each / file).is_file()]:
            return f"did you mean {max(found, key=lambda each: each.stat().st_mtime)}?"
    return None
