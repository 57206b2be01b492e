"""Count the memory traffic and launches of one compiled layer. Inductor fuses its graphs but generates no code."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._inductor import compile_fx as inductor
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import shape_env_from_inputs
from torch._inductor.virtualized import V

from bert_pretrain.config import ModelConfig
from bert_pretrain.model import bert
from bert_pretrain.model.attention import Layout, with_rotation
from bert_pretrain.train.hardware import OPERATIONS_FUSED
from tests.cuda.fake_cuda import CUDA, fake_cuda

stages: Any = inductor
# Launches per library call in the recorded profile. A matrix product has a memset before it or a reduction after it;
# flash attention initializes its state.
LAUNCHES = {
    "mm": 2, "addmm": 2, "_varlen_attn": 2, "_varlen_attn_backward": 3,
    "short_attention": 1, "short_attention_backward": 1,
}  # fmt: skip


def count(hidden_size: int, tokens: int, length: int, attention: str, settings: dict[str, Any]) -> dict[str, float]:
    """Return the launches of a layer, forward and backward, and the bytes moved outside products and attention.

    A layer of ModernBERT is a local one.
    """
    shape = {"intermediate_size": 4 * hidden_size, "local_attention": length // 2, **settings}
    config = ModelConfig(
        hidden_size=hidden_size, num_hidden_layers=2, num_attention_heads=hidden_size // 64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **shape,
    )  # fmt: skip
    nodes: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        return stages.compile_fx(graph, inputs, inner_compile=lambda *args, **_: _fuse(nodes, *args))

    with _h100(), fake_cuda():
        with CUDA:
            layer = bert.ModernLayer(config, attention, 1) if config.is_modern else bert.Layer(config, attention)
            dtype = torch.float32 if config.is_modern else torch.bfloat16  # of the sum of all layers before it
            hidden = torch.empty(tokens, hidden_size, dtype=dtype).requires_grad_()
            bounds = torch.zeros(-(-tokens // length) + 1, dtype=torch.int32)
            layout = Layout(bounds, length, None, None)
            if config.is_modern:
                positions = torch.zeros(tokens, dtype=torch.int64)
                layout = with_rotation(layout, positions, config, is_padded=False)
        weights = {
            name: weight if "norm" in name else weight.detach().to(torch.bfloat16).requires_grad_()
            for name, weight in layer.named_parameters()
        }
        for tensor in (hidden, *vars(layout).values()):
            if isinstance(tensor, torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        layer.forward = torch.compile(layer.forward, backend=backend)  # type: ignore[method-assign]
        with torch.autocast("cuda", torch.bfloat16):
            torch.func.functional_call(layer, weights, (hidden, layout))
    kernels = [node for node in nodes if not node.is_extern()]
    libraries = [node.node.op_overload.name().rpartition("::")[2].partition(".")[0] for node in nodes
                 if node.is_extern() and getattr(node.node, "op_overload", None) is not None]  # fmt: skip
    return {
        "bytes": sum(node.get_read_write_buffers_sizes() for node in kernels),
        "launches": len(kernels) + sum(LAUNCHES[name] for name in libraries),
    }


def _fuse(nodes: list[Any], graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Lower and fuse a graph with Inductor, append its kernels to `nodes`, and return the graph unchanged."""
    stages.record_original_output_strides(graph)
    stages.view_to_reshape(graph)
    fake_mode = stages.fake_tensor_prop(graph, inputs)
    with V.set_fake_mode(fake_mode):
        stages._recursive_post_grad_passes(graph, is_inference=False)
        lowering = GraphLowering(graph, shape_env=shape_env_from_inputs(inputs))
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            lowering._update_scheduler()
            for node in lowering.scheduler.nodes:
                nodes.append(node)
                node.get_read_write_buffers_sizes()  # cached by the node; needs the graph handler
    return stages.make_boxed_func(graph.forward)


@contextlib.contextmanager
def _h100() -> Iterator[None]:
    """Report an H100 to the compiler, and compile the backward pass together with the forward pass."""
    properties = SimpleNamespace(
        name="H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65_536,
        shared_memory_per_block_optin=232_448, gcnArchName="", L2_cache_size=50 << 20,
    )  # fmt: skip
    interface = "torch._dynamo.device_interface.CudaInterface"
    answers = {
        "torch.cuda.get_device_properties": properties, "torch.cuda.get_device_capability": (9, 0),
        "torch.cuda.device_count": 1, "torch.cuda.current_device": 0, "torch._inductor.scheduler.has_triton": True,
        f"{interface}.get_device_properties": properties, f"{interface}.Worker.get_device_properties": properties,
        f"{interface}.get_compute_capability": 90,
    }  # fmt: skip
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        for target, answer in answers.items():
            stack.enter_context(mock.patch(target, lambda *_, answer=answer, **__: answer))
        stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        ours = {"triton.mix_order_reduction": True, "realize_opcount_threshold": OPERATIONS_FUSED}
        stack.enter_context(torch._inductor.config.patch(ours))
        yield
