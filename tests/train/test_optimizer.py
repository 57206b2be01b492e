"""Optimizers: each equals the algorithm of its paper, and can skip a step on the device."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_pretrain.config import TrainConfig
from bert_pretrain.io import cores
from bert_pretrain.train.optimizers import (
    SATURATED_STEP,
    Lamb,
    Muon,
    has_decay,
    is_hidden_matrix,
    make_optimizers,
    orthogonalized,
    update,
)
from tests.train.conftest import make_model, tiny

KINDS = ("adamw", "lamb", "muon")


def parameter_and_gradients(*shape: int, steps: int = 3) -> tuple[nn.Parameter, list[Tensor]]:
    generator = torch.Generator().manual_seed(math.prod(shape))
    draw = [torch.randn(shape, generator=generator) for _ in range(steps + 1)]
    return nn.Parameter(draw[0]), draw[1:]


@pytest.mark.parametrize("bias_correction", [True, False])
def test_lamb_equals_algorithm_2_with_query_key_and_value_separate(bias_correction: bool) -> None:
    weight, gradients = parameter_and_gradients(6, 4)
    optimizer = Lamb(
        [{"params": [weight], "weight_decay": 0.1, "matrices": 3}],
        lr=0.01, betas=(0.9, 0.99), eps=1e-6, bias_correction=bias_correction,
    )  # fmt: skip
    expected = [part.clone() for part in weight.detach().double().chunk(3)]
    moments = [(torch.zeros(2, 4).double(), torch.zeros(2, 4).double()) for _ in range(3)]
    for step, gradient in enumerate(gradients, start=1):
        weight.grad = gradient
        optimizer.step()
        for part, (x, g) in enumerate(zip(expected, gradient.double().chunk(3), strict=True)):
            m, v = moments[part]
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
            moments[part] = (m, v)
            c1, c2 = (1 - 0.9**step, 1 - 0.99**step) if bias_correction else (1.0, 1.0)
            r = (m / c1) / ((v / c2).sqrt() + 1e-6) + 0.1 * x
            expected[part] = x - 0.01 * (x.norm() / r.norm()) * r
    torch.testing.assert_close(weight.detach().double(), torch.cat(expected), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("kind", "shape"), [("lamb", (7,)), ("muon", (8, 8)), ("muon", (12, 5)), ("muon", (5, 12))])
def test_lamb_without_trust_ratio_equals_adamw_and_muon_equals_torch(kind: str, shape: tuple[int, ...]) -> None:
    weight, gradients = parameter_and_gradients(*shape)
    other = nn.Parameter(weight.detach().clone())
    both: tuple[torch.optim.Optimizer, torch.optim.Optimizer]
    if kind == "lamb":
        settings = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6}
        groups = [{"params": [weight], "trust_ratio": False, "weight_decay": 0.0}]
        both = Lamb(groups, **settings, bias_correction=True), torch.optim.AdamW([other], **settings, weight_decay=0.0)
    else:
        reference = torch.optim.Muon([other], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        both = Muon([{"params": [weight]}], lr=0.02, weight_decay=0.1), reference
    for gradient in gradients:
        weight.grad, other.grad = gradient.clone(), gradient
        for optimizer in both:
            optimizer.step()
    torch.testing.assert_close(weight, other, atol=1e-6 if kind == "lamb" else 5e-3, rtol=0)  # Muon works in bf16


def test_muon_treats_query_key_and_value_as_three_matrices() -> None:
    fused, gradients = parameter_and_gradients(12, 4)
    parts = [nn.Parameter(part.clone()) for part in fused.detach().chunk(3)]
    together = Muon([{"params": [fused], "matrices": 3}], lr=0.02, weight_decay=0.1)
    apart = Muon([{"params": parts}], lr=0.02, weight_decay=0.1)
    for gradient in gradients:
        fused.grad = gradient.clone()
        for part, piece in zip(parts, gradient.chunk(3), strict=True):
            part.grad = piece
        together.step()
        apart.step()
    torch.testing.assert_close(fused.detach(), torch.cat([part.detach() for part in parts]))


def test_adamw_without_bias_correction_equals_the_original() -> None:
    config = TrainConfig(bias_correction=False, peak_lr=0.01, weight_decay=0.1)
    layer = nn.Linear(3, 2)
    expected = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in expected.items()}
    optimizers = make_optimizers(layer, config)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        for name, parameter in layer.named_parameters():
            parameter.grad = gradient = torch.randn(parameter.shape, generator=generator)
            m, v = moments[name]
            m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient * gradient
            moments[name] = (m, v)
            decay = 0.1 if has_decay(name) else 0.0
            expected[name] -= 0.01 * (m / (v.sqrt() + 1e-6) + decay * expected[name])
        update(optimizers, 0.01, torch.tensor(False))
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], atol=1e-6, rtol=1e-5)
        assert optimizers[0].state[parameter]["step"] == SATURATED_STEP


@pytest.mark.parametrize("kind", KINDS)
def test_each_parameter_has_one_optimizer_and_only_matrices_decay(kind: str) -> None:
    config = tiny(optimizer=kind)
    model = make_model(config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    owned: list[str] = []
    for optimizer in make_optimizers(model, config.train):
        for group in optimizer.param_groups:
            owned += [names[parameter] for parameter in group["params"]]
            for parameter in group["params"]:
                assert (group["weight_decay"] > 0) == (parameter.dim() == 2)
                if isinstance(optimizer, Muon | Lamb):
                    assert group["matrices"] == (3 if names[parameter].endswith("query_key_value.weight") else 1)
                if isinstance(optimizer, Lamb):
                    assert group["trust_ratio"] == (parameter.dim() == 2)
                assert isinstance(optimizer, Muon) == (kind == "muon" and is_hidden_matrix(names[parameter]))
    assert sorted(owned) == sorted(names.values())
    assert sum(map(is_hidden_matrix, owned)) == 4 * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias_correction", [True, False])
def test_skipped_step_changes_neither_weights_nor_state(kind: str, bias_correction: bool) -> None:
    model: Any = nn.ModuleDict({"encoder": nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)])})})
    config = TrainConfig.model_validate({"optimizer": kind, "bias_correction": bias_correction})
    optimizers = make_optimizers(model, config)

    def snapshot() -> list[Tensor]:
        states = [value for o in optimizers for state in o.state.values() for value in state.values()]
        return [tensor.detach().clone() for tensor in (*model.parameters(), *states)]

    for poison in (0.0, float("nan")):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, poison) + 1.0
        before = snapshot()
        update(optimizers, 0.1, torch.tensor(math.isnan(poison)))
        after = snapshot()
        same = len(before) == len(after) and all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert same == math.isnan(poison)


@pytest.mark.parametrize("feature", ["avx512_bf16", None])
def test_cpu_with_and_without_bf16_orthogonalizes(feature: str | None, monkeypatch) -> None:
    matrices = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(cores, "cpu_bf16_feature", lambda: feature)
    result = orthogonalized(matrices)
    assert result.dtype == torch.bfloat16  # the dtype of updates
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    cosine = torch.nn.functional.cosine_similarity(result.float().flatten(1), (left @ right).flatten(1))
    assert cosine.min() > 0.97
