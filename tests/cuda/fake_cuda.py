"""A fake CUDA device for fake tensors in a CPU build of PyTorch.

Operators check shapes, types and devices, but compute nothing. The library from `hooks.cpp` must be loaded before
`torch` is imported, so this needs a new process, which `conftest.py` starts.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from bert_pretrain.config import Config
from bert_pretrain.model.bert import BertForPreTraining, make_network
from bert_pretrain.train import hardware
from bert_pretrain.train.distillation import DistillationLoss
from bert_pretrain.train.electra import losses_of
from bert_pretrain.train.optimizers import make_optimizers
from bert_pretrain.train.packing import GlobalBatch
from bert_pretrain.train.state import LossScale, TrainState

CUDA = torch.device("cuda", 0)
# PyTorch has no fake implementation for a learning rate on the device. The update is in place, so it returns nothing.
register_op_impl(torch.ops.aten._fused_adamw_.tensor_lr)(lambda mode, func, *args, **kwargs: None)


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Enter a fake tensor mode with a CUDA device."""
    answers = {
        "torch.cuda.amp.common.amp_definitely_not_available": False,
        "torch.cuda.is_bf16_supported": True,
        "torch.cuda.get_rng_state": torch.get_rng_state(),
        "torch.cuda.set_rng_state": None,
        "torch.cuda.max_memory_allocated": 0,
        "torch.cuda.reset_peak_memory_stats": None,
    }
    with contextlib.ExitStack() as stack:
        for target, answer in answers.items():
            stack.enter_context(mock.patch(target, lambda *_, answer=answer, **__: answer))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", _pin_memory))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", _tolist))
        yield stack.enter_context(FakeTensorMode())


def _pin_memory(tensor: Tensor) -> Tensor:
    """Mark the tensor itself as page-locked. A copy fails in a thread, because fake modes are not thread-safe."""
    tensor.fake_pinned = True  # type: ignore[attr-defined]
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor, "fake_pinned", False)


def _tolist(tensor: Tensor) -> list[float]:
    """Return ones, because fake tensors have no values. As for a real tensor, all are copied to the CPU at once."""
    return [1.0] * tensor.cpu().numel()


def make_state(
    config: Config,
    vocab_size: int,
    *,
    attention: str,
    pairs: bool = True,
    backend: str | Callable[..., Any] | None = None,
    taught: bool = False,
) -> TrainState:
    """Return the initial state of a run on the fake device, as `train.run` does. `backend` compiles the layers.

    If the run is `taught`, its teacher has the sizes of the student.
    """
    with CUDA:  # fake parameters cannot be moved to another device
        checkpointing = config.train.activation_checkpointing
        model = make_network(config.model, vocab_size, attention, checkpointing=checkpointing)
        teacher = BertForPreTraining(config.model, vocab_size, attention=attention).eval()
    if not pairs:
        model.freeze_pair_heads()
    if backend is not None:
        hardware.compile_layers(model, backend, strict=True)
    scale = LossScale.start(CUDA) if config.train.precision == "fp16" else None
    is_compiled = backend is not None
    network = losses_of(model, config.train, compiled=is_compiled)
    if taught:
        network = DistillationLoss(model, teacher, compiled=is_compiled)
    return TrainState(model, network, make_optimizers(model, config.train), scale)


def fake_global_batch(mode: FakeTensorMode, batch: GlobalBatch) -> GlobalBatch:
    """Return a batch with fake tensors in page-locked memory of the CPU, as a step gets it."""
    fakes = [micro.with_tensors(mode.from_tensor).with_tensors(Tensor.pin_memory) for micro in batch.micro_batches]
    return replace(batch, micro_batches=fakes)
