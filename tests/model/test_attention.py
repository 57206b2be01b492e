"""Attention backends agree, `auto` chooses one that can run, and dropout on CPU is correct."""

from typing import Any

import pytest
import torch
from torch import nn

from bert_pretrain.config import ModelConfig
from bert_pretrain.errors import ConfigError
from bert_pretrain.model import attention
from bert_pretrain.model.attention import attend_padded, attend_varlen, make_layout
from bert_pretrain.model.attention_backend import choose_attention
from bert_pretrain.model.dropout import Dropout, dropout, dropout_by_bytes


def layout(lengths: list[int], backend: str = "padded") -> Any:
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return make_layout(bounds, max(lengths), sum(lengths), backend)


def reference(query_key_value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Compute softmax attention for one sequence at a time."""
    outputs = []
    for part in query_key_value.split(lengths):
        query, key, value = (tensor.transpose(0, 1) for tensor in part.unbind(1))  # (heads, length, head size)
        weights = (query @ key.transpose(1, 2) / query.shape[-1] ** 0.5).softmax(-1)
        outputs.append((weights @ value).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


@pytest.mark.parametrize("lengths", [[5, 1, 9, 3], [6, 6], [4]])
def test_padded_attention_and_gradient_equal_the_definition(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sum(lengths), 3, 2, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(sum(lengths), 16, generator=generator, dtype=torch.float64)
    ours, definition = attend_padded(values, layout(lengths), 0.0), reference(values, lengths)
    torch.testing.assert_close(ours, definition)
    gradients = [torch.autograd.grad((output * weights).sum(), values) for output in (ours, definition)]
    torch.testing.assert_close(*gradients)


def test_varlen_calls_flash_attention_with_bounds_and_three_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [5, 1, 9]

    def flash(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int) -> Any:
        assert query.shape == (15, 2, 8)
        assert cu_seq_q.tolist() == cu_seq_k.tolist() == [0, 5, 6, 15]
        assert cu_seq_q.dtype == torch.int32
        assert max_q == max_k == 9
        return reference(torch.stack([query, key, value], dim=1), lengths).unflatten(1, (2, 8))

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash)
    values = torch.randn(15, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    varlen = attend_varlen(*values.unbind(1), layout(lengths, "varlen"))
    torch.testing.assert_close(varlen, attend_padded(values, layout(lengths), 0.0))


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "dropout_rate", "reason"),
    [
        ("cpu", torch.bfloat16, 64, 0.0, "needs CUDA"),
        ("cuda", torch.float32, 64, 0.0, "needs bf16 or fp16"),
        ("cuda", torch.bfloat16, 64, 0.1, "attention_probs_dropout_prob"),
        ("cuda", torch.bfloat16, 26, 0.0, "here it is 26"),
        ("cuda", torch.bfloat16, 512, 0.0, "here it is 512"),
    ],
)
def test_varlen_is_refused_if_it_cannot_run(
    device: str, dtype: torch.dtype, head_size: int, dropout_rate: float, reason: str
) -> None:
    place = torch.device(device)
    model = ModelConfig(hidden_size=12 * head_size, attention_probs_dropout_prob=dropout_rate)
    with pytest.raises(ConfigError, match=reason):
        choose_attention("varlen", place, dtype, model)
    chosen, why = choose_attention("auto", place, dtype, model)
    assert chosen == "padded"
    assert reason in why


def test_modernbert_pads_if_flash_attention_of_this_torch_has_no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int) -> Any: ...

    cuda, model = torch.device("cuda"), ModelConfig(architecture="modernbert", attention_probs_dropout_prob=0.0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_attention("auto", cuda, torch.bfloat16, model) == ("varlen", "flash attention without padding")
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    chosen, why = choose_attention("auto", cuda, torch.bfloat16, model)
    assert (chosen, f"torch {torch.__version__} has no windows" in why) == ("padded", True)
    with pytest.raises(ConfigError, match="no windows, which ModernBERT needs"):
        choose_attention("varlen", cuda, torch.bfloat16, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_zeroes_elements_and_gradients_at_the_rate_and_keeps_the_mean(dtype: torch.dtype, rate: float) -> None:
    torch.manual_seed(1)
    values = torch.ones(300, 501, dtype=dtype, requires_grad=True)
    dropped = dropout(values, rate)
    (gradient,) = torch.autograd.grad(dropped.sum(), values)
    assert torch.equal(gradient, dropped)
    zeros = (dropped == 0).double().mean().item()
    assert zeros == pytest.approx(rate, abs=5 * (rate / values.numel()) ** 0.5)
    assert dropped.max().item() == pytest.approx(1 / (1 - rate), rel=1e-2)
    assert dropped.double().mean().item() == pytest.approx(1.0, abs=0.01)
    # Columns are zeroed at equal rates, unlike with a generator that repeats itself.
    assert (dropped == 0).double().mean(dim=0).std().item() == pytest.approx((rate * (1 - rate) / 300) ** 0.5, rel=0.2)


def test_dropouts_of_a_compiled_layer_have_different_masks() -> None:
    def twice(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return dropout_by_bytes(values * 2.0, 0.5), dropout_by_bytes(values * 3.0, 0.5)

    values = torch.ones(64, 32, requires_grad=True)
    first, second = torch.compile(twice, backend="aot_eager_decomp_partition", fullgraph=True)(values)
    (first.sum() + second.sum()).backward()
    kept = [first != 0, second != 0]
    assert not torch.equal(*kept)
    assert [mask.float().mean().item() for mask in kept] == pytest.approx([0.5, 0.5], abs=0.06)
    torch.testing.assert_close(values.grad, 4.0 * kept[0] + 6.0 * kept[1])


def test_dropout_in_evaluation_and_at_rates_zero_and_one() -> None:
    values = torch.randn(50)
    assert Dropout(0.5).eval()(values) is values
    assert Dropout(0.0).train()(values) is values
    assert not Dropout(1.0).train()(values).any()


def test_attention_with_dropout_averages_to_attention_without() -> None:
    torch.manual_seed(4)
    query_key_value, packed = torch.randn(17, 3, 2, 8), layout([5, 9, 3])
    plain = attend_padded(query_key_value, packed, 0.0)
    draws = torch.stack([attend_padded(query_key_value, packed, 0.2) for _ in range(1000)])
    assert (draws[0] - draws[1]).abs().max() > 0.1
    # The error of the mean of 1,000 draws is about 1/30 of the error of one draw.
    torch.testing.assert_close(draws.mean(dim=0), plain, atol=0.14, rtol=0)


@pytest.mark.parametrize("with_gelu", [True, False])
def test_fused_linear_outputs_and_gradients_equal_autograd(with_gelu: bool) -> None:
    torch.manual_seed(0)
    linear, hidden = nn.Linear(16, 48), torch.randn(3 * attention.BLOCK_ROWS, 16, requires_grad=True)
    ours = attention._fused_linear(hidden, linear.weight, linear.bias, with_gelu)
    expected = (attention.linear_gelu(hidden, linear),) if with_gelu else attention.linear_chunks(hidden, linear)
    torch.testing.assert_close(ours, tuple(expected))
    directions = [torch.randn_like(part) for part in expected]
    inputs = (hidden, linear.weight, linear.bias)
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, directions), torch.autograd.grad(expected, inputs, directions)
    )
