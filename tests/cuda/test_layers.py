"""What a compiled layer moves and launches, and the estimate of a step on an H100 that is made of it."""

import gpu_count
import pytest

from tests.cuda.conftest import Pretended


def test_a_layer_moves_and_launches_no_more_than_is_known(pretended: Pretended) -> None:
    step = gpu_count.RECORDED[0]
    found = pretended("layers.count", step.hidden, step.tokens, step.length)
    assert found["bytes"] / gpu_count.unit(step) == pytest.approx(49.2, abs=0.1)
    assert found["launches"] == 47


@pytest.mark.slow
@pytest.mark.parametrize("step", gpu_count.RECORDED, ids=lambda step: step.name)
def test_the_estimate_reproduces_the_recorded_steps(pretended: Pretended, step: gpu_count.Step) -> None:
    found = pretended("layers.count", step.hidden, step.tokens, step.length, True)
    assert gpu_count.estimate(step, found["bytes"], found["launches"]) == pytest.approx(step.milliseconds, rel=0.15)
