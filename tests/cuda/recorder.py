"""Records what the operators of some code would do to a CUDA device, above all where the host would wait for it.

What is inside a kernel of PyTorch does not show here; what the operators are given and what they return does.
"""

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import bert_pretrain
from tests.cuda.pretended import CUDA, is_pinned, pretended_cuda

PACKAGE = Path(bert_pretrain.__file__).parent
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
NO_KERNEL = {
    "aten.alias", "aten.detach", "aten.expand", "aten.permute", "aten.select", "aten.slice", "aten.split",
    "aten.split_with_sizes", "aten.t", "aten.transpose", "aten.unbind", "aten.unsqueeze", "aten.squeeze", "aten.view",
    "aten._unsafe_view", "aten._reshape_alias", "aten.empty", "aten.empty_like", "aten.new_empty",
    "profiler._record_function_enter_new", "profiler._record_function_exit",
}  # fmt: skip
"""Operators that only look at a tensor in another way, or reserve memory."""


class Recorder(TorchDispatchMode):
    """Notes waits and shapes that depend on data, and counts the operators that launch something on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.waits: list[str] = []
        """What makes the host wait for the device, each with the line of the project."""
        self.data_dependent: list[str] = []
        """What has a result whose shape only the device knows, which is a wait as well."""
        self.asynchronous_copies = 0
        """Between host and device, in the background."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Look away while something is compiled, not while what was compiled runs."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # more than all others together
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        if func is aten._local_scalar_dense.default and _on_cuda(given):
            self._note(self.waits, func, given)
            return float(given[0].dtype != torch.bool)  # one, and no to any question
        if _has_data_dependent_shape(func, args, kwargs) and _on_cuda(given):
            self._note(self.data_dependent, func, given)
        result = func(*args, **kwargs)
        devices = {tensor.device.type for tensor in (*given, *_tensors(result))}
        if {"cpu", "cuda"} <= devices:
            self._note_crossing(func, args, kwargs, given)
        name = str(func).rpartition(".")[0]
        if "cuda" in devices and name not in NO_KERNEL:
            self.operators[name] += 1
        return result

    def _note_crossing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> None:
        """Judge an operator that sees tensors of both devices."""
        if func in COPIES:
            is_asynchronous = kwargs.get("non_blocking", False) or (func is aten.copy_.default and True in args[2:])
            # Of memory that is not page-locked the driver makes a copy first, for which it may wait.
            if not is_asynchronous or not all(is_pinned(tensor) for tensor in given if tensor.device.type == "cpu"):
                self._note(self.waits, func, given)
            else:
                self.asynchronous_copies += 1
        elif not _takes_numbers(func) or any(tensor.dim() for tensor in given if tensor.device.type == "cpu"):
            self._note(self.waits, func, given)

    def _note(self, notes: list[str], func: Any, given: list[Tensor]) -> None:
        notes.append(f"{func} of {', '.join(f'{t.device.type} {tuple(t.shape)}' for t in given)} at {_project_line()}")


def _takes_numbers(func: Any) -> bool:
    """Whether a single number on the CPU becomes an argument of the kernel; else it is copied, which waits."""
    return func is aten.fill_.Tensor or (torch.Tag.pointwise in func.tags and func is not aten.where.self)


def _has_data_dependent_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if torch.Tag.dynamic_output_shape not in getattr(func, "tags", ()):
        return False
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func is aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return True


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor)]


def _on_cuda(tensors: list[Tensor]) -> bool:
    return any(tensor.device.type == "cuda" for tensor in tensors)


def _project_line() -> str:
    """Return the innermost line of the project that is being run."""
    for frame in reversed(traceback.extract_stack()):
        if PACKAGE in Path(frame.filename).parents:
            return f"{Path(frame.filename).relative_to(PACKAGE)}:{frame.lineno} {frame.line}"
    return "no line of the project"


def notes() -> list[list[list[int]]]:
    """Return for waits, data-dependent shapes and harmless things, done on purpose, how many of both were noted."""
    waits: list[Callable[[Tensor], object]] = [
        lambda values: values.sum().item(),
        lambda values: values.cpu(),
        lambda values: torch.tensor([1.0, 2.0], device=values.device),
        lambda values: torch.ones(3).to(values.device, non_blocking=True),  # from memory that is not page-locked
        lambda values: values.__setitem__(1, 1.0),  # a single element: PyTorch copies the number
        lambda values: torch.where(values > 0, torch.tensor(1.0), values),
    ]
    data_dependent = [lambda values: values[values > 0], lambda values: values.repeat_interleave(values.long())]
    harmless = [
        lambda values: values.__setitem__(slice(1, 3), 1.0),
        lambda values: torch.where(values > 0, 0.0, values * 2.0 + 1.0).clamp(max=1.0),
        lambda values: torch.ones(3).pin_memory().to(values.device, non_blocking=True),
        lambda values: values.repeat_interleave(values.long(), output_size=7),
    ]
    return [[_noted(thing) for thing in things] for things in (waits, data_dependent, harmless)]


def _noted(thing: Callable[[Tensor], object]) -> list[int]:
    with pretended_cuda(), Recorder() as recorder:
        values = torch.ones(4, device=CUDA)
        with contextlib.suppress(RuntimeError, TypeError):  # a fake tensor has no values to decide by
            thing(values)
        return [len(recorder.waits), len(recorder.data_dependent)]
