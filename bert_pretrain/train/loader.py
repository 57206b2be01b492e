"""Global batches of training, micro-batches of evaluation, and a thread that prefetches them.

A global batch is a pure function of (data folder, seed, step), so a run can resume at any step.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from bert_pretrain import ragged, rng
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.examples import concatenate
from bert_pretrain.examples.shards import read_shard
from bert_pretrain.train.distributed import SINGLE_PROCESS, DistContext
from bert_pretrain.train.packing import (
    Batch,
    GlobalBatch,
    ShapeMultiples,
    assign_by_length,
    assign_evenly,
    global_batch_of,
    packed,
)
from bert_pretrain.train.sampled_softmax import CandidateSampler

AnyBatch = TypeVar("AnyBatch", Batch, GlobalBatch)
NUM_PREFETCHED = 3


@dataclass
class TrainingData:
    """The infinite sequence of global batches of a training split, shuffled by a seed.

    Global batches and their masks do not depend on the number of ranks: each rank reads and masks all examples and
    packs its share.
    """

    data: DataFolder
    _: KW_ONLY
    seed: int
    global_batch_size: int
    micro_batch_tokens: int
    offset: int = (
        0  # examples, over all epochs, before the first one of step 0; negative if earlier batches were smaller
    )
    dist_context: DistContext = SINGLE_PROCESS
    static_shapes: bool = False  # whether micro-batches have nearly constant shapes
    sampler: CandidateSampler | None = None  # draws the candidates of a sampled softmax
    with_pairs: bool = True  # whether batches have the labels of sentence pairs
    with_draws: bool = False  # whether batches have the numbers with which ELECTRA's generator draws tokens

    def __post_init__(self) -> None:
        self._examples = self.data.shuffled(self.seed)
        self._mean_tokens = self.data.mean_tokens("train")

    def halve_micro_batches(self) -> None:
        """Halve the micro-batch size. Raise `ConfigError` if it is already one example of maximum length."""
        if self.micro_batch_tokens <= self.data.max_seq_length:
            raise ConfigError(
                f"the device has too little memory for one example of {self.data.max_seq_length} tokens",
                where="train.micro_batch_tokens",
                remedy="set train.activation_checkpointing=true, use shorter examples or a smaller model",
            )
        self.micro_batch_tokens = max(self.micro_batch_tokens // 2, self.data.max_seq_length)

    def global_batch(self, step: int) -> GlobalBatch:
        """Return this rank's part of the global batch of the next step, after `step` finished steps."""
        parts = self._examples.take(self._examples_before(step), self.global_batch_size)
        examples = concatenate([shard.take(rows) for shard, rows in parts])
        if not self.with_pairs:
            examples = replace(examples, next_sentence_label=None)
        ranks = self.dist_context
        if self.static_shapes:
            assigned = assign_evenly(examples.lengths, self.micro_batch_tokens, ranks.rank, ranks.size)
            multiples = ShapeMultiples.for_equal_shares(
                self.global_batch_size,
                len(assigned) * ranks.size,
                self.data.max_seq_length,
                self._mean_tokens,
            )
        else:
            assigned = assign_by_length(examples.lengths, self.micro_batch_tokens, ranks.rank, ranks.size)
            multiples = ShapeMultiples.for_padded_attention(self.micro_batch_tokens)
        draws = rng.stream(self.seed, "draws", step=step) if self.with_draws else None
        batch = global_batch_of(examples, assigned, multiples, draws)
        return batch if self.sampler is None else batch.with_candidates(self.sampler.draw(step))

    def batches(self, first_step: int, last_step: int | None) -> Iterator[GlobalBatch]:
        """Yield the global batches of the steps in [first_step, last_step). If `last_step` is None, never end."""
        steps = itertools.count(first_step) if last_step is None else range(first_step, last_step)
        return map(self.global_batch, steps)

    def epoch(self, step: int) -> float:
        """Return the number of epochs after `step` steps, as a fraction."""
        return self._examples_before(step) / self._examples.num_rows

    def _examples_before(self, step: int) -> int:
        return self.offset + step * self.global_batch_size


def evaluation_batches(
    data: DataFolder,
    split: str,
    micro_batch_tokens: int,
    max_rows: int | None = None,
    *,
    static_shapes: bool = False,
    dist_context: DistContext = SINGLE_PROCESS,
    with_pairs: bool = True,
    with_draws: bool = False,
) -> Iterator[Batch]:
    """Yield a rank's micro-batches of a split, with the masks and, with `with_pairs`, the labels that it stores.

    `max_rows` limits the number of rows, which are then spread evenly.
    With `static_shapes`, `max_seqlen` is constant. Otherwise, Triton would compile its kernels for several block sizes.
    """
    multiples = ShapeMultiples.for_padded_attention(micro_batch_tokens)
    if static_shapes:
        multiples = replace(multiples, max_seqlen=data.max_seq_length)
    records = data.shards(split)
    num_rows = data.rows(split)
    if max_rows is not None:
        num_rows = min(num_rows, max_rows)
    starts = ragged.offsets_of(np.array([record.rows for record in records]))
    chosen = np.linspace(0, starts[-1], num_rows, endpoint=False).astype(np.int64)
    bounds = np.searchsorted(chosen, starts)
    num_micro_batches = 0
    for index, record in enumerate(records):
        rows = chosen[bounds[index] : bounds[index + 1]] - starts[index]
        if not len(rows):
            continue
        examples = read_shard(data.path, record).take(rows)
        if not with_pairs:
            examples = replace(examples, next_sentence_label=None)
        assigned = assign_by_length(examples.lengths, micro_batch_tokens, rank=0, num_ranks=1)
        draws = rng.stream(0, "draws", shard=index) if with_draws else None
        for batch in packed(examples, assigned, multiples, draws):
            if num_micro_batches % dist_context.size == dist_context.rank:
                yield batch
            num_micro_batches += 1


class Prefetcher(Generic[AnyBatch]):
    """Iterates over batches that a thread prepares ahead of time, and copies them to the device."""

    last_wait_seconds = 0.0  # duration for which the last `next` waited for the thread

    def __init__(self, batches: Iterator[AnyBatch], device: torch.device) -> None:
        self._batches: Iterator[AnyBatch] = batches
        self._device = device
        self._thread = ThreadPoolExecutor(1, "batches")
        self._ready: deque[Any] = deque(self._thread.submit(self._read) for _ in range(NUM_PREFETCHED))

    def _read(self) -> AnyBatch | None:
        batch = next(self._batches, None)
        if batch is not None and self._device.type == "cuda":
            batch = batch.with_tensors(Tensor.pin_memory)
        return batch

    def __iter__(self) -> "Prefetcher[AnyBatch]":
        return self

    def __next__(self) -> AnyBatch:
        """Return the next batch, or raise the error of the thread."""
        begin = time.perf_counter()
        batch = self._ready.popleft().result()
        self.last_wait_seconds = time.perf_counter() - begin
        self._ready.append(self._thread.submit(self._read))
        if batch is None:
            raise StopIteration
        return batch.with_tensors(lambda tensor: tensor.to(self._device, non_blocking=True))

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._thread.shutdown(cancel_futures=True)
