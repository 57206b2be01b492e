"""Files of vectors, Parquet or `.npy` by the file's ending, written block by block, whole or not at all.

Written as a stream, not through a memory map: on a full disk the first is an error message, the second a crash.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bert_pretrain.errors import ConfigError
from bert_pretrain.io.files import atomic_path
from bert_pretrain.text.ragged import offsets_of
from bert_pretrain.tools.texts import Text


@dataclass(frozen=True)
class Block:
    """The vectors of some consecutive texts."""

    texts: list[Text]
    vectors: np.ndarray  # (texts, size) float32, or with tokens (tokens of all texts, size)
    tokens: list[list[str]] | None = None
    """Of each text, if every token has a vector."""


@dataclass(frozen=True)
class Shape:
    """What a file of vectors will hold."""

    num_texts: int
    size: int
    has_tokens: bool


def check_output(output: Path, *, has_tokens: bool) -> None:
    """Refuse a file name with an unknown ending, or one of a format that cannot hold such vectors."""
    if output.suffix not in _WRITERS:
        raise ConfigError(
            f"the ending of '{output.name}' is not a format for vectors",
            where="--output",
            remedy=f"end it in one of {', '.join(_WRITERS)}",
        )
    if has_tokens and output.suffix == ".npy":
        raise ConfigError(
            "an .npy file is one matrix, and texts have different numbers of tokens",
            where="--output",
            remedy="write token vectors to .parquet",
        )


def write_vectors(output: Path, blocks: Iterable[Block], shape: Shape) -> None:
    """Write all blocks to a file whose name `check_output` accepts; an existing file is replaced at the end."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(output) as temporary:
        _WRITERS[output.suffix](temporary, blocks, shape)


def _write_parquet(path: Path, blocks: Iterable[Block], shape: Shape) -> None:
    vector = pa.list_(pa.float32(), shape.size)
    columns = {"source": pa.string(), "row": pa.int64(), "text": pa.string()}
    features = {"tokens": pa.list_(pa.string()), "embeddings": pa.list_(vector)}
    schema = pa.schema({**columns, **(features if shape.has_tokens else {"embedding": vector})})
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=["source"]) as writer:
        for block in blocks:
            vectors = pa.FixedSizeListArray.from_arrays(pa.array(block.vectors.reshape(-1)), type=vector)
            texts = [
                pa.array([text.location for text in block.texts]),
                pa.array([text.row for text in block.texts]),
                pa.array([text.text for text in block.texts]),
            ]
            if block.tokens is None:
                arrays = [*texts, vectors]
            else:
                offsets = offsets_of(np.array([len(tokens) for tokens in block.tokens])).astype(np.int32)
                arrays = [*texts, pa.array(block.tokens), pa.ListArray.from_arrays(pa.array(offsets), vectors)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _write_npy(path: Path, blocks: Iterable[Block], shape: Shape) -> None:
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (shape.num_texts, shape.size)}
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block.vectors, dtype="<f4").data)


_WRITERS: dict[str, Callable[[Path, Iterable[Block], Shape], None]] = {".parquet": _write_parquet, ".npy": _write_npy}
