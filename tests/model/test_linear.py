"""The layers whose bias gradients are summed in blocks compute what autograd does."""

import pytest
import torch
from torch import nn

from bert_pretrain.model import linear as fused


@pytest.mark.parametrize("with_gelu", [True, False])
def test_outputs_and_gradients_are_those_of_autograd(with_gelu: bool) -> None:
    torch.manual_seed(0)
    linear, hidden = nn.Linear(16, 48), torch.randn(3 * fused.BLOCK_ROWS, 16, requires_grad=True)
    found = fused._apply(hidden, linear, with_gelu)
    expected = (fused.gelu_of(hidden, linear),) if with_gelu else fused.three_outputs(hidden, linear)
    torch.testing.assert_close(found, tuple(expected))
    directions = [torch.randn_like(part) for part in expected]
    inputs = (hidden, linear.weight, linear.bias)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, directions), torch.autograd.grad(expected, inputs, directions)
    )
