"""Files of vectors, written block by block and whole or not at all: Parquet, `.npy` or JSONL by the file's ending.

A plain stream of writes, not a memory map: on a full disk the one is a message, the other a crash.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bert_pretrain.errors import ConfigError
from bert_pretrain.files import atomic_path
from bert_pretrain.ragged import offsets_of
from bert_pretrain.tools.texts import Text


@dataclass(frozen=True)
class Block:
    """The features of some consecutive texts."""

    texts: list[Text]
    vectors: np.ndarray  # (texts, size) float32; with tokens (tokens of all texts, size)
    tokens: list[list[str]] | None = None
    """Of each text, where every token has a vector."""


@dataclass(frozen=True)
class Shape:
    """What a file of vectors will hold."""

    num_texts: int
    size: int
    has_tokens: bool


def check_output(output: Path, *, has_tokens: bool) -> None:
    """Refuse a file name whose ending says no format, or one that cannot hold such vectors.

    Raises:
        ConfigError: naming the formats there are.
    """
    if output.suffix not in _WRITERS:
        raise ConfigError(
            f"the ending of '{output.name}' is no format for vectors",
            where="--output",
            remedy=f"end it in one of {', '.join(_WRITERS)}",
        )
    if has_tokens and output.suffix == ".npy":
        raise ConfigError(
            "an .npy file is one matrix, and texts have unequal numbers of tokens",
            where="--output",
            remedy="write token features to .parquet or .jsonl",
        )


def write_vectors(output: Path, blocks: Iterable[Block], shape: Shape) -> None:
    """Write all blocks to a file whose name `check_output` has passed; one that is there is replaced at the end."""
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


def _write_jsonl(path: Path, blocks: Iterable[Block], shape: Shape) -> None:
    with path.open("w", encoding="utf-8") as file:
        for block in blocks:
            written = (_written(vector) for vector in block.vectors)
            for index, text in enumerate(block.texts):
                record = {"source": text.location, "row": text.row, "text": text.text}
                if block.tokens is None:
                    features = f'"embedding": {next(written)}'
                else:
                    record["tokens"] = block.tokens[index]
                    features = f'"embeddings": [{", ".join(next(written) for _ in block.tokens[index])}]'
                file.write(f"{json.dumps(record, ensure_ascii=False)[:-1]}, {features}}}\n")


def _written(vector: np.ndarray) -> str:
    """Return a vector as JSON, in as many digits as bring back each float32."""
    return "[" + ", ".join(["%.9g" % value for value in vector.tolist()]) + "]"  # noqa: UP031, far faster than format


_WRITERS: dict[str, Callable[[Path, Iterable[Block], Shape], None]] = {
    ".parquet": _write_parquet,
    ".npy": _write_npy,
    ".jsonl": _write_jsonl,
}
