"""Traces whole training steps on the pretended device, one for each combination of settings, and tells what it saw."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bert_pretrain.config import Config
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.train.batches import GlobalBatch
from bert_pretrain.train.hardware import DTYPES
from bert_pretrain.train.loader import TrainingData
from bert_pretrain.train.state import TrainState
from bert_pretrain.train.step import train_step
from tests.cuda.pretended import CUDA, fake_global_batch, make_state, pin, pretended_cuda
from tests.cuda.recorder import Recorder

OPTIMIZERS = ("adamw", "lamb", "muon")
STEPS = 2
"""The first also makes the optimizer's state, all others are like the second."""


@dataclass(frozen=True)
class Combination:
    """What decides which operators a step consists of."""

    optimizer: str
    precision: str
    attention: str
    checkpointing: bool
    dropout: float
    pairs: bool

    def __str__(self) -> str:
        parts = [self.optimizer, self.precision, self.attention, f"dropout {self.dropout}"]
        return ", ".join(parts + ["checkpointing"] * self.checkpointing + ["without pairs"] * (not self.pairs))


def combinations() -> Iterator[Combination]:
    """Yield all that can run, each with one of the optimizers: flash attention takes 16 bits only."""
    choices = itertools.product(("bf16", "fp16", "fp32"), ("varlen", "padded"), (False, True), (0.0, 0.1))
    optimizers = itertools.cycle(OPTIMIZERS)
    for number, (precision, attention, checkpointing, dropout) in enumerate(choices):
        if attention == "padded" or precision != "fp32":
            has_pairs = (number + number // 2) % 2 == 0
            yield Combination(next(optimizers), precision, attention, checkpointing, dropout, has_pairs)


def make_config(combination: Combination, **model: Any) -> Config:
    """Return the configuration of a tiny model."""
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
        "max_position_embeddings": 32, "hidden_dropout_prob": combination.dropout,
        "attention_probs_dropout_prob": combination.dropout if combination.attention == "padded" else 0.0,
    }  # fmt: skip
    train = {
        "optimizer": combination.optimizer, "precision": combination.precision,
        "activation_checkpointing": combination.checkpointing,
    }  # fmt: skip
    return Config.model_validate({"model": {**sizes, **model}, "train": train})


def run_step(state: TrainState, config: Config, batch: GlobalBatch, step: int) -> None:
    """Run one step of the project's own, from bringing the batch to the device on."""
    batch = batch.to(CUDA)
    train_step(
        state.network.train(), state.optimizers, batch, state.sums, seed=1, step=step, learning_rate=1e-3,
        max_grad_norm=1.0, dtype=DTYPES[config.train.precision], loss_scale=state.loss_scale,
    )  # fmt: skip
    state.count(batch)


def trace(combination: Combination, batches: list[GlobalBatch], vocab_size: int) -> dict[str, Any]:
    """Return what some steps would do to the device."""
    config = make_config(combination)
    if not combination.pairs:
        batches = [without_pairs(batch) for batch in batches]
    with pretended_cuda() as mode:
        state = make_state(config, vocab_size, attention=combination.attention, pairs=combination.pairs)
        recorders = [Recorder() for _ in batches]
        for step, (recorder, batch) in enumerate(zip(recorders, batches, strict=True)):
            fake = fake_global_batch(mode, batch)
            with recorder:
                run_step(state, config, pin(fake), step)
        gradients = {str(parameter.grad.dtype) for parameter in state.model.parameters() if parameter.grad is not None}
    return {
        "name": str(combination),
        **asdict(combination),
        "waits": [wait for recorder in recorders for wait in recorder.waits],
        "data_dependent": [shape for recorder in recorders for shape in recorder.data_dependent],
        "gradients": sorted(gradients),
        "operators": dict(recorders[-1].operators),
    }


def without_pairs(batch: GlobalBatch) -> GlobalBatch:
    """Return a batch as data without sentence pairs gives it."""
    micro_batches = [replace(micro, next_sentence_labels=None) for micro in batch.micro_batches]
    return replace(batch, micro_batches=micro_batches, num_pairs=0)


def read_batches(data: str, **settings: Any) -> tuple[list[GlobalBatch], int]:
    """Return the first global batches of a data folder, and the size of its vocabulary."""
    folder = DataFolder.open(Path(data))
    reader = TrainingData(folder, **{"seed": 1, "global_batch_size": 24, "micro_batch_tokens": 600, **settings})
    return [reader.global_batch(step) for step in range(STEPS)], folder.tokenizer().vocab_size


def all_combinations(data: str) -> list[dict[str, Any]]:
    """Trace the first step, which lacks nothing that later ones do, of all combinations."""
    batches, vocab_size = read_batches(data)
    return [trace(combination, batches[:1], vocab_size) for combination in combinations()]


def plain_combinations(data: str) -> dict[str, dict[str, int]]:
    """Return the operators of a step in bf16 with flash attention and dropout, for each optimizer."""
    batches, vocab_size = read_batches(data)
    plain = [Combination(name, "bf16", "varlen", False, 0.1, True) for name in OPTIMIZERS]
    return {one.optimizer: trace(one, batches, vocab_size)["operators"] for one in plain}
