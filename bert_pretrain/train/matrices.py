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


def own_rows(parameter: Tensor) -> range:
    """Return which rows of a parameter this rank holds."""
    if not isinstance(parameter, DTensor):
        return range(parameter.shape[0])
    # As `torch.chunk` deals them: every rank but the last ones has the same number.
    begin = parameter.device_mesh.get_local_rank() * -(-parameter.shape[0] // parameter.device_mesh.size())
    begin = min(begin, parameter.shape[0])
    return range(begin, begin + parameter.to_local().shape[0])


def parts_of(parameter: Tensor, number: int) -> list[slice]:
    """Return, for each of the `number` equal matrices that lie one below the other, which of our own rows are its."""
    own, height = own_rows(parameter), parameter.shape[0] // number
    bounds = [min(max(part * height, own.start), own.stop) - own.start for part in range(number + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def norms(parameters: Sequence[Tensor], tensors: Sequence[Tensor], number: int) -> Tensor:
    """Return the 2-norms of the matrices, (parameters * number,), the same on every rank.

    Args:
        parameters: of which `tensors` are shaped.
        tensors: this rank's own rows of something.
        number: matrices a parameter consists of.
    """
    parts = [
        tensor[rows]
        for parameter, tensor in zip(parameters, tensors, strict=True)
        for rows in parts_of(parameter, number)
    ]
    found = torch.stack(torch._foreach_norm(parts))
    if isinstance(parameters[0], DTensor):
        squares = found.square()
        dist.all_reduce(squares, group=parameters[0].device_mesh.get_group())
        found = squares.sqrt()
    return found
