"""Runs the training loop, an evaluation and a snapshot on the pretended device, and tells what made the host wait."""

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bert_pretrain.config import Config
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.train.batches import GlobalBatch
from bert_pretrain.train.checkpoint import CheckpointWriter, HostBuffers, all_tensors
from bert_pretrain.train.distributed import SINGLE_PROCESS
from bert_pretrain.train.evaluation import evaluate_batches
from bert_pretrain.train.hardware import Precision
from bert_pretrain.train.loader import TrainingData, evaluation_batches
from bert_pretrain.train.log import RunLog
from bert_pretrain.train.loop import fit
from bert_pretrain.train.resolved import ResolvedRun
from bert_pretrain.train.schedule import Length
from bert_pretrain.train.state import TrainState
from tests.cuda.pretended import CUDA, fake_batch, fake_global_batch, make_state, pretended_cuda
from tests.cuda.recorder import Recorder
from tests.cuda.steps import Combination, make_config

MICRO_BATCH_TOKENS = 300
STEPS = 6
SYNCHRONIZE = "torch.cuda.synchronize"


class FakeData(TrainingData):
    """The project's own batches with fake tensors, made beforehand: a thread asks for them."""

    def prepare(self, mode: FakeTensorMode) -> None:
        self._prepared = [fake_global_batch(mode, super(FakeData, self).global_batch(step)) for step in range(STEPS)]

    def global_batch(self, step: int) -> GlobalBatch:
        return self._prepared[step]


def loop_evaluation_snapshot(data: str) -> dict[str, Any]:
    """Return the waits of a loop of six steps by the number of finished ones, and those of what it calls alone."""
    folder = DataFolder.open(Path(data))
    config = make_config(Combination("adamw", "bf16", "varlen", False, 0.1, True))
    train = {"max_steps": STEPS, "log_every": 3, "eval_every": 100, "save_every": 100, "global_batch_size": 24}
    config = config.model_copy(update={"train": config.train.model_copy(update=train)})
    with pretended_cuda() as mode:
        state = make_state(config, folder.tokenizer().vocab_size, attention="varlen")
        loop = _loop(mode, state, config, folder)
        with Recorder() as evaluation:
            micro_batches = evaluation_batches(folder, "validation", MICRO_BATCH_TOKENS)
            batches = [fake_batch(mode, batch) for batch in micro_batches]
            evaluate_batches(state.losses, batches, CUDA, torch.bfloat16)
        with Recorder() as snapshot:
            copies, _ = HostBuffers.of(CUDA).copy(all_tensors(state))
        num_tensors = len(copies)
    return {
        "loop": loop,
        "evaluation": evaluation.waits,
        "evaluated_batches": len(batches),
        "snapshot_waits": snapshot.waits,
        "snapshot_copies": snapshot.asynchronous_copies,
        "tensors": num_tensors,
        "data_dependent": evaluation.data_dependent + snapshot.data_dependent,
    }


def _loop(mode: FakeTensorMode, state: TrainState, config: Config, folder: DataFolder) -> dict[int, list[str]]:
    """Run the loop, and return the waits by the number of finished steps."""
    data = FakeData(folder, seed=1, global_batch_size=24, micro_batch_tokens=MICRO_BATCH_TOKENS)
    data.prepare(mode)
    run = ResolvedRun(
        config, folder, folder.tokenizer(), Path("run"), None, None, Length(STEPS), CUDA, Precision("bf16", ""),
        "varlen", "", False, "", SINGLE_PROCESS, 0, MICRO_BATCH_TOKENS,
    )  # fmt: skip
    waits: dict[int, list[str]] = {}

    class ByStep(list[str]):
        def append(self, note: str) -> None:
            waits.setdefault(state.progress.step, []).append(note.rpartition(" at ")[2])

    recorder = Recorder()
    recorder.waits = ByStep()
    with (
        contextlib.closing(RunLog(run.length, None, [], state.progress)) as log,
        mock.patch("torch.cuda.get_device_name", return_value="NVIDIA H200"),
        mock.patch("torch.cuda.synchronize", side_effect=lambda *_: recorder.waits.append(SYNCHRONIZE)),
        recorder,
    ):
        # Evaluations and copies of the state are traced by themselves; fake tensors cannot be written.
        checkpoints = CheckpointWriter(run.output, state, run.tokenizer, 1, None)
        fit(run, state, data, log, lambda whole: None, checkpoints, evaluate_first=False)
    return waits
