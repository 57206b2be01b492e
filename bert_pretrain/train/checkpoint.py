"""Checkpoints: a model folder as Hugging Face's tools read it, plus the state that continues the run bit for bit.

`checkpoints/step-00001000/` appears whole or not at all, is read back after writing, and holds no pickle. Tensors go to
`training_state.safetensors`, everything else to `training_state.json`; `checksums.json` covers all files but the card.
The state is copied to host memory (`host_memory.py`), from which `checkpoint_manager.py` writes it in the background.
"""

import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from bert_pretrain.errors import DataError, OutputError
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.folder import CARD, WEIGHTS
from bert_pretrain.model.huggingface import PRETRAINING, exported, save_tensors
from bert_pretrain.model.scale import scale_embeddings
from bert_pretrain.model.weights import write_tensors
from bert_pretrain.storage.checksums import damage_of_folder
from bert_pretrain.storage.files import atomic_folder, read_json, remove_temporaries, write_json, write_text
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.train.device.host_memory import HostCopy
from bert_pretrain.train.state import IntervalCounts, Progress, TrainState

STATE_TENSORS = "training_state.safetensors"
STATE_JSON = "training_state.json"
EXPONENT = "embedding_exponent"
"""Of the power of two by which the embeddings on disk are smaller than those in training."""
WEIGHT_PREFIX = "model/"
"""Of the weights' names among all tensors of a state."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose contents have been verified."""

    path: Path
    record: dict[str, Any]
    """The content of `training_state.json`."""

    @property
    def step(self) -> int:
        return int(self.record["progress"]["step"])


@dataclass(frozen=True)
class Snapshot:
    """A copy of a state, in memory that training does not touch."""

    model: BertForPreTraining
    """For its sizes only."""
    weights: dict[str, Tensor]
    """By our own names."""
    tensors: dict[str, Tensor]
    """The rest of the state."""
    copy: HostCopy
    """Of all of them; to be waited for before the first look at one."""
    record: dict[str, Any]
    """The content of `training_state.json`."""


def take_snapshot(state: TrainState, about: Mapping[str, Any]) -> Snapshot:
    """Begin to copy a state, after the snapshot before has been written.

    `about` has JSON values to keep with it: thread count, micro-batch size, data.
    """
    record = {"progress": asdict(state.progress), "interval": asdict(state.interval), **about}
    weights = {WEIGHT_PREFIX + name: parameter for name, parameter in state.model.named_parameters()}
    copy = state.host_memory.copy({**weights, **state.tensors()})
    copied = {name.removeprefix(WEIGHT_PREFIX): tensor for name, tensor in copy.tensors.items() if name in weights}
    rest = {name: tensor for name, tensor in copy.tensors.items() if name not in weights}
    return Snapshot(state.model, copied, rest, copy, record)


def write_checkpoint(path: Path, snapshot: Snapshot, tokenizer: Tokenizer, card: str) -> None:
    """Write the checkpoint of a snapshot.

    Raises:
        OutputError: when it cannot be written, for example because the disk is full.
        DataError: when what was written does not read back as it was.
    """
    snapshot.copy.wait()
    weights, exponent = exported(snapshot.weights)
    try:
        with atomic_folder(path) as temporary:
            write_tensors(snapshot.tensors, temporary / STATE_TENSORS)
            write_json(temporary / STATE_JSON, {**snapshot.record, EXPONENT: exponent})
            save_tensors(weights, snapshot.model, temporary, tokenizer, snapshot.record[PRETRAINING])
            write_text(temporary / CARD, card)
            written = {WEIGHTS: weights, STATE_TENSORS: snapshot.tensors}
            if not all(_are_equal(tensors, load_file(temporary / name)) for name, tensors in written.items()):
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


def newest_checkpoint(folder: Path, *, changes: bool = True) -> Checkpoint | None:
    """Return the newest checkpoint that is whole; None if there is none at all.

    Broken ones that are newer are reported on stderr and renamed, so that they no longer count; without `changes`, they
    are only passed over.
    """
    if changes and folder.is_dir():
        remove_temporaries(folder)
    damages: dict[Path, DataError] = {}
    for path in reversed(checkpoint_paths(folder)):
        try:
            found = open_checkpoint(path)
        except DataError as error:
            damages[path] = error
            continue
        for newer, damage in damages.items() if changes else ():
            broken = newer.with_name(f"broken-{newer.name}")
            shutil.rmtree(broken, ignore_errors=True)
            newer.rename(broken)
            print(
                f"WARNING: {newer} is broken ({damage.what}); it is now {broken.name}, and {path.name} is used.",
                file=sys.stderr,
            )
        return found
    if damages:
        newest, damage = next(iter(damages.items()))
        raise DataError(
            f"none of the run's checkpoints is whole; of the newest, {newest.name}, {damage.what}",
            where=str(folder),
            remedy="restore one from a copy, or start over with --overwrite (the old folder is moved aside)",
        )
    return None


def open_checkpoint(path: Path, flag: str = "checkpoint") -> Checkpoint:
    """Read a checkpoint's record, after comparing all its files with their checksums."""
    if not (path / STATE_JSON).is_file():
        remedy = "name a folder checkpoints/step-… of a run"
        raise DataError(f"{path} has no {STATE_JSON}", where=flag, remedy=remedy)
    if damage := damage_of_folder(path):
        remedy = "use the checkpoint before it, or restore it from a copy"
        raise DataError(f"{path.name} is damaged: {damage}", where=str(path), remedy=remedy)
    return Checkpoint(path, read_json(path / STATE_JSON))


def restore(state: TrainState, checkpoint: Checkpoint) -> None:
    """Bring a state, into which the weights on disk are loaded, to where the checkpoint was taken."""
    _undo_export(state, checkpoint)
    state.load_tensors(load_file(checkpoint.path / STATE_TENSORS))
    state.progress = Progress(**checkpoint.record["progress"])
    state.interval = IntervalCounts(**checkpoint.record["interval"])


def carry_over(state: TrainState, checkpoint: Checkpoint, data: str) -> None:
    """Take the optimizer's state, the step and the counts from another run's checkpoint, but not its clock.

    Equal data (by the folder's content hash) continues where that run ended; other data starts at its first epoch.
    """
    _undo_export(state, checkpoint)
    state.load_optimizers(load_file(checkpoint.path / STATE_TENSORS))
    state.progress = replace(
        Progress(**checkpoint.record["progress"]), elapsed_seconds=0.0, wall_seconds=0.0, longest_seconds={}
    )
    if checkpoint.record["data"] != data:
        state.progress.examples_before = state.progress.examples


@torch.no_grad()
def _undo_export(state: TrainState, checkpoint: Checkpoint) -> None:
    """Make the embeddings as large again as in training."""
    weights = dict(state.model.named_parameters())
    for name, tensor in scale_embeddings(weights, -int(checkpoint.record[EXPONENT])).items():
        weights[name].copy_(tensor)


def checkpoint_paths(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, whole or not, the newest last."""
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir())


def _are_equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Whether names, types, shapes and bits are the same."""

    def bits(tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().reshape(-1).view(torch.uint8)

    return left.keys() == right.keys() and all(
        (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape)
        and torch.equal(bits(tensor), bits(right[name]))
        for name, tensor in left.items()
    )
