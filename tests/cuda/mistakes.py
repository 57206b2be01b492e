"""Things that make the host wait, done on purpose: the recorder must see each of them."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.cuda.pretended import CUDA, pretended_cuda
from tests.cuda.recorder import Recorder


def _set_one(values: Tensor) -> None:
    values[1] = 1.0  # a single element: PyTorch copies the number


def _add_to_all(values: Tensor) -> None:
    torch._foreach_add_([values], values.sum())


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda values: values.sum().item(),
    "if": lambda values: bool((values > 0).any()),
    "tolist": lambda values: values[:1].tolist(),
    "cpu": lambda values: values.cpu(),
    "a new tensor": lambda values: torch.tensor([1.0, 2.0], device=values.device),
    "memory that is not page-locked": lambda values: torch.ones(3).to(values.device, non_blocking=True),
    "a copy that blocks": lambda values: torch.ones(3).pin_memory().to(values.device),
    "one element": _set_one,
    "foreach without alpha": _add_to_all,
    "index on the CPU": lambda values: values[torch.tensor([0, 1])],
    "a choice on the CPU": lambda values: torch.where(values > 0, torch.tensor(1.0), values),
}
DATA_DEPENDENT: dict[str, Callable[[Tensor], object]] = {
    "nonzero": lambda values: values.nonzero(),
    "mask": lambda values: values[values > 0],
    "masked_select": lambda values: values.masked_select(values > 0),
    "unique": lambda values: values.unique(),
    "repeat_interleave": lambda values: values.repeat_interleave(values.long()),
}
HARMLESS: dict[str, Callable[[Tensor], object]] = {
    "fill": lambda values: values[1:].fill_(1.0),
    "some elements": lambda values: values.__setitem__(slice(1, 3), 1.0),
    "numbers": lambda values: torch.where(values > 0, 0.0, values * 2.0 + 1.0).clamp(max=1.0),
    "full": lambda values: torch.full((), 3.0, device=values.device),
    "asynchronous copy": lambda values: torch.ones(3).pin_memory().to(values.device, non_blocking=True),
    "repeat_interleave": lambda values: values.repeat_interleave(values.long(), output_size=7),
}


def notes() -> dict[str, dict[str, list[int]]]:
    """Return for each kind of thing, and each thing, how many waits and data-dependent shapes were noted."""
    kinds = {"waits": WAITS, "data_dependent": DATA_DEPENDENT, "harmless": HARMLESS}
    return {kind: {name: _noted(thing) for name, thing in things.items()} for kind, things in kinds.items()}


def _noted(thing: Callable[[Tensor], object]) -> list[int]:
    with pretended_cuda(), Recorder() as recorder:
        values = torch.ones(4, device=CUDA)
        try:
            thing(values)
        except (RuntimeError, TypeError):  # a fake tensor has no values to decide by
            assert recorder.waits or recorder.data_dependent
        return [len(recorder.waits), len(recorder.data_dependent)]
