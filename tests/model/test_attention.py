"""Both attention backends mean the same, and `auto` chooses what can run, saying why."""

from typing import Any

import pytest
import torch

from bert_pretrain.errors import ConfigError
from bert_pretrain.model.attention import attend, choose_attention, layout_of


def layout(lengths: list[int], backend: str = "padded") -> Any:
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return layout_of(bounds, max(lengths), sum(lengths), backend)


def reference(query_key_value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Softmax attention written out, a sequence at a time."""
    outputs = []
    for part in query_key_value.split(lengths):
        query, key, value = (tensor.transpose(0, 1) for tensor in part.unbind(1))  # (heads, length, head size)
        weights = (query @ key.transpose(1, 2) / query.shape[-1] ** 0.5).softmax(-1)
        outputs.append((weights @ value).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


@pytest.mark.parametrize("lengths", [[5, 1, 9, 3], [6, 6], [4]])
def test_padded_attention_and_its_gradient_equal_the_definition(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sum(lengths), 3, 2, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(sum(lengths), 16, generator=generator, dtype=torch.float64)
    ours, definition = attend(values, layout(lengths), "padded", 0.0), reference(values, lengths)
    torch.testing.assert_close(ours, definition)
    gradients = [torch.autograd.grad((output * weights).sum(), values) for output in (ours, definition)]
    torch.testing.assert_close(*gradients)


def test_nothing_is_padded_where_all_lengths_are_equal() -> None:
    assert layout([6, 6]).mask is None
    assert layout([6, 6]).slots is None
    assert layout([6, 5]).mask is not None


def test_varlen_hands_flash_attention_bounds_and_three_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [5, 1, 9]

    def flash(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int) -> Any:
        assert query.shape == (15, 2, 8)
        assert cu_seq_q.tolist() == cu_seq_k.tolist() == [0, 5, 6, 15]
        assert cu_seq_q.dtype == torch.int32
        assert max_q == max_k == 9
        return reference(torch.stack([query, key, value], dim=1), lengths).unflatten(1, (2, 8))

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash)
    values = torch.randn(15, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    varlen = attend(values, layout(lengths, "varlen"), "varlen", 0.0)
    torch.testing.assert_close(varlen, attend(values, layout(lengths), "padded", 0.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_backends_agree_forward_and_backward_on_the_gpu(dtype: torch.dtype) -> None:
    lengths = [128, 17, 64, 1]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sum(lengths), 3, 4, 64, generator=generator).to("cuda", dtype).requires_grad_()
    results = []
    for backend in ("varlen", "padded"):
        bounds = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
        output = attend(values, layout_of(bounds, max(lengths), sum(lengths), backend), backend, 0.0)
        results.append((output.detach(), *torch.autograd.grad(output.square().sum(), values)))
    torch.testing.assert_close(results[0], results[1], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "dropout_rate", "reason"),
    [
        ("cpu", torch.bfloat16, 64, 0.0, "needs CUDA"),
        ("cuda", torch.float32, 64, 0.0, "needs bf16 or fp16, the precision is float32"),
        ("cuda", torch.bfloat16, 64, 0.1, "has no dropout, attention_probs_dropout_prob is 0.1"),
        ("cuda", torch.bfloat16, 26, 0.0, "here they are 26 wide"),
        ("cuda", torch.bfloat16, 512, 0.0, "here they are 512 wide"),
    ],
)
def test_varlen_is_refused_where_it_cannot_run(
    device: str, dtype: torch.dtype, head_size: int, dropout_rate: float, reason: str
) -> None:
    place = torch.device(device)
    with pytest.raises(ConfigError, match=reason):
        choose_attention("varlen", place, dtype, head_size=head_size, dropout_rate=dropout_rate)
    chosen, why = choose_attention("auto", place, dtype, head_size=head_size, dropout_rate=dropout_rate)
    assert chosen == "padded"
    assert reason in why
