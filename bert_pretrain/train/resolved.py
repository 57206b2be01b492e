"""The configuration resolved for this machine and data, with the identity of the run and where it resumes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bert_pretrain.config import DEFAULT_EVAL_EVERY, Config
from bert_pretrain.errors import ConfigError, OutputError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.io import manifest
from bert_pretrain.io.files import read_json, remove_temporaries
from bert_pretrain.model.attention_backend import choose_attention
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.folder import check_model, damage_of_model, read_config, weights_sha256
from bert_pretrain.model.hub import model_folder
from bert_pretrain.model.huggingface import PRETRAINING
from bert_pretrain.model.vocabulary import check_rows, check_same_vocabulary, match_vocabulary
from bert_pretrain.text.tokenizer import Extension, Tokenizer
from bert_pretrain.train import flops, hardware, schedule
from bert_pretrain.train.checkpoint import Checkpoint, checkpoint_paths, newest_checkpoint, open_checkpoint
from bert_pretrain.train.distributed import DistContext
from bert_pretrain.train.inputs import TEACHER
from bert_pretrain.train.schedule import Length, duration

# What may change between two commands for the same run; everything else of the section is compared.
FREE_SETTINGS = {
    "micro_batch_tokens", "max_steps", "max_epochs", "time_budget", "schedule_steps", "attention", "device", "compile",
    "activation_checkpointing", "log_every", "eval_every", "eval_examples", "save_every", "keep_checkpoints",
    "trackers",
}  # fmt: skip
OBJECTIVES = {
    "nsp": "masked tokens and next sentence",
    "sop": "masked tokens and sentence order (in metrics.jsonl by the names of next sentence)",
    "none": "masked tokens alone; pooler and next-sentence head stay untrained",
}
MASKING = {"static": "stored in the data", "dynamic": "drawn again in every epoch"}


@dataclass(frozen=True)
class ResolvedRun:
    """A run with every choice made: what its configuration comes to on this machine and for this data."""

    config: Config
    data: DataFolder
    tokenizer: Tokenizer
    output: Path
    init_from: Path | None
    teacher: Path | None
    length: Length
    device: torch.device
    precision: hardware.Precision
    attention: str
    attention_reason: str
    compiled: bool
    compiled_reason: str
    dist_context: DistContext
    num_parameters: int
    micro_batch_tokens: int  # at most; training continues with fewer where they do not fit
    identity: dict[str, Any]  # all that changes the weights this run will write, as JSON values
    extension: Extension | None = None  # how the data's vocabulary extends that of `init_from`, if that has one
    carried: Checkpoint | None = None  # `init_from`, where the optimizer's state and the step are carried over

    @property
    def peak_flops(self) -> float | None:
        """Peak FLOP/s of all devices in this precision; None where unknown."""
        one = flops.peak_flops(self.device, self.precision.dtype)
        return None if one is None else one * self.dist_context.size

    def pretraining(self, tokens: int) -> dict[str, Any]:
        """Return what `config.json` says of the training after `tokens` tokens."""
        return {"optimizer": self.config.train.optimizer, "language": self.data.config.language, "tokens": tokens}

    def evaluates_by_clock(self, before: float, now: float, reserve: float) -> bool:
        """Whether an eighth of a time budget ends between two steps, and an evaluation, by default, costs little."""
        seconds, is_default = self.length.seconds, self.config.train.eval_every == DEFAULT_EVAL_EVERY
        if seconds is None or not is_default or reserve > 0.02 * seconds:
            return False
        return int(8 * before / seconds) < int(8 * now / seconds)

    def learning_rate(self, step: int, seconds: float, reserve: float) -> float:
        """Return the learning rate of the update after `step` finished ones, `seconds` into the run."""
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
    train.check_warmup(None if length.steps is None else schedule.schedule_steps(train, length.steps))
    extension, carried = None, None
    if init_from is not None:
        check_model(init_from, "--init-from")
        extension = match_vocabulary(init_from, tokenizer, "--init-from")
        carried = _carried(config, init_from, length, extension) if carry_optimizer else None
    teacher = None if train.teacher is None else model_folder(train.teacher, TEACHER)
    if teacher is not None:
        check_model(teacher, TEACHER)
        check_same_vocabulary(teacher, tokenizer, TEACHER)
        check_rows(teacher, read_config(teacher, TEACHER)[1], tokenizer, TEACHER)
    device = hardware.choose_device(train.device, dist_context.local_rank)
    hardware.keep_freed_memory(device)
    precision = hardware.choose_precision(train.precision, device)
    attention, reason = dist_context.run_on_main(
        lambda: choose_attention(
            train.attention, device, precision.dtype,
            hidden_size=config.model.hidden_size, num_heads=config.model.num_attention_heads,
            dropout_rate=config.model.attention_probs_dropout_prob,
            longest=None if train.compile is False else data.max_seq_length,  # compiled steps have one longest length
        )
    )  # fmt: skip
    compiled, why = hardware.choose_compile(train.compile, device, attention)
    with torch.device("meta"):
        model = BertForPreTraining(config.model, tokenizer.vocab_size, attention=attention)
    tokens = hardware.choose_micro_batch_tokens(
        train, model, data.max_seq_length, device, precision.dtype, dist_context.size
    )
    settings = train.model_dump(mode="json", exclude=FREE_SETTINGS | {"teacher"})
    identity = {
        "model": config.model.model_dump(mode="json"),
        "train": {**settings, "precision": precision.name},
        "data": data.content_hash,
        "tokenizer": tokenizer.hash,
        "init_from": weights_sha256(init_from, "--init-from") if init_from else None,
        "carry_optimizer": carry_optimizer,
        "teacher": weights_sha256(teacher, TEACHER) if teacher else None,  # not its path
    }
    return ResolvedRun(
        config, data, tokenizer, output, init_from, teacher, length, device, precision, attention, reason, compiled,
        why, dist_context, model.num_parameters, dist_context.run_on_main(lambda: tokens), identity, extension, carried,
    )  # fmt: skip


def _carried(config: Config, init_from: Path, length: Length, extension: Extension | None) -> Checkpoint:
    """Open the checkpoint that `--init-from` names, and refuse an optimizer's state that does not fit the run."""
    checkpoint, wanted = open_checkpoint(init_from, "--init-from"), config.train.optimizer
    optimizer = checkpoint.record[PRETRAINING]["optimizer"]
    if length.is_over(checkpoint.step, 0.0):
        what = f"the run would end at step {length.steps}, the checkpoint is at step {checkpoint.step}"
        where, remedy = "train.max_steps", "count the steps of all phases together"
    elif optimizer != wanted:
        what = f"the optimizer of that run was {optimizer}, this run's is {wanted}"
        where, remedy = "train.optimizer", f"set it to {optimizer}"
    elif extension is not None and extension.pieces:
        what = f"the data's vocabulary has {len(extension.pieces)} new tokens, which the optimizer's state lacks"
        where, remedy = "--carry-optimizer", "make data with that model's vocabulary"
    else:
        return checkpoint
    raise ConfigError(what, where=where, remedy=f"{remedy}, or leave out --carry-optimizer")


def describe(run: ResolvedRun) -> str:
    """Return, for users, what will be done, and every value that was derived."""
    config, data, size = run.config, run.data, run.dist_context.size
    mean_tokens, batch, held_out = data.mean_tokens("train"), config.train.global_batch_size, data.rows("validation")
    return "\n".join((
        f"data       {data.rows('train'):,} examples of {mean_tokens:.1f} tokens on average, "
        + (f"{held_out:,} held out" if held_out else "no validation split, so nothing is evaluated"),
        f"objective  {OBJECTIVES[data.config.next_sentence]}, masks {MASKING[data.config.masking]}",
        f"model      {run.num_parameters:,} parameters",
        f"device     {hardware.describe_device(run.device)}",
        *([f"processes  {size}"] if size > 1 else []),
        f"precision  {run.precision.name} ({run.precision.reason})",
        f"attention  {run.attention} ({run.attention_reason})",
        f"compiled   {'yes' if run.compiled else 'no'} ({run.compiled_reason})",
        f"optimizer  {config.train.optimizer}, peak learning rate {config.train.peak_lr:g}",
        f"length     {_describe_length(run)}",
        f"batch      {batch} examples, about {batch * mean_tokens:,.0f} tokens, "
        f"in micro-batches of at most {run.micro_batch_tokens:,} tokens",
    ))  # fmt: skip


def _describe_length(run: ResolvedRun) -> str:
    train, length, carried = run.config.train, run.length, 0 if run.carried is None else run.carried.step
    if length.steps is None:
        return f"{length}, {train.warmup_ratio:.1%} of warm-up, schedule {train.schedule} by the clock"
    spanned = schedule.schedule_steps(train, length.steps)
    return (
        f"{length}{f', {carried:,} of them done before' if carried else ''}, "
        f"{(length.steps - carried) * train.global_batch_size / run.data.rows('train'):.2f} epochs, "
        f"{schedule.warmup_steps(train, spanned):,} steps of warm-up, schedule {train.schedule}"
        + (f" over {spanned:,} steps" if spanned > length.steps else "")
    )


def find_progress(
    run: ResolvedRun, progress: manifest.Progress, *, resume: bool, changes: bool
) -> tuple[bool, Checkpoint | None]:
    """Return whether a run has nothing left to do and, if it has, the checkpoint from which it continues.

    With `changes` leftovers are removed, and a finished run is opened again; without, for a dry run, nothing changes.
    """
    folder, wanted = run.output / "checkpoints", run.length
    is_complete = progress is manifest.Progress.COMPLETE
    if is_complete and _is_up_to_date(run):
        return True, None
    if changes:
        remove_temporaries(run.output)
    if not resume and checkpoint_paths(folder):
        raise OutputError(
            f"{folder} holds checkpoints, and --no-resume starts over",
            where="--no-resume",
            remedy="add --overwrite (the old folder is moved aside), or leave out --no-resume",
        )
    latest = newest_checkpoint(folder, changes=changes)
    if latest is None and is_complete:
        raise OutputError(
            "the finished run has no checkpoint from which it could continue",
            where=str(folder),
            remedy="restore one from a copy, or name another --output, with --init-from for the weights",
        )
    if latest is not None and wanted.steps is not None and latest.step > wanted.steps:
        raise _too_short(wanted, latest.step, 0.0)
    if is_complete and changes:
        manifest.reopen(run.output)
    return False, latest


def _is_up_to_date(run: ResolvedRun) -> bool:
    """Whether a finished run is as long as asked, and its model whole; says what is to be done."""
    found, wanted, model = read_json(run.output / manifest.MANIFEST), run.length, run.output / "model"
    step, seconds = int(found["progress"]["step"]), float(found["progress"]["wall_seconds"])
    was = Length(**found["length"])
    if was != wanted and wanted.steps != step:
        if wanted.is_over(step, seconds):
            raise _too_short(wanted, step, seconds)
        print(f"the run is extended from {was} to {wanted}")
        return False
    if damage := damage_of_model(model):
        print(f"the final model is missing or damaged ({damage}); it is written again from the newest checkpoint")
        return False
    print(f"up to date: {run.output} was trained to step {step}; the model is {model}")
    return True


def _too_short(wanted: Length, step: int, seconds: float) -> ConfigError:
    if wanted.steps is None:
        where, asked, done = "train.time_budget", str(wanted), duration(seconds)
    else:
        where, asked, done = "train.max_steps", f"step {wanted.steps}", f"step {step}"
    remedy = "ask for more, or name another --output"
    return ConfigError(f"the run would end at {asked}, but it is at {done} already", where=where, remedy=remedy)


def resumed(run: ResolvedRun, latest: Checkpoint) -> ResolvedRun:
    """Return a run with the micro-batches of its checkpoint, which decide the last bits, where they fit."""
    before = int(latest.record["micro_batch_tokens"])
    if run.config.train.micro_batch_tokens != "auto":
        return run
    if run.device.type == "cuda" and run.micro_batch_tokens < 0.9 * before:  # free memory varies a little
        print(f"micro-batches of {before:,} tokens, as before, do not fit here: now {run.micro_batch_tokens:,}")
        return run
    return replace(run, micro_batch_tokens=before)


def describe_resume(latest: Checkpoint, run: ResolvedRun) -> str:
    """Return, for users, where a run resumes and what has changed."""
    was, text = latest.record, f"continues from step {latest.step}, {latest.path}"
    if (length := Length(**was["length"])) != run.length:
        text += f"\nthe schedule is recomputed: {length} -> {run.length}"
    for name, now in (("threads", torch.get_num_threads()), ("ranks", run.dist_context.size)):
        if was[name] != now:
            text += f"\n{name} {was[name]} -> {now}: the result may differ in the last bits"
    return text
