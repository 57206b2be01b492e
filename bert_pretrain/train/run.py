"""Stage 3, `train`: a data folder in, a run folder out.

The run folder holds `config.yaml`, `metrics.jsonl`, `checkpoints/step-XXXXXXXX/` and, at the end, `model/`; every
checkpoint and `model/` open in `transformers` as they are. The same command again continues or finds it done.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bert_pretrain import manifest
from bert_pretrain.config import Config, dump_yaml
from bert_pretrain.errors import ConfigError, DataError, OutputError
from bert_pretrain.files import atomic_folder, exclusive, read_json, remove_temporaries, sha256_file, write_text
from bert_pretrain.model.attention import choose_attention
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.huggingface import check_same_vocabulary, load_weights, save_model, weights_path
from bert_pretrain.shards import DataFolder
from bert_pretrain.tokenizer import Tokenizer
from bert_pretrain.train import flops, hardware, schedule
from bert_pretrain.train.batches import TrainingData, evaluation_batches
from bert_pretrain.train.checkpoint import (
    Checkpoint,
    carry_over,
    has_checkpoints,
    keep_newest,
    newest_checkpoint,
    open_checkpoint,
    restore,
    save_checkpoint,
)
from bert_pretrain.train.evaluate import evaluate_batches
from bert_pretrain.train.loop import Plan, fit
from bert_pretrain.train.metrics import MetricsFile
from bert_pretrain.train.optimizer import make_optimizers
from bert_pretrain.train.state import TrainState
from bert_pretrain.train.step import LossScale

# What may change between two commands for the same run; everything else of the section is compared.
FREE_SETTINGS = {
    "micro_batch_tokens", "max_steps", "max_epochs", "schedule_steps", "attention", "device",
    "log_every", "eval_every", "save_every", "keep_checkpoints",
}  # fmt: skip

OBJECTIVES = {
    "nsp": "masked words and next sentence",
    "sop": "masked words and sentence order (in the figures by the names of next sentence)",
    "none": "masked words alone; pooler and next-sentence head stay untrained",
}
MASKING = {"static": "stored in the data", "dynamic": "drawn anew in every epoch"}


def train(
    config: Config,
    data: Path,
    output: Path,
    *,
    init_from: Path | None = None,
    carry_optimizer: bool = False,
    resume: bool = True,
    overwrite: bool = False,
) -> Path:
    """Train a BERT and return the path of the final model folder.

    Args:
        config: the whole configuration; the sections `model` and `train` matter here.
        data: a data folder of stage 2.
        output: the run folder; need not exist.
        init_from: any BERT folder whose weights to begin with.
        carry_optimizer: take optimizer state and step from there too; it must be a checkpoint of ours.
        resume: go on from the newest checkpoint in `output`.
        overwrite: move what is in `output` aside and begin anew.

    Raises:
        UserError: when folders or settings do not fit each other.
        Interrupted: after SIGINT or SIGTERM, once the checkpoint is written.
    """
    folder = DataFolder.open(data)
    tokenizer = folder.tokenizer()
    _check_sizes(config, folder)
    if init_from is not None:
        check_same_vocabulary(init_from, tokenizer, "--init-from")
    setting = _choose_setting(config, folder)
    origin = _open_origin(config, init_from, carry_optimizer, setting)
    identity = _identity(config, folder, tokenizer, setting, origin)
    with exclusive(output):
        claimed = manifest.claim(output, "run", identity, overwrite=overwrite)
        if claimed is manifest.Progress.COMPLETE and _is_up_to_date(output, setting):
            return output / "model"
        latest = _checkpoint_to_continue(output, setting, resume)
        state = _make_state(config, folder, tokenizer, setting, origin, latest)
        micro_batch_tokens = _micro_batch_tokens(config, folder, setting, state.model, latest)
        _describe(config, folder, setting, state, micro_batch_tokens, latest)
        write_text(output / "config.yaml", dump_yaml(config))
        log = MetricsFile(output / "metrics.jsonl", keep_until_step=latest.step if latest else None)
        try:
            _fit(config, folder, tokenizer, setting, state, micro_batch_tokens, output, log)
            _finish(config, folder, tokenizer, setting, state, output, log, identity)
        finally:
            log.close()
    return output / "model"


@dataclass(frozen=True)
class _Setting:
    """What the configuration comes to on this machine and for this data."""

    steps: int
    device: torch.device
    precision: hardware.Precision
    attention: str
    attention_reason: str


@dataclass(frozen=True)
class _Origin:
    """Where `--init-from` points."""

    folder: Path
    weights_sha256: str
    checkpoint: Checkpoint | None
    """Given if the optimizer's state and the step are carried over."""


def _check_sizes(config: Config, folder: DataFolder) -> None:
    """Refuse, before the first step, data that does not fit the model or itself."""
    if folder.max_seq_length > config.model.max_position_embeddings:
        raise ConfigError(
            f"the data holds examples of up to {folder.max_seq_length} tokens, "
            f"the model has {config.model.max_position_embeddings} positions",
            where="model.max_position_embeddings",
            remedy=f"set it to {folder.max_seq_length} or more, or make data with a smaller data.max_seq_length",
        )
    if not folder.rows("train"):
        raise DataError("the data has no training examples", where=str(folder.path), remedy="make it from more text")


def _choose_setting(config: Config, folder: DataFolder) -> _Setting:
    device = hardware.choose_device(config.train.device)
    precision = hardware.choose_precision(config.train.precision, device)
    dropout = config.model.attention_probs_dropout_prob
    attention, reason = choose_attention(config.train.attention, device, precision.dtype, dropout)
    steps = schedule.total_steps(config.train, folder.rows("train"))
    return _Setting(steps, device, precision, attention, reason)


def _open_origin(config: Config, init_from: Path | None, carry_optimizer: bool, setting: _Setting) -> _Origin | None:
    if init_from is None:
        if carry_optimizer:
            raise ConfigError(
                "there is no optimizer state to carry over",
                where="--carry-optimizer",
                remedy="add --init-from RUN/checkpoints/step-…",
            )
        return None
    checkpoint = open_checkpoint(init_from, "--init-from") if carry_optimizer else None
    if checkpoint is not None and checkpoint.step >= setting.steps:
        raise ConfigError(
            f"the run would end at step {setting.steps}, the checkpoint is at step {checkpoint.step}",
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
    return _Origin(init_from, sha256_file(weights_path(init_from, "--init-from")), checkpoint)


def _identity(
    config: Config, folder: DataFolder, tokenizer: Tokenizer, setting: _Setting, origin: _Origin | None
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


def _is_up_to_date(output: Path, setting: _Setting) -> bool:
    """Say whether a finished run is as long as asked; a longer one is opened again."""
    finished = int(read_json(output / manifest.MANIFEST)["steps"])
    if finished == setting.steps and not (output / "model").is_dir():
        print("the final model is missing; it is written again from the newest checkpoint")
        manifest.reopen(output)
        return False
    if finished == setting.steps:
        print(f"up to date: {output} was trained to step {finished}; the model is {output / 'model'}")
        return True
    if finished > setting.steps:
        raise _too_short(setting, finished)
    if not has_checkpoints(output / "checkpoints"):
        raise OutputError(
            f"the finished run has no checkpoint from which it could go on to step {setting.steps}",
            where=str(output / "checkpoints"),
            remedy="name another --output, with --init-from for the weights",
        )
    print(f"the run is extended from {finished} to {setting.steps} steps")
    manifest.reopen(output)
    return False


def _too_short(setting: _Setting, step: int) -> ConfigError:
    return ConfigError(
        f"the run would end at step {setting.steps}, but it is at step {step} already",
        where="train.max_steps",
        remedy=f"ask for {step} steps or more, or name another --output",
    )


def _checkpoint_to_continue(output: Path, setting: _Setting, resume: bool) -> Checkpoint | None:
    """Return the newest whole checkpoint of this run, or None to begin at the beginning."""
    remove_temporaries(output)
    folder = output / "checkpoints"
    if not resume and has_checkpoints(folder):
        raise OutputError(
            f"{folder} holds checkpoints, and --no-resume begins anew",
            where="--no-resume",
            remedy="add --overwrite (the old folder is moved aside), or leave out --no-resume",
        )
    latest = newest_checkpoint(folder)
    if latest is not None and latest.step > setting.steps:
        raise _too_short(setting, latest.step)
    return latest


def _make_state(
    config: Config, folder: DataFolder, tokenizer: Tokenizer, setting: _Setting, origin: _Origin | None,
    latest: Checkpoint | None,
) -> TrainState:  # fmt: skip
    """Build model and optimizer, and fill them from the run's checkpoint, from `--init-from`, or anew."""
    model = BertForPreTraining(config.model, tokenizer.vocab_size, attention=setting.attention)
    if latest is None and origin is None:
        model.initialize(config.train.seed)
    if latest is None and origin is not None:
        fresh, unused = load_weights(model, origin.folder, flag="--init-from", seed=config.train.seed)
        print(f"weights from {origin.folder}")
        for names, what in ((fresh, "not there, drawn anew"), (unused, "there, but without a place here")):
            if names:
                print(f"  {what}: {', '.join(names)}")
    model.to(setting.device)
    if folder.config.next_sentence == "none":  # no loss reaches these two; they stay as they are
        model.pooler.requires_grad_(False)
        model.nsp_head.requires_grad_(False)
    loss_scale = LossScale.start(setting.device) if setting.precision.name == "fp16" else None
    state = TrainState.start(model, make_optimizers(model, config.train), loss_scale)
    if latest is not None:
        restore(state, latest)
    elif origin is not None and origin.checkpoint is not None:
        carry_over(state, origin.checkpoint, folder.content_hash)
    return state


def _micro_batch_tokens(
    config: Config, folder: DataFolder, setting: _Setting, model: BertForPreTraining, latest: Checkpoint | None
) -> int:
    """Return the size of a micro-batch; one found automatically stays what it was, since it decides the last bits."""
    if latest is not None and config.train.micro_batch_tokens == "auto":
        return int(latest.record["micro_batch_tokens"])
    return hardware.choose_micro_batch_tokens(config.train, model, folder.max_seq_length, setting.device)


def _describe(
    config: Config, folder: DataFolder, setting: _Setting, state: TrainState, micro_batch_tokens: int,
    latest: Checkpoint | None,
) -> None:  # fmt: skip
    """Print what will be done, and every value that was derived."""
    rows, tokens = folder.rows("train"), sum(record.tokens for record in folder.shards("train"))
    batch, steps = config.train.global_batch_size, setting.steps
    spanned = schedule.spanned_steps(config.train, steps)
    threads = torch.get_num_threads()
    print(
        f"data       {rows:,} examples of {tokens / rows:.1f} tokens on average, "
        f"{folder.rows('validation'):,} held out\n"
        f"objective  {OBJECTIVES[folder.config.next_sentence]}, masks {MASKING[folder.config.masking]}\n"
        f"model      {sum(parameter.numel() for parameter in state.model.parameters()):,} parameters\n"
        f"device     {setting.device}" + (f", {threads} threads" if setting.device.type == "cpu" else "") + "\n"
        f"precision  {setting.precision.name} ({setting.precision.reason})\n"
        f"attention  {setting.attention} ({setting.attention_reason})\n"
        f"steps      {steps:,}, {steps * batch / rows:.2f} epochs, "
        f"{schedule.warmup_steps(config.train, spanned):,} of warm-up, schedule {config.train.schedule}"
        + (f" over {spanned:,} steps" if spanned > steps else "")
        + "\n"
        f"batch      {batch} examples, about {batch * tokens / rows:,.0f} tokens, "
        f"in micro-batches of at most {micro_batch_tokens:,} tokens"
    )
    if not folder.rows("validation"):
        print("there is no validation split, so nothing is evaluated")
    if latest is None:
        return
    print(f"continues from step {latest.step}, {latest.path}")
    if latest.record["steps"] != steps:
        print(f"the schedule is recomputed: {latest.record['steps']} -> {steps} steps")
    if setting.device.type == "cpu" and latest.record["threads"] != threads:
        print(f"threads {latest.record['threads']} -> {threads}: the result may differ in the last bits")


def _fit(
    config: Config, folder: DataFolder, tokenizer: Tokenizer, setting: _Setting, state: TrainState,
    micro_batch_tokens: int, output: Path, log: MetricsFile,
) -> None:  # fmt: skip
    """Train to the last step, with evaluations and checkpoints on the way."""
    device, dtype = setting.device, setting.precision.dtype
    data = TrainingData(
        folder,
        seed=config.train.seed,
        global_batch_size=config.train.global_batch_size,
        micro_batch_tokens=micro_batch_tokens,
        first_step=state.progress.first_step,
    )
    about = {
        "steps": setting.steps,
        "optimizer": config.train.optimizer,
        "micro_batch_tokens": micro_batch_tokens,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "precision": setting.precision.name,
        "data": folder.content_hash,
    }

    def evaluate() -> dict[str, float]:
        batches = evaluation_batches(folder, "validation", micro_batch_tokens)
        return evaluate_batches(state.model, batches, device, dtype)

    def save() -> Path:
        path = save_checkpoint(output / "checkpoints", state, tokenizer, about)
        keep_newest(output / "checkpoints", config.train.keep_checkpoints)
        return path

    plan = Plan(config.train, setting.steps, device, dtype, flops.peak_flops(device, dtype))
    fit(state, data, plan, log, evaluate=evaluate if folder.rows("validation") else None, save=save)


def _finish(
    config: Config, folder: DataFolder, tokenizer: Tokenizer, setting: _Setting, state: TrainState, output: Path,
    log: MetricsFile, identity: dict[str, Any],
) -> None:  # fmt: skip
    """Write the final model and, last of all, the manifest with the final figures."""
    with atomic_folder(output / "model") as temporary:
        save_model(state.model, temporary, tokenizer)
    body = {
        "steps": setting.steps,
        "progress": asdict(state.progress),
        "training": log.last_training,
        "validation": log.last_validation,
        "parameters": sum(parameter.numel() for parameter in state.model.parameters()),
        "device": str(setting.device),
        "torch": torch.__version__,
        "data": {"path": str(folder.path), "content_hash": folder.content_hash},
        "config": config.model_dump(mode="json"),
    }
    manifest.complete(output, "run", identity, body)
    print(f"the model is {output / 'model'}")
