"""Write metrics of logging intervals and evaluations to `metrics.jsonl`, the console, the progress bar and trackers.

Times are those of training steps, including the wait for data but not evaluations and checkpoints. Rates leave out
the first step after a start, in which kernels are chosen or compiled.
"""

import contextlib
import datetime
import functools
import hashlib
import json
import math
import os
import platform
import resource
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.io.files import parse_json, write_text
from bert_pretrain.io.manifest import is_in_place, moved_while_writing
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.metrics import perplexity
from bert_pretrain.report.diagnosis import Diagnosis, Hint
from bert_pretrain.train.resolved import ResolvedRun
from bert_pretrain.train.schedule import too_long
from bert_pretrain.train.state import Progress, StepSums, TrainState

Record = Mapping[str, Any]
# A service that receives metrics: its functions to log metrics at a step, and to close it.
Tracker = tuple[Callable[[dict[str, float], int], Any], Callable[[], Any]]
# A console that ends, such as `tee` at Ctrl-C in `train | tee log`, must not stop a run before it saves a checkpoint.
without_console_errors = functools.partial(contextlib.suppress, OSError)


class RunLog:
    """The log of one run. Without a record, as on all ranks but the first, it does nothing."""

    def __init__(
        self,
        run: ResolvedRun,
        start: Progress,
        record: Record | None = None,
        metrics_end: Record | None = None,
    ) -> None:
        """Start logging after `start`. `record` is the run's manifest. Truncate `metrics.jsonl` to `metrics_end`."""
        self._length = run.length
        self._pairs = run.data.config.next_sentence
        self._file: MetricsFile | None = None
        self._trackers: list[Tracker] = []
        self.newest: Mapping[str, dict[str, Any]] = {}  # the last line of `training` and of `validation`
        if record is not None:
            self._file = MetricsFile(run.output / "metrics.jsonl", end=metrics_end, diagnosis=Diagnosis(record))
            self.newest = self._file.newest
            for name in run.config.train.trackers:
                open_tracker = _tensorboard if name == "tensorboard" else _weights_and_biases
                self._trackers.append(open_tracker(run.output, record["config"], start.step))
        self._bar = progress_bar(
            desc="train",
            total=run.length.steps,
            unit="step",
            initial=start.step,
            disable=record is None,
        )

    def advance(self, progress: Progress) -> None:
        with without_console_errors():
            self._bar.update(progress.step - self._bar.n)

    def training(self, line: dict[str, Any]) -> None:
        """Log the metrics of an interval. After the first interval, warn if the run will take long."""
        self._bar.set_postfix(loss=line["loss"], refresh=False)
        if self._length.steps is not None and "training" not in self.newest and line["examples_per_second"]:
            examples_left = (self._length.steps - line["step"]) * line["examples"] / line["step"]
            self._print(too_long(examples_left / line["examples_per_second"]))
        self._write(line)

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of an evaluation."""
        names = ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy", "examples", "documents")
        self._write({"step": step, **{f"validation_{name}": metrics.get(name) for name in names}})

    @property
    def position(self) -> dict[str, Any] | None:
        """The current end of `metrics.jsonl`, for a checkpoint."""
        return self._file.position if self._file is not None else None

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        now = datetime.datetime.now().astimezone()
        origin = {
            "time": now.isoformat("T", "seconds"),
            "host": platform.node(),
            "job": os.environ.get("SLURM_JOB_ID"),
        }
        hints = self._file.write({**line, **origin})
        for log, _ in self._trackers:
            log(_grouped(line), line["step"])
        text = f"{now:%m-%d %H:%M:%S}  {console_line(line, self._length.steps, self._pairs)}"
        self._print("\n".join([text, *map(str, hints)]))

    def _print(self, text: str) -> None:
        if text and self._file is not None:
            with without_console_errors():
                tqdm.write(text)

    def close(self) -> None:
        with without_console_errors():
            self._bar.close()
        for _, close in self._trackers:
            close()
        if self._file is not None:
            self._file.close()


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: allocated by PyTorch on CUDA, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def training_line(state: TrainState, *, rate: float, epoch: float, peak: float | None) -> dict[str, Any]:
    """Return the line of `metrics.jsonl` for the interval that ends now. Wait for the device.

    Metrics are means over the interval, without skipped steps. The `nsp_` metrics are also those of sentence order, and
    None if examples are not pairs. `peak` is the peak FLOP/s of all devices, or None if unknown.
    """
    progress = state.progress
    interval = state.interval
    sums = StepSums.read(state.sums)
    updates = interval.steps - sums.skipped
    seconds = interval.timed_seconds
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


def console_line(line: dict[str, Any], steps: int | None, pairs: str) -> str:
    """Format a line of `metrics.jsonl` for the console. `steps` is None for a run with a time budget."""
    head = f"step {line['step']:>7}" if steps is None else f"step {line['step']:>{len(str(steps))}}/{steps}"
    if "validation_mlm_loss" in line:
        parts = [head, "validation", *_losses(line, "validation_", pairs)]
        if line["validation_mlm_loss"] is not None:
            parts.append(f"perplexity {perplexity(line['validation_mlm_loss']):,.1f}")
        return "  ".join(parts)
    if line["loss"] is None:
        return f"{head}  all {line['skipped_steps']} steps skipped: gradients were not finite"
    parts = [head, f"loss {line['loss']:7.4f}", *_losses(line, "", pairs)]
    parts += [f"lr {line['learning_rate']:.2e}", f"norm {line['grad_norm']:6.3f}"]
    if line["tokens_per_second"] is not None:
        parts += [f"{line['examples_per_second']:7.1f} examples/s", f"{line['tokens_per_second']:9,.0f} tokens/s"]
    if line["mfu"] is not None:
        parts.append(f"MFU {line['mfu']:5.1%}")
    if line["skipped_steps"]:
        parts.append(f"{line['skipped_steps']} skipped")
    return "  ".join(parts)


def _losses(line: dict[str, Any], prefix: str, pairs: str) -> list[str]:
    parts = [f"mlm {line[f'{prefix}mlm_loss']:7.4f} nats {line[f'{prefix}mlm_accuracy']:6.2%}"]
    if line[f"{prefix}nsp_loss"] is not None:
        parts.append(f"{pairs} {line[f'{prefix}nsp_loss']:6.4f} nats {line[f'{prefix}nsp_accuracy']:6.2%}")
    return parts


class MetricsFile:
    """The file `metrics.jsonl`: one JSON object per line, appended during the run."""

    def __init__(self, path: Path, *, end: Record | None, diagnosis: Diagnosis | None = None) -> None:
        """Open the file, truncate it to the position `end` or, if None, to nothing, and diagnose its lines."""
        self._path = path
        self._diagnosis = diagnosis or Diagnosis({})
        content = _read_until(path, end) if end is not None else b""
        write_text(path, content.decode())
        self._file = path.open("a", encoding="utf-8")
        self._digest = hashlib.sha256(content)
        self._bytes = len(content)
        self.newest: dict[str, dict[str, Any]] = {}  # the last line of `training` and of `validation`
        for line in content.decode().splitlines():
            self._note(parse_json(line))

    @property
    def position(self) -> dict[str, Any]:
        """The size and SHA-256 of the file, after flushing it to disk."""
        self._check_in_place()
        os.fsync(self._file.fileno())
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def write(self, line: dict[str, Any]) -> list[Hint]:
        """Append one line, with null for non-finite numbers, and return the hints of the diagnosis."""
        self._check_in_place()
        not_finite = [name for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)]
        line = {**line, **dict.fromkeys(not_finite)}
        text = json.dumps(line, allow_nan=False) + "\n"
        self._file.write(text)
        self._file.flush()
        self._digest.update(text.encode())
        self._bytes += len(text.encode())
        return self._note(line)

    def _note(self, line: dict[str, Any]) -> list[Hint]:
        self.newest["validation" if "validation_mlm_loss" in line else "training"] = line
        return self._diagnosis.add(line)

    def _check_in_place(self) -> None:
        if not is_in_place(self._file, self._path):
            raise moved_while_writing(self._path.parent)

    def close(self) -> None:
        self._file.close()


def _read_until(path: Path, position: Record) -> bytes:
    """Return the content of the file up to a position, or nothing if there is no file."""
    if not path.is_file():
        print(f"warning: {path} is missing; the metrics up to the checkpoint are lost")
        return b""
    content = path.read_bytes()[: position["bytes"]]
    if hashlib.sha256(content).hexdigest() != position["sha256"]:
        raise DataError(
            f"{path.name} is damaged: its lines up to the checkpoint were changed",
            where=str(path),
            remedy="restore it from a copy, or remove it to continue without the metrics so far",
        )
    return content


def _grouped(line: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line, without nulls, under names that start with `train/` or `validation/`."""
    group = "validation" if "validation_mlm_loss" in line else "train"
    return {
        f"{group}/{name.removeprefix('validation_')}": float(value)
        for name, value in line.items()
        if name != "step" and value is not None
    }


def _tensorboard(run: Path, _config: dict[str, Any], step: int) -> Tracker:
    """Write event files to `RUN/tensorboard`."""
    from torch.utils.tensorboard import SummaryWriter

    # `purge_step` hides metrics that were logged after the checkpoint from which the run resumes.
    writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step else 0)

    def log(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _weights_and_biases(run: Path, config: dict[str, Any], _step: int) -> Tracker:
    """Log to Weights & Biases, in the project of `WANDB_PROJECT`."""
    import wandb

    id_file = run / "wandb_id"  # a resumed run continues the same wandb run
    if not id_file.exists():
        write_text(id_file, secrets.token_hex(8))
    identifier = id_file.read_text(encoding="utf-8")
    try:
        session = wandb.init(id=identifier, name=run.name, resume="allow", config=config, dir=str(run))
    except Exception as error:  # wandb has many error types
        remedy = "run 'wandb login', set WANDB_MODE=offline, or remove wandb from train.trackers"
        raise ConfigError(f"wandb does not start: {error}", where="train.trackers", remedy=remedy) from error
    return lambda metrics, step: session.log(metrics, step=step), session.finish
