"""Steps over static inputs, as a CUDA graph computes them, run without one; traces of them are in `tests/cuda`."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from bert_pretrain.config import ModelConfig
from bert_pretrain.train.cuda_graph import MAX_GRAPHS, StepGraphs, launches_dominate
from bert_pretrain.train.packing import IGNORED, GlobalBatch
from bert_pretrain.train.state import TrainState
from bert_pretrain.train.step import LossScale
from tests.train.conftest import NO_DROPOUT, cut_alike, make_examples, make_state, take_steps, tiny, without_pairs

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepGraphs, "has_failed", False)


class Launches(StepGraphs):
    """Computes a step over static inputs again and again, where a graph would be launched."""

    captured = launched = 0

    def pays(self, batch: GlobalBatch) -> bool:
        return True

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def launch() -> None:
            self.launched += 1
            self.launch(compute)

        return launch

    def launch(self, compute: Callable[[], None]) -> None:
        compute()


train = partial(take_steps, rates=(2.0**-8, 2.0**-9, 2.0**-10))
"""Take a step of each batch, at rates that fp32 has exactly."""


@pytest.mark.parametrize(
    ("optimizer", "scaled", "pairs"), [("adamw", True, True), ("lamb", False, True), ("muon", False, False)]
)
def test_steps_over_static_inputs_are_bit_equal(optimizer: str, scaled: bool, pairs: bool) -> None:
    # Dropout as well: its masks come from the seed of each step.
    config = tiny(optimizer=optimizer, bias_correction=optimizer != "lamb")
    batches = [cut_alike(make_examples(128, seed), 10_000, 32, 16.5) for seed in range(8)]
    batches = batches if pairs else [without_pairs(batch) for batch in batches]
    states = [make_state(config, loss_scale=LossScale.start(CPU) if scaled else None) for _ in range(2)]
    graphs = Launches(states[1].model, states[1].optimizers, torch.float32)
    plain, static = train(states[0], batches * 2, graphs=None), train(states[1], batches * 2, graphs=graphs)
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


class Fails(Launches):
    """Cannot capture a step."""

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")


class FailsAtLaunch(Launches):
    """Cannot launch what it has captured, and has changed the state before."""

    def launch(self, compute: Callable[[], None]) -> None:
        compute()
        raise torch.OutOfMemoryError


class Repeats(Launches):
    """Launches more than a step."""

    def launch(self, compute: Callable[[], None]) -> None:
        compute()
        compute()


@pytest.mark.parametrize("wrong", [Fails, FailsAtLaunch, Repeats])
def test_what_cannot_be_captured_or_is_wrong_is_computed_as_ever(
    capsys: pytest.CaptureFixture[str], wrong: type[Launches]
) -> None:
    batch = cut_alike(make_examples(64), 10_000, 32, 16.5)
    states = [make_state(tiny()) for _ in range(3)]
    graphs = wrong(states[1].model, states[1].optimizers, torch.float32)
    assert train(states[1], [batch] * 4, graphs=graphs) == train(states[0], [batch] * 4, graphs=None)
    assert capsys.readouterr().out.count("not captured") == 1
    assert not graphs.drop()
    another = Launches(states[2].model, states[2].optimizers, torch.float32)
    train(states[2], [batch] * 3, graphs=another)
    assert another.captured == 0  # one failure is enough for a process


def test_micro_batches_and_too_many_shapes_are_computed_as_ever() -> None:
    state = make_state(tiny(model=NO_DROPOUT))
    graphs = Launches(state.model, state.optimizers, torch.float32)
    train(state, [cut_alike(make_examples(64), 500, 32, 16.5)] * 3, graphs=graphs)
    assert graphs.captured == 0
    for rows in range(20, MAX_GRAPHS + 24):
        train(state, [cut_alike(make_examples(rows), 10_000, 32, 16.5)] * 2, graphs=graphs)
    assert graphs.captured == graphs.launched == MAX_GRAPHS
    assert graphs.drop()
    train(state, [cut_alike(make_examples(2), 10_000, 32, 16.5)] * 2, graphs=graphs)
    assert graphs.captured == MAX_GRAPHS
    plain = StepGraphs(state.model, state.optimizers, torch.float32)  # a CPU is no card of a known peak
    train(state, [cut_alike(make_examples(2), 10_000, 32, 16.5)] * 2, graphs=plain)
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


class Counted(Launches):
    """Captures any step on a card, and counts launches."""

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        return super().capture(StepGraphs.capture(self, compute))


class Waits(Counted):
    """Does in a capture what a capture does not allow."""

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        return super().capture(lambda: (compute(), torch.cuda.synchronize()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("kind", [Counted, Waits])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_on_a_card_graphs_compute_the_steps_and_a_failed_capture_leaves_nothing(
    kind: type[Counted], optimizer: str
) -> None:
    config = tiny(optimizer=optimizer)  # with dropout
    batches = [cut_alike(make_examples(256, seed), 10_000, 32, 16.5).to(torch.device("cuda")) for seed in range(3)]

    def losses(state: TrainState, graphs: StepGraphs | None) -> list[float]:
        return [metrics.loss for metrics in take_steps(state, batches * 4, torch.bfloat16, graphs=graphs)]

    states = [make_state(config, attention="varlen", compiled=True, device="cuda") for _ in range(2)]
    graphs = kind(states[1].model, states[1].optimizers, torch.bfloat16)
    assert losses(states[1], graphs) == pytest.approx(losses(states[0], None), rel=1e-3)
    assert (graphs.launched > 0) == (kind is Counted)
    torch.cuda.empty_cache()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
