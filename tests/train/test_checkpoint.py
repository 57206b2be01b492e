"""Checkpoints are written from copies in host memory, while training continues."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.folder import PRETRAINING
from bert_pretrain.model.huggingface import load_weights, scale_embeddings
from bert_pretrain.train.checkpoint import CheckpointWriter, HostBuffers, open_checkpoint
from bert_pretrain.train.distributed import SINGLE_PROCESS
from bert_pretrain.train.optimizers import update
from bert_pretrain.train.resolved import resolve_run
from tests.train.conftest import VOCAB_SIZE, make_state, tiny


def test_only_the_writer_thread_waits_for_copies(data_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    waits: list[tuple[bool, list[str]]] = []

    class Buffers(HostBuffers):
        """Acts as the CUDA event after its copies."""

        def copy(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Any]:
            return super().copy(tensors)[0], self

        def synchronize(self) -> None:
            is_main = threading.current_thread() is threading.main_thread()
            waits.append((is_main, sorted(path.name for path in folder.glob("step-*"))))

    state = make_state(tiny())
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    update(state.optimizers, 0.1, torch.tensor(False))
    run = resolve_run(tiny(), DataFolder.open(data_folder), tmp_path, SINGLE_PROCESS)
    describe = lambda: ({PRETRAINING: run.pretraining(0)}, "a card")  # noqa: E731
    checkpoints = CheckpointWriter(folder, state, run.tokenizer, 3, describe, Buffers())
    expected = []
    for step in (1, 2):
        state.progress.step = step
        expected.append({name: weight.detach().clone() for name, weight in state.model.named_parameters()})
        checkpoints.save()
        for parameter in state.model.parameters():
            parameter.data.add_(1.0)
    checkpoints.wait()
    assert waits == [(False, []), (False, ["step-00000001"])]
    for step, weights in enumerate(expected, start=1):
        checkpoint = open_checkpoint(folder / f"step-{step:08d}")  # verifies checksums
        model = BertForPreTraining(state.model.config, VOCAB_SIZE)
        load_weights(model, checkpoint.path, flag="checkpoint", seed=0)
        exported = scale_embeddings(weights, checkpoint.record["embedding_exponent"])
        assert all(torch.equal(weight, exported[name]) for name, weight in model.named_parameters())
