"""Measure the peak memory of a training step on the fake CUDA device, and compute the package's estimate."""

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from bert_pretrain.config import Config
from bert_pretrain.config_file import load_config
from bert_pretrain.model.devices import DTYPES
from bert_pretrain.train.packing import Batch, GlobalBatch
from tests.cuda.fake_cuda import fake_cuda, fake_global_batch, make_state
from tests.cuda.traces import run_step
from tests.train.conftest import estimate_memory

VOCAB_SIZE = 30522
MASKED_SHARE = 0.15
CASES = (
    ("base", 128, "adamw", True),
    ("large", 512, "muon", False),
    ("modern-base", 1024, "muon", False),
    ("modern-base", 1024, "adamw", True),
    ("albert-base", 512, "lamb", False),
    ("electra-small", 128, "adamw", False),
    ("electra-small", 128, "adamw", True),
)
ALLOCATION_BYTES = 512  # PyTorch rounds allocations on CUDA up to a multiple


class MemoryTracker(TorchDispatchMode):
    """Tracks the memory of all device tensors returned by operators.

    Buffers inside kernels are not included: the workspace of cuBLAS, and sums in the backward pass of flash attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result) if func is not torch.ops.prim.device.default else ():
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._known:
            size = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
            self._known.add(key)
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size


def full_batch(tokens: int, length: int, *, pairs: bool, draws: bool) -> GlobalBatch:
    """Return a batch of two micro-batches, each with `tokens` tokens in sequences of length `length`."""
    rows, masked = tokens // length, int(MASKED_SHARE * tokens)
    ids, masks = torch.zeros(tokens, dtype=torch.int64), torch.zeros(masked, dtype=torch.int64)
    cu_seqlens, labels = torch.arange(rows + 1, dtype=torch.int32) * length, torch.zeros(rows, dtype=torch.int64)
    micro = Batch(ids, ids, ids, cu_seqlens, masks, masks, labels if pairs else None, length, tokens, rows, masked)
    if draws:
        micro = replace(micro, draws=torch.zeros(masked))
    return GlobalBatch([micro, micro], 2 * rows, 2 * rows, 2 * masked, 2 * tokens, 2 * rows * length**2)


def peaks(num_layers: int | None, tokens: int) -> list[dict[str, Any]]:
    """Return the peak and the estimate in bytes for the networks of presets.

    `num_layers` replaces the number of layers; `tokens` is the size of a micro-batch.
    """
    rows = []
    for name, length, optimizer, checkpointing in CASES:
        config = load_config(name)
        model: dict[str, Any] = {"attention_probs_dropout_prob": 0.0}
        if num_layers is not None:
            model["num_hidden_layers"] = num_layers
        train = {"optimizer": optimizer, "activation_checkpointing": checkpointing, "precision": "bf16"}
        sections = {"model": config.model.model_copy(update=model), "train": config.train.model_copy(update=train)}
        label = f"{name} at {length}, {optimizer}{', checkpointing' if checkpointing else ''}"
        rows.append({"name": label, **_measure(config.model_copy(update=sections), length, tokens)})
    return rows


def _measure(config: Config, length: int, tokens: int) -> dict[str, int]:
    with fake_cuda() as mode, MemoryTracker() as tracker:
        state = make_state(config, VOCAB_SIZE, attention="varlen")
        full = full_batch(tokens, length, pairs=config.model.has_pair_heads, draws=config.model.is_electra)
        batch = fake_global_batch(mode, full)
        for step in range(2):  # the first step allocates the optimizer's state
            tracker.peak_bytes = 0
            run_step(state, config, batch, step)
        dtype = DTYPES[config.train.precision]
        estimate = estimate_memory(config.train, state.model, length, tokens, dtype=dtype)
    return {"peak": tracker.peak_bytes, "estimate": estimate}
