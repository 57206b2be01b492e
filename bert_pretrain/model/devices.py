"""Choose the device and the precision, and configure the CPU."""

import ctypes
import os
import sys
from dataclasses import dataclass

import torch

from bert_pretrain.errors import ConfigError
from bert_pretrain.io import cores

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Precision:
    """The precision of matrix products, and the reason for it."""

    name: str
    reason: str

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]


def choose_device(setting: str, local_rank: int = 0) -> torch.device:
    """Return the device for the setting `auto`, `cpu`, `cuda` or `cuda:N`. Without N, it is the local rank's card.

    If each rank sees only one card, as with Slurm's `--gpus-per-task=1`, the card has the number 0 on every rank.
    """
    if setting == "auto":
        setting = "cuda" if torch.cuda.is_available() else "cpu"
    if setting == "cuda":
        sees_one = torch.cuda.device_count() == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
        setting = "cuda:0" if sees_one else f"cuda:{local_rank}"
    device = torch.device(setting)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"the device is '{setting}', but this machine has {torch.cuda.device_count()} CUDA devices",
            where="train.device, or --device",
            remedy="set it to auto or cpu, or run on a machine with this device",
        )
    return device


def describe_device(device: torch.device) -> str:
    """Return the name of a device. For the CPU, add the numbers of threads and cores."""
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads (OMP_NUM_THREADS) on {cores.available_cores()} cores"
    return str(device)


def configure_cpu(device: torch.device) -> None:
    """On CPU, fix the number of threads of matrix products, and let glibc reuse the memory of freed tensors.

    By default MKL may choose another number of threads for each product, which changes the last bits of the result.
    glibc maps new pages for every large tensor, which takes a third of a training step of BERT-Base. The settings
    cannot be undone, so they are not applied if another program imports this package.
    """
    if device.type != "cpu" or not cores.owns_process:
        return
    torch.set_num_threads(torch.get_num_threads())  # also disables MKL_DYNAMIC
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # parameters from <malloc.h>
        mallopt(-4, 0)  # M_MMAP_MAX: allocate on the heap
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never return memory to the system
        mallopt(-2, 64 * 2**20)  # M_TOP_PAD: grow the heap in large steps


def choose_precision(setting: str, device: torch.device) -> Precision:
    """Return the precision for a setting. `auto` chooses bf16 if the device has instructions for it."""
    if setting != "auto":
        return Precision(setting, "as configured")
    if device.type == "cuda":
        # On older cards emulated bf16 is slower than fp32.
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision("bf16", "the card has it")
        return Precision("fp16", "the card has no bf16")
    if feature := cores.cpu_bf16_feature():
        return Precision("bf16", f"the CPU has {feature}")
    return Precision("fp32", "the CPU has neither avx512_bf16 nor AMX, without which bf16 is slower")
