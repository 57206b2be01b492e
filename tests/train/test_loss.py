"""`decoder_loss` has the value and gradients of cross-entropy."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bert_pretrain.examples.examples import IGNORE_INDEX
from bert_pretrain.train import decoder_loss as module
from bert_pretrain.train.decoder_loss import Targets, decoder_loss


def inputs(rows: int, dtype: torch.dtype = torch.float32, vocabulary: int = 90) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(rows, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, 16, generator=generator).requires_grad_()
    bias = torch.randn(vocabulary, generator=generator).requires_grad_()
    return [features, weight, bias, torch.randint(0, vocabulary, (rows,), generator=generator)]


@pytest.mark.parametrize(("rows", "vocabulary"), [(0, 90), (1, 96), (31, 90), (32, 96), (100, 90)])
def test_loss_gradients_and_accuracy_equal_cross_entropy(rows: int, vocabulary: int, monkeypatch) -> None:
    monkeypatch.setitem(module.BLOCK_ROWS, "cpu", 48)
    features, weight, bias, labels = inputs(rows, vocabulary=vocabulary)
    total, correct = decoder_loss(features, weight, bias, Targets(labels))
    logits = F.linear(features, weight, bias)
    expected = F.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(total, expected)
    assert correct == (logits.argmax(1) == labels).sum()
    with torch.no_grad():
        torch.testing.assert_close(decoder_loss(features, weight, bias, Targets(labels))[0], expected)
    ours = torch.autograd.grad(total * 0.3, (features, weight, bias))
    theirs = torch.autograd.grad(expected * 0.3, (features, weight, bias))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_loss_is_close_and_gradients_keep_their_dtypes(dtype: torch.dtype) -> None:
    features, weight, bias, labels = inputs(50, dtype)
    with torch.autocast("cpu", dtype):
        total, _ = decoder_loss(features, weight, bias, Targets(labels))
    expected = F.cross_entropy(F.linear(features.float(), weight, bias), labels, reduction="sum")
    torch.testing.assert_close(total, expected, atol=0.0, rtol=1e-2)
    ours = torch.autograd.grad(total, (features, weight, bias))
    theirs = torch.autograd.grad(expected, (features, weight, bias))
    assert [gradient.dtype for gradient in ours] == [dtype, torch.float32, torch.float32]
    torch.testing.assert_close([g.float() for g in ours], [g.float() for g in theirs], atol=0.1, rtol=0.05)


def test_fused_softmax_equals_the_plain_one() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(37, 96, generator=generator), torch.randn(96, generator=generator)
    bias[90:] = -torch.inf  # padded columns
    labels = torch.randint(0, 90, (37,), generator=generator)
    labels[-5:] = IGNORE_INDEX
    # The labels of a sampled softmax are column 90. Some are also candidates, which their rows exclude.
    own_logits = torch.randn(37, generator=generator)
    sampled = Targets(torch.where(labels < 0, labels, 90), own_logits, labels.clamp(min=0))
    for targets in (Targets(labels), sampled):
        plain, fused, d_bias = logits.clone(), logits.clone(), torch.zeros(96)
        expected = module._softmax_in_place(plain, bias, targets, 2.0, d_bias, True)
        torch.testing.assert_close(module._fused_softmax_in_place(fused, bias, targets, 2.0), expected)
        torch.testing.assert_close(fused, plain)
        torch.testing.assert_close(fused.sum(dim=0), d_bias)
    assert (plain[torch.arange(32), labels[:32]] == 0).all()
    assert (plain[:32, 90] < 0).all()


def test_many_rows_with_one_label_do_not_overflow_fp16() -> None:
    features, weight, bias, labels = inputs(1000)
    large = (8.0 + features.detach()).requires_grad_()
    labels[:200] = 7
    gradients = []
    for dtype in (torch.float32, torch.float16):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            total, _ = decoder_loss(large, weight, bias, Targets(labels))
        gradients.append(torch.autograd.grad(total, [large, weight, bias]))
    for exact, half in zip(*gradients, strict=True):
        assert half.isfinite().all()
        torch.testing.assert_close(half, exact, atol=0.01 * float(exact.abs().max()), rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_padded_and_gradients_are_not(dtype: torch.dtype) -> None:
    features, weight, bias, labels = inputs(45, vocabulary=90)
    shapes = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            if function._overloadpacket is torch.ops.aten.mm:
                shapes.extend(tensor.shape for tensor in arguments)
            return function(*arguments, **(options or {}))

    with Record(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        total, _ = decoder_loss(features, weight, bias, Targets(labels))
    assert {size for shape in shapes for size in shape} == {64, 96, 16}  # 45 rows, 90 tokens, 16 hidden
    gradients = torch.autograd.grad(total, (features, weight, bias))
    assert [gradient.shape for gradient in gradients] == [(45, 16), (90, 16), (90,)]
