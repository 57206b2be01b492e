"""Copies in host memory: used again without ever changing what is still being read."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bert_pretrain.config import Config
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.huggingface import load_weights
from bert_pretrain.model.scale import scale_embeddings
from bert_pretrain.train.checkpoint import open_checkpoint
from bert_pretrain.train.checkpoint_manager import CheckpointManager
from bert_pretrain.train.device.host_memory import HostMemory, page_locked, recorded_event
from bert_pretrain.train.distributed import SINGLE_PROCESS
from bert_pretrain.train.loader import TrainingData
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.optim.optimizer import make_optimizers, update
from bert_pretrain.train.resolved import resolve_run
from bert_pretrain.train.run_log import RunLog
from bert_pretrain.train.state import TrainState


class Allocator:
    """Stands for the driver's page-locked memory."""

    def __init__(self) -> None:
        self.allocated: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        self.allocated.append(torch.empty(tensor.shape, dtype=tensor.dtype))
        return self.allocated[-1]


def tensors(value: float) -> dict[str, Tensor]:
    return {"a": torch.full((3, 5), value), "b": torch.full((), value, dtype=torch.float64)}


def finished_thread() -> threading.Thread:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    return thread


def test_a_tensor_of_another_shape_or_type_gets_new_memory() -> None:
    allocate = Allocator()
    memory = HostMemory(allocate)
    for tensor in (torch.ones(2), torch.ones(3), torch.ones(3, dtype=torch.float64)):
        copy = memory.copy({"a": tensor})
        copy.reader = finished_thread()
        assert torch.equal(copy.tensors["a"], tensor)
        assert copy.tensors["a"].dtype == tensor.dtype
    assert len(allocate.allocated) == 3


def test_a_copy_waits_for_the_reader_of_the_one_before() -> None:
    memory, may_end, seen = HostMemory(Allocator()), threading.Event(), []
    first = memory.copy(tensors(1.0))

    def read() -> None:
        assert may_end.wait(60)
        seen.append(first.tensors["a"].clone())

    first.reader = threading.Thread(target=read)
    first.reader.start()
    threading.Timer(0.2, may_end.set).start()
    memory.copy(tensors(2.0))
    assert torch.equal(seen[0], tensors(1.0)["a"])


def test_a_copy_that_nobody_is_known_to_read_is_left_alone() -> None:
    memory = HostMemory(Allocator())
    first = memory.copy(tensors(1.0))
    second = memory.copy(tensors(2.0))
    assert torch.equal(first.tensors["a"], tensors(1.0)["a"])
    assert torch.equal(second.tensors["a"], tensors(2.0)["a"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="here memory can be locked")
def test_where_no_memory_can_be_locked_copies_take_ordinary_memory() -> None:
    copy = HostMemory(page_locked, recorded_event).copy(tensors(1.0))
    copy.wait()
    assert torch.equal(copy.tensors["a"], tensors(1.0)["a"])
    assert not copy.tensors["a"].is_pinned()


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

    state.host_memory = HostMemory(allocate, mark)
    run = resolve_run(tiny(), DataFolder.open(data_folder), tmp_path, SINGLE_PROCESS)
    data = TrainingData(run.data, seed=1, global_batch_size=16, micro_batch_tokens=256)
    checkpoints = CheckpointManager(run, state, RunLog(run.length, None, (), state.progress), data)
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
