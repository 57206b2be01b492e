"""Steps of `StepGraphs` on CPU, with function calls in place of graph launches; `tests/cuda` traces real captures."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bert_pretrain.examples.examples import IGNORE_INDEX
from bert_pretrain.train.cuda_graph import MAX_GRAPHS, StepGraphs
from bert_pretrain.train.packing import GlobalBatch
from bert_pretrain.train.sampled_softmax import CandidateSampler
from bert_pretrain.train.state import LossScale
from tests.train.conftest import (
    NO_DROPOUT,
    VOCAB_SIZE,
    cut_alike,
    make_examples,
    make_state,
    take_steps,
    tiny,
    without_pairs,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _reset_failure(monkeypatch) -> None:
    monkeypatch.setattr(StepGraphs, "has_failed", False)


class Launches(StepGraphs):
    """Computes a step over static inputs where a graph would be launched."""

    captured = launched = 0
    launch = staticmethod(lambda compute: compute())

    def fits_into_memory(self) -> bool:
        return True

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def launch() -> None:
            self.launched += 1
            self.launch(compute)

        return launch


def alike(rows: int, seed: int = 0, tokens: int = 10_000) -> GlobalBatch:
    return cut_alike(make_examples(rows, seed), tokens, 32, 16.5)


train = partial(take_steps, rates=(2.0**-8, 2.0**-9, 2.0**-10))  # rates that are exact in fp32


@pytest.mark.parametrize(
    ("optimizer", "scaled", "pairs"), [("adamw", True, True), ("lamb", False, True), ("muon", False, False)]
)
def test_steps_over_static_inputs_are_bit_equal(optimizer: str, scaled: bool, pairs: bool) -> None:
    config = tiny(optimizer=optimizer, bias_correction=optimizer != "lamb")  # with dropout
    batches = [alike(128, seed) for seed in range(8)]
    if not pairs:
        sampler = CandidateSampler(np.full(VOCAB_SIZE, 1 / VOCAB_SIZE), 60, seed=1)
        batches = [without_pairs(batch).with_candidates(sampler.draw(n)) for n, batch in enumerate(batches)]
    states = [make_state(config, loss_scale=LossScale.start(CPU) if scaled else None) for _ in range(2)]
    graphs = Launches(states[1].model, states[1].optimizers)
    assert train(states[1], batches * 2, graphs=graphs) == train(states[0], batches * 2)
    tensors = [{**state.tensors(), **dict(state.model.named_parameters())} for state in states]
    torch.testing.assert_close(tensors[1], tensors[0], atol=0, rtol=0)
    # Few shapes, although the batches differ in their numbers of tokens, predictions and sequences.
    assert graphs.launched > len(batches) > graphs.captured > 1
    assert graphs.launched + graphs.captured == 2 * len(batches)
    assert len({batch.num_tokens for batch in batches}) > graphs.captured
    assert all((batch.micro_batches[0].masked_labels == IGNORE_INDEX).any() for batch in batches)


def fail_to_capture(compute: Callable[[], None]) -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


def fail_at_launch(compute: Callable[[], None]) -> None:
    compute()
    raise RuntimeError("operation failed due to a previous error during capture") from torch.OutOfMemoryError()


def compute_twice(compute: Callable[[], None]) -> None:
    compute()
    compute()


@pytest.mark.parametrize(
    ("method", "wrong", "is_final"),
    [("capture", fail_to_capture, True), ("launch", fail_at_launch, False), ("launch", compute_twice, True)],
)
def test_a_failed_or_wrong_capture_does_not_change_the_run(capsys, method: str, wrong: Any, is_final: bool) -> None:
    batch = alike(64)
    plain, state, other = (make_state(tiny()) for _ in range(3))
    graphs, another = (Launches(each.model, each.optimizers) for each in (state, other))
    setattr(graphs, method, wrong)
    assert train(state, [batch] * 4, graphs=graphs) == train(plain, [batch] * 4)
    assert capsys.readouterr().out.count("not captured") == 1
    assert not graphs.drop()
    train(other, [batch] * 3, graphs=another)
    assert another.captured == (0 if is_final else 1)  # one failure is enough for a process, if memory was sufficient


def test_several_micro_batches_and_too_many_shapes_are_not_captured() -> None:
    state = make_state(tiny(model=NO_DROPOUT))
    graphs = Launches(state.model, state.optimizers)
    train(state, [alike(64, tokens=500)] * 3, graphs=graphs)
    assert graphs.captured == 0
    for rows in range(20, MAX_GRAPHS + 24):
        train(state, [alike(rows)] * 2, graphs=graphs)
    assert graphs.captured == graphs.launched == MAX_GRAPHS
    assert graphs.drop()
    train(state, [alike(2)] * 2, graphs=graphs)
    assert graphs.captured == MAX_GRAPHS
    plain = StepGraphs(state.model, state.optimizers)  # a CPU has no graphs
    train(state, [alike(2)] * 2, graphs=plain)
    assert not plain.drop()


@pytest.mark.parametrize(("free", "fits"), [(1000, True), (200, False)])
def test_a_graph_is_used_if_memory_can_hold_the_activations_twice(monkeypatch, free: int, fits: bool) -> None:
    state = make_state(tiny(model=NO_DROPOUT))
    graphs = StepGraphs(state.model, state.optimizers)
    assert not graphs.fits_into_memory()  # on a CPU
    unit = 3 * sum(weight.nbytes for weight in state.model.parameters())
    monkeypatch.setattr(graphs, "_counts", SimpleNamespace(device=torch.device("cuda", 0)))
    bytes_of = {"memory_allocated": 50, "max_memory_allocated": 150, "memory_reserved": 150}
    for name, units in bytes_of.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=units * unit: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * unit - 100 * unit, 0))
    assert graphs.fits_into_memory() == fits


class Counted(Launches):
    """Captures steps on a GPU, and counts launches."""

    also = staticmethod(lambda: None)

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        return super().capture(StepGraphs.capture(self, lambda: (compute(), self.also())))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("waits", [False, True])  # in a capture, which is not allowed
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_graphs_and_failed_captures_on_a_gpu(optimizer: str, waits: bool) -> None:
    config = tiny(optimizer=optimizer)  # with dropout
    batches = [alike(256, seed).to(torch.device("cuda")) for seed in range(3)]
    states = [make_state(config, attention="varlen", compiled=True, device="cuda") for _ in range(2)]
    graphs = Counted(states[1].model, states[1].optimizers)
    if waits:
        graphs.also = torch.cuda.synchronize
    plain, captured = (
        [sums.loss for sums in take_steps(state, batches * 4, torch.bfloat16, graphs=each)]
        for state, each in zip(states, (None, graphs), strict=True)
    )
    assert captured == pytest.approx(plain, rel=1e-3)
    assert (graphs.launched > 0) != waits
    torch.cuda.empty_cache()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
