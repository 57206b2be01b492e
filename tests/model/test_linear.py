"""The layers whose bias gradients are summed in blocks compute what autograd does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_pretrain.model import linear as fused


@pytest.mark.parametrize(
    ("function", "plain"),
    [
        (fused._ThreeOutputs, lambda hidden, linear: linear(hidden).chunk(3, dim=1)),
        (fused._Gelu, lambda hidden, linear: (F.gelu(linear(hidden)),)),
    ],
)
def test_outputs_and_gradients_are_those_of_autograd(function: Any, plain: Callable[..., tuple[Tensor, ...]]) -> None:
    torch.manual_seed(0)
    linear, hidden = nn.Linear(16, 48), torch.randn(3 * fused.BLOCK_ROWS, 16, requires_grad=True)
    found = function.apply(hidden, linear.weight, linear.bias)
    found = found if isinstance(found, tuple) else (found,)
    expected = plain(hidden, linear)
    torch.testing.assert_close(found, tuple(expected))
    directions = [torch.randn_like(part) for part in expected]
    inputs = (hidden, linear.weight, linear.bias)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, directions), torch.autograd.grad(expected, inputs, directions)
    )
