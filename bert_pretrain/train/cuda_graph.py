"""The whole training step as one launch: CUDA graphs over static inputs, for networks that are bound by launches.

A small network's step is some hundred launches, which take the host longer than the device computes. Captured once with
forward and backward pass, clipping and update, they are replayed as one. A graph has one shape, so all that a
micro-batch holds gets a tail. Traced, and run without a capture; never captured on a GPU.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bert_pretrain.config import ModelConfig
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.batches import Batch, GlobalBatch
from bert_pretrain.train.flops import batch_flops, peak_flops
from bert_pretrain.train.optimizers import Optimizers

MAX_GRAPHS = 32
LAUNCHES, LAUNCHES_PER_LAYER, LAUNCH_SECONDS = 226, 49, 42e-6
"""Kernel launches of a compiled step with AdamW, and the host's time for one; measured on an H100."""
USUAL_MFU = 0.4
Compute = Callable[[Iterable[Batch], Tensor, Tensor], None]
"""Computes a step of micro-batches, the counts that their losses are divided by, (2,), and the learning rate, ()."""


class StepGraphs:
    """The graphs of a compiled model's steps, one for each shape of a micro-batch.

    A shape's first step is computed as ever, by which kernels are compiled and chosen. Where graphs do not pay or
    capturing fails, or there are too many shapes, all or those steps are.
    """

    def __init__(self, model: BertForPreTraining, optimizers: Optimizers, dtype: torch.dtype) -> None:
        self._model, self._optimizers = model, optimizers
        device = model.mlm_head.bias.device
        self._peak = peak_flops(device, dtype)
        self._pool: Any = None
        self._counts = torch.zeros(2, dtype=torch.float64, device=device)
        self._rate = torch.zeros((), device=device)
        self._graphs: dict[tuple[object, ...], tuple[Batch, Callable[[], None]] | None] = {}
        self.has_failed = False

    def run(self, compute: Compute, batch: GlobalBatch, learning_rate: float) -> bool:
        """Compute the step by its graph, with dropout from the generator's present state; False if there is none."""
        if self.has_failed or len(batch.micro_batches) > 1 or not self.pays(batch):
            return False
        (given,) = batch.micro_batches
        shape = (*(len(tensor) for tensor in given.tensors().values()), given.max_seqlen)
        if shape not in self._graphs:
            if len(self._graphs) < MAX_GRAPHS:
                self._graphs[shape] = None
            return False
        graph = self._graphs[shape] or self._captured(compute, given)
        if graph is None:
            return False
        self._graphs[shape] = graph
        inputs, launch = graph
        torch._foreach_copy_(list(inputs.tensors().values()), list(given.tensors().values()))
        self._counts[0].fill_(batch.num_predictions)
        self._counts[1].fill_(batch.num_pairs)
        self._rate.fill_(learning_rate)
        launch()
        return True

    def _captured(self, compute: Compute, given: Batch) -> tuple[Batch, Callable[[], None]] | None:
        """Return the static inputs of a shape and the launch of its graph, or None where capturing fails."""
        inputs = given.with_tensors(Tensor.clone)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["capturable"] = True  # PyTorch's AdamW asks for the word
        try:
            return inputs, self.capture(lambda: compute([inputs], self._counts, self._rate))
        except Exception as error:  # nothing has run, so the step can still be computed as ever
            print(f"steps are not captured as CUDA graphs: {type(error).__name__}: {error}")
            self.drop()
            return None
        finally:
            for optimizer in self._optimizers:
                optimizer.zero_grad(set_to_none=True)  # they are in the graph's own memory

    def pays(self, batch: GlobalBatch) -> bool:
        """Whether launching a step's kernels takes longer than computing them."""
        model = self._model
        return launches_dominate(model.config, batch_flops(batch, model.config, model.vocab_size), self._peak)

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Return what launches all that `compute` launches, and run nothing."""
        graph = torch.cuda.CUDAGraph()
        # One memory for all, since no graph leaves anything in it that is needed after the step. Other threads lock
        # pages for the next batches meanwhile, which must not end the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()
        self._pool = graph.pool()
        return graph.replay

    def drop(self) -> bool:
        """Give back the graphs' memory, and capture no more; returns whether there were any."""
        had_graphs = any(self._graphs.values())
        self._graphs.clear()
        self.has_failed = True
        return had_graphs


def launches_dominate(model: ModelConfig, flops: float, peak_flops: float | None) -> bool:
    """Whether launching the kernels of a step takes longer than its operations, on a card of a known peak."""
    launching = (LAUNCHES + LAUNCHES_PER_LAYER * model.num_hidden_layers) * LAUNCH_SECONDS
    return peak_flops is not None and launching > flops / (USUAL_MFU * peak_flops)
