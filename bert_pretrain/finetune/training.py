"""Fine-tuning with the `transformers` Trainer: its arguments, resuming, and a progress bar in place of its logs."""

import contextlib
import functools
import math
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import ConfigError, DataError, UserError
from bert_pretrain.finetune.baselines import is_clearly_better
from bert_pretrain.finetune.finetuned_bert import FinetunedBert
from bert_pretrain.finetune.rows import Example
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.task import MODEL, Task, Window, collate
from bert_pretrain.io.files import DISK_FULL, atomic_folder, errno_of, read_json, write_json
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.model.devices import choose_precision
from bert_pretrain.model.folder import CONFIG, TRAINED_LENGTH, lengths
from bert_pretrain.model.huggingface import fine_tuning_rate

_REPORT = "report.json"
_DAMAGED = (safetensors.SafetensorError, pickle.UnpicklingError, EOFError)
_DAMAGE_MESSAGES = ("PytorchStreamReader", "find a valid checkpoint")  # of torch and of the Trainer


def open_network(folder: Path, task: Task, settings: Settings, *, untrained: bool = False) -> Any:
    """Open the model of a folder with the head of the task. A missing head is initialized from the seed.

    With `untrained`, all weights are initialized from the seed, in a network of the same size.
    """
    transformers.set_seed(settings.seed)
    changes = task.model_config()
    changes |= {"hidden_dropout_prob": settings.dropout, "attention_probs_dropout_prob": settings.dropout}
    changes |= {"output_hidden_states": False, "output_attentions": False}
    model_class = getattr(transformers, task.model_class)
    if untrained:
        return model_class.from_config(transformers.AutoConfig.from_pretrained(folder, **changes), dtype=torch.float32)
    try:
        # A head for a different number of classes is reinitialized.
        network, info = model_class.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True, dtype=torch.float32, **changes
        )
    except Exception as error:  # `transformers` does not validate config.json, so any exception may follow
        what, remedy = f"transformers cannot open {folder}: {error}", "give the folder of a BERT model"
        raise DataError(what, where="MODEL", remedy=remedy) from error
    new = {*info["missing_keys"], *(str(entry[0]) for entry in info["mismatched_keys"])}
    labels = changes.get("id2label")
    has_head = "classifier.weight" not in new
    if labels and has_head and labels != transformers.AutoConfig.from_pretrained(folder).id2label:
        # The head has the right size but other labels, or another order of them.
        network.classifier.weight.data.normal_(std=network.config.initializer_range)
        network.classifier.bias.data.zero_()
        new |= {"classifier.weight", "classifier.bias"}
    if settings.regression and has_head:
        _rescale_head(network, 1.0 / task.label_deviation, -task.label_mean / task.label_deviation)
    if new:
        print(f"initialized with seed {settings.seed}: {', '.join(sorted(new))}")
    return network


@torch.no_grad()
def _rescale_head(network: Any, factor: float, shift: float) -> None:
    """Change the head of a regression, whose output becomes `factor * output + shift`."""
    network.classifier.weight.mul_(factor)
    network.classifier.bias.mul_(factor).add_(shift)


class FineTuner:
    """Trains a model on the examples of a task, and predicts with the result."""

    def __init__(self, task: Task, model: Path, examples: dict[str, list[Example]], device: torch.device) -> None:
        self.task = task
        self.model = model
        self.examples = examples
        self.device = device
        self.precision = choose_precision("auto", device)
        self.windows: dict[str, list[Window]] = {}
        for split, rows in examples.items():
            self.windows[split] = task.windows_of(rows, split)
            task.report_long_examples(rows, split)
            if split != "train":  # reduces the padding of batches
                self.windows[split].sort(key=lambda window: -len(window.input_ids))
        task.unknown_words.warn()
        self.settings = task.settings.with_epochs(len(self.windows["train"]))

    def train(self, folder: Path, *, refits: bool, untrained: bool = False) -> tuple[dict[str, Any], Path]:
        """Train and, with `refits`, train again on all rows unless the first training has overfitted.

        Returns the report of the first training, whose model is `folder / "train" / MODEL`, and the final model folder.
        """
        report = self.train_once(folder / "train", untrained=untrained)
        report["refit_epochs"] = None
        if refits and self.is_overfitted(report):
            print(f"epoch {report['best_epoch']} is kept, because later epochs are worse on the validation rows")
        elif refits:
            report["refit_epochs"] = self.settings.epochs
            print(f"training again for {self.settings.epochs} epochs on all rows, including the validation rows")
            self.train_once(folder / "all", untrained=untrained, on_all_rows=True)
        return report, folder / ("all" if report["refit_epochs"] else "train") / MODEL

    def train_once(self, folder: Path, *, untrained: bool = False, on_all_rows: bool = False) -> dict[str, Any]:
        """Run one training, save its model in `folder`, and return its report (see `report_of`).

        With `on_all_rows`, the validation rows are trained on too, and the last epoch is kept. A finished training
        returns its saved report. An unfinished one resumes from its last checkpoint.
        """
        if (folder / _REPORT).exists():
            return dict(read_json(folder / _REPORT))
        settings = self.settings
        network = open_network(self.model, self.task, settings, untrained=untrained)
        rate = settings.learning_rate or fine_tuning_rate(network.base_model.encoder, network.config.hidden_size)
        checkpoints = folder / "checkpoints"
        trainer = self._make_trainer(network, rate, checkpoints, on_all_rows=on_all_rows)
        fit(trainer, checkpoints)
        if settings.regression:
            _rescale_head(network, self.task.label_deviation, self.task.label_mean)
        with atomic_folder(folder / MODEL) as model:
            length = max(settings.max_length or 0, lengths(self.model)[0])
            with contextlib.suppress(AttributeError, TypeError):  # other programs write no such record
                network.config.pretraining[TRAINED_LENGTH] = length
            network.save_pretrained(model)
            self.task.tokenizer.save(model, length)
            for file in model.glob("*.safetensors"):  # safetensors makes them readable only for their owner
                file.chmod((model / CONFIG).stat().st_mode)
        report = {} if on_all_rows else {"learning_rate": rate, **report_of(trainer.state)}
        write_json(folder / _REPORT, report)
        shutil.rmtree(checkpoints)
        return report

    def is_overfitted(self, report: dict[str, Any]) -> bool:
        """Return whether the last epoch is worse on the validation rows than the best one by 1.5 standard errors."""
        best, last = report["score"], report["epochs"][-1][f"eval_{self.task.main_metric}"]
        return is_clearly_better(best, last, len(self.examples["validation"]), num_errors=1.5)

    def _make_trainer(self, network: Any, rate: float, folder: Path, *, on_all_rows: bool) -> Any:
        """Return a Trainer that saves its checkpoints in `folder` and shows a progress bar instead of logs."""
        task, settings = self.task, self.settings
        windows = self.windows["train"] + (self.windows["validation"] if on_all_rows else [])
        arguments: Any = TrainingArguments(
            output_dir=str(folder),
            seed=settings.seed,
            num_train_epochs=settings.epochs,
            per_device_train_batch_size=settings.batch_size,
            per_device_eval_batch_size=settings.batch_size,
            learning_rate=rate,
            weight_decay=settings.weight_decay,
            warmup_steps=settings.warmup_ratio,
            eval_strategy="no" if on_all_rows else "epoch",
            save_strategy="epoch",
            logging_strategy="epoch",
            metric_for_best_model=f"eval_{task.main_metric}",
            greater_is_better=True,
            load_best_model_at_end=not on_all_rows,
            save_total_limit=2,  # the last and the best
            use_cpu=self.device.type == "cpu",
            dataloader_pin_memory=self.device.type == "cuda",
            bf16=self.precision.name == "bf16",
            fp16=self.precision.name == "fp16",
            label_names=list(task.label_names),
            remove_unused_columns=False,
            report_to="none",
            disable_tqdm=True,
        )
        arguments._n_gpu = min(1, arguments.n_gpu)  # prevents DataParallel over all visible GPUs
        trainer = LengthGroupingTrainer(
            model=network,
            args=arguments,
            data_collator=functools.partial(collate, pad_id=task.tokenizer.pad_id),
            train_dataset=[window.inputs for window in windows],
            eval_dataset=[window.inputs for window in self.windows["validation"]],
            compute_metrics=self._score_validation,
            callbacks=[_AverageCallback(), _ProgressCallback()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    def _score_validation(self, evaluated: transformers.EvalPrediction) -> dict[str, float]:
        logits: Any = evaluated.predictions
        if self.task.settings.regression:
            logits = self.task.label_mean + self.task.label_deviation * logits.astype(np.float64)
        examples = self.examples["validation"]
        return self.task.score(examples, self.task.decode(examples, self.windows["validation"], logits))

    def predict(self, folder: Path, split: str) -> list[Any]:
        """Predict a split in fp32 with a model folder that `train` saved."""
        try:
            finetuned = FinetunedBert.open(folder, TrainConfig(device=str(self.device), precision="fp32"))
        except UserError as error:  # its remedy is for the user's MODEL
            remedy = "start over with --overwrite; if training has diverged, with a smaller --learning-rate"
            raise DataError(error.what, where=str(folder), remedy=remedy) from error
        windows = self.windows[split]
        with progress_bar(desc=split, total=len(windows), unit="window") as bar:
            logits = finetuned.logits(windows, bar, len(windows))
        return self.task.decode(self.examples[split], windows, logits)


def fit(trainer: Any, folder: Path) -> None:
    """Train to the end, resuming from the last complete checkpoint in `folder` if there is one."""
    newest = last_checkpoint(folder)
    if newest is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"continues from {newest.name}")
    try:
        trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    except torch.OutOfMemoryError as error:
        where, remedy = "--batch-size, --max-length", "reduce one or use --device cpu, and start over with --overwrite"
        raise ConfigError("the GPU is out of memory", where=where, remedy=remedy) from error
    except Exception as error:
        is_damage = isinstance(error, _DAMAGED) or any(text in str(error) for text in _DAMAGE_MESSAGES)
        if not is_damage or errno_of(error) in DISK_FULL:  # the disk may be full while a checkpoint is written
            raise
        what = f"a checkpoint is damaged: {str(error).partition('\n')[0]}"
        raise DataError(what, where=str(folder), remedy="start over with --overwrite") from error


def report_of(state: Any) -> dict[str, Any]:
    """Return the score and the number of the best epoch, and the loss and metrics of every epoch."""
    assert state.best_model_checkpoint is not None  # otherwise the Trainer has kept the last weights
    epochs: dict[int, dict[str, float]] = {}
    for line in state.log_history:
        # Sorted, so that a resumed run, whose state has sorted keys, returns the same.
        if metrics := {name: value for name, value in sorted(line.items()) if _is_metric(name)}:
            epochs.setdefault(round(line["epoch"]), {}).update(metrics)
    return {
        "score": state.best_metric,
        "best_epoch": round(state.best_global_step / state.max_steps * state.num_train_epochs),
        "epochs": [{"epoch": epoch, **metrics} for epoch, metrics in sorted(epochs.items())],
    }


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, or None if there is none or the Trainer cannot resume from it.

    A checkpoint is complete if its state is readable, because the Trainer writes the state last. The state contains
    the path of the best checkpoint, so a moved folder cannot be resumed.
    """
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.partition("-")[2])):
        with contextlib.suppress(DataError):  # the state is missing or truncated
            best = read_json(path / "trainer_state.json").get("best_model_checkpoint")
            return path if best is None or (Path(best).parent == folder and Path(best).is_dir()) else None
    return None


@contextlib.contextmanager
def isolated_transformers() -> Iterator[None]:
    """Turn off the log and the progress bars of `transformers`, and plugins that the environment turns on."""
    plugins = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("ACCELERATE_")}
    logging: Any = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        os.environ.update(plugins)
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


def _is_metric(name: str) -> bool:
    return name == "loss" or (name.startswith("eval_") and not name.endswith(("_runtime", "_second")))


class LengthGroupingTrainer(Trainer):
    """A Trainer whose batches hold windows of similar length, with little padding.

    The strategy `group_by_length` of `transformers` would also change the order of the evaluation.
    """

    def _get_train_sampler(self, train_dataset: Any = None) -> LengthGroupedSampler:
        windows: Any = self.train_dataset
        lengths = [len(window["input_ids"]) for window in windows]
        return LengthGroupedSampler(self.args.train_batch_size, lengths=lengths)


class _AverageCallback(TrainerCallback):
    """Replaces the weights after the last step by their mean over the second half of the steps (Izmailov et al., 2018).

    The optimizer state contains the running mean, so checkpoints contain it too. Earlier epochs are not averaged.
    """

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        number = state.global_step - state.max_steps // 2  # of the steps that are averaged
        for weight, moments in optimizer.state.items() if number > 0 else ():
            mean = moments.setdefault("mean", torch.zeros_like(weight)).lerp_(weight, 1.0 / number)
            if state.global_step == state.max_steps:
                weight.copy_(mean)


class _ProgressCallback(TrainerCallback):
    """Shows a progress bar of the steps and prints a line per epoch."""

    bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar = progress_bar(desc="finetune", total=state.max_steps, initial=state.global_step, unit="step")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update(state.global_step - self.bar.n)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        shown = [f"{name.removeprefix('eval_')} {value:.4f}" for name, value in metrics.items() if _is_metric(name)]
        loss = next((line["loss"] for line in reversed(state.log_history) if "loss" in line), math.nan)
        head = f"epoch {round(state.epoch)}/{args.num_train_epochs:g}  loss {loss:.4f}  validation: "
        self.bar.write(head + "  ".join(shown[:4]))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.close()
