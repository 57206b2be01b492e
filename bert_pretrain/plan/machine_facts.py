"""What the machine can do: the speed of a training step for a few sizes of the network, timed on random tokens."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from bert_pretrain.config import ModelConfig, TrainConfig
from bert_pretrain.examples.examples import Examples, Masks
from bert_pretrain.model.attention import choose_attention
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.parallel.cores import available_cores
from bert_pretrain.parallel.progress import progress_bar
from bert_pretrain.train.batches import GlobalBatch, cut
from bert_pretrain.train.device import hardware
from bert_pretrain.train.device.flops import training_flops
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.optim.optimizer import make_optimizers, update
from bert_pretrain.train.step import StepSums, train_step

MASKED_SHARE = 0.3
"""Of the tokens: of the timed steps, and of plans."""
LENGTH, BATCH = 64, 32
"""Of the timed steps; other lengths, batches and vocabularies are computed from these by their operations."""
TIMED_STEPS = 3


class Size(NamedTuple):
    """Layers and width of a network; heads are 64 wide, the feed-forward layer four times as wide as the rest."""

    layers: int
    hidden: int

    @property
    def weights(self) -> int:
        """Weights of the matrices inside the encoder."""
        return 12 * self.layers * self.hidden**2

    def model_config(self, length: int) -> ModelConfig:
        """Return the network of this size, without dropout."""
        return ModelConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden // 64),
            intermediate_size=4 * self.hidden,
            max_position_embeddings=length,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )

    def flops_per_token(self, vocab_size: int, length: int) -> float:
        """Return the floating-point operations of a token of training, forward and backward."""
        return training_flops(self.model_config(length), vocab_size, 1.0, length, MASKED_SHARE)


SIZES = tuple(
    Size(layers, hidden) for layers, hidden in ((2, 128), (2, 256), (4, 256), (4, 512), (8, 512), (12, 768), (24, 1024))
)
"""From BERT-Tiny to BERT-Large, and one between the smallest two of Turc et al. (2019)."""


class Speed(NamedTuple):
    """How fast a network of some size is trained."""

    flops_per_second: float
    """That the pass forward and backward reaches."""
    update_seconds: float
    """Of the optimizers, per step: the larger a batch, the less they count."""

    def seconds(self, flops: float) -> float:
        """Return the time of a step of so many floating-point operations."""
        return flops / self.flops_per_second + self.update_seconds


@dataclass(frozen=True)
class MachineFacts:
    """How fast training is."""

    cores: int
    speeds: dict[Size, Speed]
    timed: frozenset[Size]
    """Sizes that were timed; others are extrapolated from the largest of them."""

    def tokens_per_second(self, size: Size, vocab_size: int, length: int, batch_tokens: int) -> float:
        """Return the speed of training in batches of so many tokens, without evaluations and checkpoints."""
        flops = batch_tokens * size.flops_per_token(vocab_size, length)
        return batch_tokens / self.speeds[size].seconds(flops)


def measure_machine(seconds: float, vocab_size: int, device_setting: str = "auto") -> MachineFacts:
    """Time steps of the sizes with a vocabulary, the smallest first, for at most about so many seconds."""
    device = hardware.choose_device(device_setting)
    precision = hardware.choose_precision("auto", device)
    hardware.keep_freed_memory(device)  # as training does
    begin = time.perf_counter()
    speeds: dict[Size, Speed] = {}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for size in progress_bar(SIZES, desc="time", unit="network"):
            left = seconds - (time.perf_counter() - begin)
            flops = BATCH * LENGTH * size.flops_per_token(vocab_size, LENGTH)
            if speeds:
                expected = _extrapolated(size, speeds)
                if (2 + TIMED_STEPS) * expected.seconds(flops) + (1 + TIMED_STEPS) * expected.update_seconds > left:
                    break
            speeds[size] = _measure_speed(size, vocab_size, device, precision.dtype)
    return MachineFacts(
        available_cores(),
        {size: speeds.get(size) or _extrapolated(size, speeds) for size in SIZES},
        frozenset(speeds),
    )


def _extrapolated(size: Size, speeds: dict[Size, Speed]) -> Speed:
    """Return the speed to expect from the last size that was timed; Muon multiplies the weights by their width."""
    last, speed = list(speeds.items())[-1]
    update_seconds = speed.update_seconds * size.weights * size.hidden / (last.weights * last.hidden)
    return Speed(speed.flops_per_second, update_seconds)


def _measure_speed(size: Size, vocab_size: int, device: torch.device, dtype: torch.dtype) -> Speed:
    """Time steps, and their updates alone."""
    flops = BATCH * LENGTH * size.flops_per_token(vocab_size, LENGTH)
    config = TrainConfig(optimizer="muon", global_batch_size=BATCH)
    network_config = size.model_config(LENGTH)
    head_size = network_config.hidden_size // network_config.num_attention_heads
    attention, _ = choose_attention("auto", device, dtype, head_size=head_size, dropout_rate=0.0)
    model = BertForPreTraining(network_config, vocab_size, attention=attention)
    model.initialize(0)
    model.to(device).train()
    network, optimizers = PretrainingLoss(model), make_optimizers(model, config)
    sums, keep = StepSums.zeros(device), torch.zeros((), dtype=torch.bool, device=device)
    batch = _random_batch(vocab_size).to(device)

    def step() -> None:
        train_step(network, optimizers, batch, sums, seed=0, step=0, learning_rate=1e-4, max_grad_norm=1.0, dtype=dtype)

    whole, updating = _median_seconds(step, device), _median_seconds(lambda: update(optimizers, 1e-4, keep), device)
    return Speed(flops / max(whole - updating, 0.1 * whole), updating)


def _median_seconds(timed: Callable[[], None], device: torch.device) -> float:
    """Return the median of a few calls; the first, in which kernels are chosen, does not count."""
    times = []
    for _ in range(1 + TIMED_STEPS):
        begin = time.perf_counter()
        timed()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return sorted(times[1:])[TIMED_STEPS // 2]


def _random_batch(vocab_size: int) -> GlobalBatch:
    """Return a batch of full examples with random tokens, pairs and masks."""
    rng = np.random.default_rng(0)
    num_masked = round(MASKED_SHARE * LENGTH)
    offsets = np.arange(BATCH + 1, dtype=np.int64) * LENGTH
    positions = np.sort(rng.permuted(np.tile(np.arange(1, LENGTH - 1), (BATCH, 1)), axis=1)[:, :num_masked], axis=1)
    examples = Examples(
        rng.integers(0, vocab_size, BATCH * LENGTH).astype(np.uint16),
        offsets,
        np.full(BATCH, LENGTH // 2, dtype=np.uint16),
        Masks(
            positions.astype(np.uint16).ravel(),
            rng.integers(0, vocab_size, BATCH * num_masked).astype(np.uint16),
            np.arange(BATCH + 1, dtype=np.int64) * num_masked,
        ),
        rng.integers(0, 2, BATCH).astype(np.uint8),
    )
    return cut(examples, max(LENGTH, hardware.CPU_MICRO_BATCH_TOKENS))
