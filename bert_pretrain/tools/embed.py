"""`embed`: texts as vectors, one per text or one per token, in the order of the input.

Texts are read in groups of bounded size, sorted by length within a group, and run without padding. Vectors are fp32
whatever the precision of the matrix products; in fp32 they are those of `transformers` from the same folder.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bert_pretrain.config import TextField, TrainConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.text.ragged import offsets_of, spans
from bert_pretrain.tools.inference import Bert, batches_by_length, open_bert
from bert_pretrain.tools.sentence_model import MODULES, read_sentence_model
from bert_pretrain.tools.texts import Texts, encoded_groups, refuse_input_as_output
from bert_pretrain.tools.vectors import Block, Shape, check_output, write_vectors

POOLINGS = {
    "sentence": ("mean", "cls", "pooler", "last4-mean", "last4-concat"),
    "token": ("last", "last4-mean", "last4-concat"),
}
"""By level; the first is the default."""
NUM_LAST_LAYERS = 4
"""Devlin et al. (2018), section 5.3, table 7: the last four layers, concatenated, were the best features."""
BLOCK_BYTES = 128 << 20
"""Vectors held in memory before they are written, approximately."""


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
    def has_tokens(self) -> bool:
        return self.level == "token"

    @property
    def num_layers(self) -> int:
        return NUM_LAST_LAYERS if self.pooling.startswith("last4") else 1

    @property
    def size(self) -> int:
        """The length of a vector."""
        return self.bert.network.config.hidden_size * (NUM_LAST_LAYERS if self.pooling == "last4-concat" else 1)

    def blocks(self, texts: Texts, done: Callable[[int], object], counted: Counter[str]) -> Iterator[Block]:
        """Yield the vectors of all texts, in order, in blocks of bounded size."""
        for group in encoded_groups(texts, self.bert.tokenizer):
            counted["truncated"] += sum(len(ids) > self.max_length - 2 for ids in group.ids)
            sequences = [self.bert.add_special_tokens(ids[: self.max_length - 2]) for ids in group.ids]
            longest = max(map(len, sequences))
            # The sentence vectors of a group are small; the token vectors of that many long texts may not fit.
            size = max(1, BLOCK_BYTES // (4 * self.size * (longest if self.has_tokens else 1)))
            for begin in range(0, len(sequences), size):
                part = slice(begin, begin + size)
                tokens = [[self.bert.tokenizer.tokens[index] for index in ids] for ids in sequences[part]]
                vectors = self.vectors(sequences[part], done)
                yield Block(group.texts[part], vectors, tokens if self.has_tokens else None)
            counted["texts"] += len(sequences)
            counted["tokens"] += sum(map(len, sequences))
        if counted["texts"] != texts.number:
            raise InputError(
                f"the inputs had {texts.number:,} texts at first and {counted['texts']:,} now",
                where=texts.sources[0].location,
                remedy="run the command again once the inputs no longer change",
            )

    def vectors(self, sequences: Sequence[np.ndarray], done: Callable[[int], object]) -> np.ndarray:
        """Return the vectors of sequences in their order: (sequences, size) float32, or (tokens of all, size)."""
        lengths = np.array([len(sequence) for sequence in sequences])
        counts = lengths if self.has_tokens else np.ones_like(lengths)
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
        hidden = self.bert.network.encode(*packed, num_layers=self.num_layers)  # (tokens, layers * hidden)
        if self.pooling == "last4-mean":
            hidden = torch.stack(hidden.chunk(NUM_LAST_LAYERS, dim=1)).float().mean(dim=0)  # (tokens, hidden)
        if self.has_tokens:
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
    embedder = _open(model, output, config, level, pooling, max_length, batch_tokens)
    texts = Texts.open(inputs, text_field, encoding=encoding, skip_empty=skip_empty)
    refuse_input_as_output(output, (source.location for source in texts.sources))
    shape = Shape(texts.number, embedder.size, embedder.has_tokens)
    print(f"features   {shape.size} numbers per {level}, {embedder.pooling}, of {texts.number:,} texts")
    counted: Counter[str] = Counter()
    with progress_bar(total=texts.number, unit=" texts", unit_scale=True, desc="embed") as bar:
        write_vectors(output, embedder.blocks(texts, bar.update, counted), shape)
    if counted["truncated"]:
        print(f"truncated  {counted['truncated']:,} texts longer than {embedder.max_length} tokens (--max-length)")
    if texts.num_skipped:
        print(f"skipped    {texts.num_skipped:,} empty texts")
    print(f"written    {output}: {counted['texts']:,} texts, {counted['tokens']:,} tokens")


def _open(
    model: Path,
    output: Path,
    config: TrainConfig,
    level: str,
    pooling: str | None,
    max_length: int | None,
    batch_tokens: int | None,
) -> _Embedder:
    """Check the options and open the model."""
    if level not in POOLINGS:
        raise ConfigError(f"the level is '{level}'", where="--level", remedy=f"choose {' or '.join(POOLINGS)}")
    sentence = read_sentence_model(model) if level == "sentence" and pooling is None else None
    pooling = sentence.pooling if sentence else pooling or POOLINGS[level][0]
    if pooling not in POOLINGS[level]:
        what = f"'{pooling}' is not a pooling of a {level}"
        raise ConfigError(what, where="--pooling", remedy=f"choose {', '.join(POOLINGS[level])}")
    check_output(output, has_tokens=level == "token")
    bert = open_bert(model, config, ("bert.pooler",) if pooling == "pooler" else ())
    if max_length is not None and not 3 <= max_length <= bert.max_length:
        raise ConfigError(
            f"the length is {max_length}, the model {model} has {bert.max_length} positions",
            where="--max-length",
            remedy=f"give 3 to {bert.max_length} tokens, [CLS] and [SEP] included",
        )
    longest = bert.max_length
    if sentence is not None:
        longest = min(longest, sentence.max_length or longest)
        normalized = ", normalized" if sentence.is_normalized else ""
        print(f"pooling    {pooling}{normalized}, texts of at most {longest} tokens ({MODULES})")
    is_normalized = sentence is not None and sentence.is_normalized
    size = batch_tokens or bert.batch_tokens
    embedder = _Embedder(bert, level, pooling, max_length or longest, size, is_normalized)
    if embedder.num_layers > bert.network.config.num_hidden_layers:
        raise ConfigError(
            f"{pooling} takes the last {NUM_LAST_LAYERS} layers, the model has {bert.network.config.num_hidden_layers}",
            where="--pooling",
            remedy=f"choose another: {', '.join(name for name in POOLINGS[level] if 'last4' not in name)}",
        )
    return embedder
