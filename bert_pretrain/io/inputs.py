"""Inputs: any local path or URL opened for reading, and decompressed in bounded memory."""

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
_BUFFER_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 16
_XZ_MEMORY_BYTES = 256 << 20  # `xz -9` needs 65 MiB; the header of a file can ask for gigabytes
# File systems' names for what changes with a file, the best first.
_VERSIONS = ("ETag", "etag", "blob_id", "Content-MD5", "mtime", "LastModified", "Last-Modified", "updated", "modified")


def open_input(location: str) -> BinaryIO:
    """Open a local path or fsspec URL for reading bytes, decompressed as its ending says."""
    try:
        return decompress(open_raw(location), location)
    except OSError as error:
        remedy = "check that it exists and may be read"
        raise InputError(f"cannot open the input: {error}", where=location, remedy=remedy) from error


def open_raw(location: str) -> BinaryIO:
    """Open a local path or fsspec URL for reading its bytes as they are."""
    if not is_url(location):
        return open(location, "rb")
    import fsspec

    with _reaching(location):
        stream = fsspec.open(location, "rb").open()
    return cast(BinaryIO, io.BufferedReader(_RemoteStream(stream), _BUFFER_BYTES))


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each file system has errors of its own
        remedy = "check the address and access"
        if isinstance(error, ImportError):
            remedy = "pip install 'bert-pretrain[http]'" if url.startswith("http") else "install the package it names"
        what = f"cannot reach the URL: {str(error) or type(error).__name__}"
        raise InputError(what, where=url, remedy=remedy) from error


def matching_urls(url: str) -> list[str]:
    """Return the URLs that match a pattern, in order, or the URL itself if it is none."""
    import fsspec

    with _reaching(url):
        filesystem, path = fsspec.core.url_to_fs(url)
        paths = sorted(filesystem.glob(path)) if any(character in url for character in "*?[") else [path]
    if not paths:
        raise InputError("no file matches the URL", where=url, remedy="check the pattern")
    return [filesystem.unstrip_protocol(entry) for entry in paths]


def size_and_version(url: str) -> tuple[int | None, str]:
    """Return the size of a file in bytes if it is known, and what changes with its content, "" if nothing tells it."""
    import fsspec

    with _reaching(url):
        filesystem, path = fsspec.core.url_to_fs(url)
        info = filesystem.info(path)
    return info.get("size"), next((f"{key}:{info[key]}" for key in _VERSIONS if info.get(key)), "")


class _RemoteStream(io.RawIOBase):
    """A stream of fsspec with the interface of `io`, and `OSError` as its only error."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        try:  # the stream of a server that cannot send a part of a file says it is seekable, and is not
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
        except Exception as error:  # each file system has errors of its own
            raise OSError(f"{type(error).__name__}: {error}") from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def decompress(raw: BinaryIO, location: str) -> BinaryIO:
    """Return the content of an open file, decompressed in bounded memory as the ending of its location says."""
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
    """Yield the content; `lzma.LZMAFile` has no limit of memory, and ends at zeros between two streams."""
    packed = raw.read(_BLOCK_BYTES)
    while packed:
        decompressor = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)
        while not decompressor.eof:
            if decompressor.needs_input and not (packed := packed or raw.read(_BLOCK_BYTES)):
                raise EOFError("the compressed file ends too early")
            try:
                yield decompressor.decompress(packed, _BLOCK_BYTES)
            except lzma.LZMAError as error:
                if "Memory usage limit" not in str(error):
                    raise
                what = f"decompressing needs more than {_XZ_MEMORY_BYTES >> 20} MiB of memory"
                remedy = "compress it again with a smaller dictionary, such as that of xz -9"
                raise InputError(what, where=location, remedy=remedy) from error
            packed = b""
        packed = decompressor.unused_data.lstrip(b"\0")  # a further stream, after zeros that fill the first one up
        while not packed and (block := raw.read(_BLOCK_BYTES)):
            packed = block.lstrip(b"\0")


def stream_of(file: BinaryIO, blocks: Iterator[bytes]) -> BinaryIO:
    """Return a stream of the blocks that are made from those of a file, which is closed with it."""
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
