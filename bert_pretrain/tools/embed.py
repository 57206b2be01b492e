"""`embed`: one vector per text or per token, in the order of the input.

Texts are read in groups of bounded size and sorted by length within a group. Batches are packed; only attention may pad
them. Vectors are always written in fp32. With fp32 matrix products they equal those of `transformers` up to rounding.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from bert_pretrain.config import Config, TrainConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.io.files import atomic_path
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.model.hub import MODULES
from bert_pretrain.ragged import offsets_of, spans
from bert_pretrain.tools.inference import batches_by_length, checked, open_bert, report_truncated
from bert_pretrain.tools.texts import Text, Texts, check_output_file, encoded_groups

POOLINGS = {  # by level; the first is the default
    "sentence": ("mean", "cls", "pooler", "last4-mean", "last4-concat"),
    "token": ("last", "last4-mean", "last4-concat"),
}
NUM_LAST_LAYERS = 4  # their concatenation was best in section 5.3, table 7 of Devlin et al. (2018)
BLOCK_BYTES = 128 << 20  # approximate size of the vectors in memory before they are written

# Consecutive texts, their tokens, and their vectors: (texts, dim) or (tokens of all texts, dim) float32.
Block = tuple[list[Text], list[list[str]], np.ndarray]


class Embedder:
    """Computes vectors of texts or tokens (`level`) with one model and pooling.

    `pooling` defaults to the first of the level's `POOLINGS`. `max_length` is that of `length_limit`, and includes
    [CLS] and [SEP]. `batch_tokens` includes padding.
    """

    def __init__(
        self,
        model: Path,
        config: TrainConfig,
        level: str,
        pooling: str | None = None,
        max_length: int | None = None,
        batch_tokens: int | None = None,
    ) -> None:
        if pooling is None and level == "sentence" and (model / MODULES).is_file():
            what = "a sentence-transformers model defines its own pooling, normalization and maximum length"
            remedy = "use that library, or ignore these and choose a pooling, for example --pooling mean"
            raise ConfigError(what, where="MODEL", remedy=remedy)
        self.level, self.pooling = level, pooling or POOLINGS[level][0]
        if self.pooling not in POOLINGS[level]:
            what = f"'{self.pooling}' is not a pooling of a {level}"
            raise ConfigError(what, where="--pooling", remedy=f"choose {', '.join(POOLINGS[level])}")
        required = ("bert.pooler",) if self.pooling == "pooler" else ()
        self.bert = open_bert(model, config, required, max_length=max_length)
        num_layers = self.bert.network.config.num_hidden_layers
        if self.pooling.startswith("last4") and num_layers < NUM_LAST_LAYERS:
            what = f"{self.pooling} needs {NUM_LAST_LAYERS} layers, the model has {num_layers}"
            raise ConfigError(what, where="--pooling", remedy=f"choose another, such as {POOLINGS[level][0]}")
        self.batch_tokens = batch_tokens or self.bert.batch_tokens

    @property
    def dim(self) -> int:
        return self.bert.network.config.hidden_size * (NUM_LAST_LAYERS if self.pooling == "last4-concat" else 1)

    def blocks(self, texts: Texts, on_batch: Callable[[int], object], counts: Counter[str]) -> Iterator[Block]:
        """Yield blocks in the order of the texts and update `counts`. `on_batch` gets the number of texts per batch."""
        for group, ids in encoded_groups(texts, self.bert.tokenizer):
            max_tokens = self.bert.max_length - 2
            counts["truncated"] += sum(len(each) > max_tokens for each in ids)
            sequences = [self.bert.add_special_tokens(each[:max_tokens]) for each in ids]
            # Sentence vectors of a group fit in memory, but token vectors of many long texts may not.
            num_vectors = max(map(len, sequences)) if self.level == "token" else 1
            num_texts = max(1, BLOCK_BYTES // (4 * self.dim * num_vectors))  # in a block
            for begin in range(0, len(sequences), num_texts):
                part = slice(begin, begin + num_texts)
                tokens = [[self.bert.tokenizer.tokens[index] for index in each] for each in sequences[part]]
                yield group[part], tokens, self.vectors(sequences[part], on_batch)
            counts["texts"] += len(sequences)
            counts["tokens"] += sum(map(len, sequences))
        if counts["texts"] != texts.num_texts:
            what = f"the inputs had {texts.num_texts:,} texts and now have {counts['texts']:,}"
            remedy = "run the command again when the inputs no longer change"
            raise InputError(what, where=texts.sources[0].location, remedy=remedy)

    def vectors(self, sequences: Sequence[np.ndarray], on_batch: Callable[[int], object]) -> np.ndarray:
        """Return vectors in the order of the sequences: (sequences, dim) or (tokens, dim) float32."""
        lengths = np.array([len(sequence) for sequence in sequences])
        num_vectors = lengths if self.level == "token" else np.ones_like(lengths)
        offsets = offsets_of(num_vectors)
        vectors = np.empty((offsets[-1], self.dim), dtype=np.float32)
        with self.bert.running():
            for batch in batches_by_length(lengths, self.batch_tokens):
                pooled = checked(self.pooled([sequences[index] for index in batch])).float()
                vectors[spans(offsets[batch], num_vectors[batch])] = pooled.cpu().numpy()
                on_batch(len(batch))
        return vectors

    def pooled(self, sequences: Sequence[np.ndarray]) -> Tensor:
        """Return the vectors of one batch, (sequences, dim) or (tokens, dim)."""
        packed = self.bert.pack(sequences)
        cu_seqlens = packed[3]
        num_last = NUM_LAST_LAYERS if self.pooling.startswith("last4") else 1
        hidden = self.bert.network.encode(*packed, num_last=num_last)  # (tokens, num_last * hidden)
        if self.pooling == "last4-mean":
            hidden = torch.stack(hidden.chunk(NUM_LAST_LAYERS, dim=1)).float().mean(dim=0)  # (tokens, hidden)
        if self.level == "token":
            return hidden
        if self.pooling == "cls":
            return hidden.index_select(0, cu_seqlens[:-1])
        if self.pooling == "pooler":
            return self.bert.network.pooler(hidden, cu_seqlens)
        return torch.segment_reduce(hidden.float(), "mean", lengths=cu_seqlens.diff().long(), axis=0)


def embed(
    model: Path,
    inputs: Sequence[str],
    output: Path,
    *,
    config: Config,
    level: str = "sentence",
    skip_empty: bool = False,
    **options: Any,
) -> None:
    """Write the vectors of all texts of the inputs to a file.

    `output` ends in `.parquet`, or in `.npy` for sentences. `options` are those of `Embedder`.
    """
    if level not in POOLINGS:
        raise ConfigError(f"unknown level '{level}'", where="--level", remedy=f"choose {' or '.join(POOLINGS)}")
    if output.suffix not in (".parquet", ".npy") or (output.suffix == ".npy" and level == "token"):
        what = f"the extension of '{output.name}' is not a format for {level} vectors"
        raise ConfigError(what, where="--output", remedy="use .parquet, or .npy for sentences")
    embedder = Embedder(model, config.train, level, **options)
    texts = Texts(
        inputs, config.data.text_field, strips_accents=embedder.bert.tokenizer.strips_accents,
        encoding=config.data.encoding, skip_empty=skip_empty,
    )  # fmt: skip
    check_output_file(output, (source.location for source in texts.sources))
    print(f"features   {texts.num_texts:,} texts, {embedder.dim} numbers per {level}, pooling {embedder.pooling}")
    counts: Counter[str] = Counter()
    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        progress_bar(total=texts.num_texts, unit=" texts", unit_scale=True, desc="embed") as bar,
        atomic_path(output) as temporary,
    ):
        blocks = embedder.blocks(texts, bar.update, counts)
        if output.suffix == ".npy":
            _write_npy(temporary, blocks, (texts.num_texts, embedder.dim))
        else:
            _write_parquet(temporary, blocks, embedder.dim, level)
    report_truncated(counts["truncated"], embedder.bert)
    print(f"written    {output}: {counts['texts']:,} texts, {counts['tokens']:,} tokens")


def _write_parquet(path: Path, blocks: Iterable[Block], size: int, level: str) -> None:
    vector = pa.list_(pa.float32(), size)
    columns = {"source": pa.string(), "row": pa.int64(), "text": pa.string()}
    features = {"tokens": pa.list_(pa.string()), "embeddings": pa.list_(vector)}
    schema = pa.schema({**columns, **(features if level == "token" else {"embedding": vector})})
    with (
        path.open("wb") as file,
        pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=["source"]) as writer,
    ):
        for texts, tokens, vectors in blocks:
            array = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=vector)
            values: dict[str, Any] = {name: [getattr(text, name) for text in texts] for name in ("row", "text")}
            # The name of a file need not be UTF-8.
            values["source"] = [text.location.encode(errors="backslashreplace").decode() for text in texts]
            if level == "token":
                offsets = offsets_of(np.array([len(each) for each in tokens])).astype(np.int32)
                values |= {"tokens": tokens, "embeddings": pa.ListArray.from_arrays(pa.array(offsets), array)}
            else:
                values["embedding"] = array
            writer.write_table(pa.table(values, schema=schema))


def _write_npy(path: Path, blocks: Iterable[Block], shape: tuple[int, int]) -> None:
    # Not a memory map, because that crashes on a full disk instead of raising an error.
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for _, _, vectors in blocks:
            file.write(np.ascontiguousarray(vectors, dtype="<f4").data)
