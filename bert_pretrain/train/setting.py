"""What a configuration comes to on this machine and for this data, and which part of it makes a run another run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.extension import Extension
from bert_pretrain.model.attention import choose_attention
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.huggingface import read_config
from bert_pretrain.model.vocabulary import match_vocabulary
from bert_pretrain.model.weights import weights_sha256
from bert_pretrain.shards import DataFolder
from bert_pretrain.tokenizer import Tokenizer
from bert_pretrain.train import hardware, schedule
from bert_pretrain.train.checkpoint import Checkpoint, open_checkpoint
from bert_pretrain.train.distributed import Team

# What may change between two commands for the same run; everything else of the section is compared.
FREE_SETTINGS = {
    "micro_batch_tokens", "max_steps", "max_epochs", "time_budget", "schedule_steps", "attention", "device", "parallel",
    "compile", "activation_checkpointing", "log_every", "eval_every", "save_every", "keep_checkpoints", "trackers",
}  # fmt: skip


OBJECTIVES = {
    "nsp": "masked words and next sentence",
    "sop": "masked words and sentence order (in the figures by the names of next sentence)",
    "none": "masked words alone; pooler and next-sentence head stay untrained",
}
MASKING = {"static": "stored in the data", "dynamic": "drawn anew in every epoch"}


@dataclass(frozen=True)
class Setting:
    """The choices that were left to the machine and the data."""

    length: schedule.Length
    device: torch.device
    precision: hardware.Precision
    attention: str
    attention_reason: str
    compiled: bool
    compiled_reason: str
    team: Team


@dataclass(frozen=True)
class Origin:
    """Where `--init-from` points."""

    folder: Path
    weights_sha256: str
    checkpoint: Checkpoint | None
    """Given if the optimizer's state and the step are carried over."""
    extension: Extension | None
    """How the data's vocabulary extends that folder's; None where the folder has none."""

    def describe(self) -> str:
        """Return, for people, where the weights come from and what happens to the rows of the vocabulary."""
        lines = [f"weights from {self.folder}"]
        if self.extension is not None and self.extension.pieces:
            new, in_slots = len(self.extension.pieces), self.extension.num_in_slots
            lines.append(
                f"the data's vocabulary extends that model's by {new:,} tokens, {in_slots:,} in unused slots and "
                f"{new - in_slots:,} at the end; their rows begin as the mean of their old pieces'"
            )
        return "\n".join(lines)


# What an origin need not share with the run: the network computes the same without dropout.
_FREE_OF_MODEL = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")


def with_model_of(config: Config, init_from: Path) -> Config:
    """Take from a model folder what the section `model` leaves open.

    Raises:
        UserError: when a key that is given contradicts the folder, or the folder holds no BERT.
    """
    found, _ = read_config(init_from, "--init-from")
    given = config.model.model_dump(exclude_unset=True)
    for key, value in given.items():
        if key not in _FREE_OF_MODEL and value != getattr(found, key):
            raise ConfigError(
                f"{key} is {value}, that of the weights in {init_from} is {getattr(found, key)}",
                where=f"model.{key}",
                remedy="leave the key out; what the section model does not give is taken from that folder",
            )
    model = found.model_copy(update=given)
    if len(given) < len(type(found).model_fields):
        print(
            f"model section from {init_from}: {model.num_hidden_layers} layers of {model.hidden_size}, "
            f"{model.num_attention_heads} heads, dropout {model.hidden_dropout_prob:g} and "
            f"{model.attention_probs_dropout_prob:g} (attention)"
        )
    return config.model_copy(update={"model": model})


def check_sizes(config: Config, folder: DataFolder, team: Team) -> None:
    """Refuse, before the first step, data that does not fit the model, the ranks or itself."""
    if folder.max_seq_length > config.model.max_position_embeddings:
        raise ConfigError(
            f"the data holds examples of up to {folder.max_seq_length} tokens, "
            f"the model has {config.model.max_position_embeddings} positions",
            where="model.max_position_embeddings",
            remedy=f"set it to {folder.max_seq_length} or more, or make data with a smaller data.max_seq_length",
        )
    if not folder.rows("train"):
        raise DataError("the data has no training examples", where=str(folder.path), remedy="make it from more text")
    if config.train.global_batch_size < team.size:
        raise ConfigError(
            f"a global batch of {config.train.global_batch_size} examples cannot be dealt to {team.size} processes",
            where="train.global_batch_size",
            remedy=f"set it to {team.size} or more, or start fewer processes",
        )


def choose_setting(config: Config, folder: DataFolder, team: Team) -> Setting:
    """Decide what the configuration leaves open."""
    device = hardware.choose_device(config.train.device, team.local_rank)
    hardware.keep_freed_memory(device)
    precision = hardware.choose_precision(config.train.precision, device)
    attention, reason = choose_attention(
        config.train.attention, device, precision.dtype,
        head_size=config.model.hidden_size // config.model.num_attention_heads,
        dropout_rate=config.model.attention_probs_dropout_prob,
    )  # fmt: skip
    length = schedule.run_length(config.train, folder.rows("train"))
    compiled, why = hardware.choose_compile(config.train.compile, device, attention)
    return Setting(length, device, precision, attention, reason, compiled, why, team)


def open_origin(
    config: Config, init_from: Path | None, carry_optimizer: bool, setting: Setting, tokenizer: Tokenizer
) -> Origin | None:
    """Open what `--init-from` names.

    Raises:
        UserError: when its vocabulary is another one, or its optimizer's state is asked for and not there, or does not
            fit this run.
    """
    if init_from is None:
        if carry_optimizer:
            raise ConfigError(
                "there is no optimizer state to carry over",
                where="--carry-optimizer",
                remedy="add --init-from RUN/checkpoints/step-…",
            )
        return None
    checkpoint = open_checkpoint(init_from, "--init-from") if carry_optimizer else None
    if checkpoint is not None and setting.length.is_over(checkpoint.step, 0.0):
        raise ConfigError(
            f"the run would end at step {setting.length.steps}, the checkpoint is at step {checkpoint.step}",
            where="train.max_steps",
            remedy="count the steps of all phases together, or leave out --carry-optimizer",
        )
    optimizer = checkpoint.record["optimizer"] if checkpoint is not None else config.train.optimizer
    if optimizer != config.train.optimizer:
        raise ConfigError(
            f"the optimizer of that run was {optimizer}, this run's is {config.train.optimizer}",
            where="train.optimizer",
            remedy=f"set it to {optimizer}, or leave out --carry-optimizer",
        )
    extension = match_vocabulary(init_from, tokenizer, "--init-from")
    if checkpoint is not None and extension is not None and extension.pieces:
        raise ConfigError(
            f"the data's vocabulary has {len(extension.pieces)} new tokens, which the optimizer's state lacks",
            where="--carry-optimizer",
            remedy="leave it out: the optimizer begins anew",
        )
    return Origin(init_from, weights_sha256(init_from, "--init-from"), checkpoint, extension)


def identity_of(
    config: Config, folder: DataFolder, tokenizer: Tokenizer, setting: Setting, origin: Origin | None
) -> dict[str, Any]:
    """Return everything that changes the weights this run will write, as JSON values."""
    settings = config.train.model_dump(mode="json", exclude=FREE_SETTINGS)
    return {
        "model": config.model.model_dump(mode="json"),
        "train": {**settings, "precision": setting.precision.name},
        "data": folder.content_hash,
        "tokenizer": tokenizer.hash,
        "init_from": origin.weights_sha256 if origin else None,
        "carry_optimizer": origin is not None and origin.checkpoint is not None,
    }


def describe(
    config: Config,
    folder: DataFolder,
    setting: Setting,
    model: BertForPreTraining,
    micro_batch_tokens: int,
    parallel: tuple[str, str],
    carried_steps: int,
) -> str:
    """Return, for people, what will be done, and every value that was derived."""
    rows, tokens = folder.rows("train"), sum(record.tokens for record in folder.shards("train"))
    batch, device, team = config.train.global_batch_size, setting.device, setting.team
    held_out = folder.rows("validation")
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    lines = [
        f"data       {rows:,} examples of {tokens / rows:.1f} tokens on average, {held_out:,} held out",
        f"objective  {OBJECTIVES[folder.config.next_sentence]}, masks {MASKING[folder.config.masking]}",
        f"model      {model.num_parameters:,} parameters",
        f"device     {device}{threads}",
        f"precision  {setting.precision.name} ({setting.precision.reason})",
        f"attention  {setting.attention} ({setting.attention_reason})",
        f"compiled   {'yes' if setting.compiled else 'no'} ({setting.compiled_reason})",
        f"optimizer  {config.train.optimizer}, peak learning rate {config.train.peak_lr:g}",
        f"length     {_describe_length(config, setting.length, rows, carried_steps)}",
        f"batch      {batch} examples, about {batch * tokens / rows:,.0f} tokens, "
        f"in micro-batches of at most {micro_batch_tokens:,} tokens",
    ]
    if team.size > 1:
        lines.insert(4, f"processes  {team.size}, {parallel[0]} ({parallel[1]})")
    if not held_out:
        lines.append("there is no validation split, so nothing is evaluated")
    return "\n".join(lines)


def _describe_length(config: Config, length: schedule.Length, rows: int, carried_steps: int) -> str:
    train = config.train
    if length.steps is None:
        warmup = f"{train.warmup_steps:,} steps" if train.warmup_steps is not None else f"{train.warmup_ratio:.1%}"
        return f"{length}, {warmup} of warm-up, schedule {train.schedule} by the clock"
    spanned = schedule.spanned_steps(train, length.steps)
    return (
        f"{length}{f', {carried_steps:,} of them done before' if carried_steps else ''}, "
        f"{(length.steps - carried_steps) * train.global_batch_size / rows:.2f} epochs, "
        f"{schedule.warmup_steps(train, spanned):,} steps of warm-up, schedule {train.schedule}"
        + (f" over {spanned:,} steps" if spanned > length.steps else "")
    )
