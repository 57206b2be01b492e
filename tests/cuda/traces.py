"""Trace steps, the training loop, an evaluation and a snapshot on the fake CUDA device."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensorMode

from bert_pretrain.config import Config
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.model.devices import DTYPES, Precision
from bert_pretrain.train import cuda_graph, decoder_loss
from bert_pretrain.train.checkpoint import HostBuffers, all_tensors
from bert_pretrain.train.cuda_graph import StepGraphs
from bert_pretrain.train.distributed import SINGLE_PROCESS
from bert_pretrain.train.evaluation import evaluate_batches
from bert_pretrain.train.loader import TrainingData, evaluation_batches
from bert_pretrain.train.log import RunLog
from bert_pretrain.train.loop import Loop
from bert_pretrain.train.packing import GlobalBatch, ShapeMultiples, global_batch_of
from bert_pretrain.train.resolved import ResolvedRun
from bert_pretrain.train.sampled_softmax import CandidateSampler
from bert_pretrain.train.schedule import Length
from bert_pretrain.train.state import TrainState
from tests.cuda.fake_cuda import CUDA, fake_cuda, fake_global_batch, make_state
from tests.cuda.recorder import Recorder
from tests.train.conftest import VOCAB_SIZE, make_examples, without_pairs
from tests.train.conftest import step as train_one

OPTIMIZERS = ("adamw", "lamb", "muon")


class Combination(NamedTuple):
    """Settings that change the operators of a step."""

    optimizer: str = "adamw"
    precision: str = "bf16"
    attention: str = "varlen"
    checkpointing: bool = False
    dropout: float = 0.1
    pairs: bool = True
    taught: bool = False  # whether the loss has a teacher
    architecture: str = "bert"


# Four layers: the first and last are global, and only the first has no normalization before its attention.
MODERN = {"architecture": "modernbert", "num_hidden_layers": 4, "local_attention": 8}


def combinations() -> Iterator[Combination]:
    """Yield valid combinations, each with one of the optimizers."""
    checkpointing_and_dropout = ((False, 0.0), (False, 0.1), (True, 0.1))  # recomputation must repeat the dropout
    choices = itertools.product(("bf16", "fp16", "fp32"), ("varlen", "triton", "padded"), checkpointing_and_dropout)
    optimizers = itertools.cycle(OPTIMIZERS)
    for number, (precision, attention, (checkpointing, dropout)) in enumerate(choices):
        if attention == "padded" or precision != "fp32":  # other attention needs 16 bits
            has_pairs = (number + number // 2) % 2 == 0
            is_taught = number % 4 == 1
            yield Combination(next(optimizers), precision, attention, checkpointing, dropout, has_pairs, is_taught)
    for architecture in ("albert", "electra"):
        yield Combination("lamb", architecture=architecture, pairs=architecture == "albert")
        yield Combination("muon", "fp16", "triton", checkpointing=True, architecture=architecture, pairs=False)
    yield Combination("muon", architecture="modernbert", pairs=False)
    yield Combination("adamw", "fp16", checkpointing=True, architecture="modernbert", pairs=False)
    yield Combination("lamb", attention="padded", architecture="modernbert", pairs=False)


class Traced:
    """A run on the fake device. If layers are compiled, the backend gets their graphs and that of the softmax."""

    def __init__(self, mode: FakeTensorMode, combination: Combination, backend: Any) -> None:
        sizes = {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "max_position_embeddings": 32,
            "hidden_dropout_prob": combination.dropout,
            "attention_probs_dropout_prob": combination.dropout if combination.attention == "padded" else 0.0,
        }
        if combination.architecture == "modernbert":
            sizes |= MODERN
        elif combination.architecture != "bert":
            sizes |= {"architecture": combination.architecture, "embedding_size": 32, "generator_size": 0.5}
        train = {
            "objective": "electra" if combination.architecture == "electra" else "mlm",
            "optimizer": combination.optimizer,
            "precision": combination.precision,
            "activation_checkpointing": combination.checkpointing,
        }
        self.mode, self.pairs = mode, combination.pairs
        self.config = Config.model_validate({"model": sizes, "train": train})
        self.state = make_state(
            self.config, VOCAB_SIZE, attention=combination.attention, pairs=self.pairs, backend=backend,
            taught=combination.taught,
        )  # fmt: skip

    def step(self, batch: GlobalBatch, number: int, graphs: StepGraphs | None = None) -> Recorder:
        """Run one training step with a batch, and record its operators."""
        fake = fake_global_batch(self.mode, batch if self.pairs else without_pairs(batch))
        with Recorder() as recorder:
            run_step(self.state, self.config, fake, number, graphs)
        return recorder

    def gradients(self) -> list[str]:
        """Return the types of all gradients."""
        return sorted({str(one.grad.dtype) for one in self.state.model.parameters() if one.grad is not None})


@contextlib.contextmanager
def traced(combination: Combination, backend: Any = None) -> Iterator[Traced]:
    softmax = functools.partial(decoder_loss._compiled_softmax, backend)
    with fake_cuda() as mode, mock.patch.object(decoder_loss, "_compiled_softmax", softmax):
        yield Traced(mode, combination, backend)


def run_step(
    state: TrainState, config: Config, batch: GlobalBatch, step: int, graphs: StepGraphs | None = None
) -> None:
    """Copy a batch to the device, and run one training step."""
    batch = batch.to(CUDA)
    train_one(state, batch, step, DTYPES[config.train.precision], graphs=graphs)
    state.count(batch)


def read_batch(data: Path, size: int = 24, tokens: int = 600, **settings: Any) -> GlobalBatch:
    reader = TrainingData(DataFolder.open(data), seed=1, global_batch_size=size, micro_batch_tokens=tokens, **settings)
    return reader.global_batch(0)


def all_combinations(data: Path) -> list[dict[str, Any]]:
    """Return the waits and the types of gradients of the first step."""
    batch, rows = read_batch(data, with_draws=True), []
    for combination in combinations():
        with traced(combination) as run:
            waits = run.step(batch, 0).waits
            rows.append({"combination": tuple(combination), "waits": waits, "gradients": run.gradients()})
    return rows


def plain_combinations(data: Path) -> dict[str, dict[str, int]]:
    """Return the operators of the second step in bf16 with flash attention and dropout, for each optimizer."""
    batch, operators = read_batch(data), {}
    for optimizer in OPTIMIZERS:
        with traced(Combination(optimizer)) as run:
            recorders = [run.step(batch, number) for number in range(2)]
            operators[optimizer] = dict(recorders[-1].operators)
    return operators


def compilations(data: Path, checkpointing: bool, attention: str, architecture: str) -> dict[str, Any]:
    """Return the number of compiled graphs after each of two steps in fp16, the waits and the operators."""
    batches = [read_batch(data, size, 10**6, static_shapes=True) for size in (24, 37)]
    compiled, graphs, recorders = [], [], []

    def counter(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Count the graphs, and compile them without code generation."""
        compiled.append(graph)
        return aot_eager(graph, inputs)

    combination = Combination(
        "adamw", "fp16", attention, checkpointing, pairs=architecture == "bert", architecture=architecture
    )
    with traced(combination, counter) as run:
        for number, batch in enumerate(batches):
            recorders.append(run.step(batch, number))
            graphs.append(len(compiled))
        gradients = run.gradients()
    micro = [batch.micro_batches[0] for batch in batches]
    return {
        "graphs": graphs,
        "waits": [wait for recorder in recorders for wait in recorder.waits],
        "casts": sum(recorder.operators["aten._to_copy"] for recorder in recorders),
        "gradients": gradients,
        "shapes": [(len(one.input_ids), len(one.cu_seqlens), len(one.masked_positions)) for one in micro],
    }


class TracedGraphs(StepGraphs):
    """Records the operators of a capture in place of a CUDA graph."""

    def fits_into_memory(self) -> bool:
        return True

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.captured = Recorder()
        with self.captured, mock.patch("torch.manual_seed", side_effect=AssertionError("seeded in a capture")):
            compute()
        return lambda: None


def captured_steps(others: bool) -> list[dict[str, Any]]:
    """Trace the capture of a step for each optimizer and three networks, or for `others`, which repeat their parts.

    Two batches of the same shape differ in their tokens, predictions and lengths. The captures must be equal. The last
    pair of batches has candidates of a sampled softmax.
    """
    multiples = ShapeMultiples(1024, 256, 32, 32, with_labels=True)
    batches = [global_batch_of(make_examples(rows, rows), [np.arange(rows)], multiples) for rows in (23, 24)]
    drawn = [
        global_batch_of(make_examples(rows, rows), [np.arange(rows)], multiples, np.random.default_rng(rows))
        for rows in (23, 24)
    ]
    sampler = CandidateSampler(np.full(VOCAB_SIZE, 1 / VOCAB_SIZE), 40, seed=0)
    sampled = [batch.with_candidates(sampler.draw(step)) for step, batch in enumerate(batches)]
    if others:
        return [
            _captured(Combination("muon", attention="triton", dropout=0.0), batches, None),
            _captured(Combination("muon", dropout=0.0), sampled, aot_eager),
            _captured(Combination("adamw", architecture="albert"), batches, aot_eager),
        ]
    return [
        _captured(Combination("adamw", "fp16"), batches, aot_eager),
        _captured(Combination("lamb", pairs=False, taught=True), batches, None),
        _captured(Combination("adamw", taught=True), sampled, aot_eager),
        _captured(Combination("adamw", architecture="electra", pairs=False), drawn, aot_eager),
        _captured(Combination("muon", dropout=0.0, pairs=False, architecture="modernbert"), sampled, aot_eager),
    ]


def _captured(combination: Combination, batches: list[GlobalBatch], backend: Any) -> dict[str, Any]:
    captured: list[Recorder] = []
    compared = mock.patch.object(cuda_graph.Trial, "distances", return_value=(0.0, 0.0))  # fake tensors have no values
    with compared, traced(combination, backend) as run:
        for batch in batches:
            graphs = TracedGraphs(run.state.model, run.state.optimizers)
            for number in range(3):
                outside = run.step(batch, number, graphs)
            captured.append(graphs.captured)
        gradients_left = run.gradients()
    return {
        "combination": tuple(combination),
        "waits": [wait for recorder in (outside, *captured) for wait in recorder.waits],
        "copies": sum(recorder.asynchronous_copies for recorder in captured),
        "operators": [dict(recorder.operators) for recorder in captured],
        "outside": sum(outside.operators.values()),
        "gradients_left": gradients_left,
        "sizes": [[batch.num_sequences, batch.num_tokens, batch.num_predictions] for batch in batches],
    }


MICRO_BATCH_TOKENS = 300
STEPS = 6
SYNCHRONIZE = "torch.cuda.synchronize"


class FakeData(TrainingData):
    """Global batches with fake tensors. They are made in advance, because a fake mode must not be used in a thread."""

    def prepare(self, mode: FakeTensorMode) -> None:
        self._batches = [fake_global_batch(mode, super(FakeData, self).global_batch(step)) for step in range(STEPS)]

    def global_batch(self, step: int) -> GlobalBatch:
        return self._batches[step]


def loop_evaluation_snapshot(data: Path) -> dict[str, Any]:
    """Trace a loop of six steps, and separately an evaluation and a snapshot of the state."""
    folder = DataFolder.open(data)
    train = {"max_steps": STEPS, "log_every": 3, "eval_every": 100, "save_every": 100, "global_batch_size": 24}
    with traced(Combination()) as run:
        config = run.config.model_copy(update={"train": run.config.train.model_copy(update=train)})
        loop = _loop(run.mode, run.state, config, folder)
        with Recorder() as evaluation:
            micro_batches = evaluation_batches(folder, "validation", MICRO_BATCH_TOKENS)
            batches = [batch.with_tensors(run.mode.from_tensor) for batch in micro_batches]
            evaluate_batches(run.state.losses, batches, CUDA, torch.bfloat16)
        with Recorder() as snapshot:
            copies, _ = HostBuffers().copy(all_tensors(run.state))
    return {
        "loop": loop,
        "evaluation": evaluation.waits,
        "evaluated_batches": len(batches),
        "snapshot_waits": snapshot.waits,
        "snapshot_copies": snapshot.asynchronous_copies,
        "tensors": len(copies),
    }


def _loop(mode: FakeTensorMode, state: TrainState, config: Config, folder: DataFolder) -> dict[int, list[str]]:
    data = FakeData(folder, seed=1, global_batch_size=24, micro_batch_tokens=MICRO_BATCH_TOKENS)
    data.prepare(mode)
    # Nothing is evaluated and no checkpoint is written, because fake tensors have no values.
    splits = {"train": folder.manifest["splits"]["train"]}
    folder = DataFolder(folder.path, {**folder.manifest, "splits": splits})
    run = ResolvedRun(
        config, folder, folder.tokenizer(), Path("run"), None, None, Length(STEPS), CUDA, Precision("bf16", ""),
        "varlen", "", False, "", SINGLE_PROCESS, 0, MICRO_BATCH_TOKENS, folder.max_seq_length,
    )  # fmt: skip
    waits: dict[int, list[str]] = {}

    class ByStep(list[str]):
        def append(self, note: str) -> None:
            waits.setdefault(state.progress.step, []).append(note.rpartition(" at ")[2])

    recorder = Recorder()
    recorder.waits = ByStep()
    with (
        contextlib.closing(RunLog(run, state.progress)) as log,
        mock.patch("torch.cuda.get_device_name", return_value="NVIDIA H200"),
        mock.patch("torch.cuda.synchronize", side_effect=lambda *_: recorder.waits.append(SYNCHRONIZE)),
        recorder,
    ):
        Loop(run, state, data, log, is_start=False).fit()
    return waits
