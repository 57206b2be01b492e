"""Checkpoints are written from copies in host memory, which training neither changes nor waits for."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bert_pretrain.config import Config
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.huggingface import PRETRAINING, load_weights
from bert_pretrain.model.scale import scale_embeddings
from bert_pretrain.train.checkpoint import CheckpointWriter, HostBuffers, open_checkpoint
from bert_pretrain.train.distributed import SINGLE_PROCESS
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.optimizers import make_optimizers, update
from bert_pretrain.train.resolved import resolve_run
from bert_pretrain.train.state import TrainState


class Allocator:
    """Stands for the driver's page-locked memory."""

    def __init__(self) -> None:
        self.allocated: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        self.allocated.append(torch.empty(tensor.shape, dtype=tensor.dtype))
        return self.allocated[-1]


def test_a_tensor_of_another_shape_or_type_gets_new_memory() -> None:
    allocate = Allocator()
    buffers = HostBuffers(allocate)
    for tensor in (torch.ones(2), torch.zeros(2), torch.ones(3), torch.ones(3, dtype=torch.float64)):
        copies, _ = buffers.copy({"a": tensor})
        assert torch.equal(copies["a"], tensor)
        assert copies["a"].dtype == tensor.dtype
    assert len(allocate.allocated) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="here memory can be locked")
def test_where_no_memory_can_be_locked_copies_take_ordinary_memory() -> None:
    copies, event = HostBuffers.of(torch.device("cuda")).copy({"a": torch.ones(3)})
    assert event is None
    assert torch.equal(copies["a"], torch.ones(3))
    assert not copies["a"].is_pinned()


@pytest.fixture
def state(tiny: Callable[..., Config]) -> TrainState:
    model = BertForPreTraining(tiny().model, 152)
    model.initialize(1)
    state = TrainState.start(model, PretrainingLoss(model), make_optimizers(model, tiny().train), None)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    update(state.optimizers, 0.1, torch.tensor(False))
    return state


class Arrival:
    """Stands for a CUDA event: notes in which thread it was waited for, and what was on disk then."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.waits = folder, []  # type: Path, list[tuple[str, list[Path]]]

    def synchronize(self) -> None:
        self.waits.append((threading.current_thread().name, list(self.folder.glob("*"))))


def test_the_writer_waits_for_copies_and_training_does_not(
    state: TrainState, tiny: Callable[..., Config], data_folder: Path, tmp_path: Path
) -> None:
    arrivals: list[Arrival] = []
    allocate = Allocator()

    def mark() -> Arrival:
        arrivals.append(Arrival(tmp_path / "checkpoints"))
        return arrivals[-1]

    run = resolve_run(tiny(), DataFolder.open(data_folder), tmp_path, SINGLE_PROCESS)
    checkpoints = CheckpointWriter(
        tmp_path / "checkpoints", state, run.tokenizer, 3, lambda: ({PRETRAINING: run.pretraining(0)}, "a card"),
        HostBuffers(allocate, mark),
    )  # fmt: skip
    expected = []
    for step in (1, 2):
        state.progress.step = step
        expected.append({name: weight.detach().clone() for name, weight in state.model.named_parameters()})
        checkpoints.save()
        for parameter in state.model.parameters():
            parameter.data.add_(1.0)
    checkpoints.wait()
    assert [[name for name, _ in arrival.waits] for arrival in arrivals] == [["checkpoint"], ["checkpoint"]]
    assert arrivals[0].waits[0][1] == []
    assert [path.name for path in arrivals[1].waits[0][1]] == ["step-00000001"]
    assert len(allocate.allocated) == len(expected[0]) + len(state.tensors())
    for step, weights in enumerate(expected, start=1):
        checkpoint = open_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}")  # verifies its hash
        model = BertForPreTraining(state.model.config, 152)
        load_weights(model, checkpoint.path, flag="checkpoint", seed=0)
        exported = scale_embeddings(weights, checkpoint.record["embedding_exponent"])
        assert all(torch.equal(weight, exported[name]) for name, weight in model.named_parameters())
