"""`embed`: texts as vectors, one per text or one per token, in the order of the input.

Texts are read in groups of bounded size, sorted by length within a group, and run without padding. Vectors are fp32
whatever the precision of the matrix products; in fp32 they are those of `transformers` from the same folder.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor

from bert_pretrain.config import TextField, TrainConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.io.files import atomic_path
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.text.ragged import offsets_of, spans
from bert_pretrain.tools.inference import Bert, batches_by_length, open_bert
from bert_pretrain.tools.sentence_model import MODULES, read_sentence_model
from bert_pretrain.tools.texts import Text, Texts, encoded_groups, refuse_input_as_output

POOLINGS = {
    "sentence": ("mean", "cls", "pooler", "last4-mean", "last4-concat"),
    "token": ("last", "last4-mean", "last4-concat"),
}
"""Poolings by level; the first is the default."""
NUM_LAST_LAYERS = 4
"""Devlin et al. (2018), section 5.3, table 7: the last four layers, concatenated, were the best features."""
BLOCK_BYTES = 128 << 20
"""Vectors held in memory before they are written, approximately."""

Block = tuple[list[Text], list[list[str]], np.ndarray]
"""Some consecutive texts, their tokens, and their vectors: (texts, size) float32, or (tokens of all, size)."""


@dataclass(frozen=True)
class _Embedder:
    """A model and the kind of vectors wanted from it."""

    bert: Bert
    level: str
    pooling: str
    max_length: int
    batch_tokens: int
    is_normalized: bool
    """Whether vectors are divided by their length."""

    @property
    def size(self) -> int:
        """The length of a vector."""
        return self.bert.network.config.hidden_size * (NUM_LAST_LAYERS if self.pooling == "last4-concat" else 1)

    def blocks(self, texts: Texts, done: Callable[[int], object], counted: Counter[str]) -> Iterator[Block]:
        """Yield the vectors of all texts, in order, in blocks of bounded size."""
        for group, ids in encoded_groups(texts, self.bert.tokenizer):
            counted["truncated"] += sum(len(each) > self.max_length - 2 for each in ids)
            sequences = [self.bert.add_special_tokens(each[: self.max_length - 2]) for each in ids]
            # The sentence vectors of a group are small; the token vectors of that many long texts may not fit.
            num_vectors = max(map(len, sequences)) if self.level == "token" else 1
            size = max(1, BLOCK_BYTES // (4 * self.size * num_vectors))
            for begin in range(0, len(sequences), size):
                part = slice(begin, begin + size)
                tokens = [[self.bert.tokenizer.tokens[index] for index in each] for each in sequences[part]]
                yield group[part], tokens, self.vectors(sequences[part], done)
            counted["texts"] += len(sequences)
            counted["tokens"] += sum(map(len, sequences))
        if counted["texts"] != texts.number:
            what = f"the inputs had {texts.number:,} texts at first and {counted['texts']:,} now"
            remedy = "run the command again once the inputs no longer change"
            raise InputError(what, where=texts.sources[0].location, remedy=remedy)

    def vectors(self, sequences: Sequence[np.ndarray], done: Callable[[int], object]) -> np.ndarray:
        """Return the vectors of sequences in their order: (sequences, size) float32, or (tokens of all, size)."""
        lengths = np.array([len(sequence) for sequence in sequences])
        counts = lengths if self.level == "token" else np.ones_like(lengths)
        offsets = offsets_of(counts)
        vectors = np.empty((offsets[-1], self.size), dtype=np.float32)
        with self.bert.running():
            for batch in batches_by_length(lengths, self.batch_tokens):
                found = self.pooled([sequences[index] for index in batch]).float()
                found = F.normalize(found, dim=1) if self.is_normalized else found
                vectors[spans(offsets[batch], counts[batch])] = found.cpu().numpy()
                done(len(batch))
        return vectors

    def pooled(self, sequences: Sequence[np.ndarray]) -> Tensor:
        """Return the vectors of one batch, (sequences, size) or (tokens, size)."""
        packed = self.bert.pack(sequences)
        cu_seqlens = packed[3]
        num_layers = NUM_LAST_LAYERS if self.pooling.startswith("last4") else 1
        hidden = self.bert.network.encode(*packed, num_layers=num_layers)  # (tokens, layers * hidden)
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
    config: TrainConfig,
    level: str = "sentence",
    pooling: str | None = None,
    max_length: int | None = None,
    batch_tokens: int | None = None,
    text_field: TextField = "text",
    encoding: str = "utf-8",
    skip_empty: bool = False,
) -> None:
    """Write the vectors of all texts of some inputs to a file.

    `output` is `.parquet`, or for sentences `.npy`. A folder of `sentence-transformers` gives the defaults of `pooling`
    and `max_length`, and may also normalize vectors; otherwise they are the first of the level's `POOLINGS`, and the
    model's positions. `max_length` includes [CLS] and [SEP]; `batch_tokens` run at once, padding included.
    """
    if level not in POOLINGS:
        raise ConfigError(f"the level is '{level}'", where="--level", remedy=f"choose {' or '.join(POOLINGS)}")
    if output.suffix not in (".parquet", ".npy") or (output.suffix == ".npy" and level == "token"):
        what = f"the ending of '{output.name}' is not a format for {level} vectors"
        raise ConfigError(what, where="--output", remedy="end it in .parquet, or for sentences in .npy")
    embedder = _open(model, config, level, pooling, max_length, batch_tokens)
    texts = Texts.open(inputs, text_field, encoding=encoding, skip_empty=skip_empty)
    refuse_input_as_output(output, (source.location for source in texts.sources))
    print(f"features   {embedder.size} numbers per {level}, {embedder.pooling}, of {texts.number:,} texts")
    counted: Counter[str] = Counter()
    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        progress_bar(total=texts.number, unit=" texts", unit_scale=True, desc="embed") as bar,
        atomic_path(output) as temporary,
    ):
        blocks = embedder.blocks(texts, bar.update, counted)
        if output.suffix == ".npy":
            _write_npy(temporary, blocks, (texts.number, embedder.size))
        else:
            _write_parquet(temporary, blocks, embedder.size, level)
    if counted["truncated"]:
        print(f"truncated  {counted['truncated']:,} texts longer than {embedder.max_length} tokens (--max-length)")
    print(f"written    {output}: {counted['texts']:,} texts, {counted['tokens']:,} tokens")


def _open(
    model: Path,
    config: TrainConfig,
    level: str,
    pooling: str | None,
    max_length: int | None,
    batch_tokens: int | None,
) -> _Embedder:
    """Check the options and open the model."""
    sentence = read_sentence_model(model) if level == "sentence" and pooling is None else None
    own_pooling, is_normalized, own_length = sentence or (POOLINGS[level][0], False, None)
    pooling = pooling or own_pooling
    if pooling not in POOLINGS[level]:
        what = f"'{pooling}' is not a pooling of a {level}"
        raise ConfigError(what, where="--pooling", remedy=f"choose {', '.join(POOLINGS[level])}")
    bert = open_bert(model, config, ("bert.pooler",) if pooling == "pooler" else ())
    if max_length is not None and not 3 <= max_length <= bert.max_length:
        what = f"the length is {max_length}, the model {model} has {bert.max_length} positions"
        remedy = f"give 3 to {bert.max_length} tokens, [CLS] and [SEP] included"
        raise ConfigError(what, where="--max-length", remedy=remedy)
    num_layers = bert.network.config.num_hidden_layers
    if pooling.startswith("last4") and num_layers < NUM_LAST_LAYERS:
        what = f"{pooling} takes the last {NUM_LAST_LAYERS} layers, the model has {num_layers}"
        raise ConfigError(what, where="--pooling", remedy=f"choose another, such as {POOLINGS[level][0]}")
    longest = min(bert.max_length, own_length or bert.max_length)
    if sentence is not None:
        normalized = ", normalized" if is_normalized else ""
        print(f"pooling    {pooling}{normalized}, texts of at most {longest} tokens ({MODULES})")
    return _Embedder(bert, level, pooling, max_length or longest, batch_tokens or bert.batch_tokens, is_normalized)


def _write_parquet(path: Path, blocks: Iterable[Block], size: int, level: str) -> None:
    vector = pa.list_(pa.float32(), size)
    columns = {"source": pa.string(), "row": pa.int64(), "text": pa.string()}
    features = {"tokens": pa.list_(pa.string()), "embeddings": pa.list_(vector)}
    schema = pa.schema({**columns, **(features if level == "token" else {"embedding": vector})})
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=["source"]) as writer:
        for texts, tokens, vectors in blocks:
            arrays = [
                pa.array([text.location for text in texts]),
                pa.array([text.row for text in texts]),
                pa.array([text.text for text in texts]),
                pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=vector),
            ]
            if level == "token":
                offsets = offsets_of(np.array([len(each) for each in tokens])).astype(np.int32)
                arrays[3:] = [pa.array(tokens), pa.ListArray.from_arrays(pa.array(offsets), arrays[3])]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _write_npy(path: Path, blocks: Iterable[Block], shape: tuple[int, int]) -> None:
    # A stream, not a memory map: on a full disk the first is an error message, the second a crash.
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for _, _, vectors in blocks:
            file.write(np.ascontiguousarray(vectors, dtype="<f4").data)
