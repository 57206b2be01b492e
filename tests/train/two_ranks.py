"""What each of two processes computes for `test_ranks.py`, which starts them by torchrun: `two_ranks.py FOLDER`.

Every rank writes what it found to `FOLDER/rank-N.safetensors`. One process computes the same by the same functions.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bert_pretrain.config import ModelConfig, TrainConfig
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.batches import cut
from bert_pretrain.train.checkpoint import take_snapshot
from bert_pretrain.train.distillation import Teacher
from bert_pretrain.train.distributed import DistContext, parallelize, shut_down
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.optim.matrices import local, total_norm, whole
from bert_pretrain.train.optim.muon import Muon
from bert_pretrain.train.optim.optimizer import make_optimizers, update
from bert_pretrain.train.optim.sharing import buckets_of, collect, give_back, process_group_of
from bert_pretrain.train.state import TrainState
from bert_pretrain.train.step import train_step
from tests.train.conftest import make_examples

Place = Callable[[Tensor], Tensor]
"""Puts a tensor where a rank has it: whole under DDP, some of its rows under FSDP."""
SHAPES = ((7, 5), (1, 3), (12,), (64, 33), (1,))
"""Rows that two ranks share evenly, unevenly, and of which the second rank gets none."""
MATRICES = ((3, ((36, 12), (36, 12), (15, 5))), (1, ((12, 12), (12, 12), (7, 20), (7, 20), (7, 20), (20, 7), (1, 4))))
"""Matrices in each parameter, and shapes of parameters: more and fewer than ranks, and of odd heights."""

OPTIMIZERS = ("adamw", "lamb", "muon")


def drawn(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Draw tensors that are the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def gradient_norms(place: Place) -> dict[str, Tensor]:
    """Take norms of gradients, finite and not."""
    factors = {"norm": 1.0, "norm/inf": float("inf")}
    return {name: total_norm([place(factor * tensor) for tensor in drawn(*SHAPES)]) for name, factor in factors.items()}


def groups_of_parameters(place: Place) -> list[dict[str, object]]:
    return [
        {"params": [nn.Parameter(place(tensor)) for tensor in drawn(*shapes)], "matrices": number}
        for number, shapes in MATRICES
    ]


def doubled_matrices(place: Place) -> dict[str, Tensor]:
    """Collect the matrices of all parameters, let the rank that gets one double it, and give it back."""
    optimizer = torch.optim.SGD(groups_of_parameters(place))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    group, size = process_group_of(parameters[0])
    found, numbers = {}, {parameter: number for number, parameter in enumerate(parameters)}
    for bucket in buckets_of(optimizer.param_groups, group, size):
        rows = torch.stack([local(parameter.detach()) for parameter in bucket.parameters])
        matrices = collect(bucket, rows)()
        assert matrices.shape[1:] == bucket.shape
        for parameter, twice in zip(bucket.parameters, give_back(bucket, 2 * matrices)(), strict=True):
            local(parameter.grad).copy_(twice)
            found[f"doubled/{numbers[parameter]}"] = whole(parameter.grad)
    return found


def muon_weights(place: Place) -> dict[str, Tensor]:
    """Return weights and momentum after steps of Muon, one of which is skipped."""
    muon = Muon(groups_of_parameters(place), lr=0.02, weight_decay=0.1)
    parameters = [parameter for group in muon.param_groups for parameter in group["params"]]
    for step in range(4):
        gradients = drawn(*(tuple(parameter.shape) for parameter in parameters), seed=step + 1)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = place(gradient * (float("nan") if step == 2 else 1.0))
        muon.found_inf = torch.tensor(float(step == 2))
        muon.step()
    found = {}
    for number, parameter in enumerate(parameters):
        found[f"muon/weight/{number}"] = whole(parameter.detach())
        found[f"muon/momentum/{number}"] = whole(muon.state[parameter]["momentum_buffer"])
    return found


def make_state(parallel: str, optimizer: str, *, with_teacher: bool = False) -> TrainState:
    """Build the state of a tiny run; it is the same in every process."""
    sizes = {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 60}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    train = TrainConfig.model_validate({"optimizer": optimizer})
    model = BertForPreTraining(ModelConfig(**sizes, **no_dropout, max_position_embeddings=32), 153)
    model.initialize(1)
    teacher = None
    if with_teacher:
        network = BertForPreTraining(ModelConfig(**sizes, initializer_range=0.3, max_position_embeddings=32), 153)
        network.initialize(2)
        teacher = Teacher(network, sizes["hidden_size"])
    losses = PretrainingLoss(model, teacher=teacher)
    network = parallelize(losses, model, parallel, torch.float32)
    return TrainState.start(model, network, make_optimizers(model, train), None)


def snapshot(parallel: str, place: Place) -> dict[str, Tensor]:
    """Return a snapshot after a step of AdamW with given gradients; nothing on a rank that does not write."""
    state = make_state(parallel, "adamw")
    named = dict(state.model.named_parameters())
    for parameter, gradient in zip(named.values(), drawn(*(tuple(p.shape) for p in named.values())), strict=True):
        parameter.grad = place(gradient)
    update(state.optimizers, 1e-3, torch.tensor(False))
    taken = take_snapshot(state, {})
    assert state.weights().keys() == taken.weights.keys()
    assert taken.step == 0
    return {f"snapshot/{name}": tensor for name, tensor in (taken.weights | taken.tensors).items()}


def trained(
    parallel: str, optimizer: str, dist_context: DistContext, *, with_teacher: bool = False
) -> dict[str, Tensor]:
    """Return the weights and the figures after three steps on 30 examples."""
    state = make_state(parallel, optimizer, with_teacher=with_teacher)
    for step in range(3):
        batch = cut(make_examples(30, np.random.default_rng(step)), 200, dist_context.rank, dist_context.size)
        train_step(
            state.network, state.optimizers, batch, state.sums, seed=1, step=step, learning_rate=5e-3,
            max_grad_norm=1.0, dtype=torch.float32, dist_context=dist_context,
        )  # fmt: skip
    weights = {f"{optimizer}/{name}": whole(weight.detach()) for name, weight in state.model.named_parameters()}
    return {**weights, f"{optimizer}/sums": state.sums}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dist_context = DistContext(dist.get_rank(), dist.get_world_size())

    def own_rows(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)])

    found = gradient_norms(own_rows)
    for parallel, place in (("ddp", as_it_is), ("fsdp", own_rows)):
        of_both = doubled_matrices(place) | muon_weights(place) | snapshot(parallel, place)
        for optimizer in OPTIMIZERS:
            of_both |= trained(parallel, optimizer, dist_context)
        found.update({f"{parallel}/{name}": tensor for name, tensor in of_both.items()})
    taught = trained("ddp", "adamw", dist_context, with_teacher=True)
    found.update({f"taught/{name}": tensor for name, tensor in taught.items()})
    save_file(found, folder / f"rank-{dist_context.rank}.safetensors")
    dist.barrier()
    shut_down(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
