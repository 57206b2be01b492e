"""Fine-tuning: epochs over batches of windows of similar length. A killed training continues after its last epoch."""

import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.optim.swa_utils import AveragedModel
from transformers.trainer_pt_utils import LengthGroupedSampler

from bert_pretrain import rng
from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import ConfigError, DataError, UserError
from bert_pretrain.finetune.baselines import is_clearly_better
from bert_pretrain.finetune.finetuned_bert import FinetunedBert
from bert_pretrain.finetune.rows import Example
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.task import MODEL, Task, Window, collate
from bert_pretrain.io.files import atomic_folder, atomic_path, read_json, write_json
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.model.architectures import ARCHITECTURES
from bert_pretrain.model.devices import choose_precision
from bert_pretrain.model.folder import CONFIG, TRAINED_LENGTH, lengths, read_config
from bert_pretrain.model.huggingface import fine_tuning_rate

MAX_GRAD_NORM = 1.0
STATE = "state.pt"  # of an unfinished training, after its last epoch
_EPOCH = "epoch"  # folder of the model after an epoch
_REPORT = "report.json"


def open_network(
    folder: Path,
    task: Task,
    settings: Settings,
    *,
    untrained: bool = False,
) -> Any:
    """Open the model of a folder with the head of the task. A missing head is initialized from the seed.

    With `untrained`, all weights are initialized from the seed, in a network of the same size.
    """
    transformers.set_seed(settings.seed)
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    changes = task.model_config()
    architecture = read_config(folder, "MODEL")[0].architecture
    changes |= dict.fromkeys(ARCHITECTURES[architecture].dropouts, settings.dropout)
    changes |= {"output_hidden_states": False, "output_attentions": False}
    model_class = getattr(transformers, task.model_class)
    if untrained:
        return model_class.from_config(transformers.AutoConfig.from_pretrained(folder, **changes), dtype=torch.float32)
    try:
        # A head for a different number of classes is reinitialized.
        network, info = model_class.from_pretrained(
            folder,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            dtype=torch.float32,
            **changes,
        )
    except Exception as error:  # `transformers` does not validate config.json, so any exception may follow
        raise DataError(
            f"transformers cannot open {folder}: {error}",
            where="MODEL",
            remedy="give the folder of a BERT model",
        ) from error
    new = {*info["missing_keys"], *(str(entry[0]) for entry in info["mismatched_keys"])}
    labels = changes.get("id2label")
    name = _head_name(network)
    has_head = f"{name}.weight" not in new
    if labels and has_head and labels != transformers.AutoConfig.from_pretrained(folder).id2label:
        # The head has the right size but other labels, or another order of them.
        head = network.get_submodule(name)
        head.weight.data.normal_(std=network.config.initializer_range)
        head.bias.data.zero_()
        new |= {f"{name}.weight", f"{name}.bias"}
    if settings.regression and has_head:
        _rescale_head(network, 1.0 / task.label_deviation, -task.label_mean / task.label_deviation)
    if new:
        print(f"initialized with seed {settings.seed}: {', '.join(sorted(new))}")
    return network


def _head_name(network: Any) -> str:
    """Return the name of the last layer of a classifier. That of an ELECTRA has two layers."""
    return "classifier.out_proj" if hasattr(getattr(network, "classifier", None), "out_proj") else "classifier"


@torch.no_grad()
def _rescale_head(network: Any, factor: float, shift: float) -> None:
    """Change the head of a regression, whose output becomes `factor * output + shift`."""
    head = network.get_submodule(_head_name(network))
    head.weight.mul_(factor)
    head.bias.mul_(factor).add_(shift)


class FineTuner:
    """Trains a model on the examples of a task, and predicts with the result."""

    def __init__(
        self,
        task: Task,
        model: Path,
        examples: dict[str, list[Example]],
        device: torch.device,
    ) -> None:
        self.task = task
        self.model = model
        self.examples = examples
        self.device = device
        self.precision = choose_precision("auto", device)
        self.windows: dict[str, list[Window]] = {}
        for split, rows in examples.items():
            self.windows[split] = task.windows_of(rows, split)
            task.report_long_examples(rows, split)
        task.unknown_words.warn()
        self.settings = task.settings.with_epochs(len(self.windows["train"]))

    def train(
        self,
        folder: Path,
        *,
        refits: bool,
        untrained: bool = False,
    ) -> tuple[dict[str, Any], Path]:
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

    def train_once(
        self,
        folder: Path,
        *,
        untrained: bool = False,
        on_all_rows: bool = False,
    ) -> dict[str, Any]:
        """Run one training, save its model in `folder`, and return its report.

        The report has the learning rate, the score and the number of the best epoch, and the loss and metrics of every
        epoch. With `on_all_rows`, the validation rows are trained on too, the last epoch is kept, and the report has
        no metrics. A finished training returns its saved report. An unfinished one continues after its last epoch.
        """
        if (folder / _REPORT).exists():
            return dict(read_json(folder / _REPORT))
        folder.mkdir(parents=True, exist_ok=True)
        network = open_network(self.model, self.task, self.settings, untrained=untrained).to(self.device)
        try:
            report = self._fit(network, folder, on_all_rows=on_all_rows)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "the GPU is out of memory",
                where="--batch-size, --max-length",
                remedy="reduce one or use --device cpu, and start over with --overwrite",
            ) from error
        write_json(folder / _REPORT, report)
        (folder / STATE).unlink(missing_ok=True)
        return report

    def _fit(
        self,
        network: Any,
        folder: Path,
        *,
        on_all_rows: bool,
    ) -> dict[str, Any]:
        """Train all epochs, save a model folder and the state after each, and return the report."""
        settings, main_metric = self.settings, f"eval_{self.task.main_metric}"
        assert settings.epochs is not None
        windows = self.windows["train"] + (self.windows["validation"] if on_all_rows else [])
        steps_per_epoch = math.ceil(len(windows) / settings.batch_size)
        encoder = getattr(network.base_model, "encoder", None) or network.base_model.layers
        rate = settings.learning_rate or fine_tuning_rate(encoder, network.config.hidden_size)
        is_fp16 = self.precision.name == "fp16"
        state = _State(
            network,
            settings,
            rate,
            steps_per_epoch * settings.epochs,
            is_fp16=is_fp16,
        )
        report: dict[str, Any] = {"learning_rate": rate, "score": -math.inf, "best_epoch": 0, "epochs": []}
        if (folder / STATE).exists():
            report = state.restore(folder / STATE)
            print(f"continues after epoch {len(report['epochs'])}")
        done = len(report["epochs"])
        bar = progress_bar(desc="finetune", total=state.num_steps, initial=done * steps_per_epoch, unit="step")
        for epoch in range(done + 1, settings.epochs + 1):
            metrics = {"epoch": epoch, "loss": self._run_epoch(state, windows, epoch, bar)}
            self._save(state.mean.module if epoch == settings.epochs else network, folder / _EPOCH)
            if not on_all_rows:
                scores = self.task.score(self.examples["validation"], self.predict(folder / _EPOCH, "validation"))
                metrics |= {f"eval_{name}": value for name, value in scores.items()}
                shown = "  ".join(f"{name} {value:.4f}" for name, value in list(scores.items())[:4])
                bar.write(f"epoch {epoch}/{settings.epochs}  loss {metrics['loss']:.4f}  validation: {shown}")
            if on_all_rows or metrics[main_metric] > report["score"]:
                report |= {"score": metrics.get(main_metric), "best_epoch": epoch}
                shutil.rmtree(folder / MODEL, ignore_errors=True)
                (folder / _EPOCH).rename(folder / MODEL)
            report["epochs"].append(metrics)
            state.save(folder / STATE, report)
        bar.close()
        return report

    def _run_epoch(
        self,
        state: "_State",
        windows: list[Window],
        epoch: int,
        bar: Any,
    ) -> float:
        """Train on all windows once, and return the mean loss."""
        batch_size = self.settings.batch_size
        # Batches and dropout masks depend on the epoch only, so that a resumed training draws the same.
        torch.manual_seed(rng.torch_seed(self.settings.seed, "fine-tuning", epoch=epoch))
        order = list(LengthGroupedSampler(batch_size, lengths=[len(window.input_ids) for window in windows]))
        losses = []
        state.network.train()
        for begin in range(0, len(order), batch_size):
            rows = [windows[index].inputs for index in order[begin : begin + batch_size]]
            batch = {name: each.to(self.device) for name, each in collate(rows, self.task.tokenizer.pad_id).items()}
            with torch.autocast(self.device.type, self.precision.dtype, enabled=self.precision.name != "fp32"):
                loss = state.network(**batch).loss
            state.update(loss)
            losses.append(loss.detach())
            bar.update()
        return torch.stack(losses).mean().item()

    def _save(self, network: Any, folder: Path) -> None:
        """Write the model folder of a network."""
        weights = dict(network.state_dict())
        if self.settings.regression:  # the head of the folder predicts labels
            head = _head_name(network)
            for name in (f"{head}.weight", f"{head}.bias"):
                weights[name] = weights[name] * self.task.label_deviation
            weights[f"{head}.bias"] += self.task.label_mean
        length = max(self.settings.max_length or 0, lengths(self.model)[0])
        if isinstance(record := getattr(network.config, "pretraining", None), dict):  # only of this package
            record[TRAINED_LENGTH] = length
        with atomic_folder(folder) as model:
            network.save_pretrained(model, state_dict=weights)
            self.task.tokenizer.save(model, length)
            for file in model.glob("*.safetensors"):  # safetensors makes them readable only for their owner
                file.chmod((model / CONFIG).stat().st_mode)

    def is_overfitted(self, report: dict[str, Any]) -> bool:
        """Return whether the last epoch is worse on the validation rows than the best one by 1.5 standard errors."""
        best, last = report["score"], report["epochs"][-1][f"eval_{self.task.main_metric}"]
        return is_clearly_better(best, last, len(self.examples["validation"]), num_errors=1.5)

    def predict(self, folder: Path, split: str) -> list[Any]:
        """Predict a split in fp32 with a model folder that `train` saved."""
        try:
            finetuned = FinetunedBert.open(folder, TrainConfig(device=str(self.device), precision="fp32"))
        except UserError as error:  # its remedy is for the user's MODEL
            raise DataError(
                error.what,
                where=str(folder),
                remedy="start over with --overwrite; if training has diverged, with a smaller --learning-rate",
            ) from error
        windows = self.windows[split]
        with progress_bar(total=len(windows), disable=True) as bar:
            logits = finetuned.logits(windows, bar, len(windows))
        return self.task.decode(self.examples[split], windows, logits)


class _State:
    """The weights, optimizer and schedule of a training."""

    def __init__(
        self,
        network: Any,
        settings: Settings,
        rate: float,
        num_steps: int,
        *,
        is_fp16: bool,
    ) -> None:
        self.network = network
        self.mean = AveragedModel(network)  # over the second half of the steps (Izmailov et al., 2018)
        self.num_steps = num_steps
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": settings.weight_decay}, {"params": []}]
        for weight in network.parameters():
            groups[weight.dim() <= 1]["params"].append(weight)  # only matrices decay
        self.optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=0.0, fused=True)
        num_warmup_steps = round(settings.warmup_ratio * num_steps)
        self.schedule = transformers.get_scheduler("linear", self.optimizer, num_warmup_steps, num_steps)
        self.scaler = torch.amp.GradScaler(enabled=is_fp16)
        self.parts = {
            "network": network,
            "mean": self.mean,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
        }

    def update(self, loss: Any) -> None:
        """Update the weights with the gradients of a loss."""
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), MAX_GRAD_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        if self.schedule.last_epoch > self.num_steps // 2:  # the number of steps
            self.mean.update_parameters(self.network)

    def save(self, path: Path, report: dict[str, Any]) -> None:
        """Write the state and the report of the epochs."""
        states = {name: part.state_dict() for name, part in self.parts.items()}
        with atomic_path(path) as temporary:
            torch.save({"report": report, **states}, temporary)

    def restore(self, path: Path) -> dict[str, Any]:
        """Read a state, and return its report."""
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise DataError(
                f"the state is damaged: {type(error).__name__}",
                where=str(path),
                remedy="start over with --overwrite",
            ) from error
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        return dict(saved["report"])
