"""How matrices are assigned to ranks; that they reach them is tested with two processes in `test_ranks.py`."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bert_pretrain.config_file import load_config
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.optim.optimizer import is_hidden_matrix, num_matrices
from bert_pretrain.train.optim.sharing import MATRICES_AT_ONCE, Bucket, buckets_of, cost


def hidden_matrices(preset: str) -> list[dict[str, Any]]:
    """Return the groups of a model's hidden matrices, with gradients, without memory."""
    with torch.device("meta"):
        model = BertForPreTraining(load_config(preset).model, 30522)
    groups: dict[int, list[Tensor]] = {1: [], 3: []}
    for name, parameter in model.named_parameters():
        if is_hidden_matrix(name):
            parameter.grad = torch.empty_like(parameter)
            groups[num_matrices(name)].append(parameter)
    return [{"params": parameters, "matrices": number} for number, parameters in groups.items()]


def loads(buckets: list[Bucket], size: int) -> list[int]:
    return [sum(len(bucket.matrices_of(rank)) * cost(*bucket.shape) for bucket in buckets) for rank in range(size)]


@pytest.mark.parametrize(("preset", "size"), [("base", 2), ("base", 5), ("base", 8), ("large", 8), ("large", 64)])
def test_ranks_have_about_equally_many_products_to_compute(preset: str, size: int) -> None:
    buckets = buckets_of(hidden_matrices(preset), None, size)
    found = loads(buckets, size)
    assert max(found) - min(found) <= max(cost(*bucket.shape) for bucket in buckets)
    if (preset, size) == ("base", 8):
        assert max(found) == min(found)


def test_every_matrix_has_one_rank() -> None:
    buckets = buckets_of(hidden_matrices("base"), None, 5)
    assert sum(bucket.num_matrices for bucket in buckets) == 12 * 6
    for bucket in buckets:
        matrices = [matrix for rank in range(5) for matrix in bucket.matrices_of(rank)]
        assert sorted(matrices) == list(range(bucket.num_matrices))
        assert all(len(bucket.matrices_of(rank)) <= MATRICES_AT_ONCE for rank in range(5))
        assert {parameter.shape for parameter in bucket.parameters} == {bucket.parameters[0].shape}


def test_parameters_without_a_gradient_are_left_out() -> None:
    groups = hidden_matrices("base")
    groups[0]["params"][0].grad = None
    assert sum(bucket.num_matrices for bucket in buckets_of(groups, None, 1)) == 12 * 6 - 1


def test_a_wide_matrix_costs_three_times_a_square_one_of_its_height() -> None:
    # 4 m² n + 2 m³ floating-point operations for n = 4 m and n = m: 18 m³ and 6 m³.
    assert cost(768, 3072) == cost(3072, 768) == 3 * cost(768, 768)
