"""Apple's GPU, on which this project has never run: what is chosen for it, and that nothing asks it for float64."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from bert_pretrain.config import Config, TrainConfig
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError
from bert_pretrain.model.attention import choose_attention
from bert_pretrain.train import hardware
from bert_pretrain.train.batches import cut
from bert_pretrain.train.checkpoint import HostBuffers, all_tensors
from bert_pretrain.train.evaluation import evaluate_batches
from bert_pretrain.train.optimizers import make_optimizers, update
from tests.train.conftest import NO_DROPOUT, make_state, step

MPS, CPU = torch.device("mps"), torch.device("cpu")


def test_mps_must_be_asked_for_and_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.choose_device("auto") == CPU
    assert hardware.choose_device("mps") == MPS
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no Apple GPU"):
        hardware.choose_device("mps")
    with pytest.raises(ConfigError, match=r"train\.device"):
        load_config(None, ["train.device=mps:1"])


def test_on_mps_attention_pads_in_fp32_without_a_compiler() -> None:
    precision = hardware.choose_precision("auto", MPS)
    assert precision.name == "fp32"
    backend, _ = choose_attention("auto", MPS, precision.dtype, head_size=64, dropout_rate=0.0)
    assert backend == "padded"
    assert hardware.choose_compile("auto", MPS, backend)[0] is False
    with pytest.raises(ConfigError, match="mps"):
        hardware.choose_compile(True, MPS, backend)


class WithoutFloat64(TorchDispatchMode):
    """Refuses operators that take or return float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter((args, kwargs, result)):
            assert not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float64, func
        return result


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "muon"])
def test_where_figures_are_fp32_nothing_is_float64(
    tiny: Callable[..., Config], examples: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    def compute(dtype: torch.dtype) -> list[float]:
        monkeypatch.setattr(hardware, "figures_dtype", lambda _: dtype)
        state = make_state(tiny(model=NO_DROPOUT, optimizer=optimizer))
        batch = cut(examples(20), 300)
        with WithoutFloat64() if dtype == torch.float32 else torch.enable_grad():
            for number in range(2):
                step(state, batch, number)
            copies, _ = HostBuffers().copy(all_tensors(state))
            assert copies["interval/sums"].dtype == dtype
            held_out = evaluate_batches(state.losses, batch.micro_batches, CPU, torch.float32)
            return [*state.sums.tolist(), *held_out.values()]

    assert hardware.figures_dtype(MPS) == torch.float32
    assert compute(torch.float32) == pytest.approx(compute(torch.float64), rel=1e-6)


class Answering(TorchDispatchMode):
    """Lets the host read one answer from every tensor of a pretended device, and counts the operators."""

    def __init__(self, answer: int) -> None:
        super().__init__()
        self.answer, self.operators = answer, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.answer
        self.operators[str(func)] += 1
        if str(func).startswith("aten._fused_adamw_"):
            assert (kwargs or {}).get("found_inf") is None
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("skip", [False, True])
def test_on_mps_the_host_skips_steps_for_the_fused_adamw(skip: bool) -> None:
    with FakeTensorMode(), Answering(int(skip)) as seen:
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.empty(3, 2, device=MPS))
        layer.weight.grad = torch.empty(3, 2, device=MPS)
        update(make_optimizers(layer, TrainConfig()), 0.1, torch.empty((), dtype=torch.bool, device=MPS))
    fused = [name for name in seen.operators if name.startswith("aten._fused_adamw_")]
    assert len(fused) == (0 if skip else 1), seen.operators
