"""Compressed files as streams of `io`: gzip, bzip2, xz and zstd, in bounded memory."""

import bz2
import gzip
import io
import lzma
from typing import Any, BinaryIO, cast

from bert_pretrain.errors import InputError

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_XZ_BLOCK_BYTES = 1 << 16
_XZ_MEMORY_BYTES = 256 << 20  # `xz -9` needs 65 MiB; the header of a file can ask for gigabytes


def decompress(raw: BinaryIO, location: str) -> BinaryIO:
    """Return the content of an open file, decompressed as the ending of its location says."""
    if location.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if location.endswith(".bz2"):
        return cast(BinaryIO, bz2.BZ2File(raw))
    if location.endswith(".xz"):
        return cast(BinaryIO, io.BufferedReader(_XzReader(raw, location), _XZ_BLOCK_BYTES))
    if location.endswith(".zst"):
        import pyarrow as pa

        return cast(BinaryIO, io.BufferedReader(Stream(pa.CompressedInputStream(raw, "zstd"), is_seekable=False)))
    return raw


class _XzReader(io.RawIOBase):
    """The content of an `.xz` file, in bounded memory: `lzma.LZMAFile` takes no limit."""

    def __init__(self, raw: BinaryIO, location: str) -> None:
        self._raw = raw
        self._location = location
        self._decompressor = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        packed = b""
        while True:
            if self._decompressor.eof:
                packed = self._next_stream()
                if not packed:
                    return 0
            elif self._decompressor.needs_input:
                packed = self._raw.read(_XZ_BLOCK_BYTES)
                if not packed:
                    raise EOFError("the compressed file ends too early")
            if data := self._decompress(packed, len(buffer)):
                buffer[: len(data)] = data
                return len(data)
            packed = b""

    def _next_stream(self) -> bytes:
        """Return the beginning of the stream after the one that has ended, and zeros that fill it up; b"" if none."""
        packed = self._decompressor.unused_data.lstrip(b"\0")
        while not packed and (block := self._raw.read(_XZ_BLOCK_BYTES)):
            packed = block.lstrip(b"\0")
        if packed:
            self._decompressor = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)
        return packed

    def _decompress(self, packed: bytes, max_bytes: int) -> bytes:
        try:
            return self._decompressor.decompress(packed, max_bytes)
        except lzma.LZMAError as error:
            if "Memory usage limit" not in str(error):
                raise
            raise InputError(
                f"decompressing needs more than {_XZ_MEMORY_BYTES >> 20} MiB of memory",
                where=self._location,
                remedy="compress it again with a smaller dictionary, such as that of xz -9",
            ) from error

    def close(self) -> None:
        self._raw.close()
        super().close()


class Stream(io.RawIOBase):
    """A stream of fsspec or pyarrow with the interface of `io`, and `OSError` as its only error."""

    def __init__(self, stream: Any, *, is_seekable: bool) -> None:
        self._stream = stream
        self._is_seekable = is_seekable

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
        except OSError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise OSError(f"{type(error).__name__}: {error}") from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()
