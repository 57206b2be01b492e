"""Run training steps on random tokens: to time networks on this machine, or to compile before the data is ready."""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from bert_pretrain.config import Config, ModelConfig, TrainConfig
from bert_pretrain.examples.examples import Examples, Masks
from bert_pretrain.io.cores import available_cores
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.model import devices
from bert_pretrain.model.attention_backend import choose_attention
from bert_pretrain.model.bert import make_network
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
from bert_pretrain.train.electra import losses_of
from bert_pretrain.train.optimizers import make_optimizers, update
from bert_pretrain.train.packing import GlobalBatch, assign_by_length, global_batch_of
from bert_pretrain.train.sampled_softmax import CandidateSampler
from bert_pretrain.train.state import TrainState
from bert_pretrain.train.step import MicroBatchTooLarge, train_step

LENGTH = 64  # tokens per example; for other lengths, batches and vocabularies the FLOPs are scaled
BATCHES = {"cpu": (32,), "cuda": (64, 512, 4096)}  # examples per step
MIN_TIMED_STEPS = 3
MIN_TIMED_SECONDS = {"cpu": 1.0, "cuda": 0.0}  # of all timed steps: the speed of a shared CPU varies within a second
MIN_TIMED_NETWORKS = 3  # networks whose timing may take longer than planned, see `measure_machine`
REFERENCES = {"cpu": "cpu2", "cuda": "h200"}  # shipped machines whose speed ratios extrapolate to networks not timed


def measure_machine(
    seconds: float,
    vocab_size: int,
    train: TrainConfig,
    latest_start: float = 0.0,
) -> MachineFacts:
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
    memory_bytes = _memory_bytes(device)
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
        smallest = SIZES[0].model_config(LENGTH)
        runner = StepRunner(smallest, LENGTH, vocab_size, train, device, is_timed=False)
        if runner.is_compiled:
            torch.compile(torch.neg)(torch.zeros(8, device=device))  # starts the compiler
    outputs = num_outputs(device.type, vocab_size)
    begin = time.perf_counter()
    took = 0.0
    speeds: list[Speed] = []
    with torch.random.fork_rng(devices=[device] if is_cuda else []):
        for size in progress_bar(SIZES, desc="time", unit="network"):
            started = time.perf_counter()
            if speeds:
                expected = took  # on a GPU, where compilation takes most of it
                if not is_cuda:  # the time grows at most with the operations
                    expected *= size.flops_per_token(outputs, LENGTH) / speeds[-1].size.flops_per_token(outputs, LENGTH)
                spent = started - begin
                may_exceed = len(speeds) < MIN_TIMED_NETWORKS and spent < latest_start
                has_time = may_exceed or spent + expected <= seconds
                if not has_time or BYTES_PER_WEIGHT * size.weights >= memory_bytes:
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
        memory_bytes=memory_bytes,
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


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def extrapolated(size: Size, last: Speed, device: str) -> Speed:
    """Return the expected speed of a network: that of the last timed one, scaled by the ratios of a shipped machine."""
    shipped = read_machine(REFERENCES[device])
    expected = shipped.speed(size)
    known = shipped.speed(last.size)
    return Speed(
        layers=size.layers,
        hidden=size.hidden,
        flops_per_second=last.flops_per_second * expected.flops_per_second / known.flops_per_second,
        update_seconds=last.update_seconds * expected.update_seconds / known.update_seconds,
        launch_seconds=last.launch_seconds * size.layers / last.layers,
        is_timed=False,
    )


def _measure_speed(
    size: Size,
    vocab_size: int,
    device: torch.device,
    train: TrainConfig,
) -> Speed:
    """Time steps with a few batch sizes; with only one batch size, also the optimizer update alone."""
    _free_cuda_memory(device)
    train = train.model_copy(update={"optimizer": "muon"})
    training = StepRunner(
        size.model_config(LENGTH),
        LENGTH,
        vocab_size,
        train,
        device,
        is_timed=True,
    )
    outputs = num_outputs(device.type, vocab_size)
    timed: list[tuple[float, float]] = []
    best_rate = 0.0
    for examples in BATCHES[device.type]:
        of_this_size = train.model_copy(update={"global_batch_size": examples})
        batch = training.random_batch(examples, training.micro_batch_tokens(of_this_size), outputs)
        has_graphs = training.is_compiled and not train.activation_checkpointing
        graphs = StepGraphs(training.model, training.state.optimizers) if has_graphs else None
        seconds = _median_seconds(partial(training.step, batch, graphs), device)
        flops = examples * LENGTH * size.flops_per_token(outputs, LENGTH)
        timed.append((flops, seconds))
        if flops / seconds < 1.1 * best_rate:
            break  # larger batches hardly raise the throughput
        best_rate = max(best_rate, flops / seconds)
    update_seconds = None
    if len(timed) == 1:
        keep = torch.zeros((), dtype=torch.bool, device=device)
        update_seconds = _median_seconds(partial(update, training.state.optimizers, 1e-4, keep), device)
    return speed_of(size, timed, update_seconds, has_launches=device.type == "cuda")


def speed_of(
    size: Size,
    timed: list[tuple[float, float]],
    update_seconds: float | None,
    *,
    has_launches: bool,
) -> Speed:
    """Return the speed of a network from the (operations, seconds) of its steps, the smallest step first.

    `update_seconds` is the duration of the optimizer update alone. If it is None, the last two steps determine it: on a
    GPU the update overlaps with kernel launches or is part of a CUDA graph, so alone it would take longer.
    """
    flops, seconds = timed[-1]
    fewer_flops, fewer_seconds = (0.0, update_seconds) if update_seconds is not None else timed[-2]
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


def _free_cuda_memory(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()  # a compiled network is part of a reference cycle
        torch.cuda.empty_cache()


class StepRunner:
    """A network with its optimizer, as training sets them up for examples of at most `length` tokens."""

    def __init__(
        self,
        shape: ModelConfig,
        length: int,
        vocab_size: int,
        train: TrainConfig,
        device: torch.device,
        *,
        is_timed: bool,
    ) -> None:
        """Choose attention, precision and compilation as training does. `is_timed` allows it to time kernels."""
        self.length = length
        self.train = train
        self.device = device
        self.dtype = devices.choose_precision(train.precision, device).dtype
        attention, _ = choose_attention(
            train.attention,
            device,
            self.dtype,
            shape,
            longest=length,
            is_timed=is_timed,
        )
        self.is_compiled, _ = hardware.choose_compile(train.compile, device, attention)
        self.model = make_network(shape, vocab_size, attention, checkpointing=train.activation_checkpointing)
        self.model.initialize(0)
        self.model.to(device).train()
        if self.is_compiled:
            hardware.compile_layers(self.model)
        network = losses_of(self.model, train, compiled=self.is_compiled)
        self.state = TrainState(self.model, network, make_optimizers(self.model, train), None)

    def micro_batch_tokens(self, train: TrainConfig) -> int:
        """Return the tokens of a micro-batch, as training chooses them."""
        return hardware.choose_micro_batch_tokens(
            train,
            self.model,
            self.length,
            self.device,
            self.dtype,
        )

    def random_batch(
        self,
        examples: int,
        micro_batch_tokens: int,
        outputs: int,
    ) -> GlobalBatch:
        """Return a batch of random tokens and labels, with `outputs` candidates if the vocabulary has more tokens."""
        rng = np.random.default_rng(0)
        length = self.length
        vocab_size = self.model.vocab_size
        num_masked = round(MASKED_SHARE * length)
        masks = Masks(
            np.tile(np.arange(1, num_masked + 1, dtype=np.uint16), examples),
            rng.integers(0, vocab_size, examples * num_masked).astype(np.uint16),
            np.arange(examples + 1) * num_masked,
        )
        drawn = Examples(
            rng.integers(0, vocab_size, examples * length).astype(np.uint16),
            np.arange(examples + 1) * length,
            np.full(examples, length // 2, dtype=np.uint16),
            masks,
            rng.integers(0, 2, examples).astype(np.uint8),
        )
        assigned = assign_by_length(drawn.lengths, max(length, micro_batch_tokens), rank=0, num_ranks=1)
        batch = global_batch_of(drawn, assigned, draws=rng if self.model.config.is_electra else None)
        if outputs < vocab_size:
            batch = batch.with_candidates(CandidateSampler(np.ones(vocab_size), outputs, seed=0).draw(step=0))
        return batch.to(self.device)

    def step(self, batch: GlobalBatch, graphs: StepGraphs | None = None) -> None:
        train_step(
            self.state,
            batch,
            self.train,
            step=0,
            learning_rate=1e-4,
            dtype=self.dtype,
            graphs=graphs,
        )


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
    length = config.data.max_seq_length
    vocab_size = config.vocab.size
    try:
        with torch.random.fork_rng(devices=[device]):
            # The kernels are not timed, because the work on the data would distort the times.
            training = StepRunner(
                config.model,
                length,
                vocab_size,
                train,
                device,
                is_timed=False,
            )
            yield
            if training.is_compiled:
                tokens = training.micro_batch_tokens(train)
                examples = max(1, min(train.global_batch_size, tokens // length))
                training.step(training.random_batch(examples, tokens, train.softmax_candidates or vocab_size))
                torch.cuda.synchronize(device)
    finally:
        _free_cuda_memory(device)
