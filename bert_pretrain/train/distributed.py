"""Data-parallel training, one process per device: `torchrun --nproc-per-node N -m bert_pretrain train …`.

DDP copies the model to every rank and averages gradients. Only the first rank writes files. On CUDA, device tensors use
NCCL, and host tensors use gloo, so that ranks can exchange them without waiting for a device.
"""

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert_pretrain.errors import ConfigError, UserError
from bert_pretrain.io.cores import num_ranks

Result = TypeVar("Result")
TIMEOUT = timedelta(minutes=30)  # the first rank may verify a large checkpoint while the others wait


@dataclass(frozen=True)
class DistContext:
    """The rank of this process in its process group, and collective operations."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # rank on this machine, which selects its device

    @property
    def is_main(self) -> bool:
        """Whether this is the first rank, the only one that writes files."""
        return self.rank == 0

    def run_on_main(self, function: Callable[[], Result]) -> Result:
        """Call a function on the first rank and return its result on all.

        If it raises a `UserError`, the first rank raises it, and the others exit silently with code 2.
        """
        if self.size == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = function()
            except UserError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
        if outcome[1] is not None:
            raise outcome[1] if self.is_main else SystemExit(2)
        return cast(Result, outcome[0])

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, computed in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def maximum(self, numbers: Sequence[float]) -> list[float]:
        """Return the largest of the values that the ranks pass, for each of the numbers."""
        if self.size == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return cast(list[float], values.tolist())

    @contextlib.contextmanager
    def only_main_prints(self) -> Iterator[None]:
        """Silence the standard output of all ranks but the first."""
        if self.is_main:
            yield
            return
        with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
            yield


SINGLE_PROCESS = DistContext()


def init_distributed(device: str) -> DistContext:
    """Join the process group of `torchrun`, if any, and return the context of this process."""
    if num_ranks() < 2:
        return SINGLE_PROCESS
    try:
        context = DistContext(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device != "cpu" and torch.cuda.is_available() else "gloo"
            store = _store_of_this_start(context, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            dist.init_process_group(
                backend,
                store=store,
                rank=context.rank,
                world_size=context.size,
                timeout=TIMEOUT,
            )
    except KeyError as error:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {error.args[0]} is not set",
            where="the environment",
            remedy="start with torchrun, set it, or unset WORLD_SIZE",
        ) from error
    return context


def _store_of_this_start(context: DistContext, address: str, port: int) -> Any:
    """Return a store for the rendezvous, without the entries of processes from before a restart.

    torchrun keeps one store across restarts (torch 2.13), so a rank may find the address of a dead process. Therefore
    each rank sends a unique name to the first rank and receives a new prefix. Dead processes never confirm the prefix.
    """
    hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and context.is_main
    stores: Any = dist  # typed without its store classes
    store = stores.TCPStore(
        address,
        port,
        context.size,
        is_master=hosts_store,
        timeout=TIMEOUT,
    )
    name = uuid.uuid4().hex
    if not context.is_main:
        store.set(f"greeting/{context.rank}", name)
        prefix = store.get(f"answer/{name}").decode()
        store.set(f"{prefix}/{context.rank}", "here")
        return stores.PrefixStore(prefix, store)
    for rank in range(1, context.size):
        store.wait([f"greeting/{rank}"])
        while not store.check([f"{name}/{rank}"]):  # the first greeting may be that of a dead process
            store.set(f"answer/{store.get(f'greeting/{rank}').decode()}", name)
            time.sleep(0.01)
    return stores.PrefixStore(name, store)


def shut_down(exit_code: int) -> None:
    """Exit from a process that joined a process group; otherwise do nothing.

    With gloo, a normal exit of the interpreter sometimes aborts, even after the process group is destroyed.
    """
    if not dist.is_initialized():
        return
    with contextlib.suppress(Exception):  # the other ranks may have exited
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def parallelize(losses: nn.Module, dist_context: DistContext) -> nn.Module:
    """Wrap a module in DDP, which averages gradients over ranks; return it unchanged for a single process."""
    if dist_context.size == 1:
        return losses
    device = next(losses.parameters()).device
    ids = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(losses, device_ids=ids, gradient_as_bucket_view=True)


def gradient_sync(network: nn.Module, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which only the last backward pass of a step averages gradients over ranks."""
    if isinstance(network, nn.parallel.DistributedDataParallel) and not is_last:
        return network.no_sync()
    return contextlib.nullcontext()
