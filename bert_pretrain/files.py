"""Files: reading any compression from any file system, and writing so that an output appears whole or not at all.

Where the two kinds of places (see `places.py`) differ, they differ here: a local file is written beside its place and
renamed, a remote one is written to a local file and put.
"""

import bz2
import contextlib
import errno
import fcntl
import gzip
import hashlib
import io
import json
import lzma
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from bert_pretrain.errors import DataError, InputError, OutputError
from bert_pretrain.places import Place, RemotePath, is_url

if TYPE_CHECKING:
    import numpy as np

LOCK = ".lock"
CHECKSUMS = "checksums.json"
_REMOTE_BUFFER_BYTES = 1 << 20
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


def open_input(location: str) -> BinaryIO:
    """Open a local path or fsspec URL for reading bytes, decompressed as its ending says.

    Raises:
        InputError: when it cannot be opened.
    """
    try:
        return decompress(open_raw(location), location)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(
            f"cannot open the input: {error}", where=location, remedy="check that it exists and may be read"
        ) from error


def open_raw(location: str) -> BinaryIO:
    """Open a local path or fsspec URL for reading its bytes as they are."""
    if not is_url(location):
        return open(location, "rb")
    import fsspec

    try:
        return cast(BinaryIO, io.BufferedReader(_Remote(fsspec.open(location, "rb").open()), _REMOTE_BUFFER_BYTES))
    except OSError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise OSError(f"{type(error).__name__}: {error}") from error


class _Remote(io.RawIOBase):
    """A file of fsspec as `io` knows files: one kind of error, and sought in only where its server allows that."""

    def __init__(self, file: Any) -> None:
        self._file = file
        try:  # the stream of a server that cannot send a part of a file calls itself seekable, and is not
            file.seek(1)
            file.seek(0)
            self._is_seekable = True
        except (ValueError, OSError):
            self._is_seekable = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._is_seekable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except OSError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise OSError(f"{type(error).__name__}: {error}") from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def decompress(raw: BinaryIO, location: str) -> BinaryIO:
    """Return what an open file holds, decompressed as the ending of its location says."""
    if location.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if location.endswith(".bz2"):
        return cast(BinaryIO, bz2.BZ2File(raw))
    if location.endswith(".xz"):
        return cast(BinaryIO, lzma.LZMAFile(raw))
    if location.endswith(".zst"):
        import pyarrow as pa

        return cast(BinaryIO, io.BufferedReader(_Readable(pa.CompressedInputStream(raw, "zstd"))))
    return raw


class _Readable(io.RawIOBase):
    """Give pyarrow's decompressing stream the interface that `io.BufferedReader` needs."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


@contextlib.contextmanager
def atomic_path(path: Place) -> Iterator[Path]:
    """Yield a temporary local path; on success its content appears at `path` whole, otherwise nothing does."""
    if isinstance(path, RemotePath):
        with tempfile.TemporaryDirectory(prefix="bert-pretrain-") as folder:
            yield Path(folder) / path.name
            path.put(Path(folder) / path.name)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_beside(path)
    try:
        yield temporary
        _flush_to_disk(temporary)
        os.replace(temporary, path)
        _flush_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it is flushed and takes the place of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_beside(path)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            _flush_to_disk(file)
        _replace_folder(temporary, path)
        _flush_to_disk(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary_beside(path: Path) -> Path:
    # Process numbers repeat from machine to machine, and two may write the same file of a cluster's output.
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def _replace_folder(new: Path, path: Path) -> None:
    for attempts_left in reversed(range(5)):
        shutil.rmtree(path, ignore_errors=True)
        try:
            os.replace(new, path)
            return
        except OSError as error:
            # Another machine may have put the same folder there in between.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not attempts_left:
                raise


def is_bookkeeping(path: Place) -> bool:
    """Whether a file or folder is a lock of ours, or left by a killed writer."""
    return path.name == LOCK or (path.name.startswith(".") and path.name.endswith(".tmp"))


def remove_temporaries(folder: Place) -> None:
    """Remove what killed writers of `atomic_path` and `atomic_folder` left in `folder`; a put leaves nothing."""
    if isinstance(folder, RemotePath):
        return
    for leftover in folder.glob(".*.tmp"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def remove_tree(folder: Place) -> None:
    """Remove a folder and all that is in it, if it is there."""
    if isinstance(folder, RemotePath):
        folder.remove_tree()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def save_array(path: Path, values: "np.ndarray") -> None:
    """Write an `.npy` file atomically."""
    import numpy as np

    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.save(file, values)


def write_text(path: Place, text: str) -> None:
    """Write a text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Place, value: object) -> None:
    """Write a JSON file atomically, readable by people."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Place) -> Any:
    """Read a JSON file of ours.

    Raises:
        DataError: when it is missing or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path.name}: {error}",
            where=str(path),
            remedy="give a folder that a finished stage has written",
        ) from error


def sha256_file(path: Place) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal_folder(folder: Path) -> None:
    """Write down the size and SHA-256 of every file in a folder, so that damage can be found later."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    sums = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in files}
    write_json(folder / CHECKSUMS, sums)


def damage_of_folder(folder: Path) -> str | None:
    """Return what has happened to a sealed folder, reading all of it; None if it is as it was sealed."""
    try:
        for name, sums in read_json(folder / CHECKSUMS).items():
            size = (folder / name).stat().st_size
            if size != sums["bytes"]:
                return f"{name} has {size:,} bytes instead of {sums['bytes']:,}"
            if sha256_file(folder / name) != sums["sha256"]:
                return f"the SHA-256 of {name} is not what it was"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (DataError, OSError, AttributeError, TypeError, KeyError) as error:
        return str(error).partition("\n")[0]
    return None


def move_aside(folder: Place) -> Place:
    """Move what a folder holds to a new folder beside it and return that; the folder itself keeps its lock.

    Manifests go first, so that what is left after an interruption is not taken for a finished output.
    """
    if isinstance(folder, RemotePath):
        return folder.move_aside()
    folder = folder.resolve()  # `.` has no name of its own
    stem = f"{folder.name}.old-{time.strftime('%Y%m%d-%H%M%S')}"
    aside = folder.with_name(stem)
    number = 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{stem}-{number}")
    aside.mkdir()
    for path in sorted(folder.iterdir(), key=lambda path: (not path.name.startswith("manifest"), path.name)):
        if path.name != LOCK:
            path.rename(aside / path.name)
    return aside


@contextlib.contextmanager
def exclusive(folder: Place) -> Iterator[None]:
    """Hold a folder against a second process of ours; the lock dies with the process, whatever kills it.

    An object store has no locks. There, two equal commands write equal objects, and another is refused by its manifest.
    """
    if isinstance(folder, RemotePath):
        yield
        return
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"'{folder}' is a file", where="--output", remedy="name a folder")
    lock = folder / LOCK
    busy = OutputError("another process is writing this folder", where=str(folder), remedy="wait for it, or stop it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OutputError(
            f"cannot write there: {error.strerror}", where=str(folder), remedy="name a folder that you may write to"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_current = os.fstat(file.fileno()).st_ino == lock.stat().st_ino
        except (BlockingIOError, FileNotFoundError) as error:
            raise busy from error
        if not is_current:  # the process before removed its lock between our opening and locking it
            raise busy
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
