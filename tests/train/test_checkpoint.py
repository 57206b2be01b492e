"""Checkpoints are written from copies in host memory, while training continues."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.model.folder import PRETRAINING
from bert_pretrain.model.huggingface import load_model
from bert_pretrain.train.checkpoint import CheckpointWriter, HostBuffers, open_checkpoint
from bert_pretrain.train.distributed import SINGLE_PROCESS
from bert_pretrain.train.resolved import resolve_run
from tests.train.conftest import make_state, tiny


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
    bias = state.model.mlm_head.bias.data
    run = resolve_run(tiny(), DataFolder.open(data_folder), tmp_path, SINGLE_PROCESS)
    describe = lambda: ({PRETRAINING: run.pretraining(0)}, "a card")  # noqa: E731
    checkpoints = CheckpointWriter(folder, state, run.tokenizer, 3, describe, Buffers())
    for step in (1, 2):
        state.progress.step = step
        bias.fill_(step)
        checkpoints.save()
        bias.fill_(9)  # while the checkpoint is written
    checkpoints.wait()
    assert waits == [(False, []), (False, ["step-00000001"])]
    for step in (1, 2):
        checkpoint = open_checkpoint(folder / f"step-{step:08d}")  # verifies checksums
        assert load_model(checkpoint.path).model.mlm_head.bias.unique().tolist() == [step]
