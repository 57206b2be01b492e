"""The whole training step as one launch: CUDA graphs over static inputs, for networks that are bound by launches.

A small network's step is some hundred launches, which take the host longer than the device computes. Captured once with
forward and backward pass, clipping and update, they are replayed as one. A graph has one shape, so all that a
micro-batch holds gets a tail. Captures depend on card and driver, and one pair has been tried, so the first result of
each graph is compared with that of the plain step, and only the plain step's counts.
"""

import contextlib
import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bert_pretrain.config import ModelConfig
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.flops import batch_flops, peak_flops
from bert_pretrain.train.optimizers import Optimizers
from bert_pretrain.train.packing import Batch, GlobalBatch

MAX_GRAPHS = 32
LAUNCHES, LAUNCHES_PER_LAYER, LAUNCH_SECONDS = 226, 49, 42e-6
"""Kernel launches of a compiled step with AdamW, and the host's time for one; measured on an H100."""
USUAL_MFU = 0.4
MAX_DIFFERENCES = (1e-4, 0.3)
"""Largest differences of metrics and weights between a graph's first result and a plain step, relative to the update.

The forward pass is deterministic, sums of gradients are not.
"""
Compute = Callable[[Iterable[Batch], Tensor, Tensor], None]
"""Computes a step of micro-batches, the counts that their losses are divided by, (2,), and the learning rate, ()."""


class Graph(NamedTuple):
    """The static inputs of a captured step, and what launches it."""

    inputs: Batch
    launch: Callable[[], None]


class Trial(NamedTuple):
    """Tensors that a step changes, and copies of them: before it, and after a launch that was undone."""

    changed: list[Tensor]
    before: list[Tensor]
    by_graph: list[Tensor]

    def distances(self) -> tuple[float, float]:
        """Return the 2-norms of the graph's values less the present ones, and of the old ones less these."""
        wrong, moved = (
            torch.stack([(one - now).double().norm() for one, now in zip(values, self.changed, strict=True)]).norm()
            for values in (self.by_graph, self.before)
        )
        return wrong.item(), moved.item()


class StepGraphs:
    """The graphs of a compiled model's steps, one for each shape of a micro-batch.

    A shape's first step is computed without a graph, which compiles and chooses kernels. So is the second, from which
    its graph is made. Where graphs do not pay, capturing fails or results differ, or there are too many shapes, all or
    those steps are.
    """

    has_failed: ClassVar[bool] = False
    """Whether this process could not capture a step; it does not try again."""

    def __init__(self, model: BertForPreTraining, optimizers: Optimizers, dtype: torch.dtype) -> None:
        self._model, self._optimizers = model, optimizers
        device = model.mlm_head.bias.device
        self._peak = peak_flops(device, dtype)
        self._pool: Any = None
        self._stream: Any = None
        self._counts = torch.zeros(2, dtype=torch.float64, device=device)
        self._rate = torch.zeros((), device=device)
        self._graphs: dict[tuple[object, ...], Graph | None] = {}
        self._trials: list[Trial] = []
        self._is_dropped = False

    def run(
        self,
        compute: Compute,
        batch: GlobalBatch,
        learning_rate: float,
        seed: Callable[[], object],
        metrics: Sequence[Tensor],
    ) -> bool:
        """Compute the step by its graph; False if it must be computed without one.

        `seed` sets the generator for dropout. `metrics` are what a step changes besides the weights and the state of
        the optimizers, the same tensors in every step.
        """
        if self.has_failed or self._is_dropped or len(batch.micro_batches) > 1 or not self.pays(batch):
            return False
        (given,) = batch.micro_batches
        shape = (*(len(tensor) for tensor in given.tensors().values()), given.max_seqlen)
        if shape not in self._graphs:
            if len(self._graphs) < MAX_GRAPHS:
                self._graphs[shape] = None
            return False

        def launch(graph: Graph) -> None:
            torch._foreach_copy_(list(graph.inputs.tensors().values()), list(given.tensors().values()))
            self._counts[0].fill_(batch.num_predictions)
            self._counts[1].fill_(batch.num_pairs)
            self._rate.fill_(learning_rate)
            seed()
            graph.launch()

        graph = self._graphs[shape]
        if graph is None:
            self._graphs[shape] = self._captured(compute, given, launch, metrics)
            return False
        launch(graph)
        return True

    def _captured(
        self, compute: Compute, given: Batch, launch: Callable[[Graph], None], metrics: Sequence[Tensor]
    ) -> Graph | None:
        """Capture a step, launch it for `check` and undo that; None where anything fails."""
        # So that a value that is captured, not read, gives another result.
        self._counts.fill_(torch.nan)
        self._rate.fill_(torch.nan)
        torch.manual_seed(0)
        states = (state for optimizer in self._optimizers for state in optimizer.state.values())
        moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        changing: list[list[Tensor]] = [list(metrics), list(self._model.parameters()), moments]
        try:
            before = [_copies(tensors) for tensors in changing]
            inputs = given.with_tensors(Tensor.clone)
            graph = Graph(inputs, self.capture(lambda: compute([inputs], self._counts, self._rate)))
            try:
                launch(graph)
                by_graph = [_copies(tensors) for tensors in changing[:2]]
            finally:
                with torch.no_grad():
                    for tensors, old in zip(changing, before, strict=True):
                        torch._foreach_copy_(tensors, old)
        except Exception as error:  # the state is what it was, so the step can still be computed without a graph
            cause = error.__cause__ or error.__context__ or error
            self._give_up(f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}")
            return None
        finally:
            self._zero_grad()  # they are in the graph's own memory
        self._trials = [Trial(*each) for each in zip(changing[:2], before, by_graph, strict=False)]
        return graph

    def check(self) -> None:
        """Compare the first result of a graph, if it is new, with that of the plain step, computed since."""
        if self._trials:
            self._zero_grad()  # replays need none
        for trial, most in zip(self._trials, MAX_DIFFERENCES, strict=False):
            difference, movement = trial.distances()
            if not difference <= most * movement:  # nor where one is not a number
                self._give_up(f"one gives another result: {difference:.2e} from the plain one, of {movement:.2e}")
                break
        self._trials = []

    def pays(self, batch: GlobalBatch) -> bool:
        """Whether launching a step's kernels takes longer than computing them."""
        model = self._model
        return launches_dominate(model.config, batch_flops(batch, model.config, model.vocab_size), self._peak)

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Return what launches all that `compute` launches, and run nothing; where that fails, torch is as before."""
        device = self._counts.device
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for group in groups:
            group["capturable"] = True  # PyTorch's AdamW asks for the word
        gc.collect()
        gc.disable()  # a kernel that is unloaded meanwhile would end the capture
        try:
            # One memory for all, since no graph leaves anything in it that is needed after the step. Other threads lock
            # pages for the next batches meanwhile, which must not end the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                compute()
        except BaseException:
            # An error at the end of a capture leaves torch on the capture's stream, and before 2.13 with a generator
            # and an allocator that take it for unfinished.
            torch.cuda.set_stream(before)
            torch.cuda.default_generators[device.index].graphsafe_set_state(torch.Generator(device))
            with contextlib.suppress(Exception):  # it has ended
                torch._C._cuda_endAllocateToPool(device.index, self._pool)
            raise
        finally:
            gc.enable()
            for group in groups:
                group["capturable"] = False
        return graph.replay

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _give_up(self, why: str) -> None:
        StepGraphs.has_failed = True
        print(f"steps are not captured as CUDA graphs: {why}")
        self.drop()

    def drop(self) -> bool:
        """Give back the graphs' memory, and capture no more; returns whether there were any."""
        had_graphs = any(self._graphs.values())
        self._graphs.clear()
        self._trials = []
        self._is_dropped = True
        return had_graphs


def _copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def launches_dominate(model: ModelConfig, flops: float, peak_flops: float | None) -> bool:
    """Whether launching the kernels of a step takes longer than its operations, on a card of a known peak."""
    launching = (LAUNCHES + LAUNCHES_PER_LAYER * model.num_hidden_layers) * LAUNCH_SECONDS
    return peak_flops is not None and launching > flops / (USUAL_MFU * peak_flops)
