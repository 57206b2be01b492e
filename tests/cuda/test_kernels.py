"""What the compiler makes of a layer for an H200: few kernels, each of which becomes machine code."""

from typing import Any

import pytest
import torch

from tests.cuda.conftest import Pretended, needs_triton

pytestmark = [pytest.mark.slow, needs_triton]

LAUNCHES = {
    "embeddings": (1, 0, 1),
    "embeddings backward": (5, 0, 0),
    "layer": (12, 4, 2),
    "layer backward": (18, 8, 1),
    "head": (4, 1, 0),
    "head backward": (8, 2, 0),
    "softmax": (3, 0, 0),
}
"""Kernels of Triton, matrix products, and other operators (attention, the seeds of dropout) of BERT-Base in bf16 with
dropout, 32,768 tokens at once, by PyTorch 2.13. A change that launches more must not go unseen; update the numbers
where it is meant to, or with another PyTorch.

Of a layer's twelve kernels forward nine cast (four weights, four biases, its input), two add, drop and normalise, one
is GELU. Backward four cast the gradients of weights to fp32, eight sum over tokens (the gradients of biases, in two
stages each), three are the backward passes of the normalisations, one is that of GELU, one puts the gradients of query,
key and value together, and one adds the two ways into the layer."""


@pytest.fixture(scope="module")
def generated(pretended: Pretended, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return pretended("kernels.generate", tmp_path_factory.mktemp("inductor"))


@pytest.mark.skipif(torch.__version__ < "2.13" or torch.__version__ >= "2.14", reason="the numbers are of PyTorch 2.13")
def test_a_layer_launches_so_many_kernels(generated: Any) -> None:
    found = {name: (one["kernels"], one["products"], one["others"]) for name, one in generated["launches"].items()}
    assert found == LAUNCHES


def test_every_kernel_becomes_machine_code(generated: Any) -> None:
    assert len(generated["machine_code"]) > 30
    assert all(size > 1000 for size in generated["machine_code"].values())
