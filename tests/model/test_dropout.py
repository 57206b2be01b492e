"""Dropout on CPU, by masks of our own."""

import pytest
import torch
import torch.nn.functional as F

from bert_pretrain.model.attention import attend, layout_of
from bert_pretrain.model.dropout import Dropout, dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_elements_are_zeroed_at_the_rate_and_the_mean_stays(dtype: torch.dtype, rate: float) -> None:
    torch.manual_seed(1)
    values = torch.ones(300, 501, dtype=dtype)
    dropped = dropout(values, rate)
    zeros = (dropped == 0).double().mean().item()
    assert zeros == pytest.approx(rate, abs=5 * (rate / values.numel()) ** 0.5)
    assert dropped.max().item() == pytest.approx(1 / (1 - rate), rel=1e-2)
    assert dropped.double().mean().item() == pytest.approx(1.0, abs=0.01)
    # No row or column is favoured, as one would be by a generator that repeats itself.
    assert (dropped == 0).double().mean(dim=0).std().item() == pytest.approx((rate * (1 - rate) / 300) ** 0.5, rel=0.2)


def test_the_gradient_passes_where_the_value_did_and_is_scaled_alike() -> None:
    torch.manual_seed(2)
    values = torch.randn(40, 30, requires_grad=True)
    dropped = dropout(values, 0.25)
    dropped.backward(torch.full_like(dropped, 3.0))
    expected = torch.where(dropped == 0, 0.0, 3.0 / 0.75)
    torch.testing.assert_close(values.grad, expected)
    torch.testing.assert_close(dropped.detach(), torch.where(dropped == 0, 0.0, values.detach() / 0.75))


def test_the_mask_follows_the_seed_of_torch() -> None:
    values, masks = torch.ones(2000), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append([dropout(values, 0.5), dropout(values, 0.5)])
    assert torch.equal(masks[0][0], masks[1][0])
    assert torch.equal(masks[0][1], masks[1][1])
    assert not torch.equal(masks[0][0], masks[2][0])
    assert not torch.equal(masks[0][0], masks[0][1])


def test_nothing_is_dropped_in_evaluation_or_at_rate_zero_and_all_at_rate_one() -> None:
    values = torch.randn(50)
    assert Dropout(0.5).eval()(values) is values
    assert Dropout(0.0).train()(values) is values
    assert not Dropout(1.0).train()(values).any()


def test_attention_with_dropout_is_that_without_it_on_average() -> None:
    torch.manual_seed(4)
    lengths = [5, 9, 3]
    query_key_value = torch.randn(sum(lengths), 3, 2, 8)
    layout = layout_of(F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int(), 9, sum(lengths), "padded")
    plain = attend(query_key_value, layout, "padded", 0.0)
    draws = torch.stack([attend(query_key_value, layout, "padded", 0.2) for _ in range(1000)])
    assert (draws[0] - draws[1]).abs().max() > 0.1
    # Each draw's error is of the size of the values; their mean's is a thirtieth of it.
    torch.testing.assert_close(draws.mean(dim=0), plain, atol=0.14, rtol=0)
