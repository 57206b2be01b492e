"""`finetune`: read and check, train and choose the best epoch, predict, and write a Hugging Face folder.

The work is done in `OUTPUT.partial`; `OUTPUT` appears when all is finished, with `metrics.json` and `predictions.jsonl`
next to the model. The same command again continues, or finds it complete.
"""

import contextlib
import glob
import hashlib
import importlib.util
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCardData

from bert_pretrain import rng
from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import ConfigError, DataError, InputError
from bert_pretrain.finetune.answer import Answer
from bert_pretrain.finetune.baselines import is_clearly_better
from bert_pretrain.finetune.classify import Classify
from bert_pretrain.finetune.multi_label import MultiLabel
from bert_pretrain.finetune.rows import Example, LabelledInput
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tag import Tag
from bert_pretrain.finetune.task import Task
from bert_pretrain.io import manifest
from bert_pretrain.io.files import (
    atomic_folder,
    damage_of_folder,
    read_json,
    seal_folder,
    sha256_file,
    write_json,
    write_text,
)
from bert_pretrain.model.folder import CARD, CONFIG, weights_sha256
from bert_pretrain.model.hub import name_of_folder
from bert_pretrain.model.huggingface import PRETRAINING
from bert_pretrain.report.render import render
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.inference import open_bert
from bert_pretrain.train.hardware import Precision, choose_device, choose_precision

if TYPE_CHECKING:
    from bert_pretrain.finetune.training import Learner

KIND = "finetune"
_REMEDIES = {
    True: "Pretrain it for longer on more text, or label more rows",
    False: "Pretrain it on text of this kind (train --init-from), or label more rows",
}
"""Advice on how to improve on the baselines, by whether the model was pretrained here."""
METRICS = "metrics.json"
_TRIALS, _ALL_ROWS = "trials", "all"
_PACKAGES = ("transformers", "accelerate", "sklearn", "seqeval")
HEADS: dict[str, Callable[[Settings, Tokenizer], Task]] = {"classify": Classify, "tag": Tag, "answer": Answer}
_PIPELINES = {"classify": "text-classification", "tag": "token-classification", "answer": "question-answering"}
"""The Hub's names of the tasks."""


def finetune(
    task: str,
    model: Path,
    *,
    train: str,
    output: Path,
    validation: str | None = None,
    test: str | None = None,
    settings: Settings | None = None,
    device: str = "auto",
    overwrite: bool = False,
    **reading: Any,
) -> Path:
    """Fine-tune a BERT folder on a task and return the folder written.

    The arguments are the options of the command; `settings` holds those of the training, and `reading` are `format`,
    `columns` and `encoding` of all inputs. Without `validation`, a tenth of the training rows selects the best epoch,
    and the model is then trained again on all of them.
    """
    inputs = [
        LabelledInput(location, flag, **reading)
        for flag, location in (("--train", train), ("--validation", validation), ("--test", test))
        if location is not None
    ]
    output = output if output.name not in ("", "..") else output.resolve()
    _check_environment(device)
    chosen_device = choose_device(device)
    opened = open_bert(model, TrainConfig(device="cpu"))  # only for its checks
    settings = (settings or Settings()).resolve(task, opened.max_length)
    chosen, examples = _read(HEADS[task](settings, opened.tokenizer), inputs)
    identity = {"task": task, "refits": validation is None, **_identity(chosen, model, examples)}
    work = output.with_name(f"{output.name}.partial")
    with _working_folder(work):
        if _is_complete(output, work, identity, overwrite):
            print(f"up to date: {output}")
            if warning := read_json(output / METRICS).get("warning"):
                print(f"WARNING: {warning}")
        else:
            for leftover in output.parent.glob(f".{glob.escape(output.name)}.*.tmp"):  # of a run killed while writing
                shutil.rmtree(leftover)
            from bert_pretrain.finetune.training import Learner

            _train(Learner(chosen, model, examples, chosen_device), identity, work, output)
    return output


@contextlib.contextmanager
def _working_folder(work: Path) -> Iterator[None]:
    """Lock the working folder; remove what is in it on success, and the folder if it is empty at the end."""
    try:
        with manifest.exclusive(work):
            yield
            shutil.rmtree(work / _TRIALS, ignore_errors=True)
            (work / manifest.PARTIAL).unlink(missing_ok=True)
    finally:
        with contextlib.suppress(OSError):
            work.rmdir()


def _check_environment(device: str) -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        what, remedy = f"fine-tuning needs {', '.join(missing)}", 'pip install "bert-pretrain[finetune]"'
        raise ConfigError(what, where="finetune", remedy=remedy)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("torchrun starts several processes", where="finetune", remedy="start one, without torchrun")
    if device not in ("auto", "cpu", "cuda"):
        remedy = "give auto, cpu or cuda; select one of several GPUs with CUDA_VISIBLE_DEVICES=N"
        raise ConfigError(f"the device is '{device}'", where="--device", remedy=remedy)


def _read(task: Task, inputs: list[LabelledInput]) -> tuple[Task, dict[str, list[Example]]]:
    """Return the task that suits the labels, and the examples of each split.

    Without an input for validation, a tenth of the training rows is held out.
    """
    examples = {source.flag.removeprefix("--"): task.read(source) for source in inputs}
    if isinstance(task, Classify) and any(isinstance(example.label, list) for example in examples["train"]):
        task = MultiLabel(task.settings, task.tokenizer)
    task.set_labels(examples["train"], [each for split, rows in examples.items() if split != "train" for each in rows])
    if "validation" not in examples:
        train, seed = examples["train"], task.settings.seed
        group_of = {example.row: example.inputs.get(task.group, example.row) for example in train}
        groups = list(dict.fromkeys(group_of.values()))
        if len(groups) < 2:
            unit = task.group or "row"
            what = f"there is only one {unit} in {len(train):,} rows, so none can be held out for validation"
            raise InputError(what, where="--train", remedy=f"give more {unit}s, or --validation INPUT")
        classes: dict[Any, set[str]] = {group: set() for group in groups}
        for example in train:
            classes[group_of[example.row]].update(task.classes_of(example))
        order = [groups[number] for number in rng.stream(seed, "hold out").permutation(len(groups))]
        held = hold_out(order, classes, max(1, round(len(groups) / 10)))
        examples["validation"] = [example for example in train if group_of[example.row] in held]
        examples["train"] = [example for example in train if group_of[example.row] not in held]
        num_held = len(examples["validation"])
        print(f"held out for validation: {num_held:,} of {len(train):,} rows, drawn with seed {seed}")
    print("rows: " + ", ".join(f"{split} {len(rows):,}" for split, rows in examples.items()))
    return task, examples


def hold_out(order: Sequence[Any], classes: Mapping[Any, set[str]], number: int) -> set[Any]:
    """Return the groups of rows to hold out: the first in this order, so that each class is in both parts.

    For a class that one part lacks, a group is moved there and another one back, unless a part would then lack a class.
    """
    parts = [list(order[:number]), list(order[number:])]

    def can_leave(part: list[Any]) -> Iterator[Any]:
        counts = Counter(name for group in part for name in classes[group])
        return (group for group in part if all(counts[name] > 1 for name in classes[group]))

    for name in sorted(set().union(*classes.values())):
        for lacking, other in (parts, parts[::-1]):
            if not any(name in classes[group] for group in lacking):
                for moved in [group for group in can_leave(other) if name in classes[group]][:1]:
                    for back in list(can_leave(lacking))[:1]:
                        lacking.remove(back)
                        other.append(back)
                    other.remove(moved)
                    lacking.append(moved)
    return set(parts[0])


def _absent(task: Task, train: list[Example], examples: list[Example]) -> str:
    """Return which classes of the training rows a split does not have, as text."""
    known, found = ({name for example in rows for name in task.classes_of(example)} for rows in (train, examples))
    names = sorted(known - found)
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10:,} more" if len(names) > 10 else "")
    return f"  (without rows of {shown})" if names else ""


def _identity(task: Task, model: Path, examples: dict[str, list[Example]]) -> dict[str, Any]:
    """Return everything that changes the result; inputs by their content, so that they may be moved."""
    data = {}
    for split, rows in examples.items():
        digest = hashlib.sha256()
        for example in rows:
            content = json.dumps([example.inputs, example.label], ensure_ascii=False)
            digest.update(content.encode("utf-8", "surrogatepass"))
        data[split] = {"rows": len(rows), "sha256": digest.hexdigest()}
    weights = {"config": sha256_file(model / CONFIG), "weights": weights_sha256(model, "MODEL")}
    return {
        "model": weights | {"tokenizer": task.tokenizer.hash},
        "data": data,
        "settings": json.loads(json.dumps(asdict(task.settings))),  # as the manifest will hold them
    }


def _is_complete(output: Path, work: Path, identity: dict[str, Any], overwrite: bool) -> bool:
    """Return whether the same command has finished before; otherwise claim the working folder."""
    if overwrite:
        manifest.set_aside_once(output, KIND, identity)
    if manifest.would_claim(output, KIND, identity) is manifest.Progress.COMPLETE:
        if damage := damage_of_folder(output):
            remedy = "restore it from a copy, or fine-tune again with --overwrite (the old folder is moved aside)"
            raise DataError(f"{output} is damaged: {damage}", where="--output", remedy=remedy)
        return True
    manifest.claim(work, KIND, identity, overwrite=overwrite)
    return False


def _train(learner: "Learner", identity: dict[str, Any], work: Path, output: Path) -> None:
    """Train in `work` and write the result to `output`."""
    from bert_pretrain.finetune import training

    began, task, examples = time.monotonic(), learner.task, learner.examples
    precision = choose_precision("auto", learner.device)
    print(f"{learner.device.type}, {precision.name} ({precision.reason}), {torch.get_num_threads()} threads")
    with training.quiet():
        folder = (work / _TRIALS).resolve()
        trials = task.settings.trials(len(learner.windows["train"]))
        reports = [learner.train(trial, folder / str(number), precision) for number, trial in enumerate(trials)]
        best = max(range(len(trials)), key=lambda number: reports[number]["score"])
        for number, each in enumerate(reports if len(trials) > 1 else ()):
            kept = ", kept" if number == best else ""
            line = f"learning rate {each['learning_rate']:g}: {task.main_metric} {each['score']:.4f}"
            print(f"{line} on the validation rows{kept}")
        validated = folder / str(best)
        refit_epochs = _refit(learner, trials[best], reports[best], folder, precision) if identity["refits"] else None
        final = folder / _ALL_ROWS if refit_epochs else validated
        with atomic_folder(output) as result:
            shutil.copytree(final / training.MODEL, result, dirs_exist_ok=True)
            by_split = {"validation": learner.predict(validated / training.MODEL, "validation")}
            if "test" in examples:
                by_split["test"] = learner.predict(result, "test")
            scores = {
                split: task.score(examples[split], predictions)
                for split, predictions in by_split.items()
                if all(window.labels for window in learner.windows[split])
            }
            judged = "test" if "test" in scores else "validation"
            baselines = _baselines(
                learner, trials[best], folder, judged, refits=identity["refits"] and judged == "test"
            )
            metrics = {
                "task": identity["task"],
                "main_metric": task.main_metric,
                **scores,
                **reports[best],
                "trials": [{name: each[name] for name in ("learning_rate", "score")} for each in reports],
                "refit_epochs": refit_epochs,
                "baselines": baselines,
                "warning": _warning(learner, judged, scores[judged][task.main_metric], baselines),
                "seconds": round(time.monotonic() - began, 1),
                "rows": {split: len(rows) for split, rows in examples.items()},
            }
            _write_results(learner, identity, trials[best], metrics, by_split, result)
    for split, found in scores.items():
        line = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
        print(f"{split}: {line}{_absent(task, examples['train'], examples[split])}")
    for split in by_split.keys() - scores:
        print(f"not all rows of --{split} have a label, so they are predicted but not scored")
    for name, score in baselines.items():
        print(f"{name}: {100 * score:.1f} %")
    best_epoch = f"best epoch {metrics['best_epoch']} of {trials[best].epochs}"
    trained = f"{refit_epochs} epochs over all rows" if refit_epochs else best_epoch
    print(f"{trained}; model, metrics and predictions: {output}")
    if metrics["warning"]:
        print(f"WARNING: {metrics['warning']}")


def _refit(
    learner: "Learner", chosen: Settings, report: dict[str, Any], folder: Path, precision: Precision
) -> int | None:
    """Train again on all rows and return the number of epochs; None where later epochs of a trial were worse."""
    if learner.is_overfitted(report):
        print(f"epoch {report['best_epoch']} is kept: later ones are worse on the validation rows")
        return None
    print(f"again for {chosen.epochs} epochs, with the validation rows")
    learner.train(chosen, folder / _ALL_ROWS, precision, on_all_rows=True)
    return chosen.epochs


def _baselines(learner: "Learner", chosen: Settings, folder: Path, judged: str, *, refits: bool) -> dict[str, float]:
    """Return the scores on a split of what needs no pretraining; with `refits`, trained on the validation rows too."""
    from bert_pretrain.finetune.training import MODEL

    task, examples = learner.task, learner.examples
    found, train = {}, examples["train"] + (examples["validation"] if refits else [])
    if not task.settings.no_baseline and (predictions := task.words_alone(train, examples[judged])) is not None:
        found["words alone"] = predictions
    if task.settings.baselines:
        precision, untrained = choose_precision("auto", learner.device), folder / "untrained"
        report = learner.train(chosen, untrained, precision, untrained=True)
        if refits and not learner.is_overfitted(report):
            untrained = folder / "untrained-all"
            learner.train(chosen, untrained, precision, untrained=True, on_all_rows=True)
        found["the same network untrained"] = learner.predict(untrained / MODEL, judged)
    return {name: task.score(examples[judged], each)[task.main_metric] for name, each in found.items()}


def _warning(learner: "Learner", split: str, score: float, baselines: dict[str, float]) -> str:
    """Return a warning if the model is no better than a constant or not clearly better than a baseline, else ""."""
    examples = learner.examples[split]
    rows, metric = f"the {len(examples):,} {split} rows", learner.task.main_metric
    constant, floor = learner.task.constant(examples)
    if score <= floor:
        what = f"no sign of learning: {metric} {score:.4f} on {rows} is no better than {constant} ({floor:.4f})"
        return f"{what}. Check the labels; try a larger --learning-rate, more --epochs or rows"
    best = max(baselines, key=lambda name: baselines[name], default=None)
    if best is None or is_clearly_better(score, baselines[best], len(examples)):
        return ""
    what = f"not clearly better than {best}: {metric} {score:.4f} and {baselines[best]:.4f} on {rows}"
    return f"{what}. {_REMEDIES[PRETRAINING in read_json(learner.model / CONFIG)]}"


def _write_results(
    learner: "Learner",
    identity: dict[str, Any],
    chosen: Settings,
    metrics: dict[str, Any],
    by_split: dict[str, list[Any]],
    result: Path,
) -> None:
    """Write metrics, the predictions of the last split, checksums of all so far, the card, and finally the manifest."""
    task, predicted = learner.task, "test" if "test" in by_split else "validation"
    write_json(result / METRICS, metrics)
    with (result / "predictions.jsonl").open("w", encoding="utf-8") as file:
        for example, prediction in zip(learner.examples[predicted], by_split[predicted], strict=True):
            file.write(json.dumps(task.record(example, prediction), ensure_ascii=False) + "\n")
    seal_folder(result)
    pipeline, scores = _PIPELINES[metrics["task"]], {split: metrics[split] for split in by_split if split in metrics}
    names = dict.fromkeys(name for each in scores.values() for name in each)
    card = render(
        "finetuned_card.md",
        task=metrics["task"],
        kind="regression" if chosen.regression else pipeline.replace("-", " "),
        model_class=task.model_class,
        base=name_of_folder(learner.model),
        rows=metrics["rows"],
        splits=list(scores),
        scores=[(name, *(f"{each[name]:.4f}" if name in each else "" for each in scores.values())) for name in names],
        settings=asdict(chosen) | {"learning_rate": f"{metrics['learning_rate']:g}", "dropout": metrics["dropout"]},
        best_epoch=metrics["best_epoch"],
        refit_epochs=metrics["refit_epochs"],
        baselines={name: f"{score:.4f}" for name, score in metrics["baselines"].items()},
        metric=metrics["main_metric"],
        warning=metrics["warning"],
    )
    data = ModelCardData(library_name="transformers", pipeline_tag=pipeline, tags=["bert", pipeline, "bert-pretrain"])
    write_text(result / CARD, f"---\n{data}\n---\n\n{card}")
    body = {"rows": metrics["rows"], "predictions": predicted, "may_be_none": task.may_be_none}
    manifest.complete(result, KIND, identity, body)
