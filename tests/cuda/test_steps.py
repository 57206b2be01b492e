"""No training step makes the host wait for the device, whatever the settings, nor launches more than is known."""

from pathlib import Path

from tests.cuda.conftest import Pretended

OPERATORS = {"adamw": 282, "lamb": 399, "muon": 369}
"""Of a step with one micro-batch and two layers, not compiled. Small models are bound by the launching of kernels, and
a change that launches more must not go unseen. Update the numbers where a change is meant to be."""


def test_no_step_waits_for_the_device(pretended: Pretended, small_data: Path) -> None:
    traced = pretended("steps.all_combinations", small_data)
    assert len({(one["optimizer"], one["precision"]) for one in traced}) == 9
    assert {one["name"]: one["waits"] for one in traced if one["waits"]} == {}
    assert {one["name"]: one["data_dependent"] for one in traced if one["data_dependent"]} == {}
    assert {one["name"]: one["gradients"] for one in traced if one["gradients"] != ["torch.float32"]} == {}


def test_a_step_launches_so_many_operators(pretended: Pretended, small_data: Path) -> None:
    operators = pretended("steps.plain_combinations", small_data)
    for name, counts in operators.items():
        listed = "\n".join(f"{count:5} {operator}" for operator, count in sorted(counts.items()))
        assert sum(counts.values()) == OPERATORS[name], f"{name}\n{listed}"
    # Two in each of five iterations for each of three shapes, of which query, key and value have that of the output.
    assert operators["muon"]["aten.baddbmm"] == 2 * 5 * 3
