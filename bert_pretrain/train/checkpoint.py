"""Checkpoints: model folders that `transformers` opens, plus the state that resumes the run bit for bit.

`checkpoints/step-00001000/` appears whole or not at all, is read back after writing, and holds no pickle. Tensors go to
`training_state.safetensors`, everything else to `training_state.json`; `checksums.json` covers all files but the card.
Saving copies the state to host memory and returns; a thread writes the copy while training continues.
"""

import contextlib
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from bert_pretrain.errors import DataError, OutputError
from bert_pretrain.io.files import (
    atomic_folder,
    damage_of_folder,
    read_json,
    remove_temporaries,
    write_json,
    write_text,
)
from bert_pretrain.io.manifest import moved_while_writing
from bert_pretrain.model.folder import CARD, WEIGHTS
from bert_pretrain.model.huggingface import PRETRAINING, export_weights, save_tensors, write_tensors
from bert_pretrain.model.scale import scale_embeddings
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.train.state import IntervalCounts, Progress, TrainState

STATE_TENSORS = "training_state.safetensors"
STATE_JSON = "training_state.json"
EXPONENT = "embedding_exponent"  # of 2: by so much the embeddings on disk are smaller than those in training
WEIGHT_PREFIX = "model/"  # of the weights' names among all tensors of a state


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose contents have been verified."""

    path: Path
    record: dict[str, Any]  # the content of `training_state.json`

    @property
    def step(self) -> int:
        return int(self.record["progress"]["step"])


class CheckpointWriter:
    """Writes a run's checkpoints in a thread, one at a time, and keeps the newest few."""

    write_seconds = 0.0  # duration of the last write, during which training continued

    def __init__(
        self,
        folder: Path,
        state: TrainState,
        tokenizer: Tokenizer,
        keep: int,
        describe: Callable[[], tuple[Mapping[str, Any], str]] | None,
        buffers: "HostBuffers | None" = None,
    ) -> None:
        """Save a state with what `describe` returns: values kept as JSON, and the model card; without it, nothing."""
        self._folder, self._state, self._tokenizer, self._keep = folder, state, tokenizer, keep
        self._describe = describe
        self._buffers = buffers or HostBuffers()
        self._writing: Future[None] | None = None

    def save(self) -> Path:
        """Begin to write a checkpoint, after the one before is on disk, and return its path."""
        state, path = self._state, self._folder / f"step-{self._state.progress.step:08d}"
        if self._describe is not None:
            self.wait()  # the host memory is free then
            about, card = self._describe()
            record = {"progress": asdict(state.progress), "interval": asdict(state.interval), **about}
            copies, arrival = self._buffers.copy(all_tensors(state))
            writing = self._writing = Future[None]()

            def write() -> None:
                try:
                    self._write(path, copies, arrival, record, card)
                    writing.set_result(None)
                except Exception as error:
                    writing.set_exception(error)

            # A daemon, unlike the threads of an executor: a run that must end at once does not wait for it.
            threading.Thread(target=write, name="checkpoint", daemon=True).start()
        return path

    def _write(self, path: Path, tensors: dict[str, Tensor], arrival: Any, record: dict[str, Any], card: str) -> None:
        """Write a checkpoint from copies of `all_tensors`, and remove older ones; of the model only sizes are used."""
        begin = time.perf_counter()
        if arrival is not None:
            arrival.synchronize()
        ours = {name: tensor for name, tensor in tensors.items() if name.startswith(WEIGHT_PREFIX)}
        weights, exponent = export_weights({name.removeprefix(WEIGHT_PREFIX): tensor for name, tensor in ours.items()})
        rest = {name: tensor for name, tensor in tensors.items() if name not in ours}
        try:
            with atomic_folder(path) as temporary:
                write_tensors(rest, temporary / STATE_TENSORS)
                write_json(temporary / STATE_JSON, {**record, EXPONENT: exponent})
                save_tensors(weights, self._state.model, temporary, self._tokenizer, record[PRETRAINING])
                write_text(temporary / CARD, card)
                for name, written in ((WEIGHTS, weights), (STATE_TENSORS, rest)):
                    if not _are_equal(written, load_file(temporary / name)):
                        raise DataError(
                            "a checkpoint does not read back as it was written",
                            where=str(path),
                            remedy="check the disk; the checkpoints before it are untouched",
                        )
            for old in checkpoint_paths(self._folder)[: -self._keep]:
                shutil.rmtree(old)
        except FileNotFoundError as error:
            raise moved_while_writing(path.parent.parent) from error
        except (OSError, safetensors.SafetensorError) as error:
            raise OutputError(
                f"cannot write a checkpoint: {error}",
                where=str(path),
                remedy="make room on the disk and run the same command again; it continues from the checkpoint before",
            ) from error
        self.write_seconds = time.perf_counter() - begin

    def check(self) -> None:
        """Raise what failed in the thread since the last call, without waiting."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until all checkpoints are on disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


class HostBuffers:
    """Host memory for one copy of a state on a GPU, used again for the next.

    Only page-locked memory takes copies from a GPU asynchronously, and locking pages is slow. The GPU works in order:
    kernels that change a tensor run after its copy, so training continues at once.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        """Return copies and the CUDA event after the last of them; None where all are complete."""
        if next(iter(tensors.values())).device.type != "cuda":
            return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}, None
        for name, tensor in tensors.items():
            if name not in self._buffers:
                self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                with contextlib.suppress(RuntimeError):  # no more pages can be locked
                    self._buffers[name] = self._buffers[name].pin_memory()
            self._buffers[name].copy_(tensor.detach(), non_blocking=True)
        event: Any = torch.cuda.Event() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
        if event is not None:  # without a driver, in traces, there is none
            event.record()
        return {name: self._buffers[name] for name in tensors}, event


def all_tensors(state: TrainState) -> dict[str, Tensor]:
    """Return the weights, under our own names with a prefix, and the rest of the state."""
    weights = {WEIGHT_PREFIX + name: parameter for name, parameter in state.model.named_parameters()}
    return {**weights, **state.tensors()}


def newest_checkpoint(folder: Path, *, changes: bool = True) -> Checkpoint | None:
    """Return the newest checkpoint that is whole; None if there is none at all.

    Broken ones that are newer are reported on stderr and renamed, so that they no longer count; without `changes`, they
    are only passed over.
    """
    if changes and folder.is_dir():
        remove_temporaries(folder)
    found, damages = None, dict[Path, str]()
    for path in reversed(checkpoint_paths(folder)):
        try:
            found = open_checkpoint(path)
            break
        except DataError as error:
            damages[path] = error.what
    for newer, damage in damages.items():
        if found is None:
            raise DataError(
                f"none of the run's checkpoints is whole; of the newest, {newer.name}, {damage}",
                where=str(folder),
                remedy="restore one from a copy, or start over with --overwrite (the old folder is moved aside)",
            )
        if changes:
            broken = newer.with_name(f"broken-{newer.name}")
            shutil.rmtree(broken, ignore_errors=True)
            newer.rename(broken)
            text = f"WARNING: {newer} is broken ({damage}); it is now {broken.name}, and {found.path.name} is used."
            print(text, file=sys.stderr)
    return found


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
    state.load_tensors(load_file(checkpoint.path / STATE_TENSORS), only_optimizers=True)
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
    """Whether names, types, shapes and bits of tensors on the CPU are the same."""

    def bits(tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1).view(torch.uint8)

    return left.keys() == right.keys() and all(
        (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape)
        and torch.equal(bits(tensor), bits(right[name]))
        for name, tensor in left.items()
    )
