"""One step: works in every precision, and draws dropout from its place in the run."""

from typing import Any

import pytest
import torch

from bert_pretrain.train.packing import cut
from bert_pretrain.train.step import LOSS_SCALE_GROWTH_STEPS, LossScale, StepSums
from tests.train.conftest import NO_DROPOUT, make_examples, make_state, step, take_steps, tiny


@pytest.fixture
def batch() -> Any:
    return cut(make_examples(20), 200)


def test_fp16_with_a_loss_scale_trains_and_recovers_from_an_overflow(batch: Any) -> None:
    scale = LossScale(torch.tensor(2.0**40), torch.tensor(0, dtype=torch.int32))
    state = make_state(tiny(), loss_scale=scale)
    before = [parameter.clone() for parameter in state.model.parameters()]
    step(state, batch, 0, torch.float16)
    assert (scale.scale.item(), StepSums.read(state.sums).skipped) == (2.0**39, 1)
    assert all(map(torch.equal, before, state.model.parameters()))
    scale.scale.fill_(2.0**12)
    losses = [sums.loss for sums in take_steps(state, [batch] * 29, torch.float16, rates=(5e-3,))]
    assert losses[-1] < losses[0] - 0.5


def test_the_loss_scale_grows_after_many_good_steps() -> None:
    scale = LossScale(torch.tensor(8.0), torch.tensor(LOSS_SCALE_GROWTH_STEPS - 2, dtype=torch.int32))
    for expected in (8.0, 16.0, 16.0):
        scale.update(torch.tensor(False))
        assert scale.scale.item() == expected
    scale.update(torch.tensor(True))
    assert (scale.scale.item(), scale.good_steps.item()) == (8.0, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lower_precision_gives_nearly_the_same_step(batch: Any, dtype: torch.dtype) -> None:
    scale = LossScale.start(torch.device("cpu")) if dtype == torch.float16 else None
    exact, close = make_state(tiny(model=NO_DROPOUT)), make_state(tiny(model=NO_DROPOUT), loss_scale=scale)
    step(exact, batch)
    step(close, batch, dtype=dtype)
    left, right = StepSums.read(exact.sums), StepSums.read(close.sums)
    assert right.skipped == 0
    assert right.loss == pytest.approx(left.loss, rel=2e-3)
    assert right.grad_norm == pytest.approx(left.grad_norm, rel=2e-2)


def test_dropout_is_a_function_of_seed_step_and_micro_batch(batch: Any) -> None:
    found = []
    for number in (5, 5, 6):
        state = make_state(tiny())
        torch.manual_seed(len(found))  # what happened to torch's generator before does not matter
        step(state, batch, number)
        found.append(state.sums.tolist())
    assert found[0] == found[1] != found[2]


def test_gradients_are_clipped_to_the_given_norm(batch: Any) -> None:
    state = make_state(tiny(model={"initializer_range": 0.5}))
    step(state, batch)
    assert StepSums.read(state.sums).grad_norm > 1.0
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in state.model.parameters()])
    assert norm.item() == pytest.approx(1.0, rel=1e-4)
