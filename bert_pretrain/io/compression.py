"""Compressed files as streams of `io`: gzip, bzip2, xz and zstd, in bounded memory."""

import bz2
import gzip
import io
import lzma
from collections.abc import Iterator
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
        return cast(BinaryIO, io.BufferedReader(BlockStream(raw, _unpack_xz(raw, location)), _XZ_BLOCK_BYTES))
    if location.endswith(".zst"):
        import pyarrow as pa

        return cast(BinaryIO, io.BufferedReader(Stream(pa.CompressedInputStream(raw, "zstd"), is_seekable=False)))
    return raw


def _unpack_xz(raw: BinaryIO, location: str) -> Iterator[bytes]:
    """Yield the content of an `.xz` file in bounded memory; `lzma.LZMAFile` takes no limit."""
    packed = raw.read(_XZ_BLOCK_BYTES)
    while packed:
        decompressor = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)
        while not decompressor.eof:
            if decompressor.needs_input and not (packed := packed or raw.read(_XZ_BLOCK_BYTES)):
                raise EOFError("the compressed file ends too early")
            try:
                yield decompressor.decompress(packed, _XZ_BLOCK_BYTES)
            except lzma.LZMAError as error:
                if "Memory usage limit" not in str(error):
                    raise
                what = f"decompressing needs more than {_XZ_MEMORY_BYTES >> 20} MiB of memory"
                remedy = "compress it again with a smaller dictionary, such as that of xz -9"
                raise InputError(what, where=location, remedy=remedy) from error
            packed = b""
        packed = decompressor.unused_data.lstrip(b"\0")  # a further stream, after zeros that fill the first one up
        while not packed and (block := raw.read(_XZ_BLOCK_BYTES)):
            packed = block.lstrip(b"\0")


class BlockStream(io.RawIOBase):
    """A stream of the blocks that are made from those of a file."""

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
