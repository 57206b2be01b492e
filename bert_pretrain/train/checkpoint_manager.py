"""The checkpoints of a run: with what record and card one is saved, while training continues."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bert_pretrain.train.checkpoint import CheckpointWriter, take_snapshot
from bert_pretrain.train.model_card import model_card
from bert_pretrain.train.resolved import ResolvedRun
from bert_pretrain.train.run_log import RunLog
from bert_pretrain.train.state import TrainState


class CheckpointManager:
    """Saves the state of one run; ranks that do not write only learn where."""

    def __init__(self, run: ResolvedRun, state: TrainState, log: RunLog, micro_batch_tokens: int) -> None:
        self._run, self._state, self._log = run, state, log
        self._record = _record_of(run, micro_batch_tokens)
        self._folder = run.output / "checkpoints"
        self._writer = CheckpointWriter(self._folder, run.tokenizer, run.config.train.keep_checkpoints)

    @property
    def write_seconds(self) -> float:
        """How long the last checkpoint took to be written, while training went on."""
        return self._writer.seconds()

    def save(self) -> Path:
        """Begin to write a checkpoint of the state, and return its path."""
        if not self._run.dist_context.is_main:
            return self._folder / f"step-{self._state.progress.step:08d}"
        snapshot = take_snapshot(self._state, {**self._record, "metrics": self._log.position})
        return self._writer.write(snapshot, self._card())

    def _card(self) -> str:
        state = self._state
        return model_card(
            self._run, state.progress, self._log.last_validation,
            num_parameters=state.model.num_parameters, is_final=False,
        )  # fmt: skip

    def check(self) -> None:
        """Raise what went wrong while writing, without waiting."""
        self._writer.check()

    def wait(self) -> None:
        """Wait until all checkpoints are on disk."""
        self._writer.wait()


def _record_of(run: ResolvedRun, micro_batch_tokens: int) -> dict[str, Any]:
    """Return what a checkpoint notes of the circumstances under which it was taken."""
    return {
        "length": asdict(run.length),
        "optimizer": run.config.train.optimizer,
        "micro_batch_tokens": micro_batch_tokens,
        "threads": torch.get_num_threads(),
        "ranks": run.dist_context.size,
        "torch": torch.__version__,
        "precision": run.precision.name,
        "data": run.data.content_hash,
    }
