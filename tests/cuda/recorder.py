"""Record the operators that run on a CUDA device, and where the host would wait for the device.

Only the inputs and outputs of operators are visible, not the inside of PyTorch's kernels.
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
from tests.cuda.fake_cuda import CUDA, fake_cuda, is_pinned

PACKAGE = Path(bert_pretrain.__file__).parent
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
NO_KERNEL = {  # operators that return a view or allocate memory
    "aten.alias", "aten.detach", "aten.expand", "aten.permute", "aten.select", "aten.slice", "aten.split",
    "aten.split_with_sizes", "aten.t", "aten.transpose", "aten.unbind", "aten.unsqueeze", "aten.squeeze", "aten.view",
    "aten._unsafe_view", "aten._reshape_alias", "aten.empty", "aten.empty_like", "aten.new_empty",
    "profiler._record_function_enter_new", "profiler._record_function_exit",
}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Records waits, and counts the operators that launch a kernel on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.waits: list[str] = []  # operators that make the host wait, each with its line in the package
        self.asynchronous_copies = 0  # between host and device

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Ignore operators during compilation, but not those of compiled code."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # for speed: this is called more often than all others
            return func(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        if func is aten._local_scalar_dense.default and _on_cuda(inputs):
            self._wait(func, inputs)
            return float(inputs[0].dtype != torch.bool)  # a value for `item`: 1.0 for numbers, false for conditions
        if _has_data_dependent_shape(func, args, kwargs) and _on_cuda(inputs):
            self._wait(func, inputs)
        result = func(*args, **kwargs)
        devices = {tensor.device.type for tensor in (*inputs, *_tensors(result))}
        if {"cpu", "cuda"} <= devices:
            self._record_transfer(func, args, kwargs, inputs)
        name = str(func).rpartition(".")[0]
        if "cuda" in devices and name not in NO_KERNEL:
            self.operators[name] += 1
        return result

    def _record_transfer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor]) -> None:
        """Record an operator with tensors on both devices."""
        if func in COPIES:
            is_asynchronous = kwargs.get("non_blocking", False) or (func is aten.copy_.default and True in args[2:])
            # The driver first copies memory that is not page-locked, and may wait.
            if not is_asynchronous or not all(is_pinned(tensor) for tensor in inputs if tensor.device.type == "cpu"):
                self._wait(func, inputs)
            else:
                self.asynchronous_copies += 1
        elif not _accepts_cpu_scalars(func) or any(tensor.dim() for tensor in inputs if tensor.device.type == "cpu"):
            self._wait(func, inputs)

    def _wait(self, func: Any, inputs: list[Tensor]) -> None:
        shapes = ", ".join(f"{tensor.device.type} {tuple(tensor.shape)}" for tensor in inputs)
        self.waits.append(f"{func} of {shapes} at {_package_line()}")


def _accepts_cpu_scalars(func: Any) -> bool:
    """Return whether a scalar on the CPU is passed as a kernel argument. Otherwise it is copied, which is a wait."""
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


def _package_line() -> str:
    for frame in reversed(traceback.extract_stack()):
        if PACKAGE in Path(frame.filename).parents:
            return f"{Path(frame.filename).relative_to(PACKAGE)}:{frame.lineno} {frame.line}"
    return "no line of the package"


def recorded_counts() -> list[list[int]]:
    """Return the number of waits of operations that wait, and of operations that do not."""
    waits: list[Callable[[Tensor], object]] = [
        lambda values: values.sum().item(),
        lambda values: values.cpu(),
        lambda values: torch.tensor([1.0, 2.0], device=values.device),
        lambda values: torch.ones(3).to(values.device, non_blocking=True),  # the memory is not page-locked
        lambda values: values.__setitem__(1, 1.0),  # PyTorch copies the number for a single element
        lambda values: torch.where(values > 0, torch.tensor(1.0), values),
        lambda values: values[values > 0],  # the shape depends on the data
        lambda values: values.repeat_interleave(values.long()),
    ]
    harmless = [
        lambda values: values.__setitem__(slice(1, 3), 1.0),
        lambda values: torch.where(values > 0, 0.0, values * 2.0 + 1.0).clamp(max=1.0),
        lambda values: torch.ones(3).pin_memory().to(values.device, non_blocking=True),
        lambda values: values.repeat_interleave(values.long(), output_size=7),
    ]
    return [[_num_waits(operation) for operation in group] for group in (waits, harmless)]


def _num_waits(operation: Callable[[Tensor], object]) -> int:
    with fake_cuda(), Recorder() as recorder:
        values = torch.ones(4, device=CUDA)
        with contextlib.suppress(RuntimeError, TypeError):  # fake tensors have no values
            operation(values)
    return len(recorder.waits)
