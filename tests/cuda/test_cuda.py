"""Regression tests on a fake CUDA device: waits, launches, compilations, memory traffic and peak memory of a step."""

from pathlib import Path
from typing import Any

import pytest

from tests.cuda.conftest import OnFakeCuda

GRAPH_LAUNCHES = 20  # of a step as one CUDA graph


def test_recorder_detects_every_wait(on_fake_cuda: OnFakeCuda) -> None:
    waits, harmless = on_fake_cuda("recorder.recorded_counts")
    assert min(waits) > 0, waits
    assert max(harmless) == 0, harmless


def test_step_never_waits_for_the_device(on_fake_cuda: OnFakeCuda, small_data: Path) -> None:
    traced = on_fake_cuda("traces.all_combinations", small_data)
    assert len({one["combination"][:2] for one in traced}) == 9
    for one in traced:
        assert (one["waits"], one["gradients"]) == ([], ["torch.float32"]), one["combination"]


def test_number_of_operators_of_a_step(on_fake_cuda: OnFakeCuda, small_data: Path) -> None:
    """Launches limit the speed of small models. Update the numbers after an intended change."""
    expected = {"adamw": 290, "lamb": 407, "muon": 377}  # one micro-batch, two layers, not compiled
    operators = on_fake_cuda("traces.plain_combinations", small_data)
    for name, counts in operators.items():
        listed = "\n".join(f"{count:5} {operator}" for operator, count in sorted(counts.items()))
        assert sum(counts.values()) == expected[name], f"{name}\n{listed}"
    # Two products in each of five iterations, for three shapes: query, key and value have the shape of the output.
    assert operators["muon"]["aten.baddbmm"] == 2 * 5 * 3


@pytest.mark.parametrize(
    ("architecture", "checkpointing", "attention", "layers", "casts"),
    # Compiled layers cast weights themselves only with activation checkpointing.
    [
        ("bert", True, "varlen", 1, 232),
        ("bert", False, "varlen", 1, 120),
        ("bert", False, "triton", 1, 120),
        ("modernbert", True, "varlen", 3, 434),
        ("modernbert", False, "varlen", 3, 194),
    ],
)
def test_nothing_is_compiled_after_the_first_step(
    on_fake_cuda: OnFakeCuda,
    small_data: Path,
    architecture: str,
    checkpointing: bool,
    attention: str,
    layers: int,
    casts: int,
) -> None:
    """`layers` is the number of different layers, and `casts` those of two steps."""
    compiled = on_fake_cuda("traces.compilations", small_data, checkpointing, attention, architecture)
    # The embeddings, the layers, the masked language model head and the softmax.
    assert compiled["graphs"] == [3 + layers, 3 + layers]
    assert compiled["waits"] == []
    assert compiled["gradients"] == ["torch.float32"]
    assert compiled["casts"] == casts
    tokens, sequences, masked = zip(*compiled["shapes"], strict=True)
    assert min(len(set(sizes)) for sizes in (tokens, sequences, masked)) > 1


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_captured_step_has_no_waits_or_copies_and_does_not_depend_on_data(
    on_fake_cuda: OnFakeCuda, others: bool
) -> None:
    for one in on_fake_cuda("traces.captured_steps", others):
        assert (one["waits"], one["copies"], one["gradients_left"]) == ([], 0, []), one["combination"]
        assert one["operators"][0] == one["operators"][1], one["combination"]
        assert all(left != right for left, right in zip(*one["sizes"], strict=True))
        # Copies of the batch to the device and to the graph's inputs, and three numbers.
        assert one["outside"] <= GRAPH_LAUNCHES, one["combination"]


def test_loop_waits_at_log_lines_only_evaluation_once_and_snapshot_never(
    on_fake_cuda: OnFakeCuda, small_data: Path
) -> None:
    traced = on_fake_cuda("traces.loop_evaluation_snapshot", small_data)
    # It also waits after the first step, which is not timed because it compiles kernels.
    # A log line reads the sums and the number of skipped steps in a row.
    assert {step: len(waits) for step, waits in traced["loop"].items()} == {1: 1, 3: 3, 6: 3}, traced["loop"]
    assert {waits[0] for waits in traced["loop"].values()} == {"torch.cuda.synchronize"}
    assert traced["evaluated_batches"] > 1
    assert len(traced["evaluation"]) == 1, traced["evaluation"]
    assert traced["snapshot_waits"] == []
    assert traced["snapshot_copies"] == traced["tensors"] > 100


@pytest.mark.parametrize(
    ("num_layers", "tokens"),
    [
        (2, 32768),
        pytest.param(None, 8192, marks=pytest.mark.slow),
        pytest.param(None, 131072, marks=pytest.mark.slow),
    ],
)
def test_memory_estimate_is_near_the_traced_peak(on_fake_cuda: OnFakeCuda, num_layers: int | None, tokens: int) -> None:
    ratios = {one["name"]: one["estimate"] / one["peak"] for one in on_fake_cuda("memory.peaks", num_layers, tokens)}
    assert len(ratios) == 7
    assert {name: ratio for name, ratio in ratios.items() if not 0.85 < ratio < 1.15} == {}


@pytest.mark.parametrize(
    ("backend", "settings", "u", "launches"),
    [
        ("varlen", {}, 42.6, 47),
        # One kernel for the rotation and one for the gate in each pass. Hidden states are in fp32.
        ("varlen", {"architecture": "modernbert", "intermediate_size": 2048, "biases": False}, 70.1, 42),
        pytest.param("triton", {}, 39.4, 43, marks=pytest.mark.slow),
    ],
)
def test_memory_traffic_and_launches_of_a_layer(
    on_fake_cuda: OnFakeCuda, backend: str, settings: dict[str, Any], u: float, launches: int
) -> None:
    """The unit u is one tensor of tokens × hidden in 16 bits."""
    hidden, tokens = 768, 30_720
    counts = on_fake_cuda("layers.count", hidden, tokens, 128, backend, settings)
    assert counts["bytes"] / (2 * tokens * hidden) == pytest.approx(u, abs=0.1)
    assert counts["launches"] == launches
