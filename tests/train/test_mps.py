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
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train import hardware
from bert_pretrain.train.batches import cut
from bert_pretrain.train.checkpoint import HostBuffers, all_tensors
from bert_pretrain.train.distributed import init_distributed
from bert_pretrain.train.evaluation import evaluate_batches
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.optimizers import make_optimizers, update
from bert_pretrain.train.state import TrainState
from bert_pretrain.train.step import StepSums, train_step

MPS, CPU = torch.device("mps"), torch.device("cpu")
NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


def test_mps_must_be_asked_for_and_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config(None, ["train.device=mps"]).train.device == "mps"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.choose_device("auto") == CPU
    assert hardware.choose_device("mps") == MPS
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device is 'mps', but torch .* finds no Apple GPU") as caught:
        hardware.choose_device("mps")
    assert caught.value.where == "train.device, or --device"
    assert "set it to auto" in caught.value.remedy
    with pytest.raises(ConfigError, match=r"train\.device is 'mps:1'"):
        load_config(None, ["train.device=mps:1"])


def test_on_mps_attention_pads_in_fp32_without_a_compiler_and_says_that_it_is_untested() -> None:
    precision = hardware.choose_precision("auto", MPS)
    assert (precision.name, precision.reason) == ("fp32", "16 bits are untested on mps")
    assert hardware.choose_precision("bf16", MPS).name == "bf16"
    backend, reason = choose_attention("auto", MPS, precision.dtype, head_size=64, dropout_rate=0.0)
    assert (backend, reason) == (
        "padded",
        "flash attention over packed sequences needs CUDA, the device is mps",
    )
    assert hardware.choose_compile("auto", MPS, backend)[0] is False
    with pytest.raises(ConfigError, match="not compiled for mps"):
        hardware.choose_compile(True, MPS, backend)
    assert hardware.describe_device(MPS) == "mps (untested)"
    assert hardware.describe_device(torch.device("cuda", 1)) == "cuda:1"
    assert "threads" in hardware.describe_device(CPU)


def test_several_processes_cannot_share_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="2 processes were started"):
        init_distributed("mps")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        init_distributed("mps")


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
    config, found = tiny(model=NO_DROPOUT, optimizer=optimizer), []
    for dtype in (torch.float64, hardware.figures_dtype(MPS)):
        monkeypatch.setattr(hardware, "figures_dtype", lambda _, dtype=dtype: dtype)
        model = BertForPreTraining(config.model, 152)
        model.initialize(1)
        state = TrainState.start(model, PretrainingLoss(model), make_optimizers(model, config.train), None)
        batch = cut(examples(20), 300)

        def compute(state: TrainState = state, batch: Any = batch) -> list[float]:
            for step in range(2):
                train_step(
                    state.network.train(), state.optimizers, batch, state.sums, seed=1, step=step, learning_rate=1e-3,
                    max_grad_norm=1.0, dtype=torch.float32,
                )  # fmt: skip
            copies, _ = HostBuffers.of(state.sums.device).copy(all_tensors(state))
            assert copies["interval/sums"].dtype == state.sums.dtype
            held_out = evaluate_batches(state.losses, batch.micro_batches, CPU, torch.float32)
            return [*state.sums.tolist(), *held_out.values()]

        if dtype == torch.float32:
            with WithoutFloat64():
                found.append(compute())
        else:
            found.append(compute())
            with pytest.raises(AssertionError), WithoutFloat64():
                compute()
    assert len(found[0]) > len(StepSums._fields)
    assert found[1] == pytest.approx(found[0], rel=1e-6)


class Answering(TorchDispatchMode):
    """Lets the host read one answer from every tensor of a pretended device, and counts the operators."""

    def __init__(self, answer: int) -> None:
        super().__init__()
        self.answer, self.operators = answer, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.answer
        name = str(func)
        self.operators[name] += 1
        if name.startswith("aten._fused_adamw_"):
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
