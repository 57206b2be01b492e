"""Checkpoints: model folders that `transformers` can load, plus the training state, from which a run resumes.

On the same CPU, with the same threads and versions, a resumed run has the same bits as an uninterrupted run.

`checkpoints/step-00001000/` is written atomically and contains no pickle. The state's tensors are in
`training_state.safetensors`, its numbers in `training_state.json`; `checksums.json` covers all files except the model
card. Saving copies the state to host memory and returns. A thread writes the copy while training continues.
"""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bert_pretrain.errors import DataError
from bert_pretrain.io import files
from bert_pretrain.model.folder import CARD, GENERATOR_WEIGHTS, PRETRAINING
from bert_pretrain.model.huggingface import export_weights, save_model_folder, scale_embeddings, write_tensors
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.train.signals import checkpoint_paths
from bert_pretrain.train.state import IntervalCounts, Progress, TrainState

STATE_TENSORS = "training_state.safetensors"
STATE_JSON = "training_state.json"
EXPONENT = "embedding_exponent"  # embeddings on disk are those in training divided by 2 ** exponent


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk with verified checksums."""

    path: Path
    record: dict[str, Any]  # contents of `training_state.json`

    @property
    def step(self) -> int:
        return int(self.record["progress"]["step"])


class HostBuffers:
    """Page-locked host memory for asynchronous copies of a GPU's training state, reused because locking is slow.

    The GPU runs operations in order, so later kernels change a tensor only after its copy. Training need not wait.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        """Return the copies, and a CUDA event that is reached when they are complete, or None on CPU."""
        is_on_cuda = next(iter(tensors.values())).is_cuda
        for name, tensor in tensors.items():
            if name not in self._buffers:
                self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                if is_on_cuda:
                    with contextlib.suppress(RuntimeError):  # if no more pages can be locked, the copy is synchronous
                        self._buffers[name] = self._buffers[name].pin_memory()
            self._buffers[name].copy_(tensor.detach(), non_blocking=True)
        event: Any = None
        if is_on_cuda and torch.cuda.is_available():  # not when the tests trace CUDA code without a driver
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return {name: self._buffers[name] for name in tensors}, event


@dataclass
class CheckpointWriter:
    """Writes checkpoints in a background thread, one at a time, and keeps the newest `keep` of them."""

    folder: Path
    state: TrainState
    tokenizer: Tokenizer
    keep: int
    # Returns extra values for `training_state.json`, and the model card. None disables writing.
    describe: Callable[[], tuple[Mapping[str, Any], str]] | None
    buffers: HostBuffers = field(default_factory=HostBuffers)
    write_seconds: float = 0.0  # duration of the last write
    _writing: Future[None] | None = None

    @property
    def path(self) -> Path:
        """The path of a checkpoint of the current step."""
        return self.folder / f"step-{self.state.progress.step:08d}"

    def save(self) -> Path:
        """Wait until the previous checkpoint is on disk, start writing a new one and return its path."""
        path = self.path
        if self.describe is None:
            return path
        self.wait()  # the thread of the previous checkpoint reads the buffers
        extra, card = self.describe()
        record = {"progress": asdict(self.state.progress), "interval": asdict(self.state.interval), **extra}
        copies, event = self.buffers.copy(all_tensors(self.state))
        writing = self._writing = Future[None]()

        def write() -> None:
            try:
                self._write(
                    path,
                    copies,
                    event,
                    record,
                    card,
                )
                writing.set_result(None)
            except Exception as error:
                writing.set_exception(error)

        # A daemon thread, so that a run that must exit immediately does not wait for it.
        threading.Thread(target=write, name="checkpoint", daemon=True).start()
        return path

    def _write(
        self,
        path: Path,
        tensors: dict[str, Tensor],
        event: Any,
        record: dict[str, Any],
        card: str,
    ) -> None:
        """Wait for the CUDA event, write copies of `all_tensors` as a checkpoint, and remove old checkpoints."""
        begin = time.perf_counter()
        if event is not None:
            event.synchronize()
        parameters = {name: tensors.pop(name) for name, _ in self.state.model.named_parameters()}
        exported = export_weights(parameters, self.state.model.config.architecture)
        with files.atomic_folder(path) as temporary:
            write_tensors(tensors, temporary / STATE_TENSORS)
            files.write_json(temporary / STATE_JSON, {**record, EXPONENT: exported.exponent})
            if exported.generator:
                write_tensors(exported.generator, temporary / GENERATOR_WEIGHTS)
            save_model_folder(
                exported.weights,
                self.state.model,
                temporary,
                self.tokenizer,
                record[PRETRAINING],
            )
            files.write_text(temporary / CARD, card)
        for old in checkpoint_paths(self.folder)[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)  # such as a link, or a file that another program reads over NFS
        self.write_seconds = time.perf_counter() - begin

    def check(self) -> None:
        """Raise the error of the background thread, if it failed. Do not wait for it."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint is on disk. Raise the error of the background thread, if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def all_tensors(state: TrainState) -> dict[str, Tensor]:
    """Return the weights and the tensors of the training state, whose names contain a slash."""
    return {**dict(state.model.named_parameters()), **state.tensors()}


def newest_checkpoint(folder: Path, *, changes: bool = True) -> Checkpoint | None:
    """Return the newest intact checkpoint, or None if the folder has no checkpoints.

    Newer, broken checkpoints are skipped. With `changes`, they are also renamed and reported on stderr. Raises
    DataError if all checkpoints are broken.
    """
    if changes and folder.is_dir():
        files.remove_temporaries(folder)
    damages = dict[Path, str]()
    for path in reversed(checkpoint_paths(folder)):
        try:
            newest = open_checkpoint(path)
        except DataError as error:
            damages[path] = error.what
            continue
        if changes:
            _rename_broken(damages, newest.path)
        return newest
    if not damages:
        return None
    raise DataError(
        f"all checkpoints of the run are broken; the newest: {next(iter(damages.values()))}",
        where=str(folder),
        remedy="restore one from a backup, or start over with --overwrite (the old folder is moved aside)",
    )


def _rename_broken(damages: Mapping[Path, str], used: Path) -> None:
    for path, damage in damages.items():
        renamed = path.with_name(f"broken-{path.name}")
        shutil.rmtree(renamed, ignore_errors=True)
        path.rename(renamed)
        print(
            f"WARNING: {path} is broken ({damage}); it is renamed to {renamed.name}, and {used.name} is used.",
            file=sys.stderr,
        )


def open_checkpoint(path: Path, flag: str = "checkpoint") -> Checkpoint:
    """Verify the checksums of a checkpoint and read its record."""
    if not (path / STATE_JSON).is_file():
        raise DataError(
            f"{path} has no {STATE_JSON}",
            where=flag,
            remedy="pass a folder checkpoints/step-… of a run",
        )
    if damage := files.damage_of_folder(path):
        raise DataError(
            f"{path.name} is damaged: {damage}",
            where=str(path),
            remedy="use the previous checkpoint, or restore this one from a backup",
        )
    return Checkpoint(path, files.read_json(path / STATE_JSON))


@torch.no_grad()
def restore(state: TrainState, checkpoint: Checkpoint, *, only_optimizers: bool = False) -> None:
    """Restore a training state from a checkpoint, except the weights, which the model has already loaded.

    Undo the scaling of their embeddings. `only_optimizers` leaves out the loss scale of fp16 and the
    metrics since the last log line.
    """
    weights = dict(state.model.named_parameters())
    for name, tensor in scale_embeddings(weights, -int(checkpoint.record[EXPONENT])).items():
        weights[name].copy_(tensor)
    state.load_tensors(load_file(checkpoint.path / STATE_TENSORS), only_optimizers=only_optimizers)
    state.progress = Progress(**checkpoint.record["progress"])
    if not only_optimizers:
        state.interval = IntervalCounts(**checkpoint.record["interval"])


def carry_over(state: TrainState, checkpoint: Checkpoint, data: str) -> None:
    """Restore optimizer state, step and counts from a checkpoint of another run, but not its elapsed time.

    `data` is the content hash of the data folder. If the other run used the same data, training continues at the same
    position; otherwise it starts with the first example.
    """
    restore(state, checkpoint, only_optimizers=True)
    state.progress = replace(
        state.progress,
        elapsed_seconds=0.0,
        wall_seconds=0.0,
        warmup_start=0.0,
        longest_seconds={},
    )
    if checkpoint.record["data"] != data:
        state.progress.examples_before = state.progress.examples
