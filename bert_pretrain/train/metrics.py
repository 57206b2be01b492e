"""What a run reports: one line of figures per logging interval, for `metrics.jsonl` and for the console.

Times are those of training steps, including the wait for data but neither evaluations nor checkpoints. Rates leave
out the first step after a start, in which kernels are chosen or compiled.
"""

import hashlib
import json
import math
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bert_pretrain.errors import DataError
from bert_pretrain.report.curves import perplexity
from bert_pretrain.report.diagnosis import Diagnosis, Hint
from bert_pretrain.storage.files import parse_json, write_text
from bert_pretrain.storage.locking import is_in_place, moved_while_writing
from bert_pretrain.train.state import TrainState
from bert_pretrain.train.step import StepSums


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this run has held: tensors on a CUDA device, else the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def training_line(state: TrainState, *, rate: float, epoch: float, peak: float | None) -> dict[str, Any]:
    """Return the line of `metrics.jsonl` for the interval that ends here, which waits for the device.

    Losses, accuracies, the gradient norm and the rates are means over the interval, without skipped steps. The `nsp_`
    figures, which are also those of sentence order, are None if examples are not pairs.

    `peak` is the FLOPs per second that all devices can do together, or None.
    """
    progress, interval = state.progress, state.interval
    sums = StepSums.read(state.sums)
    updates, seconds = interval.steps - sums.skipped, interval.timed_seconds
    flops_per_second = _ratio(interval.timed_flops, seconds)
    return {
        "step": progress.step,
        "epoch": epoch,
        "examples": progress.examples,
        "tokens": progress.tokens,
        "elapsed_seconds": progress.elapsed_seconds,
        "loss": _ratio(sums.loss, updates),
        "mlm_loss": _ratio(sums.mlm_loss, sums.predictions),
        "mlm_accuracy": _ratio(sums.mlm_correct, sums.predictions),
        "nsp_loss": _ratio(sums.nsp_loss, sums.pairs),
        "nsp_accuracy": _ratio(sums.nsp_correct, sums.pairs),
        "learning_rate": rate,
        "grad_norm": _ratio(sums.grad_norm, updates),
        "examples_per_second": _ratio(interval.timed_examples, seconds),
        "tokens_per_second": _ratio(interval.timed_tokens, seconds),
        "mfu": None if peak is None or flops_per_second is None else flops_per_second / peak,
        "padding_share": 1.0 - interval.own_tokens / max(interval.attended_slots, 1),
        "data_wait_share": _ratio(interval.waited_seconds, seconds),
        "peak_memory_bytes": peak_memory_bytes(state.sums.device),
        "skipped_steps": int(sums.skipped),
    }


def _ratio(total: float, number: float) -> float | None:
    return total / number if number else None


def console_line(line: dict[str, Any], steps: int | None, pairs: str = "nsp") -> str:
    """Return a line of `metrics.jsonl` for the console, with units.

    `steps` are those of the whole run, None where time ends it; `pairs` is what the figures of pairs are called.
    """
    head = f"step {line['step']:>7}" if steps is None else f"step {line['step']:>{len(str(steps))}}/{steps}"
    if "validation_mlm_loss" in line:
        loss = line["validation_mlm_loss"]
        suffix = f"  perplexity {perplexity(loss):,.1f}" if loss is not None else ""
        return f"{head}  validation  {_losses(line, 'validation_', pairs)}{suffix}"
    if line["loss"] is None:
        return f"{head}  all {line['skipped_steps']} steps skipped: gradients were not finite"
    text = (
        f"{head}  loss {line['loss']:7.4f}  {_losses(line, '', pairs)}  lr {line['learning_rate']:.2e}"
        f"  norm {line['grad_norm']:6.3f}"
    )
    if line["tokens_per_second"] is not None:
        text += f"  {line['examples_per_second']:7.1f} examples/s  {line['tokens_per_second']:9,.0f} tokens/s"
    text += f"  MFU {line['mfu']:5.1%}" if line["mfu"] is not None else ""
    return text + (f"  {line['skipped_steps']} skipped" if line["skipped_steps"] else "")


def _losses(line: dict[str, Any], prefix: str, pairs: str) -> str:
    text = f"mlm {line[f'{prefix}mlm_loss']:7.4f} nats {line[f'{prefix}mlm_accuracy']:6.2%}"
    if line[f"{prefix}nsp_loss"] is None:
        return text
    return f"{text}  {pairs} {line[f'{prefix}nsp_loss']:6.4f} nats {line[f'{prefix}nsp_accuracy']:6.2%}"


def bar_text(line: dict[str, Any]) -> str:
    """Return the figures shown next to the progress bar."""
    loss = "–" if line["loss"] is None else f"{line['loss']:.3f}"
    mfu = "" if line["mfu"] is None else f", MFU {line['mfu']:.1%}"
    rate = ""
    if line["tokens_per_second"] is not None:
        rate = f", {line['examples_per_second']:,.0f} examples/s, {line['tokens_per_second']:,.0f} tokens/s"
    return f"loss {loss}, lr {line['learning_rate']:.1e}{rate}{mfu}"


class MetricsFile:
    """`metrics.jsonl`, one JSON object per line, appended during the run."""

    def __init__(self, path: Path, *, kept: Mapping[str, Any] | None, diagnosis: Diagnosis | None = None) -> None:
        """Open the file and remove what is beyond a `position`, or all lines for None.

        The diagnosis gets the lines that are kept, too; their hints were given when they were written.
        """
        self._path = path
        content = _read_until(path, kept) if kept is not None else b""
        write_text(path, content.decode())
        self._file = path.open("a", encoding="utf-8")
        self._digest, self._bytes = hashlib.sha256(content), len(content)
        self._latest: dict[str, dict[str, Any]] = {}
        self._diagnosis = Diagnosis({}) if diagnosis is None else diagnosis
        for line in content.decode().splitlines():
            self._note(parse_json(line))

    @property
    def position(self) -> dict[str, Any]:
        """Its bytes so far, which are on disk now, and their SHA-256."""
        self._check_in_place()
        os.fsync(self._file.fileno())
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    @property
    def last_training(self) -> dict[str, Any] | None:
        """The newest line of an interval of training."""
        return self._latest.get("training")

    @property
    def last_validation(self) -> dict[str, Any] | None:
        """The newest line of an evaluation."""
        return self._latest.get("validation")

    def write(self, line: dict[str, Any]) -> list[Hint]:
        """Append one line, flush it, and return its hints; numbers that are not finite become null."""
        self._check_in_place()
        line = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in line.items()
        }
        text = json.dumps(line, allow_nan=False) + "\n"
        self._file.write(text)
        self._file.flush()
        self._digest.update(text.encode())
        self._bytes += len(text.encode())
        return self._note(line)

    def _note(self, line: dict[str, Any]) -> list[Hint]:
        self._latest["validation" if "validation_mlm_loss" in line else "training"] = line
        return self._diagnosis.add(line)

    def _check_in_place(self) -> None:
        if not is_in_place(self._file, self._path):
            raise moved_while_writing(self._path.parent)
        if os.fstat(self._file.fileno()).st_size != self._bytes:
            raise _damaged(self._path, "another program has changed it during the run")

    def close(self) -> None:
        self._file.close()


def _read_until(path: Path, position: Mapping[str, Any]) -> bytes:
    """Return what was in the file at a position, nothing where there is no file."""
    if not path.is_file():
        print(f"{path} is missing; the figures before this step are lost")
        return b""
    content = path.read_bytes()[: position["bytes"]]
    if hashlib.sha256(content).hexdigest() != position["sha256"]:
        raise _damaged(path, "up to the checkpoint it does not hold what was written")
    return content


def _damaged(path: Path, what: str) -> DataError:
    remedy = "restore it from a copy, or remove it: the run then continues without the figures so far"
    return DataError(f"{path.name} is damaged: {what}", where=str(path), remedy=remedy)
