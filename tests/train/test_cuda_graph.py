"""Steps over static inputs, as a CUDA graph computes them, run without one; traces of them are in `tests/cuda`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bert_pretrain.config import ModelConfig
from bert_pretrain.train.batches import IGNORED, GlobalBatch
from bert_pretrain.train.cuda_graph import MAX_GRAPHS, StepGraphs, launches_dominate
from bert_pretrain.train.state import TrainState
from bert_pretrain.train.step import LossScale, StepSums
from tests.train.conftest import NO_DROPOUT, cut_alike, make_state, step

CPU = torch.device("cpu")


class Launches(StepGraphs):
    """Computes a step over static inputs again and again, where a graph would be launched."""

    captured = launched = 0

    def pays(self, batch: GlobalBatch) -> bool:
        return True

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def launch() -> None:
            self.launched += 1
            compute()

        return launch


def train(state: TrainState, batches: list[GlobalBatch], graphs: StepGraphs | None) -> list[StepSums[float]]:
    """Take a step of each batch, at rates that fp32 has exactly."""
    figures = []
    for number, batch in enumerate(batches):
        state.sums.zero_()
        step(state, batch, number, rate=2.0 ** -(8 + number % 3), graphs=graphs)
        figures.append(StepSums.read(state.sums))
    return figures


@pytest.mark.parametrize(
    ("optimizer", "scaled", "pairs"), [("adamw", True, True), ("lamb", False, True), ("muon", False, False)]
)
def test_steps_over_static_inputs_are_bit_equal(
    tiny: Callable[..., Any], examples: Callable[..., Any], optimizer: str, scaled: bool, pairs: bool
) -> None:
    # Dropout as well: its masks come from the seed of each step.
    config = tiny(optimizer=optimizer, bias_correction=optimizer != "lamb")
    batches = [cut_alike(examples(256, seed), 10_000, 32, 16.5) for seed in range(8)]
    if not pairs:
        for batch in batches:
            vars(batch.micro_batches[0])["next_sentence_labels"] = None
            vars(batch)["num_pairs"] = 0
    states = [make_state(config, loss_scale=LossScale.start(CPU) if scaled else None) for _ in range(2)]
    graphs = Launches(states[1].model, states[1].optimizers, torch.float32)
    plain, static = train(states[0], batches * 2, None), train(states[1], batches * 2, graphs)
    assert static == plain
    for name, expected in states[0].tensors().items():
        assert torch.equal(states[1].tensors()[name], expected), name
    for left, right in zip(states[0].model.parameters(), states[1].model.parameters(), strict=True):
        assert torch.equal(left, right)
    # Few shapes, though the numbers of tokens, predictions and real sequences differ from batch to batch.
    assert graphs.launched > len(batches) > graphs.captured > 1
    assert graphs.launched + graphs.captured == 2 * len(batches)
    assert len({batch.num_tokens for batch in batches}) > graphs.captured
    assert all((batch.micro_batches[0].masked_labels == IGNORED).any() for batch in batches)


def test_what_cannot_be_captured_is_computed_as_ever(
    tiny: Callable[..., Any], examples: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    class Fails(Launches):
        def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation not permitted when stream is capturing")

    batch = cut_alike(examples(64), 10_000, 32, 16.5)
    states = [make_state(tiny(model=NO_DROPOUT)) for _ in range(2)]
    graphs = Fails(states[1].model, states[1].optimizers, torch.float32)
    assert train(states[1], [batch] * 4, graphs) == train(states[0], [batch] * 4, None)
    assert capsys.readouterr().out.count("not captured") == 1
    assert not graphs.drop()


def test_micro_batches_and_too_many_shapes_are_computed_as_ever(
    tiny: Callable[..., Any], examples: Callable[..., Any]
) -> None:
    state = make_state(tiny(model=NO_DROPOUT))
    graphs = Launches(state.model, state.optimizers, torch.float32)
    train(state, [cut_alike(examples(64), 500, 32, 16.5)] * 3, graphs)
    assert graphs.captured == 0
    for rows in range(20, MAX_GRAPHS + 24):
        train(state, [cut_alike(examples(rows), 10_000, 32, 16.5)] * 2, graphs)
    assert graphs.captured == graphs.launched == MAX_GRAPHS
    assert graphs.drop()
    train(state, [cut_alike(examples(2), 10_000, 32, 16.5)] * 2, graphs)
    assert graphs.captured == MAX_GRAPHS
    plain = StepGraphs(state.model, state.optimizers, torch.float32)  # a CPU is no card of a known peak
    train(state, [cut_alike(examples(2), 10_000, 32, 16.5)] * 2, plain)
    assert not plain.drop()


@pytest.mark.parametrize(
    ("layers", "flops", "peak", "dominate"),
    [
        (4, 1.0e12, 989e12, True),  # L4-H256, 256 examples of 128, on an H100: 422 launches take 18 ms
        (12, 16e12, 989e12, False),  # Base: 34 ms, and 40 ms of arithmetic
        (4, 1.0e12, 65e12, False),  # on a T4
        (4, 1.0e12, None, False),  # on a card whose peak is unknown
    ],
)
def test_small_networks_are_captured(layers: int, flops: float, peak: float | None, dominate: bool) -> None:
    assert launches_dominate(ModelConfig(num_hidden_layers=layers), flops, peak) == dominate
