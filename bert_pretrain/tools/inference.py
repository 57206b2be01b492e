"""Inference: open a BERT folder, pack sequences, and form batches under a token budget.

Batches contain sequences of similar length, so that padded attention wastes little. The caller restores the order.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bert_pretrain import ragged
from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import DataError
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.devices import choose_device, choose_precision, configure_cpu
from bert_pretrain.model.folder import length_limit
from bert_pretrain.model.huggingface import load_model
from bert_pretrain.model.vocabulary import check_rows
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.train.hardware import CPU_MICRO_BATCH_TOKENS

# input_ids, token_type_ids and position_ids (tokens,), cu_seqlens (sequences + 1,), max_seqlen
Packed = tuple[Tensor, Tensor, Tensor, Tensor, int]


@dataclass(frozen=True)
class Bert:
    """A network in evaluation mode and its tokenizer."""

    network: BertForPreTraining
    tokenizer: Tokenizer
    device: torch.device
    dtype: torch.dtype
    max_length: int  # maximum number of tokens of a sequence, including [CLS] and [SEP]
    # Tensors of the folder that the network lacks, such as the head of a task.
    unused: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def batch_tokens(self) -> int:
        """Return the default number of tokens per batch."""
        return CPU_MICRO_BATCH_TOKENS if self.device.type == "cpu" else 32768  # 2 GB on CUDA for BERT-Large in fp32

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Disable gradients, and compute matrix products in `dtype`."""
        with torch.inference_mode(), torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            yield

    def pack(self, sequences: Sequence[np.ndarray], token_type_ids: Sequence[np.ndarray] | None = None) -> Packed:
        """Pack sequences, which include [CLS] and [SEP], on the model's device. Token types are 0 by default."""
        lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        offsets = ragged.offsets_of(lengths)
        ids = np.concatenate(sequences).astype(np.int64)
        types = np.zeros_like(ids) if token_type_ids is None else np.concatenate(token_type_ids).astype(np.int64)
        arrays = (ids, types, ragged.positions_within(offsets), offsets.astype(np.int32))
        input_ids, token_types, positions, bounds = (torch.from_numpy(array).to(self.device) for array in arrays)
        return input_ids, token_types, positions, bounds, int(lengths.max())

    def add_special_tokens(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return `[CLS] ids [SEP]`."""
        return np.concatenate(([self.tokenizer.cls_id], ids, [self.tokenizer.sep_id])).astype(np.int64)


def open_bert(
    folder: Path, config: TrainConfig, required: tuple[str, ...] = (), *, max_length: int | None = None
) -> Bert:
    """Open a BERT folder and its tokenizer on the device, and with the precision and attention, of `config`.

    `required` are prefixes of tensors that the folder must have besides embeddings and encoder, as in `load_model`.
    `max_length` is that of `length_limit`.
    """
    device = choose_device(config.device)
    configure_cpu(device)
    dtype = choose_precision(config.precision, device).dtype
    required = ("bert.embeddings", "bert.encoder", *required)
    loaded = load_model(folder, attention=config.attention, device=device, dtype=dtype, required=required)
    tokenizer = Tokenizer.load(folder, "MODEL")
    check_rows(folder, loaded.model.vocab_size, tokenizer, "MODEL")
    return Bert(loaded.model, tokenizer, device, dtype, length_limit(folder, max_length), loaded.unused)


def checked(outputs: Tensor) -> Tensor:
    """Return outputs of a network, whose weights are finite. Raise DataError if one of them is not, as in fp16."""
    if not outputs.isfinite().all():
        what = "the outputs of the network are not finite"
        raise DataError(what, where="MODEL", remedy="use --precision fp32, or a model with smaller weights")
    return outputs


def report_truncated(number: int, bert: Bert) -> None:
    """Print how many texts were truncated, if any."""
    if number:
        limit = f"{bert.max_length} tokens (default: what the model is trained for; --max-length)"
        print(f"truncated  {number:,} texts longer than {limit}")


def batches_by_length(lengths: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Yield the indices of the sequences of each batch, longest first.

    A batch has at most `batch_tokens` tokens including padding, or one longer sequence.
    """
    order = np.argsort(-lengths, kind="stable")
    begin = 0
    while begin < len(order):
        size = max(1, batch_tokens // int(lengths[order[begin]]))
        yield order[begin : begin + size]
        begin += size
