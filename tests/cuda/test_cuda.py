"""On a pretended device: no step waits, launches, compiles, moves or takes more than is known."""

from pathlib import Path
from typing import Any

import gpu_count
import pytest

from tests.cuda.conftest import Pretended

AROUND_A_GRAPH = 20
SYNCHRONIZE = "torch.cuda.synchronize"
OPERATORS = {"adamw": 290, "lamb": 407, "muon": 377}
"""Of a step with one micro-batch and two layers, not compiled. Small models are bound by the launching of kernels, and
a change that launches more must not go unseen. Update the numbers where a change is meant to be."""


def test_the_recorder_sees_every_wait(pretended: Pretended) -> None:
    waits, data_dependent, harmless = pretended("recorder.notes")
    assert all(count > 0 for count, _ in waits), waits
    assert all(count > 0 for _, count in data_dependent), data_dependent
    assert all(counts == [0, 0] for counts in harmless), harmless


def test_no_step_waits_for_the_device(pretended: Pretended, small_data: Path) -> None:
    traced = pretended("traces.all_combinations", small_data)
    assert len({tuple(one["name"].split(", ")[:2]) for one in traced}) == 9
    for name, expected in (("waits", []), ("gradients", ["torch.float32"])):
        assert {one["name"]: one[name] for one in traced if one[name] != expected} == {}


def test_a_step_launches_so_many_operators(pretended: Pretended, small_data: Path) -> None:
    operators = pretended("traces.plain_combinations", small_data)
    for name, counts in operators.items():
        listed = "\n".join(f"{count:5} {operator}" for operator, count in sorted(counts.items()))
        assert sum(counts.values()) == OPERATORS[name], f"{name}\n{listed}"
    # Two in each of five iterations for each of three shapes, of which query, key and value have that of the output.
    assert operators["muon"]["aten.baddbmm"] == 2 * 5 * 3


@pytest.mark.parametrize(("checkpointing", "attention"), [(True, "varlen"), (False, "varlen"), (False, "triton")])
def test_nothing_is_compiled_after_the_first_step(
    pretended: Pretended, small_data: Path, checkpointing: bool, attention: str
) -> None:
    found = pretended("traces.compilations", small_data, checkpointing, attention)
    # The embeddings, one of the layers, the masked-language-model head and the softmax.
    assert found["graphs"] == [4, 4]
    assert found["waits"] == []
    assert found["gradients"] == ["torch.float32"]
    # In two steps of two layers; compiled layers cast by themselves only where they are computed twice.
    assert found["casts"] == (230 if checkpointing else 118)
    tokens, sequences, masked = zip(*found["shapes"], strict=True)
    assert min(len(set(sizes)) for sizes in (tokens, sequences, masked)) > 1


def test_a_captured_step_waits_for_nothing_copies_nothing_and_does_not_depend_on_data(pretended: Pretended) -> None:
    traced = pretended("traces.captured_steps")
    for one in traced:
        assert (one["waits"], one["copies"], one["gradients_left"]) == ([], 0, 0), one["name"]
        assert one["operators"][0] == one["operators"][1], one["name"]
        assert all(left != right for left, right in zip(*one["sizes"], strict=True))
        # Bringing the batch to the device and to the inputs, and three numbers.
        assert one["around"] <= AROUND_A_GRAPH, one["name"]


@pytest.fixture(scope="module")
def traced(pretended: Pretended, small_data: Path) -> Any:
    return pretended("traces.loop_evaluation_snapshot", small_data)


def test_the_loop_waits_at_log_lines_only(traced: Any) -> None:
    # Also after the first step, in which kernels are chosen or compiled, so as not to time it.
    assert {step: waits[0] for step, waits in traced["loop"].items()} == dict.fromkeys((1, 3, 6), SYNCHRONIZE)
    # A log line reads the sums, and whether too many steps in a row were skipped.
    assert {step: len(waits) - 1 for step, waits in traced["loop"].items()} == {1: 0, 3: 2, 6: 2}, traced["loop"]


def test_an_evaluation_reads_its_sums_once_and_a_snapshot_copies_each_tensor_once_without_waiting(traced: Any) -> None:
    assert traced["evaluated_batches"] > 1
    assert len(traced["evaluation"]) == 1, traced["evaluation"]
    assert traced["snapshot_waits"] == []
    assert traced["snapshot_copies"] == traced["tensors"] > 100
    assert traced["data_dependent"] == []


@pytest.mark.parametrize(
    ("num_layers", "tokens"),
    [
        (2, 32768),
        pytest.param(None, 8192, marks=pytest.mark.slow),
        pytest.param(None, 131072, marks=pytest.mark.slow),
    ],
)
def test_the_estimate_of_memory_is_near_the_traced_peak(
    pretended: Pretended, num_layers: int | None, tokens: int
) -> None:
    ratios = {one["name"]: one["estimate"] / one["peak"] for one in pretended("memory.peaks", num_layers, tokens)}
    assert len(ratios) == 2
    assert {name: ratio for name, ratio in ratios.items() if not 0.85 < ratio < 1.15} == {}


def test_a_layer_moves_and_launches_no_more_than_is_known(pretended: Pretended) -> None:
    step = gpu_count.RECORDED[0]
    for backend, u, launches in (("varlen", 42.6, 47), ("triton", 39.4, 43)):
        found = pretended("layers.count", step.hidden, step.tokens, step.length, backend)
        assert found["bytes"] / gpu_count.unit(step) == pytest.approx(u, abs=0.1), backend
        assert found["launches"] == launches, backend


@pytest.mark.slow
@pytest.mark.parametrize("step", gpu_count.RECORDED, ids=lambda step: step.name)
def test_the_estimate_reproduces_the_recorded_steps(pretended: Pretended, step: gpu_count.Step) -> None:
    found = pretended("layers.count", step.hidden, step.tokens, step.length, "varlen", True)
    estimate = gpu_count.estimate(step, found["bytes"], found["launches"], sum(gpu_count.ATTENTION_U["varlen"]))
    assert estimate == pytest.approx(step.milliseconds, rel=0.15)
