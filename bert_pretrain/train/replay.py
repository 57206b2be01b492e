"""A batch that broke a run, put on disk beside a checkpoint, so that its step can be computed again.

`RUN/skipped/step-XXXXXXXX/rank-N.safetensors` holds the micro-batches of rank N, `replay.json` the rest.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bert_pretrain.errors import UserError
from bert_pretrain.files import atomic_path, write_json
from bert_pretrain.model.weights import write_tensors
from bert_pretrain.train.batches import Batch, GlobalBatch
from bert_pretrain.train.distributed import Team
from bert_pretrain.train.state import TrainState

MAX_SKIPPED_IN_A_ROW = 30
"""More than a loss scale of fp16 needs to come down from its start to 1; after that, waiting does not help."""


class DivergedError(UserError):
    """A run whose gradients stay non-finite."""


def is_stuck(state: TrainState) -> bool:
    """Whether too many steps in a row were skipped; waits for the device, the same on all ranks."""
    return float(state.sums[-1]) >= MAX_SKIPPED_IN_A_ROW


def save_replay(run: Path, state: TrainState, batch: GlobalBatch, team: Team, checkpoint: Path) -> Path:
    """Write a skipped step's batch, this rank's share of it, and return the folder."""
    step = state.progress.step - 1
    folder = run / "skipped" / f"step-{step:08d}"
    tensors = {}
    for number, micro in enumerate(batch.micro_batches):
        for field in fields(Batch):
            value = getattr(micro, field.name)
            if isinstance(value, Tensor):
                tensors[f"{number}/{field.name}"] = value.cpu().contiguous()
            elif isinstance(value, int):
                tensors[f"{number}/{field.name}"] = torch.tensor(value)
    with atomic_path(folder / f"rank-{team.rank}.safetensors") as temporary:
        write_tensors(tensors, temporary)
    if team.is_first:
        write_json(
            folder / "replay.json",
            {
                "step": step,
                "ranks": team.size,
                "checkpoint": str(checkpoint.relative_to(run)),
                "num_sequences": batch.num_sequences,
                "num_pairs": batch.num_pairs,
                "num_predictions": batch.num_predictions,
                "num_tokens": batch.num_tokens,
                "sum_squared_lengths": batch.sum_squared_lengths,
            },
        )
    return folder


def load_replay(folder: Path, rank: int = 0) -> list[Batch]:
    """Return the micro-batches of a rank as they were computed."""
    by_number: dict[int, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / f"rank-{rank}.safetensors").items():
        number, _, field = name.partition("/")
        by_number.setdefault(int(number), {})[field] = tensor
    names = [field.name for field in fields(Batch)]
    batches = []
    for _, tensors in sorted(by_number.items()):
        values: dict[str, Any] = {name: tensors.get(name) for name in names}
        numbers = {name: int(value) for name, value in values.items() if value is not None and value.dim() == 0}
        batches.append(Batch(**{**values, **numbers}))
    return batches


def diverged(state: TrainState, folder: Path) -> DivergedError:
    """Return the error that ends a run."""
    return DivergedError(
        f"the gradients of {int(state.sums[-1])} steps in a row were not finite; none of them changed the weights",
        where=f"{folder}: the last batch, and the checkpoint to compute it with",
        remedy="lower train.peak_lr, or look for what is odd in that batch; the same command would try again",
    )
