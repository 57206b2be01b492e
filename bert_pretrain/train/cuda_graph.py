"""CUDA graphs of whole training steps, so that the GPU rarely waits for the host.

A step launches hundreds of kernels. Launching them takes longer than running them for a small model, and for BERT-Base
when the host is busy, for example with the next batch. A graph captures forward and backward pass, gradient clipping
and optimizer update, and replays them with one launch. Its shapes are fixed, so micro-batches and their labels are
padded at the end. Whether a capture is correct depends on GPU and driver, so the first result of each graph is compared
with a step without a graph and then discarded.
"""

import contextlib
import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.optimizers import Optimizers
from bert_pretrain.train.packing import Batch, GlobalBatch

MAX_GRAPHS = 32
USED_MEMORY_SHARE = 0.9  # of the memory that is not allocated, for a graph and for steps without one
# Largest accepted differences of metrics and of weights between a graph's first result and a step without a graph,
# relative to the update. The limit of weights is larger, because sums of gradients are not deterministic.
MAX_DIFFERENCES = (1e-4, 0.3)
# Computes a step from micro-batches, the `GlobalBatch.counts`, (3,), and the learning rate, ().
Compute = Callable[[Iterable[Batch], Tensor, Tensor], None]


class Graph(NamedTuple):
    """The static inputs of a captured step, and a function that launches it."""

    inputs: Batch
    launch: Callable[[], None]


class Trial(NamedTuple):
    """Tensors that a step changes, with copies from before the step and from after a trial launch of its graph."""

    changed: list[Tensor]
    before: list[Tensor]
    by_graph: list[Tensor]

    def distances(self) -> tuple[float, float]:
        """Return the 2-norms of two differences from the current values: the graph's, and those before the step."""

        return self._distance(self.by_graph), self._distance(self.before)

    def _distance(self, values: list[Tensor]) -> float:
        norms = [(old - new).double().norm() for old, new in zip(values, self.changed, strict=True)]
        return torch.stack(norms).norm().item()


class StepGraphs:
    """CUDA graphs of a compiled model's steps, one for each shape of a micro-batch.

    The first step of a shape runs without a graph and compiles and selects kernels. The second captures the graph, and
    runs without it for comparison. No graph is used if it does not fit into memory, if a step has several
    micro-batches, if there are already `MAX_GRAPHS` shapes, or after a failed capture or a wrong result.
    """

    has_failed: ClassVar[bool] = False  # if True, for another reason than memory, no step of this process uses a graph

    def __init__(self, model: BertForPreTraining, optimizers: Optimizers) -> None:
        self._model = model
        self._optimizers = optimizers
        device = model.mlm_head.bias.device
        self._pool: Any = None
        self._stream: Any = None
        self._counts = torch.zeros(3, dtype=torch.float64, device=device)
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
        """Run the step if its graph exists, and return whether it ran. If not, the caller must run it with `compute`.

        `seed` seeds the generator for dropout. `metrics` are the tensors that a step changes besides weights and
        optimizer state. They must be the same objects in every step.
        """
        if self.has_failed or self._is_dropped or len(batch.micro_batches) > 1:
            return False
        (micro_batch,) = batch.micro_batches
        sizes = [len(tensor) for tensor in micro_batch.tensors().values()]
        shape = (*sizes, micro_batch.max_seqlen)
        if shape not in self._graphs:
            if not self._graphs and self._counts.is_cuda:
                torch.cuda.reset_peak_memory_stats(self._counts.device)  # for the peak of this step
            if len(self._graphs) < MAX_GRAPHS:
                self._graphs[shape] = None
            return False
        if self._pool is None and not self.fits_into_memory():
            self._is_dropped = True
            return False

        def launch(graph: Graph) -> None:
            torch._foreach_copy_(list(graph.inputs.tensors().values()), list(micro_batch.tensors().values()))
            for count, number in zip(self._counts, batch.counts, strict=True):
                count.fill_(number)
            self._rate.fill_(learning_rate)
            seed()
            graph.launch()

        graph = self._graphs[shape]
        if graph is None:
            self._graphs[shape] = self._capture_and_try(compute, micro_batch, launch, metrics)
            return False
        launch(graph)
        return True

    def _capture_and_try(
        self,
        compute: Compute,
        micro_batch: Batch,
        launch: Callable[[Graph], None],
        metrics: Sequence[Tensor],
    ) -> Graph | None:
        """Capture a step, launch it once, keep the result for `check` and undo it. Return None on failure."""
        # If the capture stores these NaNs as constants, the result is NaN and `check` fails.
        self._counts.fill_(torch.nan)
        self._rate.fill_(torch.nan)
        torch.manual_seed(0)
        moments: list[Tensor] = []
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                moments += state.values()
        changed: list[list[Tensor]] = [list(metrics), list(self._model.parameters()), moments]
        try:
            before = [_copies(tensors) for tensors in changed]
            inputs = micro_batch.with_tensors(Tensor.clone)
            graph = Graph(inputs, self.capture(lambda: compute([inputs], self._counts, self._rate)))
            try:
                launch(graph)
                by_graph = [_copies(tensors) for tensors in changed[:2]]
            finally:
                with torch.no_grad():
                    for tensors, old in zip(changed, before, strict=True):
                        torch._foreach_copy_(tensors, old)
        except Exception as error:  # the state is restored, so the step can run without a graph
            if _is_out_of_memory(error):  # another network may have graphs
                print("steps are not captured as CUDA graphs: out of memory")
                self.drop()
            else:
                cause = error.__cause__ or error.__context__ or error
                first_line = str(cause).partition("\n")[0]
                self._give_up(f"{type(cause).__name__}: {first_line}")
            return None
        finally:
            self._zero_grad()  # the gradients are in the graph's memory
        self._trials = [Trial(*tensors) for tensors in zip(changed[:2], before[:2], by_graph, strict=True)]
        return graph

    def check(self) -> None:
        """Compare a new graph's trial result with the result of the same step without a graph."""
        if self._trials:
            self._zero_grad()  # replays do not need these gradients
        for trial, max_difference in zip(self._trials, MAX_DIFFERENCES, strict=False):
            difference, movement = trial.distances()
            if not difference <= max_difference * movement:  # also True for NaN
                self._give_up(f"the result of one is wrong by {difference:.2e}, for an update of {movement:.2e}")
                break
        self._trials = []

    def fits_into_memory(self) -> bool:
        """Return whether memory can hold a graph, whose pool no other step can use, next to a step without a graph."""
        device = self._counts.device
        if device.type != "cuda":
            return False
        free, _ = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        available = free + torch.cuda.memory_reserved(device) - allocated
        activations = torch.cuda.max_memory_allocated(device) - allocated
        copies = 3 * sum(weight.nbytes for weight in self._model.parameters())  # of weights and gradients, by the trial
        return 2 * activations + copies < USED_MEMORY_SHARE * available

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Capture the kernels of `compute` and return a function that launches them. Restore torch on failure."""
        device = self._counts.device
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        current_stream = torch.cuda.current_stream(device)
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for group in groups:
            group["capturable"] = True  # AdamW refuses to be captured without it
        gc.collect()
        gc.disable()  # unloading a kernel would invalidate the capture
        try:
            # Graphs share a memory pool, since no result in it is needed after the step. "thread_local" lets the
            # prefetching thread pin memory, which would invalidate the capture in the default mode.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                compute()
        except BaseException:
            # After a failed capture torch stays on the capture's stream, and before 2.13 its generator and allocator
            # stay in capture mode.
            torch.cuda.set_stream(current_stream)
            torch.cuda.default_generators[device.index].graphsafe_set_state(torch.Generator(device))
            with contextlib.suppress(Exception):  # it raises if already ended
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

    def _give_up(self, reason: str) -> None:
        StepGraphs.has_failed = True
        print(f"steps are not captured as CUDA graphs: {reason}")
        self.drop()

    def drop(self) -> bool:
        """Free the graphs' memory and stop capturing. Return whether there were graphs."""
        had_graphs = any(self._graphs.values())
        self._graphs.clear()
        self._trials = []
        self._is_dropped = True
        return had_graphs


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is that the memory of the device is used up."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None
