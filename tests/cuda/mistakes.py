"""Things that make the host wait, done on purpose, and harmless ones: the recorder must tell them apart."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.cuda.pretended import CUDA, pretended_cuda
from tests.cuda.recorder import Recorder

WAITS: list[Callable[[Tensor], object]] = [
    lambda values: values.sum().item(),
    lambda values: bool((values > 0).any()),
    lambda values: values.cpu(),
    lambda values: torch.tensor([1.0, 2.0], device=values.device),
    lambda values: torch.ones(3).to(values.device, non_blocking=True),  # from memory that is not page-locked
    lambda values: torch.ones(3).pin_memory().to(values.device),  # which blocks
    lambda values: values.__setitem__(1, 1.0),  # a single element: PyTorch copies the number
    lambda values: torch._foreach_add_([values], values.sum()),
    lambda values: values[torch.tensor([0, 1])],
    lambda values: torch.where(values > 0, torch.tensor(1.0), values),
]
DATA_DEPENDENT: list[Callable[[Tensor], object]] = [
    lambda values: values.nonzero(),
    lambda values: values[values > 0],
    lambda values: values.unique(),
    lambda values: values.repeat_interleave(values.long()),
]
HARMLESS: list[Callable[[Tensor], object]] = [
    lambda values: values.__setitem__(slice(1, 3), 1.0),
    lambda values: torch.where(values > 0, 0.0, values * 2.0 + 1.0).clamp(max=1.0),
    lambda values: torch.full((), 3.0, device=values.device),
    lambda values: torch.ones(3).pin_memory().to(values.device, non_blocking=True),
    lambda values: values.repeat_interleave(values.long(), output_size=7),
]


def notes() -> list[list[Any]]:
    """Return for each kind the numbers of waits and of data-dependent shapes that were noted for each thing."""
    return [[_noted(thing) for thing in things] for things in (WAITS, DATA_DEPENDENT, HARMLESS)]


def _noted(thing: Callable[[Tensor], object]) -> list[int]:
    with pretended_cuda(), Recorder() as recorder:
        values = torch.ones(4, device=CUDA)
        try:
            thing(values)
        except (RuntimeError, TypeError):  # a fake tensor has no values to decide by
            assert recorder.waits or recorder.data_dependent
        return [len(recorder.waits), len(recorder.data_dependent)]
