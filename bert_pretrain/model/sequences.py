"""One way of sequences through a network: ordered by length, packed without padding, in the device's precision.

Training packs its micro-batches with the same functions. `evaluate`, `embed`, `fill-mask` and `predict` open their
model and compute all outputs here.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bert_pretrain import ragged
from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import DataError, InputError
from bert_pretrain.examples.examples import Examples
from bert_pretrain.model.bert import BertForPreTraining, Packed
from bert_pretrain.model.devices import choose_device, choose_precision, configure_cpu
from bert_pretrain.model.folder import check_rows, length_limit
from bert_pretrain.model.huggingface import load_model
from bert_pretrain.text.tokenizer import Tokenizer

BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}  # on CUDA, BERT-Large in fp32 needs 2 GB


def pack_sequences(sequences: Examples, device: torch.device | str = "cpu") -> Packed:
    """Concatenate sequences, at least one."""

    def tensor(values: np.ndarray, dtype: type = np.int64) -> Tensor:
        return torch.from_numpy(values.astype(dtype)).to(device)

    return Packed(
        tensor(sequences.input_ids),
        tensor(sequences.is_segment_b),
        tensor(ragged.positions_within(sequences.offsets)),
        tensor(sequences.offsets, np.int32),
        int(sequences.lengths.max()),
    )


def batches_by_length(lengths: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """Return the indices of the sequences of each batch, shortest first.

    A batch has at most `batch_tokens` tokens, or one longer sequence. Its sequences have similar lengths, so padded
    attention pads little.
    """
    order = np.argsort(lengths, kind="stable")
    offsets = ragged.offsets_of(lengths[order])
    batches = []
    begin = 0
    while begin < len(order):
        end = int(np.searchsorted(offsets, offsets[begin] + batch_tokens, side="right")) - 1
        end = max(begin + 1, end)
        batches.append(order[begin:end])
        begin = end
    return batches


def sequences_of(
    ids: Sequence[Sequence[int] | np.ndarray], token_type_ids: Sequence[Sequence[int] | np.ndarray] | None = None
) -> Examples:
    """Return lists of ids as a table. Token types, 0 by default, are 0 in the first segment and 1 in the second."""
    lengths = np.array([len(each) for each in ids], dtype=np.int64)
    num_second = 0 if token_type_ids is None else np.array([sum(each) for each in token_type_ids])
    return Examples(np.concatenate(ids), ragged.offsets_of(lengths), lengths - num_second)


def mean_of_sequences(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the mean hidden state of each sequence, (sequences, hidden) in fp32."""
    return torch.segment_reduce(hidden.float(), "mean", lengths=cu_seqlens.diff().long(), axis=0)


class Sequences(Protocol):
    """Sequences for `Bert.run`, which may be made when they are taken."""

    @property
    def lengths(self) -> np.ndarray: ...

    def take(self, rows: np.ndarray) -> Examples: ...


@dataclass(frozen=True)
class Bert:
    """A network in evaluation mode and its tokenizer."""

    network: BertForPreTraining
    tokenizer: Tokenizer
    device: torch.device
    dtype: torch.dtype  # of matrix products
    max_length: int  # maximum number of tokens of a sequence, including [CLS] and [SEP]
    missing: Sequence[str] = ()  # names of parameters that the folder lacks
    # Tensors of the folder that the network lacks, such as the head of a task.
    unused: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Disable gradients, and compute matrix products in `dtype`."""
        with torch.inference_mode(), torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            yield

    def pack(
        self, sequences: Sequence[Sequence[int] | np.ndarray], token_type_ids: Sequence[Sequence[int]] | None = None
    ) -> Packed:
        """Pack lists of ids, which include [CLS] and [SEP], on the model's device."""
        return pack_sequences(sequences_of(sequences, token_type_ids), self.device)

    def add_special_tokens(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return `[CLS] ids [SEP]`."""
        return np.concatenate(([self.tokenizer.cls_id], ids, [self.tokenizer.sep_id])).astype(np.int64)

    def check_length(
        self,
        num_tokens: int,
        what: str,
        *,
        where: str,
        remedy: str,
    ) -> None:
        """Raise InputError if a text that cannot be truncated, described by `what`, is longer than the maximum."""
        if num_tokens > self.max_length:
            raise InputError(
                f"{what} has {num_tokens} tokens, the model is trained for {self.max_length}",
                where=where,
                remedy=remedy,
            )

    def run(
        self,
        sequences: Sequences,
        head: Callable[[Packed, Examples], Tensor],
        num_outputs: np.ndarray,
        on_batch: Callable[[np.ndarray], object] = lambda rows: None,
        batch_tokens: int | None = None,
    ) -> np.ndarray:
        """Return the outputs of all sequences in their order, (outputs, …) float32.

        Args:
            sequences: at least one, including [CLS] and [SEP].
            head: computes the outputs of a batch, (outputs of the batch, …), from its packed and unpacked sequences.
            num_outputs: the number of outputs of each sequence, (sequences,).
            on_batch: called with the indices of the sequences of each finished batch.
            batch_tokens: maximum tokens per batch; None: chosen for the device.

        Raises:
            DataError: an output is not finite, although all weights are. It can happen in fp16.
        """
        batches = batches_by_length(sequences.lengths, batch_tokens or BATCH_TOKENS[self.device.type])
        batches.reverse()  # the first batch needs the most memory
        results = []
        with self.running():
            for rows in batches:
                batch = sequences.take(rows)
                outputs = head(pack_sequences(batch, self.device), batch)
                if not outputs.isfinite().all():
                    raise DataError(
                        "the outputs of the network are not finite",
                        where="MODEL",
                        remedy="use --precision fp32, or a model with smaller weights",
                    )
                results.append(outputs.float().cpu().numpy())
                on_batch(rows)
        order = np.concatenate(batches)
        offsets = ragged.offsets_of(num_outputs[order])
        return ragged.take(np.concatenate(results), offsets, np.argsort(order))[0]


def open_bert(
    folder: Path,
    config: TrainConfig,
    required: tuple[str, ...] = (),
    *,
    max_length: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Bert:
    """Open a BERT folder on the device, and with the precision and attention, of `config`.

    `required` are parts that the folder must have besides embeddings and encoder, as in `load_model`.
    `max_length` is that of `length_limit`. `tokenizer` defaults to that of the folder.
    """
    device = choose_device(config.device)
    configure_cpu(device)
    dtype = choose_precision(config.precision, device).dtype
    required = ("embeddings", "encoder", *required)
    loaded = load_model(
        folder,
        attention=config.attention,
        device=device,
        dtype=dtype,
        required=required,
    )
    tokenizer = tokenizer or Tokenizer.load(folder, "MODEL")
    check_rows(folder, loaded.model.vocab_size, tokenizer, "MODEL")
    max_length = length_limit(folder, max_length)
    return Bert(
        loaded.model,
        tokenizer,
        device,
        dtype,
        max_length,
        loaded.missing,
        loaded.unused,
    )
