"""One training step: precisions, loss scaling, dropout masks and gradient clipping."""

from typing import Any

import pytest
import torch

from bert_pretrain.train.state import LOSS_SCALE_GROWTH_STEPS, LossScale, StepSums
from tests.train.conftest import NO_DROPOUT, cut, make_examples, make_state, step, take_steps, tiny


@pytest.fixture
def batch() -> Any:
    return cut(make_examples(20), 200)


def test_fp16_trains_and_recovers_from_an_overflow(batch: Any) -> None:
    scale = LossScale(torch.tensor(2.0**40), torch.tensor(0, dtype=torch.int32))
    state = make_state(tiny(), loss_scale=scale)
    before = [parameter.clone() for parameter in state.model.parameters()]
    step(state, batch, 0, torch.float16)
    assert (scale.scale.item(), StepSums.read(state.sums).skipped) == (2.0**39, 1)
    assert all(map(torch.equal, before, state.model.parameters()))
    scale.scale.fill_(2.0**12)
    losses = [sums.loss for sums in take_steps(state, [batch] * 29, torch.float16, rates=(5e-3,))]
    assert losses[-1] < losses[0] - 0.5


def test_loss_scale_doubles_after_many_good_steps() -> None:
    scale = LossScale(torch.tensor(8.0), torch.tensor(LOSS_SCALE_GROWTH_STEPS - 2, dtype=torch.int32))
    for expected in (8.0, 16.0, 16.0):
        scale.update(torch.tensor(False))
        assert scale.scale.item() == expected
    scale.update(torch.tensor(True))
    assert (scale.scale.item(), scale.good_steps.item()) == (8.0, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_steps_are_close_to_fp32(batch: Any, dtype: torch.dtype) -> None:
    scale = LossScale.start(torch.device("cpu")) if dtype == torch.float16 else None
    exact, close = make_state(tiny(model=NO_DROPOUT)), make_state(tiny(model=NO_DROPOUT), loss_scale=scale)
    step(exact, batch)
    step(close, batch, dtype=dtype)
    left, right = StepSums.read(exact.sums), StepSums.read(close.sums)
    assert right.skipped == 0
    assert right.loss == pytest.approx(left.loss, rel=2e-3)
    assert right.grad_norm == pytest.approx(left.grad_norm, rel=2e-2)


def test_dropout_depends_only_on_seed_step_and_micro_batch(batch: Any) -> None:
    all_sums = []
    for number in (5, 5, 6):
        state = make_state(tiny())
        torch.manual_seed(len(all_sums))  # the previous state of PyTorch's generator has no effect
        step(state, batch, number)
        all_sums.append(state.sums.tolist())
    assert all_sums[0] == all_sums[1] != all_sums[2]


def test_gradients_are_clipped_to_max_grad_norm(batch: Any) -> None:
    state = make_state(tiny(model={"initializer_range": 0.5}))
    step(state, batch)
    assert StepSums.read(state.sums).grad_norm > 1.0
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in state.model.parameters()])
    assert norm.item() == pytest.approx(1.0, rel=1e-4)
