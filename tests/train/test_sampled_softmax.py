"""Candidates of a sampled softmax, and the loss that it estimates."""

import numpy as np
import pytest
import torch

from bert_pretrain.examples.examples import IGNORE_INDEX
from bert_pretrain.train.decoder_loss import Targets, decoder_loss
from bert_pretrain.train.sampled_softmax import (
    Candidates,
    CandidateSampler,
    inclusion_probabilities,
    sampled_softmax_loss,
)

FREQUENCIES = np.random.default_rng(0).pareto(1.0, 300) + 0.01


def inputs() -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(50, 16, generator=generator).requires_grad_()
    weight = (0.1 * torch.randn(300, 16, generator=generator)).requires_grad_()
    bias = torch.from_numpy(np.log(FREQUENCIES / FREQUENCIES.sum())).float().requires_grad_()
    labels = torch.multinomial(torch.from_numpy(FREQUENCIES), 50, replacement=True, generator=generator)
    labels[-3:] = IGNORE_INDEX
    return [features, weight, bias], labels


@pytest.mark.parametrize("number", [1, 20, 100, 299])
def test_probabilities_are_proportional_to_weights_up_to_1(number: int) -> None:
    probabilities = inclusion_probabilities(FREQUENCIES, number)
    assert probabilities.sum() == pytest.approx(number)
    assert probabilities.max() <= 1.0
    below = probabilities < 1.0
    ratios = probabilities[below] / FREQUENCIES[below]
    assert np.ptp(ratios) < 1e-9 * ratios.max()
    assert (FREQUENCIES[~below] * ratios.max() >= 1.0).all()


def test_tokens_are_candidates_as_often_as_their_probability_says() -> None:
    sampler = CandidateSampler(FREQUENCIES, 100, seed=7)
    draws = [sampler.draw(step) for step in range(4000)]
    ids = torch.stack([draw.token_ids for draw in draws])
    assert (ids.diff(dim=1) > 0).all()  # no token twice
    shares = np.bincount(ids.flatten().numpy(), minlength=300) / len(draws)
    np.testing.assert_allclose(shares, inclusion_probabilities(FREQUENCIES**0.5, 100), atol=0.03)
    again = CandidateSampler(FREQUENCIES, 100, seed=7).draw(3)
    assert torch.equal(again.token_ids, draws[3].token_ids)
    assert not torch.equal(CandidateSampler(FREQUENCIES, 100, seed=8).draw(3).token_ids, draws[3].token_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_tokens_as_candidates_give_the_exact_loss_and_gradients(dtype: torch.dtype) -> None:
    parameters, labels = inputs()
    candidates = Candidates(torch.arange(300), torch.zeros(300))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        exact, exact_correct = decoder_loss(*parameters, Targets(labels))
        sampled, sampled_correct = sampled_softmax_loss(*parameters, Targets(labels), candidates)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(sampled, exact, **tolerance)
    assert abs(int(sampled_correct) - int(exact_correct)) <= (0 if dtype == torch.float32 else 2)
    expected, actual = (torch.autograd.grad(0.3 * loss, parameters) for loss in (exact, sampled))
    torch.testing.assert_close(actual, expected, **tolerance)


def test_the_mean_over_draws_is_near_the_exact_loss_and_gradients() -> None:
    parameters, labels = inputs()
    exact = decoder_loss(*parameters, Targets(labels))[0]
    expected = torch.autograd.grad(exact, parameters)
    sampler, losses = CandidateSampler(FREQUENCIES, 100, seed=0), []
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for step in range(500):
        loss, _ = sampled_softmax_loss(*parameters, Targets(labels), sampler.draw(step))
        losses.append(loss.item())
        for total, gradient in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
            total += gradient / 500
    assert np.mean(losses) == pytest.approx(exact.item(), rel=1e-3)
    assert np.ptp(losses) > 0
    for total, gradient in zip(sums, expected, strict=True):
        assert (total - gradient).norm() < 0.1 * gradient.norm()
