"""Resolve a configuration for this machine and data, and find where a run resumes."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bert_pretrain.config import Config, TrainConfig, duration
from bert_pretrain.errors import ConfigError, OutputError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.io.files import read_json, remove_temporaries
from bert_pretrain.io.manifest import MANIFEST, Output, OutputState
from bert_pretrain.model import devices
from bert_pretrain.model.attention_backend import choose_attention
from bert_pretrain.model.bert import BertForPreTraining, make_network
from bert_pretrain.model.folder import (
    GENERATOR,
    PRETRAINING,
    TRAINED_LENGTH,
    check_model,
    damage_of_model,
    lengths,
    match_vocabulary,
    read_config,
    weights_sha256,
)
from bert_pretrain.model.hub import model_folder
from bert_pretrain.text.tokenizer import Extension, Tokenizer
from bert_pretrain.train import flops, hardware, schedule
from bert_pretrain.train.checkpoint import Checkpoint, newest_checkpoint, open_checkpoint
from bert_pretrain.train.distributed import DistContext
from bert_pretrain.train.inputs import TEACHER
from bert_pretrain.train.schedule import Length

# Keys of the section `train` that may change when a run is resumed; the others are part of its identity.
CHANGEABLE_KEYS = {
    "micro_batch_tokens",
    "max_steps",
    "max_epochs",
    "time_budget",
    "schedule_steps",
    "attention",
    "device",
    "compile",
    "activation_checkpointing",
    "log_every",
    "eval_every",
    "eval_examples",
    "save_every",
    "keep_checkpoints",
    "trackers",
}
OBJECTIVES = {
    "nsp": "masked tokens and next sentence",
    "sop": "masked tokens and sentence order (logged under the next-sentence names)",
    "none": "masked tokens only; pooler and next-sentence head are not trained",
}
ELECTRA = "replaced tokens; the masked tokens are those of the generator"
MASKING = {"static": "stored in the data", "dynamic": "drawn in every epoch"}


@dataclass(frozen=True)
class ResolvedRun:
    """A run, with all choices made for this machine and data."""

    config: Config
    data: DataFolder
    tokenizer: Tokenizer
    output: Path
    init_from: Path | None
    teacher: Path | None
    length: Length
    device: torch.device
    precision: devices.Precision
    attention: str
    attention_reason: str
    compiled: bool
    compiled_reason: str
    dist_context: DistContext
    num_parameters: int
    micro_batch_tokens: int  # a maximum, which is halved if memory runs out
    trained_length: int  # tokens of the longest examples, of this run or of the training of `init_from`
    extension: Extension | None = None  # the tokens that the data's vocabulary adds to that of `init_from`
    carried: Checkpoint | None = None  # `init_from`, if its optimizer state and step are carried over

    @property
    def peak_flops(self) -> float | None:
        """Peak FLOP/s of all devices in this precision; None if unknown."""
        per_device = flops.peak_flops(self.device, self.precision.dtype)
        return None if per_device is None else per_device * self.dist_context.size

    def pretraining(self, tokens: int) -> dict[str, Any]:
        """Return the description of this training for `config.json`, after `tokens` tokens."""
        return {
            "optimizer": self.config.train.optimizer,
            "language": self.data.config.language,
            "tokens": tokens,
            TRAINED_LENGTH: self.trained_length,
        }

    @functools.cached_property
    def folder(self) -> Output:
        """The folder of the run. Its identity are the inputs and settings that must not change when it is resumed."""
        settings = self.config.train.model_dump(mode="json", exclude=CHANGEABLE_KEYS | {"teacher"})
        model = self.config.model.model_dump(mode="json")
        # Keys that are not used are left out, as in runs of earlier versions.
        if not settings["distillation"]:
            del settings["distillation"]
        if not self.config.model.is_electra:
            del settings["objective"], settings["discriminator_weight"], model["generator_size"]
        if model["embedding_size"] is None:
            del model["embedding_size"]
        identity = {
            "model": model,
            "train": {**settings, "precision": self.precision.name},
            "data": self.data.content_hash,
            "tokenizer": self.tokenizer.hash,
            "init_from": weights_sha256(self.init_from, "--init-from") if self.init_from else None,
            "carry_optimizer": self.carried is not None,
            "teacher": weights_sha256(self.teacher, TEACHER) if self.teacher else None,  # not its path
        }
        return Output(self.output, "run", identity, (self.data.path, self.init_from, self.teacher))

    @property
    def objective(self) -> str:
        """The objectives as text."""
        pairs = self.data.config.next_sentence
        if not self.config.model.is_electra:
            return OBJECTIVES[pairs]
        return ELECTRA if pairs == "none" else f"{ELECTRA}; sentence pairs are read, but have no loss"

    @property
    def warmup(self) -> str:
        """The length of the warm-up as text."""
        if self.length.steps is None:
            return f"{self.config.train.warmup_ratio:.1%} of the time"
        return f"{schedule.warmup_steps(self.config.train, self.length.steps):,} steps"

    @property
    def samples_softmax(self) -> bool:
        return 0 < self.config.train.softmax_candidates < self.tokenizer.vocab_size


def resolve_run(
    config: Config,
    data: DataFolder,
    output: Path,
    dist_context: DistContext,
    *,
    init_from: Path | None = None,
    carry_optimizer: bool = False,
) -> ResolvedRun:
    """Make the choices that a configuration leaves open. The inputs must have passed `check_inputs`.

    The section `data` and the size of the vocabulary become those of the data.
    """
    train = config.train
    tokenizer = data.tokenizer()
    vocab = config.vocab.model_copy(update={"size": tokenizer.vocab_size})
    config = config.model_copy(update={"vocab": vocab, "data": data.config})
    length = schedule.run_length(train, data.rows("train"))
    train.check_warmup(None if length.steps is None else schedule.schedule_steps(train, length.steps))
    teacher = model_folder(train.teacher, TEACHER) if train.teacher else None
    _check_models(init_from, teacher)
    extension = match_vocabulary(init_from, tokenizer, "--init-from") if init_from else None
    carried = _carried_checkpoint(config, init_from, length, extension) if init_from and carry_optimizer else None
    device = _configured_device(train, dist_context)
    precision = devices.choose_precision(train.precision, device)
    choose = functools.partial(_attention, config, data.max_seq_length, device, precision.dtype)
    attention, attention_reason = dist_context.run_on_main(choose)
    compiled, compiled_reason = hardware.choose_compile(train.compile, device, attention)
    with torch.device("meta"):
        model = make_network(config.model, tokenizer.vocab_size, attention)
    tokens = hardware.choose_micro_batch_tokens(
        train,
        model,
        data.max_seq_length,
        device,
        precision.dtype,
        dist_context.size,
        teacher=_teacher_in_loss(train, teacher),
    )
    return ResolvedRun(
        config=config,
        data=data,
        tokenizer=tokenizer,
        output=output,
        init_from=init_from,
        teacher=teacher,
        length=length,
        device=device,
        precision=precision,
        attention=attention,
        attention_reason=attention_reason,
        compiled=compiled,
        compiled_reason=compiled_reason,
        dist_context=dist_context,
        num_parameters=model.num_parameters,
        micro_batch_tokens=-int(dist_context.maximum([-tokens])[0]),  # the minimum
        trained_length=max(data.max_seq_length, lengths(init_from)[0] if init_from else 0),
        extension=extension,
        carried=carried,
    )


def _check_models(init_from: Path | None, teacher: Path | None) -> None:
    """Compare the checksums of both model folders."""
    for folder, flag in ((init_from, "--init-from"), (teacher, TEACHER)):
        if folder is not None:
            check_model(folder, flag)


def _teacher_in_loss(train: TrainConfig, teacher: Path | None) -> BertForPreTraining | None:
    """Return the network of the teacher, without weights, if it runs in the training step."""
    if teacher is None or not train.distillation:
        return None
    with torch.device("meta"):
        return BertForPreTraining(*read_config(teacher, TEACHER))


def _configured_device(train: TrainConfig, dist_context: DistContext) -> torch.device:
    device = devices.choose_device(train.device, dist_context.local_rank)
    devices.configure_cpu(device)
    return device


def _attention(
    config: Config,
    max_seq_length: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[str, str]:
    """Return the attention to use, and the reason."""
    return choose_attention(
        config.train.attention,
        device,
        dtype,
        config.model,
        # Compiled steps have a fixed maximum.
        longest=None if config.train.compile is False else max_seq_length,
    )


def _carried_checkpoint(
    config: Config,
    init_from: Path,
    length: Length,
    extension: Extension | None,
) -> Checkpoint:
    """Open the checkpoint of `--carry-optimizer`. Raise `ConfigError` if its optimizer state does not fit the run."""
    checkpoint = open_checkpoint(init_from, "--init-from")
    old, new = checkpoint.record[PRETRAINING]["optimizer"], config.train.optimizer
    if length.is_over(checkpoint.step, 0.0):
        what = f"the run would end at step {length.steps}, but the checkpoint is at step {checkpoint.step}"
        where, remedy = "train.max_steps", "set it to the sum of the steps of all phases"
    elif old != new:
        what = f"the optimizer is {new}, but the checkpoint's is {old}"
        where, remedy = "train.optimizer", f"set it to {old}"
    elif extension is not None and extension.pieces:
        what = f"the optimizer state lacks {len(extension.pieces)} new tokens of the data's vocabulary"
        where, remedy = "--carry-optimizer", "make data with that model's vocabulary"
    else:
        return checkpoint
    raise ConfigError(what, where=where, remedy=f"{remedy}, or leave out --carry-optimizer")


def describe(run: ResolvedRun) -> str:
    """Return the settings of a run as text, including every derived value."""
    data = run.data
    train = run.config.train
    mean_tokens = data.mean_tokens("train")
    held_out = data.rows("validation")
    evaluated = f"{held_out:,} held out" if held_out else "no validation split, so no evaluation"
    batch_tokens = train.global_batch_size * mean_tokens
    epochs = ""
    if run.length.steps is not None:
        steps_before = 0 if run.carried is None else run.carried.step
        num_examples = (run.length.steps - steps_before) * train.global_batch_size
        epochs = f", {num_examples / data.rows('train'):.2f} epochs"
    lines = [
        f"data       {data.rows('train'):,} examples of {mean_tokens:.1f} tokens on average, {evaluated}",
        f"objective  {run.objective}, masks {MASKING[data.config.masking]}",
        f"model      {run.num_parameters:,} parameters",
        f"device     {devices.describe_device(run.device)}",
    ]
    if run.dist_context.size > 1:
        lines.append(f"processes  {run.dist_context.size}")
    lines += [
        f"precision  {run.precision.name} ({run.precision.reason})",
        f"attention  {run.attention} ({run.attention_reason})",
        f"compiled   {'yes' if run.compiled else 'no'} ({run.compiled_reason})",
    ]
    if run.samples_softmax:
        lines.append(f"softmax    {train.softmax_candidates:,} candidates")
    lines += [
        f"optimizer  {train.optimizer}, peak learning rate {train.peak_lr:g}",
        f"length     {run.length}{epochs}, warm-up of {run.warmup}, schedule {train.schedule}",
        f"batch      {train.global_batch_size} examples, about {batch_tokens:,.0f} tokens, "
        f"in micro-batches of at most {run.micro_batch_tokens:,} tokens",
    ]
    return "\n".join(lines)


def find_progress(run: ResolvedRun, state: OutputState, *, changes: bool) -> tuple[bool, Checkpoint | None]:
    """Return whether a run is finished and, if not, its newest checkpoint. Write files only with `changes`."""
    folder = run.output / "checkpoints"
    is_complete = state is OutputState.COMPLETE
    if state is OutputState.NEW or (is_complete and _is_up_to_date(run)):
        return is_complete, None
    if changes:
        remove_temporaries(run.output)
    latest = newest_checkpoint(folder, changes=changes)
    if latest is None and is_complete:
        raise OutputError(
            "the finished run has no checkpoint to continue from",
            where=str(folder),
            remedy="restore one from a copy, or name another --output and take the weights with --init-from",
        )
    if latest is not None and run.length.steps is not None and latest.step > run.length.steps:
        raise _too_short(run.length, f"step {latest.step}")
    if is_complete and changes:
        run.folder.reopen()
    return False, latest


def _is_up_to_date(run: ResolvedRun) -> bool:
    """Print and return whether a finished run has the required length and an intact model. Raise if it is too long."""
    record = read_json(run.output / MANIFEST)
    step = record["progress"]["step"]
    seconds = record["progress"]["wall_seconds"]
    old_length = Length(**record["length"])
    model = run.output / "model"
    if run.length not in (old_length, Length(step)):
        if run.length.is_over(step, seconds):
            raise _too_short(run.length, f"step {step}, after {duration(seconds)},")
        print(f"the run is extended from {old_length} to {run.length}")
        return False
    models = (model, run.output / GENERATOR) if run.config.model.is_electra else (model,)
    if damage := next(filter(None, map(damage_of_model, models)), None):
        print(f"the final model is missing or damaged ({damage}); it is written again from the newest checkpoint")
        return False
    print(f"up to date: {run.output} was trained to step {step}; the model is {model}")
    return True


def _too_short(length: Length, position: str) -> ConfigError:
    key = "time_budget" if length.steps is None else "max_steps"
    return ConfigError(
        f"the run would end after {length}, but it is at {position} already",
        where=f"train.{key}",
        remedy="increase it, or name another --output",
    )


def describe_resume(latest: Checkpoint, run: ResolvedRun) -> str:
    """Return the step from which a run resumes and the changed settings, as text."""
    record = latest.record
    text = f"continues from step {latest.step}, {latest.path}"
    old_length = Length(**record["length"])
    if old_length != run.length:
        text += f"\nthe schedule is recomputed: {old_length} -> {run.length}"
    for name, now in (("threads", torch.get_num_threads()), ("ranks", run.dist_context.size)):
        if record[name] != now:
            text += f"\n{name} {record[name]} -> {now}: the result may differ in the last bits"
    return text
