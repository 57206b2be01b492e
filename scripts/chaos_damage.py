"""Damage to files: inputs, what a killed command has left, and finished outputs."""

import os
import signal
from pathlib import Path

from chaos_commands import files_of
from chaos_process import at_file_event
from chaos_trial import HANG, MESSAGE, NOT_READ_BACK, SAME, SILENT, UNCHECKED, UNCHECKED_INPUTS, Defect, Trial

ANOTHER_CONFIGURATION = "was written by another command or configuration"


def damage_input(trial: Trial) -> str:
    """A damaged file among the inputs."""
    trial.reset()
    files = [file for name in trial.command.needs for file in files_of(trial.now / name)]
    return _damaged(trial, trial.draw.choice(files))


def damage_unfinished(trial: Trial) -> str:
    """A killed command, and a damaged file among those it has left."""
    trial.reset()
    event = trial.event()
    children = trial.start(at_file_event(trial.now, event, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    trial.wait(children)
    written = trial.written()
    return _damaged(trial, trial.draw.choice(written)) if written else trial.repeat()


def damage_finished(trial: Trial) -> str:
    """A damaged file in a finished output, and the same command again."""
    trial.reset(finished=True)
    trial.checks = True
    written = trial.written()
    return _damaged(trial, trial.draw.choice(written)) if written else trial.repeat()


def damage(path: Path, trial: Trial) -> str:
    """Damage a file, and return how."""
    content, draw = path.read_bytes(), trial.draw
    how = draw.choice(("bit", "bit", "bit", "cut", "cut", "zeros", "empty", "deleted", "longer"))
    place = draw.randrange(max(1, len(content)))
    if how == "deleted":
        path.unlink()
    elif how in ("empty", "cut"):
        path.write_bytes(b"" if how == "empty" else content[:place])
    elif how == "longer":
        path.write_bytes(content + draw.randbytes(draw.randint(1, 64)))
    elif content:
        changed = bytearray(content)
        if how == "bit":
            changed[place] ^= 1 << draw.randrange(8)
        else:
            end = min(len(content), place + 4096)
            changed[place:end] = bytes(end - place)
        path.write_bytes(changed)
    return f"{how} {path.relative_to(trial.now)}"


def _damaged(trial: Trial, file: Path) -> str:
    name = file.relative_to(trial.now)
    original, status = file.read_bytes(), file.stat()
    how = damage(file, trial)
    trial.log.append({"damage": how})
    damaged = file.read_bytes() if file.exists() else None
    try:
        child = trial.run((0, 1, 2))
    except Defect as defect:
        if defect.verdict == HANG and name.suffix == ".yaml" and any(trial.now.rglob("metrics.jsonl")):
            return UNCHECKED  # another configuration was read, and its longer training has begun
        raise
    if child.code:
        return _mended(trial, file, original, (status.st_atime_ns, status.st_mtime_ns), how)
    differences = trial.differences(child)
    if differences and name.parts[0] in UNCHECKED_INPUTS:
        return UNCHECKED
    found = file.read_bytes() if file.exists() else None
    is_left = damaged != original and found == damaged and (trial.bench.finished(trial.command) / name).exists()
    if is_left and name.parts[0] in trial.command.outputs and set(differences) <= {str(name)}:
        if NOT_READ_BACK.search(str(name)) or _is_older_checkpoint(trial, file):
            return UNCHECKED
        raise Defect(SILENT, f"{how}: left as it is, exit 0")
    if differences:
        raise Defect(SILENT, f"{how}: accepted, other bytes: {', '.join(differences[:4])}")
    return SAME


def _is_older_checkpoint(trial: Trial, file: Path) -> bool:
    """Whether a file is in a checkpoint that is not read: of a finished run any, else not the last."""
    checkpoint = next((path for path in file.parents if path.parent.name == "checkpoints"), None)
    return checkpoint is not None and (trial.checks or checkpoint != max(checkpoint.parent.glob("step-*")))


def _mended(trial: Trial, file: Path, original: bytes, times: tuple[int, int], how: str) -> str:
    """After a message: with the file as it was, the command must succeed."""
    if file.parent.is_dir():
        file.write_bytes(original)
        os.utime(file, ns=times)  # part of the identity of an input
    try:
        trial.repeat()
    except Defect as defect:
        if file.suffix == ".yaml" and ANOTHER_CONFIGURATION in str(defect):
            return UNCHECKED  # a valid configuration, by which the first stages have written
        raise Defect(defect.verdict, f"{how}; after it is mended: {defect}") from None
    return MESSAGE
