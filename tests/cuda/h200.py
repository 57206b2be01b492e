"""Inductor on the pretended device: it makes its code for an H200, which then runs with fake tensors, without kernels.

So one sees how many kernels and matrix products a layer launches, how much memory the code of the compiler takes, and
whether Triton turns every kernel into machine code. Needs Triton, which a build of PyTorch for the CPU lacks.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda.pretended import CUDA

PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=141 * 10**9,
    warp_size=32,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    L2_cache_size=60 * 2**20,
    gcnArchName="",  # of cards that are not CUDA
)
ANSWERS: dict[str, Any] = {
    "torch.cuda.is_available": True,
    "torch.cuda.device_count": 1,
    "torch.cuda.current_device": 0,
    "torch.cuda.get_device_properties": PROPERTIES,
    "torch.cuda.get_device_capability": (9, 0),
    "torch.cuda.get_device_name": PROPERTIES.name,
    "torch.cuda.get_arch_list": ["sm_90"],
    "torch._dynamo.device_interface.CudaInterface.current_device": 0,
    "torch._dynamo.device_interface.CudaInterface.get_device_properties": PROPERTIES,
    "torch._dynamo.device_interface.CudaInterface.Worker.get_device_properties": PROPERTIES,
    "torch.cuda._lazy_init": None,
    "torch.cuda._exchange_device": 0,
    "torch.cuda._maybe_exchange_device": 0,
    "torch.cuda.set_device": None,
    "torch.cuda.synchronize": None,
    "torch._C._cuda_getCurrentRawStream": 0,
    "torch._C._dynamo.guards.assert_size_stride": None,
    "torch._C._dynamo.guards.assert_alignment": None,
    "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": None,
    # Both look for patterns that the model lacks, and make tensors on the device to do so.
    "torch._inductor.fx_passes.fuse_attention._sfdp_init": None,
    "torch._inductor.fx_passes.pad_mm._pad_mm_init": None,
}


@dataclass
class Generated:
    """What Inductor has made."""

    wrappers: list[str] = field(default_factory=list)
    """The Python code of each graph, which allocates memory and launches kernels."""
    kernels: dict[str, str] = field(default_factory=dict)
    """The names of the kernels by their source."""


@contextlib.contextmanager
def inductor_for_h200(cache: str) -> Iterator[Generated]:
    """Return a context in which `torch.compile` makes code for an H200; `cache` is a folder for it."""
    environment = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        _pretend_driver()
        from torch._inductor import config
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
        from torch._inductor.graph import GraphLowering

        generated = Generated()
        make_code, fold = GraphLowering.codegen, UniformValueConstantFolder._deduce_value

        def codegen(graph: Any) -> Any:
            wrapper, kernels = make_code(graph)
            generated.wrappers.append(wrapper.value)
            return wrapper, kernels

        def load_kernel(_: Any, name: str, source: str, device_str: str = "cuda") -> Any:
            generated.kernels[source] = name
            return SimpleNamespace(run=lambda *_, **__: None)

        def fold_on_cpu(folder: Any, node: Any) -> Any:
            with _OnCpu():
                return fold(folder, node)

        for target, answer in ANSWERS.items():
            stack.enter_context(mock.patch(target, lambda *_, answer=answer, **__: answer, create=True))
        for target, function in {
            "torch._C._dynamo.guards._empty_strided_cuda": _empty_strided,
            "torch._C._dynamo.guards._reinterpret_tensor": _reinterpret_tensor,
        }.items():
            stack.enter_context(mock.patch(target, function))
        for owner, name, method in (
            (GraphLowering, "codegen", codegen),
            (AsyncCompile, "triton", load_kernel),
            (UniformValueConstantFolder, "_deduce_value", fold_on_cpu),
        ):
            stack.enter_context(mock.patch.object(owner, name, method))
        # A kernel as Triton's own object, whose machine code one can look at.
        stack.enter_context(
            config.patch(compile_threads=1, force_disable_caches=True, use_static_triton_launcher=False)
        )
        yield generated


def launches(wrapper: str) -> dict[str, int]:
    """Return how many kernels of Triton, matrix products and other operators a graph's code launches."""
    body = wrapper[wrapper.index("def call(") : wrapper.index("def benchmark_compiled_module(")]
    return {
        "kernels": len(re.findall(r"\btriton_\w+\.run\(", body)),
        "products": len(re.findall(r"extern_kernels\.(?:mm|addmm|bmm|baddbmm)\(", body)),
        "others": len(re.findall(r"torch\.ops\.[\w.]+\(|\binductor_ops\.\w+\(|\baten\.\w+(?:\.\w+)?\(", body)),
    }


def machine_code(generated: Generated) -> dict[str, int]:
    """Compile every kernel for sm_90, in the first of its configurations; returns the bytes of each, by name."""
    from torch._inductor.codecache import PyCodeCache

    sizes = {}
    for number, (source, name) in enumerate(generated.kernels.items()):
        kernel: Any = getattr(PyCodeCache.load(source), name)
        kernel.configs = kernel.configs[:1]
        kernel.precompile(warm_cache_only=True)
        compiled = kernel.compile_results[0].kernel
        assert compiled.metadata.target.arch == 90
        sizes[f"{number} {name}"] = len(compiled.asm["cubin"])
    return sizes


class _OnCpu(TorchDispatchMode):
    """Makes on the CPU what would be made on the device: constants, of which Inductor computes with one element."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=CUDA)


def _reinterpret_tensor(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _pretend_driver() -> None:
    """Give Triton a driver of a device that is not there."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    limits = {"max_shared_mem": PROPERTIES.shared_memory_per_block_optin, "multiprocessor_count": 132, "warpSize": 32}
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_active_torch_device=lambda: CUDA,
            get_current_device=lambda: 0,
            get_current_stream=lambda device=0: 0,
            is_active=lambda: True,
            utils=SimpleNamespace(get_device_properties=lambda device: limits),
        )
    )
