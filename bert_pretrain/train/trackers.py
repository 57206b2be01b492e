"""Trackers: the lines of `metrics.jsonl` once more, for TensorBoard or Weights & Biases, by thin adapters."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from bert_pretrain.extras import import_extra

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


class Tracker(Protocol):
    """Receives figures by step."""

    def log(self, figures: dict[str, float], step: int) -> None:
        """Take the figures of a step."""

    def close(self) -> None:
        """Write what is left."""


def open_trackers(names: Sequence[str], run: Path, config: dict[str, Any], step: int) -> list[Tracker]:
    """Open the named trackers for a run that continues after `step`."""
    check_trackers(names)
    adapters: dict[str, Callable[[Path, dict[str, Any], int], Tracker]]
    adapters = {"tensorboard": _TensorBoard, "wandb": _WeightsAndBiases}
    return [adapters[name](run, config, step) for name in names]


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed."""
    for name in names:
        import_extra(_MODULES[name], name, "its curves", where="train.trackers")


def grouped(line: dict[str, Any]) -> dict[str, float]:
    """Return a line's numbers under names that trackers sort into `train/` and `validation/`; nulls are left out."""
    group = "validation" if "validation_mlm_loss" in line else "train"
    return {
        f"{group}/{name.removeprefix('validation_')}": float(value)
        for name, value in line.items()
        if name != "step" and value is not None
    }


class _TensorBoard:
    """Event files in `RUN/tensorboard`."""

    def __init__(self, run: Path, config: dict[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What was logged after the checkpoint that the run continues from is hidden.
        self._writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step else None)

    def log(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """A run of the project `bert-pretrain`, or of what the environment (`WANDB_PROJECT`) names."""

    def __init__(self, run: Path, config: dict[str, Any], step: int) -> None:
        import wandb

        # The same folder is the same run, whichever process continues it.
        identifier = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
        settings = {"id": identifier, "name": run.name, "resume": "allow", "config": config, "dir": str(run)}
        self._run: Any = wandb.init(**settings)

    def log(self, figures: dict[str, float], step: int) -> None:
        self._run.log(figures, step=step)

    def close(self) -> None:
        self._run.finish()
