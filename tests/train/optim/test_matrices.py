"""Norms of gradients in one process."""

import pytest
import torch
from torch import Tensor

from bert_pretrain.train.optim.matrices import total_norm


def gradients(factor: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [factor * torch.randn(shape, generator=generator) for shape in ((5,), (33, 1000), (1,), (7, 1, 9))]


@pytest.mark.parametrize("factor", [1.0, 1e-9, 65536.0])
def test_the_norm_of_one_process_has_the_bits_of_torch(factor: float) -> None:
    found = total_norm(gradients(factor))
    assert found.shape == ()
    assert torch.equal(found, torch.nn.utils.get_total_norm(gradients(factor)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_single_value_that_is_not_finite_shows_in_the_norm(value: float) -> None:
    poisoned = gradients()
    poisoned[1][3, 4] = value
    assert not total_norm(poisoned).isfinite()
