"""What a configuration comes to on this machine and for this data, and which part of it makes a run another run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bert_pretrain.config import DEFAULT_EVAL_EVERY, Config
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.model.attention import choose_attention
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.folder import check_model, weights_sha256
from bert_pretrain.model.huggingface import PRETRAINING
from bert_pretrain.model.vocabulary import match_vocabulary
from bert_pretrain.text.tokenizer import Extension, Tokenizer
from bert_pretrain.train import flops, hardware, schedule
from bert_pretrain.train.checkpoint import Checkpoint, open_checkpoint
from bert_pretrain.train.distributed import DistContext
from bert_pretrain.train.initial_weights import TeacherFolder, open_teacher
from bert_pretrain.train.inputs import describe_size

# What may change between two commands for the same run; everything else of the section is compared.
FREE_SETTINGS = {
    "micro_batch_tokens", "max_steps", "max_epochs", "time_budget", "schedule_steps", "attention", "device", "compile",
    "activation_checkpointing", "log_every", "eval_every", "save_every", "keep_checkpoints", "trackers",
}  # fmt: skip


OBJECTIVES = {
    "nsp": "masked tokens and next sentence",
    "sop": "masked tokens and sentence order (in metrics.jsonl by the names of next sentence)",
    "none": "masked tokens alone; pooler and next-sentence head stay untrained",
}
MASKING = {"static": "stored in the data", "dynamic": "drawn anew in every epoch"}


@dataclass(frozen=True)
class InitialCheckpoint:
    """The model folder that `--init-from` names."""

    folder: Path
    weights_sha256: str
    carried: Checkpoint | None  # given if the optimizer's state and the step are carried over
    extension: Extension | None  # how the data's vocabulary extends that folder's; None where the folder has none


@dataclass(frozen=True)
class ResolvedRun:
    """A run with every choice made: what its configuration comes to on this machine and for this data."""

    config: Config
    data: DataFolder
    tokenizer: Tokenizer
    output: Path
    init: InitialCheckpoint | None
    teacher: TeacherFolder | None
    length: schedule.Length
    device: torch.device
    precision: hardware.Precision
    attention: str
    attention_reason: str
    compiled: bool
    compiled_reason: str
    dist_context: DistContext
    num_parameters: int
    micro_batch_tokens: int  # at most; training goes on with fewer where they do not fit

    @property
    def name(self) -> str:
        """The name of the output folder."""
        return self.output.resolve().name

    @property
    def carried_steps(self) -> int:
        """Steps that another run has done before, whose optimizer state is carried over."""
        return self.init.carried.step if self.init is not None and self.init.carried is not None else 0

    @property
    def peak_flops(self) -> float | None:
        """Of all devices in this precision; None where unknown."""
        one = flops.peak_flops(self.device, self.precision.dtype)
        return None if one is None else one * self.dist_context.size

    def pretraining(self, tokens: int) -> dict[str, Any]:
        """Return what `config.json` says of the training after so many tokens."""
        return {
            "optimizer": self.config.train.optimizer,
            "language": self.data.config.language,
            "tokens": tokens,
        }

    def evaluates_by_clock(self, before: float, now: float, reserve: float) -> bool:
        """Whether an eighth of a time budget ends between two steps, and an evaluation, by default, costs little."""
        seconds, is_default = self.length.seconds, self.config.train.eval_every == DEFAULT_EVAL_EVERY
        if seconds is None or not is_default or reserve > 0.02 * seconds:
            return False
        return int(8 * before / seconds) < int(8 * now / seconds)

    def learning_rate(self, step: int, seconds: float, reserve: float) -> float:
        """Return the learning rate of the update that follows `step` finished ones, so many `seconds` into the run."""
        if self.length.steps is not None:
            return schedule.learning_rate(self.config.train, step, self.length.steps)
        return schedule.learning_rate_by_clock(self.config.train, step, seconds, (self.length.seconds or 0.0) - reserve)


def resolve_run(
    config: Config,
    data: DataFolder,
    output: Path,
    dist_context: DistContext,
    *,
    init_from: Path | None = None,
    carry_optimizer: bool = False,
) -> ResolvedRun:
    """Make the choices that a configuration leaves open, after `check_inputs`."""
    train, tokenizer = config.train, data.tokenizer()
    length = schedule.run_length(train, data.rows("train"))
    init = _initial_checkpoint(config, init_from, carry_optimizer, length, tokenizer)
    teacher = open_teacher(train, tokenizer)
    device = hardware.choose_device(train.device, dist_context.local_rank)
    hardware.keep_freed_memory(device)
    precision = hardware.choose_precision(train.precision, device)
    attention, reason = choose_attention(
        train.attention, device, precision.dtype,
        head_size=config.model.hidden_size // config.model.num_attention_heads,
        dropout_rate=config.model.attention_probs_dropout_prob,
    )  # fmt: skip
    compiled, why = hardware.choose_compile(train.compile, device, attention)
    with torch.device("meta"):
        model = BertForPreTraining(config.model, tokenizer.vocab_size, attention=attention)
    tokens = hardware.choose_micro_batch_tokens(
        train, model, data.max_seq_length, device, precision.dtype, dist_context.size
    )
    return ResolvedRun(
        config, data, tokenizer, output, init, teacher, length, device, precision, attention, reason, compiled, why,
        dist_context, model.num_parameters, dist_context.run_on_main(lambda: tokens),
    )  # fmt: skip


def _initial_checkpoint(
    config: Config, init_from: Path | None, carry_optimizer: bool, length: schedule.Length, tokenizer: Tokenizer
) -> InitialCheckpoint | None:
    """Open what `--init-from` names, and refuse an optimizer's state that does not fit the run."""
    if init_from is None:
        return None
    check_model(init_from, "--init-from")
    extension = match_vocabulary(init_from, tokenizer, "--init-from")
    weights = weights_sha256(init_from, "--init-from")
    if not carry_optimizer:
        return InitialCheckpoint(init_from, weights, None, extension)
    checkpoint = open_checkpoint(init_from, "--init-from")
    optimizer, wanted = checkpoint.record[PRETRAINING]["optimizer"], config.train.optimizer
    new = 0 if extension is None else len(extension.pieces)
    if length.is_over(checkpoint.step, 0.0):
        what = f"the run would end at step {length.steps}, the checkpoint is at step {checkpoint.step}"
        where, remedy = "train.max_steps", "count the steps of all phases together"
    elif optimizer != wanted:
        what = f"the optimizer of that run was {optimizer}, this run's is {wanted}"
        where, remedy = "train.optimizer", f"set it to {optimizer}"
    elif new:
        what = f"the data's vocabulary has {new} new tokens, which the optimizer's state lacks"
        where, remedy = "--carry-optimizer", "make data with that model's vocabulary"
    else:
        return InitialCheckpoint(init_from, weights, checkpoint, extension)
    raise ConfigError(what, where=where, remedy=f"{remedy}, or leave out --carry-optimizer")


def resumed(run: ResolvedRun, latest: Checkpoint) -> ResolvedRun:
    """Return a run with the micro-batches of its checkpoint, which decide the last bits, where they fit."""
    before = int(latest.record["micro_batch_tokens"])
    if run.config.train.micro_batch_tokens != "auto":
        return run
    if run.device.type == "cuda" and run.micro_batch_tokens < 0.9 * before:  # free memory varies a little
        print(f"micro-batches of {before:,} tokens, as before, do not fit here: now {run.micro_batch_tokens:,}")
        return run
    return replace(run, micro_batch_tokens=before)


def identity_of(run: ResolvedRun) -> dict[str, Any]:
    """Return everything that changes the weights this run will write, as JSON values."""
    settings = run.config.train.model_dump(mode="json", exclude=FREE_SETTINGS | {"teacher"})
    return {
        "model": run.config.model.model_dump(mode="json"),
        "train": {**settings, "precision": run.precision.name},
        "data": run.data.content_hash,
        "tokenizer": run.tokenizer.hash,
        "init_from": run.init.weights_sha256 if run.init else None,
        "carry_optimizer": run.init is not None and run.init.carried is not None,
        "teacher": run.teacher.weights_sha256 if run.teacher else None,  # not its path
    }


def describe(run: ResolvedRun) -> str:
    """Return, for users, what will be done, and every value that was derived."""
    config, data = run.config, run.data
    mean_tokens, batch, held_out = data.mean_tokens("train"), config.train.global_batch_size, data.rows("validation")
    lines = [
        f"data       {data.rows('train'):,} examples of {mean_tokens:.1f} tokens on average, {held_out:,} held out",
        f"objective  {OBJECTIVES[data.config.next_sentence]}, masks {MASKING[data.config.masking]}",
        f"model      {run.num_parameters:,} parameters",
        f"device     {hardware.describe_device(run.device)}",
        f"precision  {run.precision.name} ({run.precision.reason})",
        f"attention  {run.attention} ({run.attention_reason})",
        f"compiled   {'yes' if run.compiled else 'no'} ({run.compiled_reason})",
        f"optimizer  {config.train.optimizer}, peak learning rate {config.train.peak_lr:g}",
        f"length     {_describe_length(run)}",
        f"batch      {batch} examples, about {batch * mean_tokens:,.0f} tokens, "
        f"in micro-batches of at most {run.micro_batch_tokens:,} tokens",
    ]
    if run.dist_context.size > 1:
        lines.insert(4, f"processes  {run.dist_context.size}")
    if run.teacher is not None:
        lines.append(f"teacher    {run.teacher.folder}, {describe_size(run.teacher.model)}")
    if not held_out:
        lines.append("there is no validation split, so nothing is evaluated")
    return "\n".join(lines)


def _describe_length(run: ResolvedRun) -> str:
    train, length, rows, carried = run.config.train, run.length, run.data.rows("train"), run.carried_steps
    if length.steps is None:
        return f"{length}, {train.warmup_ratio:.1%} of warm-up, schedule {train.schedule} by the clock"
    spanned = schedule.spanned_steps(train, length.steps)
    return (
        f"{length}{f', {carried:,} of them done before' if carried else ''}, "
        f"{(length.steps - carried) * train.global_batch_size / rows:.2f} epochs, "
        f"{schedule.warmup_steps(train, spanned):,} steps of warm-up, schedule {train.schedule}"
        + (f" over {spanned:,} steps" if spanned > length.steps else "")
    )
