"""`embed`: one vector per text or per token, in the order of the input.

Texts are read in groups of bounded size and sorted by length within a group. Vectors are always written in fp32. With
fp32 matrix products they equal those of `transformers` up to rounding.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from bert_pretrain.config import Config, ModelConfig
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.examples import Examples
from bert_pretrain.io.files import atomic_path
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.model.bert import BertForPreTraining, Packed
from bert_pretrain.model.hub import MODULES
from bert_pretrain.model.sequences import mean_of_sequences, open_bert
from bert_pretrain.tools.texts import Text, TextEncoder, Texts, check_output_file

POOLINGS = {  # by level; the first is the default
    "sentence": ("mean", "cls", "pooler", "last4-mean", "last4-concat"),
    "token": ("last", "last4-mean", "last4-concat"),
}
NUM_LAST_LAYERS = 4  # their concatenation was best in section 5.3, table 7 of Devlin et al. (2018)
BLOCK_BYTES = 128 << 20  # approximate size of the vectors in memory before they are written

# Consecutive texts, their sequences, and their vectors: (texts, size) or (tokens of all texts, size) float32.
Block = tuple[list[Text], Examples, np.ndarray]


def embed(
    model: Path,
    inputs: Sequence[str],
    output: Path,
    *,
    config: Config,
    level: str = "sentence",
    pooling: str | None = None,
    max_length: int | None = None,
    batch_tokens: int | None = None,
    skip_empty: bool = False,
) -> None:
    """Write the vectors of all texts of the inputs to a file.

    Args:
        output: ends in `.parquet`, or in `.npy` for sentences.
        level: "sentence" for vectors of texts, or "token".
        pooling: one of the level's `POOLINGS`; None: the first.
        max_length: as in `length_limit`.
        batch_tokens: maximum tokens per batch; None: chosen for the device.
    """
    pooling = _check_options(model, output, level, pooling)
    bert = open_bert(model, config.train, ("pooler",) if pooling == "pooler" else (), max_length=max_length)
    size = _vector_size(bert.network.config, pooling)
    texts = Texts(inputs, config.data, bert.tokenizer, skip_empty=skip_empty)
    check_output_file(output, texts.locations)
    print(f"features   {texts.num_texts:,} texts, {size} numbers per {level}, pooling {pooling}")
    encoder = TextEncoder(bert)
    head = _head_of(bert.network, level, pooling)

    def blocks() -> Iterator[Block]:
        for group, sequences in encoder.groups(texts):
            # Sentence vectors of a group fit in memory, but token vectors of many long texts may not.
            num_vectors = int(sequences.lengths.max()) if level == "token" else 1
            num_texts = max(1, BLOCK_BYTES // (4 * size * num_vectors))  # in a block
            for begin in range(0, len(group), num_texts):
                part = group[begin : begin + num_texts]
                block = sequences.take(np.arange(begin, begin + len(part)))
                num_outputs = block.lengths if level == "token" else np.ones_like(block.lengths)
                vectors = bert.run(block, head, num_outputs, lambda rows: bar.update(len(rows)), batch_tokens)
                yield part, block, vectors

    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        progress_bar(total=texts.num_texts, unit=" texts", unit_scale=True, desc="embed") as bar,
        atomic_path(output) as temporary,
    ):
        if output.suffix == ".npy":
            _write_npy(temporary, blocks(), (texts.num_texts, size))
        else:
            _write_parquet(temporary, blocks(), bert.tokenizer.tokens if level == "token" else None)
    encoder.report()
    print(f"written    {output}: {texts.num_texts:,} texts, {encoder.num_tokens:,} tokens")


def _check_options(
    model: Path,
    output: Path,
    level: str,
    pooling: str | None,
) -> str:
    """Return the pooling. Raise ConfigError if it, the level or the format of the output is not supported."""
    if level not in POOLINGS:
        raise ConfigError(f"unknown level '{level}'", where="--level", remedy=f"choose {' or '.join(POOLINGS)}")
    if output.suffix not in (".parquet", ".npy") or (output.suffix == ".npy" and level == "token"):
        raise ConfigError(
            f"the extension of '{output.name}' is not a format for {level} vectors",
            where="--output",
            remedy="use .parquet, or .npy for sentences",
        )
    if pooling is None and level == "sentence" and (model / MODULES).is_file():
        raise ConfigError(
            "a sentence-transformers model defines its own pooling, normalization and maximum length",
            where="MODEL",
            remedy="use that library, or ignore these and choose a pooling, for example --pooling mean",
        )
    pooling = pooling or POOLINGS[level][0]
    if pooling not in POOLINGS[level]:
        raise ConfigError(
            f"'{pooling}' is not a pooling of a {level}",
            where="--pooling",
            remedy=f"choose {', '.join(POOLINGS[level])}",
        )
    return pooling


def _vector_size(model: ModelConfig, pooling: str) -> int:
    """Return the numbers of a vector. Raise ConfigError if the model lacks what the pooling needs."""
    if pooling == "pooler" and not model.has_pair_heads:
        raise ConfigError(
            f"a model of the type {model.architecture} has no pooler",
            where="--pooling",
            remedy="choose another, such as mean",
        )
    if not pooling.startswith("last4"):
        return model.hidden_size
    if model.num_hidden_layers < NUM_LAST_LAYERS:
        raise ConfigError(
            f"{pooling} needs {NUM_LAST_LAYERS} layers, the model has {model.num_hidden_layers}",
            where="--pooling",
            remedy="choose another, such as mean",
        )
    return model.hidden_size * (NUM_LAST_LAYERS if pooling == "last4-concat" else 1)


def _head_of(network: BertForPreTraining, level: str, pooling: str) -> Callable[[Packed, Examples], Tensor]:
    """Return a function that computes the vectors of a batch, (sequences, size) or (tokens, size)."""
    num_last = NUM_LAST_LAYERS if pooling.startswith("last4") else 1

    def head(packed: Packed, _: Examples) -> Tensor:
        hidden = network.encode(packed, num_last=num_last)  # (tokens, num_last * hidden)
        if pooling == "last4-mean":
            hidden = torch.stack(hidden.chunk(NUM_LAST_LAYERS, dim=1)).float().mean(dim=0)  # (tokens, hidden)
        if level == "token":
            return hidden
        if pooling == "cls":
            return hidden.index_select(0, packed.cu_seqlens[:-1])
        if pooling == "pooler" and network.pooler is not None:
            return network.pooler(hidden, packed.cu_seqlens)
        return mean_of_sequences(hidden, packed.cu_seqlens)

    return head


def _write_parquet(path: Path, blocks: Iterable[Block], tokens: Sequence[str] | None) -> None:
    """Write a row per text. `tokens` is the vocabulary if there is a vector per token, otherwise None."""
    tables = (_table(*block, tokens) for block in blocks)
    first = next(tables)
    with (
        path.open("wb") as file,
        pq.ParquetWriter(file, first.schema, compression="zstd", use_dictionary=["source"]) as writer,
    ):
        for table in itertools.chain([first], tables):
            writer.write_table(table)


def _table(
    texts: list[Text],
    sequences: Examples,
    vectors: np.ndarray,
    tokens: Sequence[str] | None,
) -> pa.Table:
    array = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    columns: dict[str, Any] = {
        # The name of a file need not be UTF-8.
        "source": [text.location.encode(errors="backslashreplace").decode() for text in texts],
        "row": [text.row for text in texts],
        "text": [text.text for text in texts],
    }
    if tokens is None:
        columns["embedding"] = array
    else:
        offsets = pa.array(sequences.offsets.astype(np.int32))
        names = pa.array([tokens[index] for index in sequences.input_ids.tolist()])
        columns["tokens"] = pa.ListArray.from_arrays(offsets, names)
        columns["embeddings"] = pa.ListArray.from_arrays(offsets, array)
    return pa.table(columns)


def _write_npy(path: Path, blocks: Iterable[Block], shape: tuple[int, int]) -> None:
    # Not a memory map, because that crashes on a full disk instead of raising an error.
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for _, _, vectors in blocks:
            file.write(vectors.astype("<f4", copy=False).data)
