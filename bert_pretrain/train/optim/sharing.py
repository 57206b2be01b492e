"""Muon's matrix products shared among ranks: which rank computes which matrices, and the messages around it.

Matrices of equal shape form a bucket. Under DDP every rank has every momentum, takes its own matrices, and one
all-gather per bucket exchanges the updates. Under FSDP one all-to-all brings the rows of a matrix to the rank that
computes it, and another brings the rows of its update back. Messages are in bf16, as the products are. They are
asynchronous: what starts one returns a function that waits for it, on the device where there is one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from bert_pretrain.train.optim.matrices import parts_of

MATRICES_AT_ONCE = 16
"""A rank computes so many together; more would only take more memory."""
Wait = Callable[[], Tensor]
# torch 2.13 renamed it, and warns of the old name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Bucket:
    """Parameters of equal shape, whose matrices are computed together, each by one rank."""

    settings: dict[str, Any]
    """The optimizer's group of parameters; its `matrices` is the number of equal ones in each parameter."""
    parameters: list[Tensor]
    process_group: Any
    """None in a single process."""
    ranks: tuple[int, ...]
    """All of them: matrix k is computed by `ranks[k % size]`, as the k // size-th of its own."""

    @property
    def matrices(self) -> int:
        """How many matrices a parameter consists of."""
        return int(self.settings["matrices"])

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of a matrix."""
        rows, width = self.parameters[0].shape
        return rows // self.matrices, width

    @property
    def num_matrices(self) -> int:
        return len(self.parameters) * self.matrices

    def matrices_of(self, rank: int) -> range:
        """Return which matrices a rank computes."""
        return range(self.ranks.index(rank), self.num_matrices, len(self.ranks))

    def rows_of(self, rank: int) -> list[slice]:
        """Return which rows of a rank's local shard belong to each of a parameter's matrices; all parameters alike."""
        return parts_of(self.parameters[0], self.matrices, rank)


def process_group_of(parameter: Tensor) -> tuple[Any, int]:
    """Return the process group whose ranks share a parameter's update, and its size; None and 1 in a single process.

    FSDP's parameters know theirs. Plain ones of a process that has joined others are DDP's: equal on all ranks.
    """
    group = None
    if isinstance(parameter, DTensor):
        group = parameter.device_mesh.get_group()
    elif dist.is_initialized():
        group = dist.group.WORLD
    size = 1 if group is None else dist.get_world_size(group)
    return (group, size) if size > 1 else (None, 1)


def buckets_of(groups: Iterable[dict[str, Any]], process_group: Any, size: int) -> list[Bucket]:
    """Sort the parameters that have gradients into buckets, the costliest first, and assign their matrices to ranks.

    In each bucket the least busy ranks come first, so that all have about equally many products to compute.
    """
    found: list[tuple[dict[str, Any], list[Tensor]]] = []
    for group in groups:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape.setdefault(parameter.shape, []).append(parameter)
        at_once = max(1, size * MATRICES_AT_ONCE // group["matrices"])
        for alike in by_shape.values():
            found += [(group, alike[begin : begin + at_once]) for begin in range(0, len(alike), at_once)]
    buckets = [Bucket(group, alike, process_group, tuple(range(size))) for group, alike in found]
    load, assigned = [0] * size, []
    for bucket in sorted(buckets, key=lambda bucket: -cost(*bucket.shape)):
        ranks = sorted(range(size), key=load.__getitem__)  # stable: of equally busy ones the first
        assigned.append(Bucket(bucket.settings, bucket.parameters, process_group, tuple(ranks)))
        for rank in ranks:
            load[rank] += len(assigned[-1].matrices_of(rank)) * cost(*bucket.shape)
    return assigned


def cost(height: int, width: int) -> int:
    """Return what a matrix costs: a multiple of the floating-point operations of one Newton–Schulz iteration."""
    small, large = sorted((height, width))
    return small * small * (2 * large + small)


def collect(bucket: Bucket, rows: Tensor) -> Wait:
    """Begin to collect the matrices of a bucket that this rank computes.

    `rows`, (parameters, rows, width), are this rank's local shards of something shaped as the parameters. The function
    returned waits and returns (matrices, height, width) in bf16.
    """
    height, width = bucket.shape
    if bucket.process_group is None:
        return lambda: rows.view(-1, height, width).bfloat16()
    if not isinstance(bucket.parameters[0], DTensor):
        own = bucket.matrices_of(dist.get_rank(bucket.process_group))
        matrices = rows.view(-1, height, width)[own.start :: own.step].bfloat16()
        return lambda: matrices
    routes = _Routes.of(bucket)
    by_owner = _reordered(rows.bfloat16().flatten(0, 1), routes.held, routes.by_owner)
    received = _all_to_all(bucket, by_owner, routes.held_per_rank, routes.computed_per_rank)
    return lambda: _reordered(received(), routes.computed, routes.by_matrix).view(-1, height, width)


def give_back(bucket: Bucket, updates: Tensor) -> Wait:
    """Begin to give all ranks what each has computed: `updates`, (matrices, height, width) in bf16.

    The function returned waits and returns (parameters, rows, width) in bf16: this rank's local shards of all updates.
    """
    (height, width), num_parameters, group = bucket.shape, len(bucket.parameters), bucket.process_group
    if group is None:
        return lambda: updates.reshape(num_parameters, -1, width)
    if isinstance(bucket.parameters[0], DTensor):
        routes = _Routes.of(bucket)
        in_order = [routes.computed[piece] for piece in routes.by_matrix]
        by_rank = _reordered(updates.flatten(0, 1), in_order, _inverse(routes.by_matrix))
        received = _all_to_all(bucket, by_rank, routes.computed_per_rank, routes.held_per_rank)
        heights, back = [routes.held[matrix] for matrix in routes.by_owner], _inverse(routes.by_owner)
        return lambda: _reordered(received(), heights, back).view(num_parameters, -1, width)
    most = len(range(0, bucket.num_matrices, len(bucket.ranks)))
    if len(updates) < most:  # all ranks must send equally much
        updates = torch.cat([updates, updates.new_zeros(most - len(updates), height, width)])
    gathered = updates.new_empty(len(bucket.ranks), most, height, width)
    work = _all_gather(gathered.flatten(0, 1), updates.contiguous(), group=group, async_op=True)

    def in_order_of_matrices() -> Tensor:
        work.wait()
        matrices = torch.stack([gathered[rank] for rank in bucket.ranks], dim=1).flatten(0, 1)
        return matrices[: bucket.num_matrices].view(num_parameters, -1, width)

    return in_order_of_matrices


@dataclass(frozen=True)
class _Routes:
    """Between the ranks that hold the rows of a bucket's matrices and those that compute them, as numbers of rows."""

    held: list[int]
    """Of each matrix, in this rank's shard."""
    by_owner: list[int]
    """All matrices in the order of the ranks that compute them."""
    held_per_rank: list[int]
    """Held here, for each rank that computes."""
    computed: list[int]
    """Of each matrix that this rank computes in each rank's shard, rank by rank."""
    by_matrix: list[int]
    """The same pieces, matrix by matrix."""
    computed_per_rank: list[int]
    """Computed here, for each rank that holds them."""

    @staticmethod
    def of(bucket: Bucket) -> "_Routes":
        """Return the routes of a bucket on this rank."""
        size, own_rank = len(bucket.ranks), dist.get_rank(bucket.process_group)
        parts = [[rows.stop - rows.start for rows in bucket.rows_of(rank)] for rank in range(size)]
        heights = [part * len(bucket.parameters) for part in parts]  # of each matrix, in each rank's shard
        owned = [bucket.matrices_of(rank) for rank in range(size)]
        own = owned[own_rank]
        return _Routes(
            held=heights[own_rank],
            by_owner=[matrix for matrices in owned for matrix in matrices],
            held_per_rank=[sum(heights[own_rank][matrix] for matrix in matrices) for matrices in owned],
            computed=[heights[rank][matrix] for rank in range(size) for matrix in own],
            by_matrix=[rank * len(own) + place for place in range(len(own)) for rank in range(size)],
            computed_per_rank=[sum(heights[rank][matrix] for matrix in own) for rank in range(size)],
        )


def _all_to_all(bucket: Bucket, rows: Tensor, sent: list[int], received: list[int]) -> Wait:
    """Begin to send consecutive rows to the ranks, so many to each; returns what waits for those received."""
    result = rows.new_empty(sum(received), rows.shape[1])
    work = dist.all_to_all_single(result, rows, received, sent, group=bucket.process_group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return result

    return wait


def _reordered(rows: Tensor, heights: list[int], order: list[int]) -> Tensor:
    """Return pieces of so many rows each in another order."""
    if not order:
        return rows
    pieces = torch.split(rows, heights)
    return torch.cat([pieces[piece] for piece in order])


def _inverse(order: list[int]) -> list[int]:
    """Return the order that undoes an order."""
    return sorted(range(len(order)), key=order.__getitem__)
