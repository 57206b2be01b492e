"""Device, precision of matrix products, and the tokens of a micro-batch that fit."""

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import ConfigError
from bert_pretrain.io import cores
from bert_pretrain.model.attention import Layout
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.loss import BLOCK_ROWS
from bert_pretrain.train.optimizers import is_hidden_matrix

CPU_MICRO_BATCH_TOKENS = 4096
"""On two cores 4,096 to 16,384 were equally fast at a hidden size of 128; the smallest takes the least memory."""
CPU_ACTIVATION_BYTES = 3 * 2**29
"""Bytes that a micro-batch on CPU may keep until its backward pass; smaller ones add up gradients more often."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # <malloc.h>
_PADDED_COMPILES_FROM = "2.13"  # on CPU torch 2.11 gave gradients that were off by a percent; 2.12 has not been tried
OPERATIONS_FUSED = 100
"""How many the compiler may put into one kernel before it writes a result to memory; 30 by default."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Precision:
    """How matrix products run, and why."""

    name: str
    reason: str

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]


def choose_device(setting: str, local_rank: int = 0) -> torch.device:
    """Return the device of a setting such as `auto`, `cpu`, `cuda`, `cuda:1`; without a number, the rank's.

    Where each rank sees one card of its own, as with Slurm's `--gpus-per-task=1`, that is number 0 for all.
    """
    if setting == "auto":
        setting = "cuda" if torch.cuda.is_available() else "cpu"
    if setting == "cuda":
        sees_one = torch.cuda.device_count() == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
        setting = "cuda:0" if sees_one else f"cuda:{local_rank}"
    device = torch.device(setting)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"the device is '{setting}', this machine has {torch.cuda.device_count()} CUDA devices",
            where="train.device, or --device",
            remedy="set it to auto or cpu, or run where there is one",
        )
    return device


def describe_device(device: torch.device) -> str:
    """Return a device in words, with what a reader should know of it."""
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads (OMP_NUM_THREADS) on {cores.available_cores()} cores"
    return str(device)


def keep_freed_memory(device: torch.device) -> None:
    """On CPU, keep the memory of freed tensors for the next ones, as PyTorch does on CUDA.

    By default glibc gives every large tensor fresh pages and takes them back, which was a third of a step of BERT-Base.
    Nothing is done without glibc, nor where the process is another program's, since it cannot be undone.
    """
    is_possible = cores.owns_process and device.type == "cpu" and sys.platform == "linux"
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if is_possible else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)  # never
        mallopt(_M_TOP_PAD, 64 * 2**20)


def choose_precision(setting: str, device: torch.device) -> Precision:
    """Return the precision of a setting, and the reason for it in words."""
    if setting != "auto":
        return Precision(setting, "as configured")
    if device.type == "cuda":
        # Older cards emulate bf16 without tensor cores, slower than fp32.
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision("bf16", "the card has it")
        return Precision("fp16", "the card has no bf16")
    if found := cores.cpu_bf16_feature():
        return Precision("bf16", f"the CPU has {found}")
    return Precision("fp32", "the CPU has neither avx512_bf16 nor AMX, without which bf16 is slower")


def choose_compile(setting: bool | str, device: torch.device, attention: str) -> tuple[bool, str]:
    """Return whether layers are compiled, and the reason in words."""
    if setting is True and attention == "padded" and torch.__version__ < _PADDED_COMPILES_FROM:
        raise ConfigError(
            f"torch {torch.__version__} compiles attention that pads to wrong gradients",
            where="train.compile",
            remedy=f"set it to auto or false, or install torch {_PADDED_COMPILES_FROM}",
        )
    if isinstance(setting, bool):
        return setting, "as configured"
    if device.type != "cuda":
        return False, "of use on CUDA"
    if attention == "padded":
        return False, "attention pads to the longest sequence, so shapes differ from batch to batch"
    return True, "shapes are nearly the same in every batch"


def compile_layers(
    model: BertForPreTraining, backend: str | Callable[..., Any] = "inductor", *, strict: bool = False
) -> None:
    """Let the compiler make each layer's forward and backward pass, at its first call.

    One is compiled for all, and for any number of tokens and sequences. (Inductor compiles a second time where the
    tokens of a micro-batch cross some 5 million over the hidden size, below which it fuses less.) With `strict`, what
    cannot be compiled whole is an error.
    """
    if cores.owns_process:
        from torch._inductor import config as inductor_config  # slow to import

        # By default the compiler gives up after eight versions, splits a layer for DDP's buckets, which are far larger,
        # and writes GELU's gradient out in fp32. A process that is another program's keeps its settings.
        torch._dynamo.config.recompile_limit, torch._dynamo.config.optimize_ddp = 64, False
        if model.mlm_head.bias.device.type == "cuda":
            inductor_config.realize_opcount_threshold = OPERATIONS_FUSED
    for module in (model.embeddings, *model.encoder.layers, model.mlm_head):
        module.forward = _of_any_length(torch.compile(module.forward, backend=backend, fullgraph=strict))


def _of_any_length(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a compiled function that tells the compiler which dimension varies: the first of every input.

    Left to itself the compiler makes code for one length first, and for all others at the second; told that every
    dimension may vary, it knows no width of a matrix.
    """

    def marked(*inputs: Tensor | Layout) -> Tensor:
        for given in inputs:
            for tensor in (given,) if isinstance(given, Tensor) else (given.cu_seqlens, given.slots, given.mask):
                if tensor is not None:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return forward(*inputs)

    return marked


def choose_micro_batch_tokens(
    config: TrainConfig,
    model: BertForPreTraining,
    max_seq_length: int,
    device: torch.device,
    dtype: torch.dtype,
    num_ranks: int = 1,
) -> int:
    """Return the tokens that a micro-batch may hold, from the configuration or from what fits."""
    if config.micro_batch_tokens != "auto":
        return config.micro_batch_tokens
    whole_batch = -(-config.global_batch_size // num_ranks) * max_seq_length
    kept, backward = activation_bytes_per_token(model, max_seq_length, dtype, config.activation_checkpointing)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # kept of freed tensors
        # Weights that are there already are counted in the state.
        free += sum(4 * each.numel() for each in model.parameters() if each.device.type == "cuda")
        room = USED_SHARE * (free - _state_bytes(config, model, dtype))
        with_logits = (room - USED_SHARE * _logits_bytes(model, dtype)) / kept
        fitting = int(min(with_logits, room / (kept + backward)))
    else:
        fitting = min(CPU_MICRO_BATCH_TOKENS, CPU_ACTIVATION_BYTES // (kept + backward))
    return max(max_seq_length, min(fitting, whole_batch))


USED_SHARE = 0.8
"""Share of the free memory for activations: the estimate is within 15 % of the peak, 25 % above it where layers are
compiled, and blocks do not fill it."""


def estimate_memory(
    config: TrainConfig,
    model: BertForPreTraining,
    max_seq_length: int,
    micro_batch_tokens: int,
    *,
    dtype: torch.dtype,
) -> int:
    """Estimate the bytes of a run on its device; in 16 bits, matrix products run on copies of the weights."""
    kept, backward = activation_bytes_per_token(model, max_seq_length, dtype, config.activation_checkpointing)
    # A block of masked rows and the backward pass of a layer do not exist at once.
    passing = max(_logits_bytes(model, dtype), backward * micro_batch_tokens)
    return _state_bytes(config, model, dtype) + kept * micro_batch_tokens + passing


def _state_bytes(config: TrainConfig, model: BertForPreTraining, dtype: torch.dtype) -> int:
    """Return what weights, gradients and the optimizer's state take."""
    moments = 0
    for name, parameter in model.named_parameters():
        moments += parameter.numel() * (4 if config.optimizer == "muon" and is_hidden_matrix(name) else 8)
    return moments + (8 + (2 if dtype.itemsize == 2 else 0)) * model.num_parameters


def _logits_bytes(model: BertForPreTraining, dtype: torch.dtype) -> int:
    """Return what a block of masked rows takes.

    Logits are in the precision of the product and twice in fp32, as is the gradient of the tied matrix.
    """
    return (dtype.itemsize + 8) * model.vocab_size * (BLOCK_ROWS + model.config.hidden_size)


def activation_bytes_per_token(
    model: BertForPreTraining, max_seq_length: int, dtype: torch.dtype, checkpointing: bool = False
) -> tuple[int, int]:
    """Return what a token leaves in memory until its backward pass, and what the backward pass of a layer adds.

    A layer keeps, a token: what its normalisations are given, in fp32 (8 H); what its products are given, query,
    key, value and the attention's projection (7 H values); the wide activations before and after GELU (2 I values); and
    dropout masks (2 H). Attention that pads also keeps its padded context and a row of probabilities a head, with
    dropout twice and with a mask. With checkpointing a layer keeps its input (H values), one at a time the rest.
    Tests trace whole steps and hold the estimate against the peak.
    """
    config, width = model.config, dtype.itemsize
    hidden = config.hidden_size
    masks = 2 if config.hidden_dropout_prob > 0 else 0
    layer = (8 + 7 * width + masks) * hidden + 2 * width * config.intermediate_size
    if model.attention_backend == "padded":
        row = 2 * width + 1 if config.attention_probs_dropout_prob > 0 else width
        layer += width * hidden + row * config.num_attention_heads * max_seq_length
    ends = 8 * hidden  # the embeddings' sum, normalised, and the few masked positions in the head
    backward = 10 * hidden  # the gradients of the hidden states and of a wide activation
    if checkpointing:
        return config.num_hidden_layers * width * hidden + ends, layer + backward
    return config.num_hidden_layers * layer + ends, backward
