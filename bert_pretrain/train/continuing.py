"""Whether a run folder is finished, goes on, or is extended, and from which checkpoint; only the first rank looks."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bert_pretrain import manifest
from bert_pretrain.errors import ConfigError, OutputError
from bert_pretrain.files import read_json, remove_temporaries
from bert_pretrain.train.checkpoint import Checkpoint, has_checkpoints, newest_checkpoint
from bert_pretrain.train.schedule import Length, duration
from bert_pretrain.train.setting import Setting


def is_up_to_date(output: Path, setting: Setting) -> bool:
    """Say whether a finished run is as long as asked; a longer one is opened again.

    Raises:
        UserError: when it is already longer than asked, or cannot go on.
    """
    found, wanted = read_json(output / manifest.MANIFEST), setting.length
    step, seconds = int(found["progress"]["step"]), float(found["progress"]["wall_seconds"])
    was = Length(**found["length"])
    if was == wanted or (wanted.steps is not None and wanted.steps == step):
        if (output / "model").is_dir():
            print(f"up to date: {output} was trained to step {step}; the model is {output / 'model'}")
            return True
        print("the final model is missing; it is written again from the newest checkpoint")
        manifest.reopen(output)
        return False
    if wanted.is_over(step, seconds):
        raise _too_short(wanted, step, seconds)
    if not has_checkpoints(output / "checkpoints"):
        raise OutputError(
            f"the finished run has no checkpoint from which it could go on to {wanted}",
            where=str(output / "checkpoints"),
            remedy="name another --output, with --init-from for the weights",
        )
    print(f"the run is extended from {was} to {wanted}")
    manifest.reopen(output)
    return False


def checkpoint_to_continue(output: Path, setting: Setting, resume: bool) -> Checkpoint | None:
    """Return the newest whole checkpoint of this run, or None to begin at the beginning.

    Raises:
        UserError: when the run is already longer than asked, or must not be continued.
    """
    remove_temporaries(output)
    folder = output / "checkpoints"
    if not resume and has_checkpoints(folder):
        raise OutputError(
            f"{folder} holds checkpoints, and --no-resume begins anew",
            where="--no-resume",
            remedy="add --overwrite (the old folder is moved aside), or leave out --no-resume",
        )
    latest = newest_checkpoint(folder)
    wanted = setting.length.steps
    if latest is not None and wanted is not None and latest.step > wanted:
        raise _too_short(setting.length, latest.step, 0.0)
    return latest


def describe_continuation(latest: Checkpoint, setting: Setting) -> str:
    """Return, for people, where a run goes on and what is not as before."""
    lines = [f"continues from step {latest.step}, {latest.path}"]
    was, threads = Length(**latest.record["length"]), torch.get_num_threads()
    if was != setting.length:
        lines.append(f"the schedule is recomputed: {was} -> {setting.length}")
    if setting.device.type == "cpu" and latest.record["threads"] != threads:
        lines.append(f"threads {latest.record['threads']} -> {threads}: the result may differ in the last bits")
    if latest.record["ranks"] != setting.team.size:
        lines.append(
            f"processes {latest.record['ranks']} -> {setting.team.size}: the same global batches, but rounding and "
            "dropout masks differ"
        )
    return "\n".join(lines)


def _too_short(wanted: Length, step: int, seconds: float) -> ConfigError:
    if wanted.steps is None:
        return ConfigError(
            f"the time budget is {wanted}, but the run has taken {duration(seconds)} already",
            where="train.time_budget",
            remedy="ask for more, or name another --output",
        )
    return ConfigError(
        f"the run would end at step {wanted.steps}, but it is at step {step} already",
        where="train.max_steps",
        remedy=f"ask for {step} steps or more, or name another --output",
    )


def record_of(setting: Setting, micro_batch_tokens: int, optimizer: str, data: str) -> dict[str, Any]:
    """Return what a checkpoint notes of the circumstances under which it was taken."""
    return {
        "length": asdict(setting.length),
        "optimizer": optimizer,
        "micro_batch_tokens": micro_batch_tokens,
        "threads": torch.get_num_threads(),
        "ranks": setting.team.size,
        "torch": torch.__version__,
        "precision": setting.precision.name,
        "data": data,
    }
