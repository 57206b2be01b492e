"""One of our training steps as a recipe that may be changed, measured: first losses, times on one batch, memory.

`gpu_variants.py` changes recipes; this builds the step with the package's own parts and times it. Times on CUDA are
between events, with the host running ahead as it does in training.
"""

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from bench_train import Bench, device_name, peak_memory, timed, training_data, watch_memory
from torch import nn

from bert_pretrain.config import TrainConfig
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.model.attention import choose_attention
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.batches import GlobalBatch
from bert_pretrain.train.device import cpu, hardware
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.optim.optimizer import make_optimizers
from bert_pretrain.train.step import StepSums, train_step

LEARNING_RATE = 1e-4


class NotHere(Exception):
    """A variant that cannot be applied on this machine; the message says why."""


@dataclass(frozen=True)
class Scope:
    """On what variants are measured, and how long."""

    folder: DataFolder
    device: str
    precision: str
    vocab_size: int
    loss_steps: int
    timed_steps: int


@dataclass
class Recipe:
    """A training step as a variant may change it."""

    size: str
    """Layers x hidden size."""
    examples: int
    device: torch.device
    dtype: torch.dtype
    train: dict[str, Any] = field(default_factory=dict)
    """Keys of the section `train`."""
    dropout: float = 0.0
    """Of the hidden states."""
    micro_batch_share: float | None = None
    """Of a batch's tokens that a micro-batch holds; None: as much as fits."""
    compiled: bool | str = "auto"
    compile_mode: str | None = None
    change_model: Callable[[BertForPreTraining], object] | None = None
    """Called before the layers are compiled and the optimizer is made."""
    wrap: Callable[[PretrainingLoss], nn.Module] | None = None
    before_step: Callable[[], object] | None = None


class Step:
    """A training step with its state."""

    def __init__(self, recipe: Recipe, network: nn.Module, model: nn.Module, train: TrainConfig) -> None:
        self._recipe, self._network = recipe, network
        self._optimizers = make_optimizers(model, train)
        self._sums = StepSums.zeros(recipe.device)

    def take(self, batch: GlobalBatch) -> None:
        """Update the weights by a batch."""
        if self._recipe.before_step is not None:
            self._recipe.before_step()
        self._sums.zero_()
        train_step(
            self._network, self._optimizers, batch, self._sums, seed=1, step=0, learning_rate=LEARNING_RATE,
            max_grad_norm=1.0, dtype=self._recipe.dtype,
        )  # fmt: skip

    def loss(self) -> float:
        """Return the loss of the step before, in nats, which waits for the device."""
        return StepSums.read(self._sums).loss


def measure(scope: Scope, recipe: Recipe) -> dict[str, Any]:
    """Return a recipe's first losses, the times of its step, and its memory, as JSON values."""
    start_of_memory = watch_memory(recipe.device)
    step, batches = build(scope, recipe)
    begin, losses = time.monotonic(), []
    for batch in batches:
        step.take(batch)
        losses.append(step.loss())
    warm_up_seconds = time.monotonic() - begin
    seconds = step_times(lambda: step.take(batches[0]), scope.timed_steps, recipe.device)
    low, median, high = (float(value) for value in np.quantile(seconds, [0.25, 0.5, 0.75]))
    return {
        "outcome": "done",
        "size": f"L{recipe.size.replace('x', '-H')}",
        "max_seq_length": scope.folder.max_seq_length,
        "examples": batches[0].num_sequences,
        "micro_batches": len(batches[0].micro_batches),
        "step_seconds": median,
        "step_seconds_quartiles": [low, high],
        "examples_per_second": batches[0].num_sequences / median,
        "peak_memory_bytes": peak_memory(recipe.device) - start_of_memory,
        "losses": losses,
        "warm_up_seconds": warm_up_seconds,
        "device": device_name(recipe.device),
    }


def build(scope: Scope, recipe: Recipe) -> tuple[Step, list[GlobalBatch]]:
    """Return a recipe's training step, and the batches of its first steps on the device."""
    folder, device = scope.folder, recipe.device
    precision = hardware.choose_precision(scope.precision, device)
    bench = Bench(folder, device, precision, scope.vocab_size, recipe.examples, dropout=0.0)
    config = bench.model_config(recipe.size).model_copy(update={"hidden_dropout_prob": recipe.dropout})
    cpu.owns_process = True
    hardware.keep_freed_memory(device)
    settings = {"global_batch_size": recipe.examples, "compile": recipe.compiled, **recipe.train}
    train = TrainConfig.model_validate(settings)
    head_size = config.hidden_size // config.num_attention_heads
    attention, _ = choose_attention(train.attention, device, recipe.dtype, head_size=head_size, dropout_rate=0.0)
    compiled, _ = hardware.choose_compile(train.compile, device, attention)
    model = BertForPreTraining(config, scope.vocab_size, attention=attention)
    model.initialize(1)
    model.to(device).train()
    if recipe.change_model is not None:
        recipe.change_model(model)
    losses = PretrainingLoss(model, compiled=compiled)
    network = losses if recipe.wrap is None else recipe.wrap(losses)
    if compiled:
        _compile(model, recipe.compile_mode)
    tokens = hardware.choose_micro_batch_tokens(train, model, folder.max_seq_length, device, recipe.dtype)
    if recipe.micro_batch_share is not None:
        mean = sum(record.tokens for record in folder.shards("train")) / folder.rows("train")
        # A little more, since some batches have more tokens than others.
        tokens = max(folder.max_seq_length, int(1.05 * recipe.micro_batch_share * recipe.examples * mean))
    data = training_data(bench, tokens, compiled)
    batches = [data.global_batch(number).to(device) for number in range(scope.loss_steps)]
    return Step(recipe, network, model, train), batches


def _compile(model: BertForPreTraining, mode: str | None) -> None:
    """Compile the modules that the package compiles, in one of the compiler's modes."""
    plain = torch.compile
    if mode is not None:
        torch.compile = functools.partial(plain, mode=mode)
    try:
        hardware.compile_layers(model)
    finally:
        torch.compile = plain


def step_times(step: Callable[[], object], number: int, device: torch.device) -> list[float]:
    """Return the seconds of so many steps, after one that is not timed."""
    step()
    if device.type != "cuda":
        return [timed(step, device) for _ in range(number)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return [1e-3 * first.elapsed_time(second) for first, second in itertools.pairwise(events)]
