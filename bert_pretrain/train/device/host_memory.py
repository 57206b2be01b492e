"""Copies of a training state in host memory, made without waiting for a GPU.

Only page-locked memory takes copies from a GPU in the background, and locking pages is slow: it is allocated for the
first copy and used for all that follow. Whoever reads a copy waits for it; training continues at once, because the GPU
works in order: what changes a tensor runs after the copy of it.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class HostCopy:
    """Copies of tensors by name, perhaps still under way."""

    tensors: dict[str, Tensor]
    arrival: Any = None
    """A CUDA event after the last copy; None where all have arrived."""
    reader: threading.Thread | None = None
    """Reads the copies until it ends; None: it is not known for how long they are needed."""

    def wait(self) -> None:
        """Wait until all copies have arrived; needed before the first look at one."""
        if self.arrival is not None:
            self.arrival.synchronize()


class HostMemory:
    """Memory for one copy of a state at a time."""

    def __init__(
        self,
        allocate: Callable[[Tensor], Tensor] | None = None,
        mark_arrival: Callable[[], Any] | None = None,
    ) -> None:
        """Copy into memory of a tensor's shape and type from `allocate`, used again for every copy.

        Without it each tensor gets fresh memory. `mark_arrival` returns what `HostCopy.wait` synchronizes with.
        """
        self._allocate, self._mark_arrival = allocate, mark_arrival
        self._buffers: dict[str, Tensor] = {}
        self._last: HostCopy | None = None

    @staticmethod
    def of(device: torch.device) -> "HostMemory":
        """Return memory for the copies of a state on a device."""
        return HostMemory(page_locked, recorded_event) if device.type == "cuda" else HostMemory()

    def copy(self, tensors: Mapping[str, Tensor]) -> HostCopy:
        """Begin to copy tensors, one after the other; waits for the reader of the copy before."""
        self._reclaim()
        copies = {name: self._copy(name, tensor.detach()) for name, tensor in tensors.items()}
        self._last = HostCopy(copies, None if self._mark_arrival is None else self._mark_arrival())
        return self._last

    def _reclaim(self) -> None:
        """Wait until the memory of the copy before is free, or leave it to that copy."""
        if self._last is None:
            return
        if self._last.reader is not None:
            self._last.reader.join()
        else:
            self._buffers = {}
        self._last = None

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        if self._allocate is None:
            return tensor.to("cpu", copy=True).contiguous()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[name] = self._allocate(tensor)
        return buffer.copy_(tensor, non_blocking=True)


def page_locked(tensor: Tensor) -> Tensor:
    """Return page-locked memory of a tensor's shape and type; PyTorch rounds what it locks up to a power of two.

    Where no more can be locked it is ordinary memory, and the copy waits.
    """
    memory = torch.empty(tensor.shape, dtype=tensor.dtype)
    try:
        return memory.pin_memory()
    except RuntimeError:
        return memory


def recorded_event() -> Any:
    """Return an event after all that the current stream has been given; None without a driver."""
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
