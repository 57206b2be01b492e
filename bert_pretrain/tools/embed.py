"""`embed`: what a model makes of texts, as one vector a text or a token, in the order of the input.

Texts are read in groups of bounded size, sorted by length within a group, and run without padding. Vectors are fp32
whatever the precision of the matrix products. The pooled ones of fp32 are those of `transformers` from the same folder.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.progress import progress_bar
from bert_pretrain.ragged import offsets_of, spans
from bert_pretrain.tools.inference import Bert, Packed, batches_by_length, open_bert
from bert_pretrain.tools.texts import Texts, encoded_groups, refuse_input_as_output
from bert_pretrain.tools.vectors import Block, Shape, check_output, write_vectors

POOLINGS = {
    "sentence": ("mean", "cls", "pooler", "last4-mean", "last4-concat"),
    "token": ("last", "last4-mean", "last4-concat"),
}
"""By level; the first is the default."""
NUM_LAST_LAYERS = 4
"""Devlin et al. (2018), section 5.3, table 7: the last four layers, concatenated, served best as features."""
BLOCK_BYTES = 128 << 20
"""About so many bytes of vectors are held until they are written."""


@dataclass(frozen=True)
class Features:
    """Which vectors are wanted."""

    level: str
    pooling: str
    max_length: int
    batch_tokens: int

    @property
    def has_tokens(self) -> bool:
        return self.level == "token"

    @property
    def num_layers(self) -> int:
        return NUM_LAST_LAYERS if self.pooling.startswith("last4") else 1

    def size(self, bert: Bert) -> int:
        """Return the length of a vector."""
        return bert.network.config.hidden_size * (NUM_LAST_LAYERS if self.pooling == "last4-concat" else 1)


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
    text_field: str = "text",
    skip_empty: bool = False,
) -> None:
    """Write the features of all texts of some inputs to a file.

    Args:
        model: any BERT folder with its tokenizer.
        inputs: as the stages take them; each line of `.txt` is a text.
        output: `.parquet`, `.jsonl`, or, for sentences, `.npy`.
        config: device, precision and attention.
        level: `sentence` or `token`.
        pooling: one of the level's `POOLINGS`.
        max_length: longer texts are truncated to so many tokens, [CLS] and [SEP] included; the model's positions.
        batch_tokens: tokens that run at once, padding included.
        text_field: where records have their text.
        skip_empty: leave empty texts out.

    Raises:
        ConfigError: when the choices do not fit one another or the model.
        InputError: when an input cannot be read or a text is empty.
        DataError: when the folder holds no BERT, lacks a pooler that is wanted, or its tokenizer does not fit.
    """
    pooling = _checked_pooling(level, pooling)
    check_output(output, has_tokens=level == "token")
    bert = open_bert(model, config, ("bert.pooler",) if pooling == "pooler" else ())
    features = Features(level, pooling, _checked_length(max_length, bert, model), batch_tokens or bert.batch_tokens)
    if features.num_layers > bert.network.config.num_hidden_layers:
        raise ConfigError(
            f"{pooling} takes the last {NUM_LAST_LAYERS} layers, the model has {bert.network.config.num_hidden_layers}",
            where="--pooling",
            remedy=f"choose another: {', '.join(name for name in POOLINGS[level] if 'last4' not in name)}",
        )
    texts = Texts.open(inputs, text_field, skip_empty=skip_empty)
    refuse_input_as_output(output, (source.location for source in texts.sources))
    shape = Shape(texts.number, features.size(bert), features.has_tokens)
    print(f"features   {shape.size} numbers a {level}, {pooling}, of {texts.number:,} texts")
    counted = _Counted()
    with progress_bar(total=texts.number, unit=" texts", unit_scale=True, desc="embed") as bar:
        write_vectors(output, _blocks(bert, texts, features, bar.update, counted), shape)
    if counted.truncated:
        print(f"truncated  {counted.truncated:,} texts longer than {features.max_length} tokens (--max-length)")
    if texts.num_skipped:
        print(f"left out   {texts.num_skipped:,} empty texts")
    print(f"written    {output}: {counted.texts:,} texts, {counted.tokens:,} tokens")


@dataclass
class _Counted:
    texts: int = 0
    tokens: int = 0
    truncated: int = 0


def _blocks(
    bert: Bert, texts: Texts, features: Features, done: Callable[[int], object], counted: _Counted
) -> Iterator[Block]:
    """Yield the features of all texts, in order, in blocks of bounded size.

    Raises:
        InputError: when there are not as many texts as there were at first.
    """
    for group in encoded_groups(texts, bert.tokenizer):
        room = features.max_length - 2
        counted.truncated += sum(len(ids) > room for ids in group.ids)
        sequences = [bert.surround(ids[:room]) for ids in group.ids]
        lengths = np.array([len(sequence) for sequence in sequences])
        # Sentences of a group take little; the tokens of as many long texts may not fit into memory.
        most = max(1, BLOCK_BYTES // (4 * features.size(bert) * (int(lengths.max()) if features.has_tokens else 1)))
        for begin in range(0, len(group), most):
            part = slice(begin, begin + most)
            tokens = [[bert.tokenizer.tokens[index] for index in ids] for ids in sequences[part]]
            vectors = features_of(bert, sequences[part], features, done)
            yield Block(group.texts[part], vectors, tokens if features.has_tokens else None)
        counted.texts += len(group)
        counted.tokens += int(lengths.sum())
    if counted.texts != texts.number:
        raise InputError(
            f"the inputs had {texts.number:,} texts at first and {counted.texts:,} now",
            where=texts.sources[0].location,
            remedy="run the command again when they rest",
        )


def features_of(
    bert: Bert, sequences: Sequence[np.ndarray], features: Features, done: Callable[[int], object] = lambda _: None
) -> np.ndarray:
    """Return the vectors of sequences in their order: (sequences, size) float32, or (tokens of all, size).

    Args:
        bert: the model.
        sequences: ids with [CLS] and [SEP].
        features: which vectors.
        done: is told the number of sequences after every batch.
    """
    lengths = np.array([len(sequence) for sequence in sequences])
    counts = lengths if features.has_tokens else np.ones_like(lengths)
    offsets = offsets_of(counts)
    vectors = np.empty((offsets[-1], features.size(bert)), dtype=np.float32)
    with bert.running():
        for batch in batches_by_length(lengths, features.batch_tokens):
            found = _pooled(bert.network, bert.pack([sequences[index] for index in batch]), features)
            vectors[spans(offsets[batch], counts[batch])] = found.float().cpu().numpy()
            done(len(batch))
    return vectors


def _pooled(network: BertForPreTraining, packed: Packed, features: Features) -> Tensor:
    """Return the vectors of one packed batch, (sequences, size) or (tokens, size)."""
    layers = network.encode_last_layers(*packed, features.num_layers)
    is_mean = features.pooling == "last4-mean"
    hidden = torch.stack(layers).float().mean(dim=0) if is_mean else torch.cat(layers, dim=1)  # (tokens, size)
    if features.has_tokens:
        return hidden
    cu_seqlens = packed[3]
    if features.pooling == "cls":
        return hidden.index_select(0, cu_seqlens[:-1])
    if features.pooling == "pooler":
        return network.pooler(hidden, cu_seqlens)
    return torch.segment_reduce(hidden.float(), "mean", lengths=cu_seqlens.diff().long(), axis=0)


def _checked_pooling(level: str, pooling: str | None) -> str:
    if level not in POOLINGS:
        raise ConfigError(f"the level is '{level}'", where="--level", remedy=f"choose {' or '.join(POOLINGS)}")
    if pooling is None:
        return POOLINGS[level][0]
    if pooling not in POOLINGS[level]:
        raise ConfigError(
            f"'{pooling}' is no pooling of a {level}", where="--pooling", remedy=f"choose {', '.join(POOLINGS[level])}"
        )
    return pooling


def _checked_length(max_length: int | None, bert: Bert, model: Path) -> int:
    if max_length is not None and not 3 <= max_length <= bert.max_length:
        raise ConfigError(
            f"the length is {max_length}, the model {model} has {bert.max_length} positions",
            where="--max-length",
            remedy=f"give 3 to {bert.max_length} tokens, [CLS] and [SEP] included",
        )
    return max_length or bert.max_length
