"""Whether a run folder is finished, resumed or extended, and from which checkpoint; only the first rank looks.

A dry run asks the same, and changes nothing.
"""

import torch

from bert_pretrain.errors import ConfigError, OutputError
from bert_pretrain.io import manifest
from bert_pretrain.io.files import read_json, remove_temporaries
from bert_pretrain.model.folder import damage_of_model
from bert_pretrain.train.checkpoint import Checkpoint, checkpoint_paths, newest_checkpoint
from bert_pretrain.train.resolved import ResolvedRun
from bert_pretrain.train.schedule import Length, duration


def progress_of(
    run: ResolvedRun, progress: manifest.Progress, *, resume: bool, changes: bool
) -> tuple[bool, Checkpoint | None]:
    """Return whether a run has nothing left to do and, if it has, the checkpoint from which to continue.

    With `changes` the folder is prepared for that, too: leftovers are removed, and a finished run is opened again.
    """
    is_complete = progress is manifest.Progress.COMPLETE
    if is_complete and _is_up_to_date(run, changes):
        return True, None
    if changes:
        remove_temporaries(run.output)
    latest = _checkpoint_to_resume(run, resume, changes)
    if is_complete and changes:
        manifest.reopen(run.output)
    return False, latest


def _is_up_to_date(run: ResolvedRun, changes: bool) -> bool:
    """Say whether a finished run is as long as asked."""
    found, wanted = read_json(run.output / manifest.MANIFEST), run.length
    step, seconds = int(found["progress"]["step"]), float(found["progress"]["wall_seconds"])
    was = Length(**found["length"])
    if was == wanted or (wanted.steps is not None and wanted.steps == step):
        model = run.output / "model"
        damage = damage_of_model(model) if model.is_dir() else f"there is no {model}"
        if damage is None:
            print(f"up to date: {run.output} was trained to step {step}; the model is {model}")
            return True
        purpose = f"its final model could be written again ({damage})"
        message = f"the final model is missing or damaged ({damage}); it is written again from the newest checkpoint"
    elif wanted.is_over(step, seconds):
        raise _too_short(wanted, step, seconds)
    else:
        purpose, message = f"it could be extended to {wanted}", f"the run is extended from {was} to {wanted}"
    if newest_checkpoint(run.output / "checkpoints", changes=changes) is None:
        raise OutputError(
            f"the finished run has no checkpoint from which {purpose}",
            where=str(run.output / "checkpoints"),
            remedy="restore one from a copy, or name another --output, with --init-from for the weights",
        )
    print(message)
    return False


def _checkpoint_to_resume(run: ResolvedRun, resume: bool, changes: bool) -> Checkpoint | None:
    """Return the newest whole checkpoint of this run, or None to begin at the beginning."""
    folder = run.output / "checkpoints"
    if not resume and checkpoint_paths(folder):
        raise OutputError(
            f"{folder} holds checkpoints, and --no-resume starts over",
            where="--no-resume",
            remedy="add --overwrite (the old folder is moved aside), or leave out --no-resume",
        )
    latest = newest_checkpoint(folder, changes=changes)
    wanted = run.length.steps
    if latest is not None and wanted is not None and latest.step > wanted:
        raise _too_short(run.length, latest.step, 0.0)
    return latest


def describe_resume(latest: Checkpoint, run: ResolvedRun) -> str:
    """Return, for users, where a run resumes and what has changed."""
    lines = [f"continues from step {latest.step}, {latest.path}"]
    was, threads = Length(**latest.record["length"]), torch.get_num_threads()
    if was != run.length:
        lines.append(f"the schedule is recomputed: {was} -> {run.length}")
    if run.device.type == "cpu" and latest.record["threads"] != threads:
        lines.append(f"threads {latest.record['threads']} -> {threads}: the result may differ in the last bits")
    if latest.record["ranks"] != run.dist_context.size:
        lines.append(
            f"processes {latest.record['ranks']} -> {run.dist_context.size}: the same global batches, but rounding and "
            "dropout masks differ"
        )
    return "\n".join(lines)


def _too_short(wanted: Length, step: int, seconds: float) -> ConfigError:
    if wanted.steps is None:
        where, asked, done = "train.time_budget", str(wanted), duration(seconds)
    else:
        where, asked, done = "train.max_steps", f"step {wanted.steps}", f"step {step}"
    remedy = "ask for more, or name another --output"
    return ConfigError(f"the run would end at {asked}, but it is at {done} already", where=where, remedy=remedy)
