"""Run training steps on random tokens: to time networks on this machine, or to compile before the data is ready."""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from bert_pretrain.config import Config, ModelConfig, TrainConfig
from bert_pretrain.examples.examples import Examples, Masks
from bert_pretrain.io.cores import available_cores
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.model import devices
from bert_pretrain.model.attention_backend import choose_attention
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.plan.facts import (
    BYTES_PER_WEIGHT,
    MASKED_SHARE,
    SIZES,
    MachineFacts,
    Size,
    Speed,
    num_outputs,
    read_machine,
)
from bert_pretrain.train import hardware
from bert_pretrain.train.cuda_graph import StepGraphs
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.optimizers import Optimizers, make_optimizers, update
from bert_pretrain.train.packing import GlobalBatch, assign_by_length, global_batch_of
from bert_pretrain.train.sampled_softmax import CandidateSampler
from bert_pretrain.train.step import MicroBatchTooLarge, StepSums, train_step

LENGTH = 64  # tokens per example; for other lengths, batches and vocabularies the FLOPs are scaled
BATCHES = {"cpu": (32,), "cuda": (64, 512, 4096)}  # examples per step
MIN_TIMED_STEPS = 3
MIN_TIMED_SECONDS = {"cpu": 1.0, "cuda": 0.0}  # of all timed steps: the speed of a shared CPU varies within a second
MIN_TIMED_NETWORKS = 3  # networks whose timing may take longer than planned, see `measure_machine`
REFERENCES = {"cpu": "cpu2", "cuda": "h200"}  # shipped machines whose speed ratios extrapolate to networks not timed


def measure_machine(seconds: float, vocab_size: int, train: TrainConfig, latest_start: float = 0.0) -> MachineFacts:
    """Time training steps of the networks in `SIZES`, the smallest first, and extrapolate the others.

    Args:
        seconds: approximate limit for all timings. The smallest network is always timed. The next ones, up to
            `MIN_TIMED_NETWORKS` in total, may exceed the limit if they start early enough. On a GPU the start of the
            compiler, about 20 s, does not count.
        vocab_size: size of the vocabulary in the timed steps.
        train: the device, the precision, the attention and the compilation of the steps.
        latest_start: seconds from the first timing until which a network may start that exceeds the limit.

    Raises:
        MicroBatchTooLarge, torch.OutOfMemoryError: the smallest network does not fit into memory.
    """
    device = devices.choose_device(train.device)
    devices.configure_cpu(device)  # as in training
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if _setup(SIZES[0].model_config(LENGTH), LENGTH, device, train, is_timed=False).compiled:
            torch.compile(torch.neg)(torch.zeros(8, device=device))  # starts the compiler
    outputs = num_outputs(device.type, vocab_size)
    begin, took = time.perf_counter(), 0.0
    speeds: list[Speed] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for size in progress_bar(SIZES, desc="time", unit="network"):
            started = time.perf_counter()
            if speeds:
                # On a CPU the time grows at most with the operations. On a GPU compilation takes most of it.
                flops, previous = (one.flops_per_token(outputs, LENGTH) for one in (size, speeds[-1].size))
                growth = 1.0 if device.type == "cuda" else max(1.0, flops / previous)
                spent = started - begin
                can_wait = len(speeds) < MIN_TIMED_NETWORKS and spent < latest_start
                if took * growth > seconds - spent and not can_wait:
                    break
            if speeds and BYTES_PER_WEIGHT * size.weights >= _memory_bytes(device):
                break
            try:
                speeds.append(_measure_speed(size, vocab_size, device, train))
            except (MicroBatchTooLarge, torch.OutOfMemoryError):
                if not speeds:
                    raise
                break
            took = time.perf_counter() - started
    speeds += [extrapolated(size, speeds[-1], device.type) for size in SIZES[len(speeds) :]]
    return MachineFacts(
        device=device.type,  # type: ignore[arg-type]
        cores=available_cores(),
        memory_bytes=_memory_bytes(device),
        speeds=tuple(speeds),
    )


class Device(NamedTuple):
    """Device, cores and memory of this machine."""

    type: str
    name: str  # "" for a CPU
    cores: int  # host cores
    memory_bytes: int


def device_of(setting: str) -> Device:
    """Return the device that `train.device` selects."""
    device = devices.choose_device(setting)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Device(device.type, name, available_cores(), _memory_bytes(device))


def extrapolated(size: Size, last: Speed, device: str) -> Speed:
    """Return the expected speed of a network: that of the last timed one, scaled by the ratios of a shipped machine."""
    shipped = read_machine(REFERENCES[device])
    expected, known = shipped.speed(size), shipped.speed(last.size)
    return Speed(
        layers=size.layers,
        hidden=size.hidden,
        flops_per_second=last.flops_per_second * expected.flops_per_second / known.flops_per_second,
        update_seconds=last.update_seconds * expected.update_seconds / known.update_seconds,
        launch_seconds=last.launch_seconds * size.layers / last.layers,
        is_timed=False,
    )


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _measure_speed(size: Size, vocab_size: int, device: torch.device, train: TrainConfig) -> Speed:
    """Time steps with a few batch sizes; with only one batch size, also the optimizer update alone."""
    if device.type == "cuda":
        gc.collect()  # a compiled network is part of a reference cycle
        torch.cuda.empty_cache()
    config, shape = train.model_copy(update={"optimizer": "muon"}), size.model_config(LENGTH)
    attention, dtype, compiled = _setup(shape, LENGTH, device, train, is_timed=True)
    network, optimizers = _make_network(shape, config, vocab_size, attention, device, compiled=compiled)
    model, sums, keep = network.model, StepSums.zeros(device), torch.zeros((), dtype=torch.bool, device=device)
    timed: list[tuple[float, float]] = []
    outputs = num_outputs(device.type, vocab_size)
    for examples in BATCHES[device.type]:
        micro_batch_tokens = hardware.choose_micro_batch_tokens(
            config.model_copy(update={"global_batch_size": examples}), model, LENGTH, device, dtype
        )
        batch = _random_batch(vocab_size, outputs, examples, LENGTH, micro_batch_tokens).to(device)
        graphs = StepGraphs(model, optimizers) if compiled and not train.activation_checkpointing else None

        def step(batch: GlobalBatch = batch, graphs: StepGraphs | None = graphs) -> None:
            train_step(
                network, optimizers, batch, sums, seed=0, step=0, learning_rate=1e-4, max_grad_norm=1.0, dtype=dtype,
                graphs=graphs,
            )  # fmt: skip

        flops = examples * LENGTH * size.flops_per_token(outputs, LENGTH)
        timed.append((flops, _median_seconds(step, device)))
        if _throughput(timed[-1]) < 1.1 * max(map(_throughput, timed[:-1]), default=0.0):
            break  # larger batches hardly raise the throughput
    update_time = _median_seconds(lambda: update(optimizers, 1e-4, keep), device) if len(timed) == 1 else None
    return speed_of(size, timed, update_time, has_launches=device.type == "cuda")


class _Setup(NamedTuple):
    """How a network is trained on a device."""

    attention: str
    dtype: torch.dtype
    compiled: bool


def _setup(model: ModelConfig, length: int, device: torch.device, train: TrainConfig, *, is_timed: bool) -> _Setup:
    """Choose attention, precision and compilation as training does. `is_timed` allows it to time kernels."""
    dtype = devices.choose_precision(train.precision, device).dtype
    attention, _ = choose_attention(
        train.attention, device, dtype, hidden_size=model.hidden_size, num_heads=model.num_attention_heads,
        dropout_rate=model.attention_probs_dropout_prob, longest=length, is_timed=is_timed,
    )  # fmt: skip
    return _Setup(attention, dtype, hardware.choose_compile(train.compile, device, attention)[0])


def _make_network(
    model_config: ModelConfig, config: TrainConfig, vocab_size: int, attention: str, device: torch.device, *,
    compiled: bool,
) -> tuple[PretrainingLoss, Optimizers]:  # fmt: skip
    model = BertForPreTraining(model_config, vocab_size, attention=attention)
    model.initialize(0)
    model.encoder.activation_checkpointing = config.activation_checkpointing
    model.to(device).train()
    if compiled:
        hardware.compile_layers(model)
    return PretrainingLoss(model, compiled=compiled), make_optimizers(model, config)


def compile_ahead(config: Config) -> Iterator[None]:
    """Compile for CUDA what the first training step needs, by running a step on random tokens.

    The compiled code stays in this process. Yield between parts of the work, so that the caller can stop.
    """
    train = config.train
    device = devices.choose_device(train.device)
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    if not hardware.choose_compile(train.compile, device, train.attention)[0]:
        return
    from torch._inductor.async_compile import AsyncCompile  # slow to import

    AsyncCompile.wakeup()  # starts its processes while this one imports the rest
    yield
    # The kernels are not timed, because the work on the data would distort the times.
    attention, dtype, compiled = _setup(config.model, config.data.max_seq_length, device, train, is_timed=False)
    yield
    if not compiled:
        return
    try:
        with torch.random.fork_rng(devices=[device]):
            yield from _compile_step(config, attention, device, dtype)
    finally:
        gc.collect()  # a compiled network is part of a reference cycle
        torch.cuda.empty_cache()


def _compile_step(config: Config, attention: str, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    train, length, vocab_size = config.train, config.data.max_seq_length, config.vocab.size
    network, optimizers = _make_network(config.model, train, vocab_size, attention, device, compiled=True)
    yield
    tokens = hardware.choose_micro_batch_tokens(train, network.model, length, device, dtype)
    examples = max(1, min(train.global_batch_size, tokens // length))
    batch = _random_batch(vocab_size, train.softmax_candidates or vocab_size, examples, length, tokens).to(device)
    train_step(
        network, optimizers, batch, StepSums.zeros(device), seed=0, step=0, learning_rate=0.0, max_grad_norm=1.0,
        dtype=dtype,
    )  # fmt: skip
    torch.cuda.synchronize(device)


def _throughput(timed: tuple[float, float]) -> float:
    flops, seconds = timed
    return flops / seconds


def speed_of(size: Size, timed: list[tuple[float, float]], update_time: float | None, *, has_launches: bool) -> Speed:
    """Return the speed of a network from the (operations, seconds) of its steps, the smallest step first.

    `update_time` is the duration of the optimizer update alone, in seconds. If it is None, the last two steps determine
    it: on a GPU the update overlaps with kernel launches or is part of a CUDA graph, so alone it would take longer.
    """
    flops, seconds = timed[-1]
    if update_time is not None:
        rate = flops / max(seconds - update_time, 0.1 * seconds)
    else:
        fewer_flops, fewer_seconds = timed[-2]
        rate = (flops - fewer_flops) / max(seconds - fewer_seconds, 0.1 * seconds)
    return Speed(
        layers=size.layers,
        hidden=size.hidden,
        flops_per_second=rate,
        update_seconds=max(0.0, seconds - flops / rate),
        launch_seconds=min(each for _, each in timed) if has_launches else 0.0,
    )


def _median_seconds(call: Callable[[], None], device: torch.device) -> float:
    """Return the median time of a few calls, without the first call, which chooses or compiles kernels."""
    times: list[float] = []
    while len(times) <= MIN_TIMED_STEPS or sum(times[1:]) < MIN_TIMED_SECONDS[device.type]:
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _random_batch(vocab_size: int, outputs: int, examples: int, length: int, micro_batch_tokens: int) -> GlobalBatch:
    """Return a batch of examples of `length` random tokens, with random pairs and masks.

    If `outputs` is less than `vocab_size`, the batch has this number of candidates of a sampled softmax.
    """
    rng = np.random.default_rng(0)
    num_masked = round(MASKED_SHARE * length)
    offsets = np.arange(examples + 1, dtype=np.int64) * length
    positions = np.sort(rng.permuted(np.tile(np.arange(1, length - 1), (examples, 1)), axis=1)[:, :num_masked], axis=1)
    drawn = Examples(
        rng.integers(0, vocab_size, examples * length).astype(np.uint16),
        offsets,
        np.full(examples, length // 2, dtype=np.uint16),
        Masks(
            positions.astype(np.uint16).ravel(),
            rng.integers(0, vocab_size, examples * num_masked).astype(np.uint16),
            np.arange(examples + 1, dtype=np.int64) * num_masked,
        ),
        rng.integers(0, 2, examples).astype(np.uint8),
    )
    assigned = assign_by_length(drawn.lengths, max(length, micro_batch_tokens), rank=0, num_ranks=1)
    batch = global_batch_of([(drawn, np.arange(examples))], assigned)
    if outputs >= vocab_size:
        return batch
    return batch.with_candidates(CandidateSampler(np.ones(vocab_size), outputs, seed=0).draw(step=0))
