"""Open local paths and URLs for reading, and decompress them in bounded memory."""

import bz2
import contextlib
import gzip
import io
import lzma
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from bert_pretrain.errors import InputError
from bert_pretrain.io.files import is_url

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_BLOCK_BYTES = 1 << 16
_MAX_XZ_MEMORY_BYTES = 256 << 20  # `xz -9` needs 65 MiB, but the header of a file can ask for gigabytes


def open_input(location: str) -> BinaryIO:
    """Open a local path or fsspec URL for reading, decompressed according to its file extension."""
    try:
        return decompress(open_raw(location), location)
    except OSError as error:
        remedy = "check that it exists and that you may read it"
        raise InputError(f"cannot open the input: {error}", where=location, remedy=remedy) from error


def open_raw(location: str) -> BinaryIO:
    """Open a local path or fsspec URL for reading, without decompression."""
    if not is_url(location):
        return open(location, "rb")
    import fsspec

    with _url_errors(location):
        stream = fsspec.open(location, "rb").open()
    return cast(BinaryIO, io.BufferedReader(_RemoteStream(stream), 1 << 20))


@contextlib.contextmanager
def _url_errors(url: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # every file system has different error types
        remedy = "check the URL and your access rights"
        if isinstance(error, ImportError):
            remedy = "pip install 'bert-pretrain[http]'" if url.startswith("http") else "install the named package"
        what = f"cannot reach the URL: {str(error) or type(error).__name__}"
        raise InputError(what, where=url, remedy=remedy) from error


def matching_urls(url: str) -> list[str]:
    """Return the sorted URLs that match a pattern, or the URL itself if it is not a pattern."""
    import fsspec

    with _url_errors(url):
        filesystem, path = fsspec.core.url_to_fs(url)
        paths = sorted(filesystem.glob(path)) if any(character in url for character in "*?[") else [path]
    if not paths:
        raise InputError("no file matches the URL", where=url, remedy="check the pattern")
    return [filesystem.unstrip_protocol(entry) for entry in paths]


def size_and_version(url: str) -> tuple[int | None, str]:
    """Return the size of a file in bytes, or None, and a string that changes with its content, or "" without one."""
    import fsspec

    with _url_errors(url):
        filesystem, path = fsspec.core.url_to_fs(url)
        info = filesystem.info(path)
    # The names that file systems use for such a string, the most reliable first.
    names = ("ETag", "etag", "blob_id", "Content-MD5", "mtime", "LastModified", "Last-Modified", "updated", "modified")
    return info.get("size"), next((f"{name}:{info[name]}" for name in names if info.get(name)), "")


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


def decompress(raw: BinaryIO, location: str) -> BinaryIO:
    """Return the decompressed stream of an open file, according to the file extension of its location."""
    if location.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if location.endswith(".bz2"):
        return cast(BinaryIO, bz2.BZ2File(raw))
    if location.endswith(".xz"):
        return stream_of(raw, _unpack_xz(raw, location))
    if location.endswith(".zst"):
        import pyarrow as pa

        return cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), _BLOCK_BYTES))
    return raw


def _unpack_xz(raw: BinaryIO, location: str) -> Iterator[bytes]:
    """Yield the content in blocks. `lzma.LZMAFile` has no memory limit and stops at zeros between two streams."""
    packed = raw.read(_BLOCK_BYTES)
    while packed:
        decompressor = lzma.LZMADecompressor(memlimit=_MAX_XZ_MEMORY_BYTES)
        while not decompressor.eof:
            if decompressor.needs_input and not (packed := packed or raw.read(_BLOCK_BYTES)):
                raise EOFError("the compressed file ends too early")
            try:
                yield decompressor.decompress(packed, _BLOCK_BYTES)
            except lzma.LZMAError as error:
                if "Memory usage limit" not in str(error):
                    raise
                what = f"decompression needs more than {_MAX_XZ_MEMORY_BYTES >> 20} MiB of memory"
                remedy = "compress it again with a smaller dictionary, for example with xz -9"
                raise InputError(what, where=location, remedy=remedy) from error
            packed = b""
        packed = decompressor.unused_data.lstrip(b"\0")  # another stream may follow, after zero padding
        while not packed and (block := raw.read(_BLOCK_BYTES)):
            packed = block.lstrip(b"\0")


def stream_of(file: BinaryIO, blocks: Iterator[bytes]) -> BinaryIO:
    """Return a stream over blocks of bytes that are read from `file`. Closing the stream closes the file."""
    return cast(BinaryIO, io.BufferedReader(_BlockStream(file, blocks), _BLOCK_BYTES))


class _BlockStream(io.RawIOBase):
    def __init__(self, file: BinaryIO, blocks: Iterator[bytes]) -> None:
        self._file, self._blocks = file, blocks
        self._ready = io.BytesIO()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not (num_bytes := self._ready.readinto(buffer)):
            block = next(self._blocks, None)
            if block is None:
                break
            self._ready = io.BytesIO(block)
        return num_bytes

    def close(self) -> None:
        self._file.close()
        super().close()
