"""Counts what is compiled while steps of different sizes are traced on the pretended device."""

import functools
from typing import Any
from unittest import mock

import torch
from torch._dynamo.backends.debugging import aot_eager

from bert_pretrain.train import loss
from tests.cuda.pretended import fake_global_batch, make_state, pin, pretended_cuda
from tests.cuda.recorder import Recorder
from tests.cuda.steps import Combination, make_config, read_batches, run_step

GLOBAL_BATCH_SIZES = (24, 19, 37)


class Counter:
    """A compiler that makes no code and counts the graphs that it is given."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.num_graphs += 1
        return aot_eager(graph, inputs)


def compilations(data: str, checkpointing: str) -> dict[str, Any]:
    """Return the graphs after each step in fp16, and the waits."""
    by_size = [
        read_batches(data, static_shapes=True, global_batch_size=size, micro_batch_tokens=10**6)
        for size in GLOBAL_BATCH_SIZES
    ]
    batches = [batches[0] for batches, _ in by_size]
    counter, graphs = Counter(), []
    config = make_config(Combination("adamw", "fp16", "varlen", checkpointing == "True", 0.1, True))
    softmax = functools.partial(loss._compiled_softmax, counter)
    with pretended_cuda() as mode, mock.patch.object(loss, "_compiled_softmax", softmax):
        state = make_state(config, by_size[0][1], attention="varlen", backend=counter)
        with Recorder() as recorder:
            for step, batch in enumerate(batches):
                run_step(state, config, pin(fake_global_batch(mode, batch)), step)
                graphs.append(counter.num_graphs)
    micro = [batch.micro_batches[0] for batch in batches]
    return {
        "graphs": graphs,
        "waits": recorder.waits + recorder.data_dependent,
        "casts": recorder.operators["aten._to_copy"],
        "gradients": sorted({str(one.grad.dtype) for one in state.model.parameters() if one.grad is not None}),
        "shapes": [(len(one.input_ids), len(one.cu_seqlens), len(one.masked_positions)) for one in micro],
    }
