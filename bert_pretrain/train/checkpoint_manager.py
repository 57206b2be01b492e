"""The checkpoints of a run: written in the background, while training continues."""

import shutil
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bert_pretrain.model.huggingface import PRETRAINING
from bert_pretrain.train.checkpoint import Snapshot, checkpoint_paths, take_snapshot, write_checkpoint
from bert_pretrain.train.loader import TrainingData
from bert_pretrain.train.model_card import model_card
from bert_pretrain.train.resolved import ResolvedRun
from bert_pretrain.train.run_log import RunLog
from bert_pretrain.train.state import TrainState


class CheckpointManager:
    """Saves the state of one run, one checkpoint at a time, and keeps the newest few.

    Ranks that do not write only learn where.
    """

    def __init__(self, run: ResolvedRun, state: TrainState, log: RunLog, data: TrainingData) -> None:
        self.write_seconds = 0.0
        """How long the last checkpoint took to be written, while training went on."""
        self._run, self._state, self._log = run, state, log
        self._data = data
        self._folder = run.output / "checkpoints"
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self) -> Path:
        """Begin to write a checkpoint of the state, after the one before is on disk, and return its path."""
        state, path = self._state, self._folder / f"step-{self._state.progress.step:08d}"
        if self._run.dist_context.is_main:
            pretraining = self._run.pretraining(state.progress.tokens)
            about = {
                **_record_of(self._run, self._data.micro_batch_tokens),
                PRETRAINING: pretraining,
                "metrics": self._log.position,
            }
            snapshot = take_snapshot(state, about)
            card = model_card(self._run, state.progress, self._log.last_validation, model=state.model, is_final=False)
            self.wait()
            thread = threading.Thread(target=self._write, args=(path, snapshot, card), name="checkpoint", daemon=True)
            snapshot.copy.reader = self._thread = thread
            thread.start()
        return path

    def check(self) -> None:
        """Raise what went wrong in the background since the last call, without waiting."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until all checkpoints are on disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, path: Path, snapshot: Snapshot, card: str) -> None:
        begin = time.perf_counter()
        try:
            write_checkpoint(path, snapshot, self._run.tokenizer, card)
            for old in checkpoint_paths(self._folder)[: -self._run.config.train.keep_checkpoints]:
                shutil.rmtree(old)
            self.write_seconds = time.perf_counter() - begin
        except Exception as error:  # handed to the training thread, which raises it
            self._error = error


def _record_of(run: ResolvedRun, micro_batch_tokens: int) -> dict[str, Any]:
    """Return what a checkpoint notes of the circumstances under which it was taken."""
    return {
        "length": asdict(run.length),
        "micro_batch_tokens": micro_batch_tokens,
        "threads": torch.get_num_threads(),
        "ranks": run.dist_context.size,
        "torch": torch.__version__,
        "precision": run.precision.name,
        "data": run.data.content_hash,
    }
