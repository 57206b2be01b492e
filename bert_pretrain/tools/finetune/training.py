"""The training itself, by `transformers`' Trainer: checkpoints, the best of them, and one progress bar instead of logs.

The loss, the optimizer, the schedule and mixed precision are the Trainer's own; here is only what it is told, and what
is done so that a killed run continues: checkpoints that were not written whole are removed first.
"""

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging as _logging

from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.files import write_json
from bert_pretrain.progress import progress_bar
from bert_pretrain.tokenizer import Tokenizer
from bert_pretrain.tools.finetune.settings import Settings
from bert_pretrain.tools.finetune.windows import Task, Window, collator
from bert_pretrain.train.hardware import Precision

logging: Any = _logging
_STATE = "trainer_state.json"


def open_network(folder: Path, task: Task, settings: Settings) -> Any:
    """Return the model of a folder with the task's head, drawn by the seed where the folder has none.

    Raises:
        DataError: when `transformers` cannot open it.
    """
    transformers.set_seed(settings.seed)
    changes = task.head()
    if settings.dropout is not None:
        changes |= {"hidden_dropout_prob": settings.dropout, "attention_probs_dropout_prob": settings.dropout}
    model_class = getattr(transformers, task.model_class)
    try:
        # A head for other classes than these is none for this task.
        network, info = model_class.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True, dtype=torch.float32, **changes
        )
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise DataError(
            f"transformers cannot open {folder}: {error}", where="MODEL", remedy="name a folder that holds a BERT"
        ) from error
    fresh = {*info["missing_keys"], *(str(entry[0]) for entry in info["mismatched_keys"])}
    labels = changes.get("id2label")
    if labels and not fresh and labels != transformers.AutoConfig.from_pretrained(folder).id2label:
        # As many labels, but others, or in another order.
        network.classifier.weight.data.normal_(std=network.config.initializer_range)
        network.classifier.bias.data.zero_()
        fresh = {"classifier.weight", "classifier.bias"}
    if fresh:
        print(f"new, drawn with seed {settings.seed}: {', '.join(sorted(fresh))}")
    return network


def make_trainer(
    network: Any,
    task: Task,
    settings: Settings,
    tokenizer: Tokenizer,
    train: list[Window],
    validation: list[Window],
    score: Callable[[Any], dict[str, float]],
    folder: Path,
    device: torch.device,
    precision: Precision,
) -> Any:
    """Return a Trainer that keeps its checkpoints in `folder`; `score` turns logits into metrics."""
    steps = math.ceil(len(train) / settings.batch_size) * settings.epochs
    arguments = TrainingArguments(
        output_dir=str(folder),
        learning_rate=settings.learning_rate,
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        warmup_steps=round(settings.warmup_ratio * steps),  # a ratio goes by different names in 4.57 and 5
        weight_decay=settings.weight_decay,
        seed=settings.seed,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        save_total_limit=2,  # the newest and the best
        load_best_model_at_end=True,
        metric_for_best_model=f"eval_{task.main_metric}",
        greater_is_better=True,
        label_names=list(task.label_names),
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=device.type == "cuda",
        use_cpu=device.type == "cpu",
        bf16=precision.name == "bf16",
        fp16=precision.name == "fp16",
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # or the Trainer would spread batches over all cards it sees
    trainer = Trainer(
        model=network,
        args=arguments,
        data_collator=collator(tokenizer.pad_id),
        train_dataset=[window.inputs for window in train],
        eval_dataset=[window.inputs for window in validation],
        compute_metrics=lambda evaluated: score(evaluated.predictions),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(_Bar(task.main_metric))
    return trainer


def fit(trainer: Any, folder: Path) -> dict[str, Any]:
    """Train to the end, from the newest whole checkpoint if there is one, and leave the best weights in the model.

    Returns:
        The best epoch, and for every epoch its loss and metrics.

    Raises:
        ConfigError: when the memory of the card does not suffice.
    """
    newest = newest_checkpoint(folder)
    if newest is not None:
        print(f"continues from {newest.name}")
        _point_to_best(newest)
    try:
        trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the card's memory does not suffice",
            where="--batch-size and --max-length",
            remedy="make one of them smaller, or take --device cpu; with --overwrite, since it is another fine-tuning",
        ) from error
    assert trainer.state.best_model_checkpoint is not None  # or the last weights would pass for the best
    epochs: dict[int, dict[str, float]] = {}
    for line in trainer.state.log_history:
        if "loss" in line or "eval_loss" in line:
            kept = {name: value for name, value in line.items() if _is_figure(name)}
            epochs.setdefault(round(line["epoch"]), {}).update(kept)
    steps = {line["step"]: round(line["epoch"]) for line in trainer.state.log_history if "eval_loss" in line}
    return {
        "best_epoch": steps[trainer.state.best_global_step],
        "epochs": [{"epoch": epoch, **figures} for epoch, figures in sorted(epochs.items())],
    }


def predict(
    folder: Path, task: Task, windows: list[Window], settings: Settings, device: torch.device, name: str
) -> Any:
    """Return what a finished folder gives, in fp32: for each window its logits, one list for each output of the model.

    Raises:
        ConfigError: when they are not finite.
    """
    network = getattr(transformers, task.model_class).from_pretrained(folder, dtype=torch.float32).to(device).eval()
    collate = collator(network.config.pad_token_id)
    found: list[list[np.ndarray]] = []
    with progress_bar(desc=name, total=len(windows), unit="window") as bar, torch.inference_mode():
        for begin in range(0, len(windows), settings.batch_size):
            batch = collate([window.inputs for window in windows[begin : begin + settings.batch_size]])
            inputs = {key: value.to(device) for key, value in batch.items() if key not in task.label_names}
            outputs = network(**inputs).to_tuple()
            found = found or [[] for _ in outputs]
            for rows, logits in zip(found, outputs, strict=True):
                rows.extend(logits.cpu().numpy())
            bar.update(len(batch["input_ids"]))
    if not all(np.isfinite(row).all() for rows in found for row in rows):
        raise ConfigError(
            "the network's outputs are not finite: it has diverged",
            where="--learning-rate",
            remedy="give a smaller one, with --overwrite",
        )
    return found if len(found) > 1 else found[0]


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that was written whole, and remove those that were not."""
    whole: dict[int, Path] = {}
    for path in folder.glob("checkpoint-*"):
        try:
            whole[json.loads((path / _STATE).read_text())["global_step"]] = path  # the last file of a checkpoint
        except (OSError, ValueError, KeyError):
            shutil.rmtree(path)
    return whole[max(whole)] if whole else None


def _point_to_best(checkpoint: Path) -> None:
    """Name the best checkpoint where it lies now, or one that was moved would silently not be taken in the end."""
    state = json.loads((checkpoint / _STATE).read_text())
    if state.get("best_model_checkpoint"):
        state["best_model_checkpoint"] = str(checkpoint.with_name(Path(state["best_model_checkpoint"]).name))
        write_json(checkpoint / _STATE, state)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the notes and bars of `transformers` away; what matters of them is told in our words."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def _is_figure(name: str) -> bool:
    return name == "loss" or (name.startswith("eval_") and not name.endswith(("_runtime", "_second")))


class _Bar(TrainerCallback):
    """A bar over the steps, and a line for every epoch."""

    def __init__(self, main_metric: str) -> None:
        self.main_metric = main_metric
        self.bar: Any = None
        self.loss = math.nan

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar = progress_bar(desc="finetune", total=state.max_steps, initial=state.global_step, unit="step")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.loss = (logs or {}).get("loss", self.loss)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        if self.bar is None:
            return
        figures = {name.removeprefix("eval_"): value for name, value in metrics.items() if _is_figure(name)}
        head = f"epoch {round(state.epoch)}/{args.num_train_epochs:g}  loss {self.loss:.4f}  validation: "
        self.bar.write(head + "  ".join(f"{name} {value:.4f}" for name, value in list(figures.items())[:4]))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.close()
        self.bar = None
