"""Checkpoints: a model folder as Hugging Face's tools read it, plus the state that continues the run bit for bit.

`checkpoints/step-00001000/` appears whole or not at all, is read back after writing, and holds no pickle. Tensors go to
`training_state.safetensors`, everything else to `training_state.json`, with a hash over all tensors.
"""

import hashlib
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bert_pretrain.errors import DataError, OutputError
from bert_pretrain.files import atomic_folder, read_json, remove_temporaries, write_json
from bert_pretrain.model.huggingface import WEIGHTS, huggingface_tensors, load_weights, save_model
from bert_pretrain.tokenizer import Tokenizer
from bert_pretrain.train.state import IntervalCounts, Progress, TrainState

STATE_TENSORS = "training_state.safetensors"
STATE_JSON = "training_state.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose contents have been verified."""

    path: Path
    record: dict[str, Any]
    """The content of `training_state.json`."""

    @property
    def step(self) -> int:
        return int(self.record["progress"]["step"])


def save_checkpoint(folder: Path, state: TrainState, tokenizer: Tokenizer, about: Mapping[str, Any]) -> Path:
    """Write the checkpoint of the state's step and return its path.

    Args:
        folder: that holds the run's checkpoints.
        state: to be saved whole.
        tokenizer: its files go into the checkpoint.
        about: JSON values to keep with it: thread count, micro-batch size, data.

    Raises:
        OutputError: when it cannot be written, for example because the disk is full.
        DataError: when what was written does not read back as it was.
    """
    path = folder / f"step-{state.progress.step:08d}"
    tensors = state.tensors()
    digest = _hash_tensors({**_model_tensors(state), **tensors})
    record = {
        "format_version": FORMAT_VERSION,
        "progress": asdict(state.progress),
        "interval": asdict(state.interval),
        **about,
        "tensors_sha256": digest,
    }
    try:
        with atomic_folder(path) as temporary:
            save_model(state.model, temporary, tokenizer)
            save_file(tensors, temporary / STATE_TENSORS)
            write_json(temporary / STATE_JSON, record)
            if _hash_tensors(_on_disk(temporary)) != digest:
                raise DataError(
                    "a checkpoint does not read back as it was written",
                    where=str(path),
                    remedy="check the disk; the checkpoints before it are untouched",
                )
    except (OSError, safetensors.SafetensorError) as error:
        raise OutputError(
            f"cannot write a checkpoint: {error}",
            where=str(path),
            remedy="make room on the disk and run the same command again; it continues from the checkpoint before",
        ) from error
    return path


def keep_newest(folder: Path, number: int) -> None:
    """Remove all but the newest checkpoints."""
    for path in _paths(folder)[:-number]:
        shutil.rmtree(path)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint that is whole; None if there is none.

    One that is broken is told of loudly and renamed, so that it no longer counts as the newest.
    """
    if folder.is_dir():
        remove_temporaries(folder)
    for path in reversed(_paths(folder)):
        try:
            return open_checkpoint(path)
        except DataError as error:
            broken = path.with_name(f"broken-{path.name}")
            shutil.rmtree(broken, ignore_errors=True)
            path.rename(broken)
            print(
                f"WARNING: {path} is broken; it is now {broken.name}, and the checkpoint before it is used.\n{error}",
                file=sys.stderr,
            )
    return None


def has_checkpoints(folder: Path) -> bool:
    """Whether a folder holds checkpoints, whole or not."""
    return bool(_paths(folder))


def open_checkpoint(path: Path, flag: str = "checkpoint") -> Checkpoint:
    """Read a checkpoint's record and verify its tensors against it.

    Raises:
        DataError: when a file is missing, broken, or not what was written.
    """
    remedy = "name a folder checkpoints/step-… of a run"
    if not (path / STATE_JSON).is_file():
        raise DataError(f"{path} has no {STATE_JSON}", where=flag, remedy=remedy)
    record = read_json(path / STATE_JSON)
    if not isinstance(record, dict) or record.get("format_version") != FORMAT_VERSION:
        raise DataError("it is no checkpoint of this version", where=str(path / STATE_JSON), remedy=remedy)
    expected = {"tensors_sha256", "progress", "interval", "steps", "optimizer", "micro_batch_tokens", "threads", "data"}
    if not expected.issubset(record):
        lacking = ", ".join(sorted(expected - set(record)))
        raise DataError(f"its record lacks {lacking}", where=str(path / STATE_JSON), remedy=remedy)
    try:
        digest = _hash_tensors(_on_disk(path))
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise DataError(f"its tensors cannot be read: {error}", where=str(path), remedy=remedy) from error
    if digest != record["tensors_sha256"]:
        raise DataError("its tensors are not those that were written", where=str(path), remedy=remedy)
    return Checkpoint(path, record)


def restore(state: TrainState, checkpoint: Checkpoint) -> None:
    """Bring a state to where the checkpoint was taken: weights, optimizer, loss scale, interval and progress."""
    load_weights(state.model, checkpoint.path, flag="checkpoint", seed=0)
    state.load_tensors(load_file(checkpoint.path / STATE_TENSORS))
    state.progress = Progress(**checkpoint.record["progress"])
    state.interval = IntervalCounts(**checkpoint.record["interval"])


def carry_over(state: TrainState, checkpoint: Checkpoint, data: str) -> None:
    """Take the optimizer's state, the step and the counts from another run's checkpoint, but not its clock.

    Equal data (by the folder's content hash) goes on where that run stood; other data begins with its first epoch.
    """
    state.load_optimizer(load_file(checkpoint.path / STATE_TENSORS))
    state.progress = Progress(**{**checkpoint.record["progress"], "elapsed_seconds": 0.0})
    if checkpoint.record["data"] != data:
        state.progress.first_step = checkpoint.step


def _paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir())


def _model_tensors(state: TrainState) -> dict[str, Tensor]:
    return {f"model/{name}": tensor for name, tensor in huggingface_tensors(state.model).items()}


def _on_disk(folder: Path) -> dict[str, Tensor]:
    weights = {f"model/{name}": tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    return {**weights, **load_file(folder / STATE_TENSORS)}


def _hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return a SHA-256 over names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
