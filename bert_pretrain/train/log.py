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
from bert_pretrain.io.files import checksums_of, parse_json, write_text
from bert_pretrain.io.manifest import is_in_place, moved_while_writing
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.metrics import METRICS, perplexity
from bert_pretrain.report.diagnosis import Diagnosis
from bert_pretrain.train.loss import extra_metrics
from bert_pretrain.train.resolved import ResolvedRun
from bert_pretrain.train.state import Progress, StepSums, TrainState

Record = Mapping[str, Any]
# A service that receives metrics: its functions to log metrics at a step, and to close it.
Tracker = tuple[Callable[[dict[str, float], int], Any], Callable[[], Any]]
VALIDATION = ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy", "examples", "documents")
NOT_LOGGED = ("mlm_perplexity", "predictions")  # metrics of an evaluation that follow from others, or are constant
# What the console shows of a line if the metric is in it and not 0.
CONSOLE = {
    "loss": "loss {loss:7.4f}",
    "mlm_loss": "mlm {mlm_loss:7.4f} nats {mlm_accuracy:6.2%}",
    "nsp_loss": "{pairs} {nsp_loss:6.4f} nats {nsp_accuracy:6.2%}",
    "distillation_loss": "teacher {distillation_loss:6.4f} nats",
    "hidden_loss": "hidden {hidden_loss:6.4f}",
    "perplexity": "perplexity {perplexity:,.1f}",
    "discriminator_loss": "discriminator {discriminator_loss:6.4f}",
    "replaced_found": "found {replaced_found:6.2%} of the replaced",
    "originals_flagged": "flagged {originals_flagged:6.2%} of the originals",
    "learning_rate": "lr {learning_rate:.2e}",
    "grad_norm": "norm {grad_norm:6.3f}",
    "tokens_per_second": "{examples_per_second:7.1f} examples/s  {tokens_per_second:9,.0f} tokens/s",
    "mfu": "MFU {mfu:5.1%}",
    "skipped_steps": "{skipped_steps} skipped: gradients were not finite",
}
# A console that ends, such as `tee` at Ctrl-C in `train | tee log`, must not stop a run before it saves a checkpoint.
without_console_errors = functools.partial(contextlib.suppress, OSError)


class RunLog:
    """The log of one run. Without a record, as on all ranks but the first, it is silent."""

    def __init__(
        self,
        run: ResolvedRun,
        start: Progress,
        record: Record | None = None,
        metrics_end: Record | None = None,
    ) -> None:
        """Start logging after `start`. `record` is the run's manifest. Truncate `metrics.jsonl` to `metrics_end`."""
        self._run = run
        self._path = run.output / METRICS
        self._file: Any = None
        self._trackers: list[Tracker] = []
        self.newest: dict[str, dict[str, Any]] = {}  # the last line of `training` and of `validation`
        if record is not None:
            self._diagnosis = Diagnosis(record)
            self._open(metrics_end)
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

    def _open(self, end: Record | None) -> None:
        """Truncate the file to a position or, if None, to nothing, and diagnose its lines."""
        content = "" if end is None else _read_until(self._path, end)
        write_text(self._path, content)
        self._file = self._path.open("a", encoding="utf-8")
        for line in content.splitlines():
            self._diagnose(parse_json(line))

    @property
    def is_silent(self) -> bool:
        """Whether nothing is written, as on all ranks but the first."""
        return self._file is None

    @property
    def position(self) -> dict[str, Any]:
        """The size and SHA-256 of `metrics.jsonl`, after flushing it to disk."""
        if not is_in_place(self._file, self._path):
            raise moved_while_writing(self._path.parent)
        os.fsync(self._file.fileno())
        return checksums_of(self._path.parent, [METRICS])[METRICS]

    def advance(self, progress: Progress) -> None:
        """Move the progress bar."""
        with without_console_errors():
            self._bar.update(progress.step - self._bar.n)

    def training(self, line: dict[str, Any]) -> None:
        """Log the metrics of an interval."""
        self._bar.set_postfix(loss=line["loss"], refresh=False)
        self._write(line, "train/")

    def validation(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Log the metrics of an evaluation."""
        metrics = {**metrics, "documents": self._run.data.num_documents("validation")}
        names = dict.fromkeys((*VALIDATION, *metrics))
        line = {f"validation_{name}": metrics.get(name) for name in names if name not in NOT_LOGGED}
        self._write({"step": step, **line}, "validation/")

    def _write(self, line: dict[str, Any], group: str) -> None:
        """Append a line, with null for numbers that are not finite; send and print it, and the hints that follow."""
        if self.is_silent:
            return
        not_finite = [name for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)]
        line = {**line, **dict.fromkeys(not_finite)}
        now = datetime.datetime.now().astimezone()
        origin = {
            "time": now.isoformat("T", "seconds"),
            "host": platform.node(),
            "job": os.environ.get("SLURM_JOB_ID"),
        }
        self._file.write(json.dumps({**line, **origin}, allow_nan=False) + "\n")
        self._file.flush()
        hints = self._diagnose({**line, **origin})
        values = {name.removeprefix("validation_"): value for name, value in line.items() if value is not None}
        step = values.pop("step")
        for log, _ in self._trackers:
            log({f"{group}{name}": float(value) for name, value in values.items()}, step)
        text = console_line(step, self._run.length.steps, values, self._run.data.config.next_sentence)
        with without_console_errors():
            tqdm.write("\n".join([f"{now:%m-%d %H:%M:%S}  {text}", *hints]))

    def _diagnose(self, line: dict[str, Any]) -> list[str]:
        """Add a line to the diagnosis, and return new hints."""
        self.newest["validation" if "validation_mlm_loss" in line else "training"] = line
        return list(map(str, self._diagnosis.add(line)))

    def close(self) -> None:
        """Close the file, the progress bar and the trackers."""
        with without_console_errors():
            self._bar.close()
        for _, close in self._trackers:
            close()
        if not self.is_silent:
            self._file.close()


def training_line(
    state: TrainState,
    *,
    rate: float,
    epoch: float,
    peak: float | None,
) -> dict[str, Any]:
    """Return the line of `metrics.jsonl` for the interval that ends now. Wait for the device.

    Metrics are means over the interval, without skipped steps. The `nsp_` metrics are also those of sentence order, and
    None if examples are not pairs. `peak` is the peak FLOP/s of all devices, or None if unknown.
    """
    progress = state.progress
    interval = state.interval
    sums = StepSums.read(state.sums)
    updates = interval.steps - sums.skipped
    seconds = interval.timed_seconds
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
        **extra_metrics(state.losses.extras, sums.extras, sums.predictions),
        "learning_rate": rate,
        "grad_norm": _ratio(sums.grad_norm, updates),
        "examples_per_second": _ratio(interval.timed_examples, seconds),
        "tokens_per_second": _ratio(interval.timed_tokens, seconds),
        "mfu": _ratio(interval.timed_flops, seconds * (peak or 0.0)),
        "padding_share": 1.0 - interval.own_tokens / max(interval.attended_slots, 1),
        "data_wait_share": _ratio(interval.waited_seconds, seconds),
        "peak_memory_bytes": peak_memory_bytes(state.sums.device),
        "skipped_steps": int(sums.skipped),
    }


def _ratio(total: float, number: float) -> float | None:
    return total / number if number else None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: allocated by PyTorch on CUDA, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def console_line(
    step: int,
    steps: int | None,
    values: Mapping[str, Any],
    pairs: str,
) -> str:
    """Format the metrics of a line for the console. `steps` is None for a run with a time budget."""
    shown = {**values, "pairs": pairs}
    parts = [f"step {step:>7}" if steps is None else f"step {step:>{len(str(steps))}}/{steps}"]
    if "learning_rate" not in values:
        parts.append("validation")
        if "mlm_loss" in values:
            shown["perplexity"] = perplexity(values["mlm_loss"])
    parts += [template.format_map(shown) for name, template in CONSOLE.items() if shown.get(name)]
    return "  ".join(parts)


def _read_until(path: Path, end: Record) -> str:
    """Return the content of the file up to a position, or nothing if there is no file."""
    if not path.is_file():
        print(f"warning: {path} is missing; the metrics up to the checkpoint are lost")
        return ""
    content = path.read_bytes()[: end["bytes"]]
    if hashlib.sha256(content).hexdigest() != end["sha256"]:
        raise DataError(
            f"{path.name} is damaged: its lines up to the checkpoint were changed",
            where=str(path),
            remedy="restore it from a copy, or remove it to continue without the metrics so far",
        )
    return content.decode()


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
        session = wandb.init(
            id=identifier,
            name=run.name,
            resume="allow",
            config=config,
            dir=str(run),
        )
    except Exception as error:  # wandb has many error types
        raise ConfigError(
            f"wandb does not start: {error}",
            where="train.trackers",
            remedy="run 'wandb login', set WANDB_MODE=offline, or remove wandb from train.trackers",
        ) from error
    return session.log, session.finish
