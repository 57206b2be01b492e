"""Open local paths and URLs for reading, and decompress them in bounded memory."""

import bz2
import contextlib
import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from bert_pretrain.errors import InputError
from bert_pretrain.io.files import is_url


def _open_xz(raw: BinaryIO) -> Any:
    file: Any = lzma.LZMAFile(raw)  # noqa: SIM115
    file._buffer.raw._trailing_error = ()  # otherwise damaged data after the first of several streams is ignored
    return file


def _open_zstd(raw: BinaryIO) -> Any:
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), 1 << 16)


_DECOMPRESSORS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": _open_xz,
    ".zst": _open_zstd,
}
COMPRESSIONS = tuple(_DECOMPRESSORS)
# The names that file systems use for a string that changes with the content, the most reliable first.
_VERSIONS = ("ETag", "etag", "blob_id", "Content-MD5", "mtime", "LastModified", "Last-Modified", "updated", "modified")


def open_input(location: str) -> BinaryIO:
    """Open a local path or fsspec URL for reading, decompressed according to its file extension."""
    try:
        return decompress(open_raw(location), location)
    except OSError as error:
        raise InputError(
            f"cannot open the input: {error}",
            where=location,
            remedy="check that it exists and that you may read it",
        ) from error


def open_raw(location: str) -> BinaryIO:
    """Open a local path or fsspec URL for reading, without decompression."""
    if not is_url(location):
        return open(location, "rb")
    import fsspec

    with _url_errors(location):
        stream = fsspec.open(location, "rb").open()
    return cast(BinaryIO, io.BufferedReader(_RemoteStream(stream), 1 << 20))


def decompress(raw: BinaryIO, location: str) -> BinaryIO:
    """Return the decompressed stream of an open file, according to the file extension of its location."""
    for ending, decompressor in _DECOMPRESSORS.items():
        if location.lower().endswith(ending):
            return cast(BinaryIO, decompressor(raw))
    return raw


@contextlib.contextmanager
def _url_errors(url: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # every file system has different error types
        remedy = "check the URL and your access rights"
        if isinstance(error, ImportError):
            remedy = "pip install 'bert-pretrain[http]'" if url.startswith("http") else "install the named package"
        raise InputError(
            f"cannot reach the URL: {str(error) or type(error).__name__}",
            where=url,
            remedy=remedy,
        ) from error


def matching_urls(url: str) -> list[str]:
    """Return the sorted URLs that match a pattern, or the URL itself if it is not a pattern."""
    import fsspec

    with _url_errors(url):
        filesystem, path = fsspec.core.url_to_fs(url)
        paths = [path]
        if any(character in url for character in "*?["):
            paths = sorted(filesystem.glob(path))
    if not paths:
        raise InputError("no file matches the URL", where=url, remedy="check the pattern")
    return [filesystem.unstrip_protocol(entry) for entry in paths]


def size_and_version(url: str) -> tuple[int | None, str]:
    """Return the size of a file in bytes, or None, and a string that changes with its content, or "" without one."""
    import fsspec

    with _url_errors(url):
        filesystem, path = fsspec.core.url_to_fs(url)
        info = filesystem.info(path)
    versions = (f"{name}:{info[name]}" for name in _VERSIONS if info.get(name))
    return info.get("size"), next(versions, "")


class _RemoteStream(io.RawIOBase):
    """Wraps an fsspec stream in the interface of `io`, and raises `OSError` for every error of reading."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        try:  # `stream.seekable()` is true even if the server cannot send a part of a file
            stream.seek(1)
            stream.seek(0)
            self._is_seekable = True
        except (ValueError, OSError):
            self._is_seekable = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._is_seekable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._stream.seek(offset, whence))

    def tell(self) -> int:
        return int(self._stream.tell())

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except Exception as error:  # every file system has different error types
            raise OSError(f"{type(error).__name__}: {error}") from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()
