"""Weights as the matrices of which they consist, for optimizers that look at whole matrices.

Query, key and value are one weight in memory and three matrices to LAMB and Muon. Under FSDP a rank holds some rows of
every weight only: what is in place here works on those, and says what needs the others.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return the rows of a tensor that this rank holds, in the same memory; without FSDP all of them."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all rows of a tensor, gathered from all ranks under FSDP."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(parameter: Tensor, rows: Tensor) -> Tensor:
    """Return a rank's own rows as a tensor that is distributed as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return rows
    return DTensor.from_local(
        rows, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def own_rows(parameter: Tensor, rank: int | None = None) -> range:
    """Return which rows of a parameter a rank holds; without a rank, this one."""
    if not isinstance(parameter, DTensor):
        return range(parameter.shape[0])
    # As `torch.chunk` cuts them: every rank but the last ones has the same number.
    height, mesh = parameter.shape[0], parameter.device_mesh
    each = -(-height // mesh.size())
    begin = min((mesh.get_local_rank() if rank is None else rank) * each, height)
    return range(begin, min(begin + each, height))


def parts_of(parameter: Tensor, number: int, rank: int | None = None) -> list[slice]:
    """Return, for each of the `number` equal matrices one below the other, which of a rank's own rows are its."""
    own, height = own_rows(parameter, rank), parameter.shape[0] // number
    bounds = [min(max(part * height, own.start), own.stop) - own.start for part in range(number + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together, (), the same on every rank.

    Under FSDP each rank takes the norms of its local shards, and one all-reduce of a scalar adds their squares:
    `torch.nn.utils.get_total_norm` would dispatch every parameter through DTensor.
    """
    found = torch.stack(torch._foreach_norm([local(gradient) for gradient in gradients]))
    if not isinstance(gradients[0], DTensor):
        return torch.linalg.vector_norm(found)
    squares = found.square().sum()
    dist.all_reduce(squares, group=gradients[0].device_mesh.get_group())
    return squares.sqrt()


def matrices_of(parameters: Sequence[Tensor], tensors: Sequence[Tensor], number: int) -> list[Tensor]:
    """Return the matrices of tensors shaped as parameters, as views of this rank's rows of each.

    Args:
        parameters: of `number` matrices each.
        tensors: this rank's own rows of something.
        number: equal matrices one below the other in a parameter.
    """
    if number == 1:
        return list(tensors)
    return [
        tensor[rows]
        for parameter, tensor in zip(parameters, tensors, strict=True)
        for rows in parts_of(parameter, number)
    ]


def norms(matrices: list[Tensor], parameter: Tensor) -> Tensor:
    """Return the 2-norms of matrices, (matrices,), the same on every rank.

    Args:
        matrices: this rank's rows of each.
        parameter: that some of them belong to; under FSDP it knows the ranks that hold the other rows.
    """
    found = torch.stack(torch._foreach_norm(matrices))
    if not isinstance(parameter, DTensor):
        return found
    squares = found.square()
    dist.all_reduce(squares, group=parameter.device_mesh.get_group())
    return squares.sqrt()
