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


def take_steps(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradients: list[Tensor]) -> None:
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()


def expected_weight(
    weight: Tensor,
    gradients: list[Tensor],
    *,
    beta2: float,
    decay: float = 0.0,
    bias_correction: bool = True,
    trust_ratio: bool = False,
) -> Tensor:
    """Return a weight after steps of AdamW, or of LAMB (algorithm 2 of its paper), with a learning rate of 0.01."""
    x, m, v = weight.detach().double(), 0.0, 0.0
    for step, gradient in enumerate(gradients, start=1):
        m = 0.9 * m + 0.1 * gradient.double()
        v = beta2 * v + (1 - beta2) * gradient.double() ** 2
        c1, c2 = (1 - 0.9**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
        r = (m / c1) / ((v / c2).sqrt() + 1e-6) + decay * x
        x = x - 0.01 * (x.norm() / r.norm() if trust_ratio else 1.0) * r
    return x.float()


@pytest.mark.parametrize("bias_correction", [True, False])
def test_lamb_equals_algorithm_2_with_query_key_and_value_separate(bias_correction: bool) -> None:
    weight, gradients = parameter_and_gradients(6, 4)
    parts = zip(weight.detach().clone().chunk(3), zip(*(each.chunk(3) for each in gradients), strict=True), strict=True)
    settings = {"beta2": 0.99, "decay": 0.1, "bias_correction": bias_correction, "trust_ratio": True}
    expected = torch.cat([expected_weight(part, of_part, **settings) for part, of_part in parts])
    groups = [{"params": [weight], "weight_decay": 0.1, "matrices": 3}]
    take_steps(Lamb(groups, lr=0.01, betas=(0.9, 0.99), eps=1e-6, bias_correction=bias_correction), weight, gradients)
    torch.testing.assert_close(weight.detach(), expected, atol=1e-6, rtol=1e-5)


def test_lamb_without_trust_ratio_equals_adamw() -> None:
    weight, gradients = parameter_and_gradients(7)
    expected = expected_weight(weight, gradients, beta2=0.99)
    groups = [{"params": [weight], "trust_ratio": False, "weight_decay": 0.0}]
    take_steps(Lamb(groups, lr=0.01, betas=(0.9, 0.99), eps=1e-6, bias_correction=True), weight, gradients)
    torch.testing.assert_close(weight.detach(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12)])
def test_muon_equals_torch(shape: tuple[int, ...]) -> None:
    weight, gradients = parameter_and_gradients(*shape)
    other = nn.Parameter(weight.detach().clone())
    take_steps(Muon([{"params": [weight]}], lr=0.02, weight_decay=0.1), weight, gradients)
    take_steps(torch.optim.Muon([other], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), other, gradients)
    torch.testing.assert_close(weight, other, atol=5e-3, rtol=0)  # Muon works in bf16


def test_muon_treats_query_key_and_value_as_three_matrices() -> None:
    fused, gradients = parameter_and_gradients(12, 4)
    parts = [nn.Parameter(part.clone()) for part in fused.detach().chunk(3)]
    take_steps(Muon([{"params": [fused], "matrices": 3}], lr=0.02, weight_decay=0.1), fused, gradients)
    for number, part in enumerate(parts):
        of_part = [gradient.chunk(3)[number] for gradient in gradients]
        take_steps(Muon([{"params": [part]}], lr=0.02, weight_decay=0.1), part, of_part)
    torch.testing.assert_close(fused.detach(), torch.cat([part.detach() for part in parts]))


def test_adamw_without_bias_correction_equals_the_original() -> None:
    layer = nn.Linear(3, 2)
    gradients = {name: parameter_and_gradients(*weight.shape)[1] for name, weight in layer.named_parameters()}
    expected = {
        name: expected_weight(
            weight, gradients[name], beta2=0.999, decay=0.1 if has_decay(name) else 0.0, bias_correction=False
        )
        for name, weight in layer.named_parameters()
    }
    optimizers = make_optimizers(layer, TrainConfig(bias_correction=False, weight_decay=0.1))
    for step in range(3):
        for name, parameter in layer.named_parameters():
            parameter.grad = gradients[name][step]
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
                matrices = 3 if names[parameter].endswith("query_key_value.weight") else 1
                assert group.get("matrices", matrices) == matrices
                assert group.get("trust_ratio", parameter.dim() == 2) == (parameter.dim() == 2)
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
