"""One step: skips what is not finite, works in every precision, and draws dropout from its place in the run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bert_pretrain.config import Config
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.batches import cut
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.optimizers import make_optimizers
from bert_pretrain.train.state import TrainState
from bert_pretrain.train.step import LOSS_SCALE_GROWTH_STEPS, LossScale, StepSums, train_step


def make_state(config: Config, loss_scale: LossScale | None = None) -> TrainState:
    model = BertForPreTraining(config.model, 152)
    model.initialize(1)
    return TrainState.start(model, PretrainingLoss(model), make_optimizers(model, config.train), loss_scale)


def step(
    state: TrainState, table: Any, number: int = 0, dtype: torch.dtype = torch.float32, rate: float = 1e-3
) -> None:
    train_step(
        state.network.train(),
        state.optimizers,
        cut(table, 200),
        state.sums,
        seed=1,
        step=number,
        learning_rate=rate,
        max_grad_norm=1.0,
        dtype=dtype,
        loss_scale=state.loss_scale,
    )


def snapshot(state: TrainState) -> dict[str, torch.Tensor]:
    weights = {name: parameter.detach().clone() for name, parameter in state.model.named_parameters()}
    moments = {name: tensor.clone() for name, tensor in state.tensors().items() if name.startswith("optimizer/")}
    return {**weights, **moments}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(
    tiny: Callable[..., Config], examples: Callable[..., Any], poison: float
) -> None:
    state = make_state(tiny())
    step(state, examples(20))
    before = snapshot(state)

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[0] = poison
        return gradient

    hook = state.model.nsp_head.dense.bias.register_hook(spoil)
    step(state, examples(20), 1)
    hook.remove()
    assert equal(snapshot(state), before)
    sums = StepSums(*state.sums.tolist())
    assert sums.skipped == 1
    assert sums.pairs == 20  # of the first step alone
    step(state, examples(20), 2)
    assert not equal(snapshot(state), before)
    assert StepSums(*state.sums.tolist()).pairs == 40


def test_fp16_with_a_loss_scale_trains_and_recovers_from_an_overflow(
    tiny: Callable[..., Config], examples: Callable[..., Any]
) -> None:
    scale = LossScale(torch.tensor(2.0**40), torch.tensor(0, dtype=torch.int32))
    state = make_state(tiny(), scale)
    before = snapshot(state)
    step(state, examples(20), 0, torch.float16)
    assert scale.scale.item() == 2.0**39
    assert all(torch.equal(before[name], parameter) for name, parameter in state.model.named_parameters())
    scale.scale.fill_(2.0**12)
    losses = []
    for number in range(1, 30):
        state.sums.zero_()
        step(state, examples(20), number, torch.float16, rate=5e-3)
        losses.append(StepSums(*state.sums.tolist()).loss)
    assert losses[-1] < losses[0] - 0.5


def test_the_loss_scale_grows_after_many_good_steps() -> None:
    scale = LossScale(torch.tensor(8.0), torch.tensor(LOSS_SCALE_GROWTH_STEPS - 2, dtype=torch.int32))
    for expected in (8.0, 16.0, 16.0):
        scale.update(torch.tensor(False))
        assert scale.scale.item() == expected
    scale.update(torch.tensor(True))
    assert (scale.scale.item(), scale.good_steps.item()) == (8.0, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lower_precision_gives_nearly_the_same_step(
    tiny: Callable[..., Config], examples: Callable[..., Any], dtype: torch.dtype
) -> None:
    no_dropout = tiny(model={"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0})
    exact = make_state(no_dropout)
    close = make_state(no_dropout, LossScale.start(torch.device("cpu")) if dtype == torch.float16 else None)
    step(exact, examples(20))
    step(close, examples(20), dtype=dtype)
    left, right = StepSums(*exact.sums.tolist()), StepSums(*close.sums.tolist())
    assert right.skipped == 0
    assert right.loss == pytest.approx(left.loss, rel=2e-3)
    assert right.grad_norm == pytest.approx(left.grad_norm, rel=2e-2)


def test_dropout_is_a_function_of_seed_step_and_micro_batch(
    tiny: Callable[..., Config], examples: Callable[..., Any]
) -> None:
    states = [make_state(tiny()) for _ in range(3)]
    for state, number in zip(states, (5, 5, 6), strict=True):
        torch.manual_seed(id(state) % 1000)  # what happened to torch's generator before does not matter
        step(state, examples(20), number)
    first, again, other = (state.sums.tolist() for state in states)
    assert first == again
    assert first != other


def test_gradients_are_shortened_to_the_given_norm(tiny: Callable[..., Config], examples: Callable[..., Any]) -> None:
    state = make_state(tiny(model={"initializer_range": 0.5}))
    step(state, examples(20))
    assert StepSums(*state.sums.tolist()).grad_norm > 1.0
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in state.model.parameters()])
    assert norm.item() == pytest.approx(1.0, rel=1e-4)
