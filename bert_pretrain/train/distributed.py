"""Processes that train together, one a device: `torchrun --nproc-per-node N -m bert_pretrain train …`.

DDP copies the model to every rank and averages gradients. The first rank writes, and broadcasts what it finds on disk.
On CPU everything goes through gloo; on CUDA tensors go through NCCL, and what hosts say to one another still through
gloo, so that agreeing on something never waits for a device.
"""

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert_pretrain.errors import ConfigError, UserError

Answer = TypeVar("Answer")
TIMEOUT = timedelta(minutes=30)  # the first rank may verify a large checkpoint while the others wait


@dataclass(frozen=True)
class DistContext:
    """This process among those that train together: its rank, and what ranks do together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among those on this machine; the number of its device

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def run_on_main(self, function: Callable[[], Answer]) -> Answer:
        """Run a function on the first rank and return its answer on all.

        What the first rank finds wrong it says itself; the others leave without a word.
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
        return cast(Answer, outcome[0])

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, computed in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    @contextlib.contextmanager
    def only_main_prints(self) -> Iterator[None]:
        """Silence the standard output of all ranks but the first."""
        if self.is_main:
            yield
            return
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield


SINGLE_PROCESS = DistContext()


def init_distributed(device: str) -> DistContext:
    """Return the context that `torchrun` has started this process in, after meeting the others; else one of one."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return SINGLE_PROCESS
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    needed = names if dist.is_initialized() else (*names, "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in os.environ]:
        what = f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and {', '.join(missing)} not set"
        raise ConfigError(what, where="the environment", remedy="start by torchrun, set them, or unset WORLD_SIZE")
    dist_context = DistContext(*(int(os.environ[name]) for name in names))
    if not dist.is_initialized():
        with_cuda = device != "cpu" and torch.cuda.is_available()
        backend = "cpu:gloo,cuda:nccl" if with_cuda else "gloo"
        store = _fresh_store(dist_context)
        dist.init_process_group(
            backend, store=store, rank=dist_context.rank, world_size=dist_context.size, timeout=TIMEOUT
        )
    return dist_context


def _fresh_store(dist_context: DistContext) -> Any:
    """Return the store through which the ranks find one another, without what ranks before a restart left there.

    torchrun keeps one store over all restarts (torch 2.13), so a rank may find the address of one that is dead. Each
    sends the first rank a fresh name, and gets the prefix of this round in reply; replies to dead ranks are never read.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and dist_context.is_main
    stores: Any = dist  # it does not list the stores among what it exports
    store = stores.TCPStore(address, port, dist_context.size, is_master=hosts, timeout=TIMEOUT)
    own = uuid.uuid4().hex
    if not dist_context.is_main:
        store.set(f"greeting/{dist_context.rank}", own)
        prefix = store.get(f"answer/{own}").decode()
        store.set(f"{prefix}/{dist_context.rank}", "here")
        return stores.PrefixStore(prefix, store)
    missing = set(range(1, dist_context.size))
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while missing:
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} have not come within {TIMEOUT}")
        for rank in missing:
            if store.check([f"greeting/{rank}"]):
                store.set(f"answer/{store.get(f'greeting/{rank}').decode()}", own)
        missing = {rank for rank in missing if not store.check([f"{own}/{rank}"])}
        time.sleep(0.01)
    return stores.PrefixStore(own, store)


def shut_down(exit_code: int) -> None:
    """End a process that has joined a process group; otherwise do nothing.

    With gloo, going through the interpreter's own end aborts now and then, even after the group is destroyed.
    """
    if not dist.is_initialized():
        return
    with contextlib.suppress(Exception):  # the others may be gone already
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def parallelize(losses: nn.Module, dist_context: DistContext) -> nn.Module:
    """Return a module whose backward pass averages gradients over ranks: under DDP, or itself in a single process."""
    if dist_context.size == 1:
        return losses
    device = next(losses.parameters()).device
    ids = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(losses, device_ids=ids, gradient_as_bucket_view=True)


def gradient_sync(network: nn.Module, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which gradients add up on this rank only, unless the backward pass is the last of a step."""
    if isinstance(network, nn.parallel.DistributedDataParallel) and not is_last:
        return network.no_sync()
    return contextlib.nullcontext()
