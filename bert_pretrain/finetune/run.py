"""`finetune`: reads and checks rows, trains, keeps the best epoch, predicts, and writes a Hugging Face folder.

All work happens in `OUTPUT/.trials`. At the end, the model, `metrics.json` and `predictions.jsonl` are moved to
`OUTPUT`, and the manifest is written. The same command resumes an unfinished run, or does nothing after its end.
"""

import hashlib
import importlib.util
import itertools
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
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
from bert_pretrain.finetune.task import MODEL, Task
from bert_pretrain.io import files
from bert_pretrain.io.cores import num_ranks
from bert_pretrain.io.manifest import Output, OutputState
from bert_pretrain.model.devices import choose_device
from bert_pretrain.model.folder import CARD, CONFIG, PRETRAINING, weights_sha256
from bert_pretrain.model.hub import name_of_folder
from bert_pretrain.report.render import render
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.inference import open_bert

if TYPE_CHECKING:
    from bert_pretrain.finetune.training import FineTuner  # needs the packages that `_check_environment` looks for

KIND = "finetune"
METRICS = "metrics.json"
TASK_CLASSES: dict[str, Callable[[Settings, Tokenizer], Task]] = {"classify": Classify, "tag": Tag, "answer": Answer}
TRIALS = ".trials"  # folder of unfinished work in the output
# Its subfolders: without the validation rows, with them, and the files of the output.
_TRAIN_ROWS, _ALL_ROWS, _RESULT = "train", "all", "result"


def finetune(
    task: str, model: Path, *, train: str, output: Path, validation: str | None = None, test: str | None = None,
    settings: Settings | None = None, device: str = "auto", overwrite: bool = False, **reading: Any,
) -> Path:  # fmt: skip
    """Fine-tune a BERT folder on a task and return the output folder.

    With `validation`, the epoch with the best score on it is kept. Without, a tenth of the training rows is held out
    for the validation scores, and the model is then trained again on all rows. If the last epoch is clearly worse on
    the held-out rows than the best one, the best epoch is kept instead.

    Args:
        task: "classify", "tag" or "answer".
        train, validation, test: inputs of labelled rows: a file, a URL, a folder of `datasets`, or `dataset:NAME`.
        output: folder to create; unfinished work is in its folder `.trials`.
        reading: the `format`, `columns` and `encoding` of all inputs.

    Raises:
        ConfigError: a setting, the device or the environment does not allow fine-tuning.
        InputError: an input has no usable rows, or the rows do not fit the task.
        DataError: the model folder, or an earlier output, is damaged.
    """
    inputs = [
        LabelledInput(location, flag, **reading)
        for flag, location in (("--train", train), ("--validation", validation), ("--test", test))
        if location is not None
    ]
    if any(source.is_delimited for source in inputs):  # the other inputs name their columns
        inputs = [each if each.is_delimited else replace(each, columns=()) for each in inputs]
    output = output.resolve() if output.is_symlink() or output.name in ("", "..") else output
    _check_environment(device)
    torch_device = choose_device(device)
    settings = settings or Settings()
    # Checks the folder; the Trainer opens it again.
    bert = open_bert(model, TrainConfig(device="cpu"), max_length=settings.max_length)
    settings = settings.resolve(task, bert.max_length)
    prepared_task, examples = _read(TASK_CLASSES[task](settings, bert.tokenizer), inputs)
    identity = {"task": task, "refits": validation is None, **_identity(prepared_task, model, examples)}
    out = Output(output, KIND, identity, [model, *(each.location for each in inputs)])
    with out.open(overwrite=overwrite) as state:
        if state is OutputState.COMPLETE:
            _check_finished(output)
            print(f"up to date: {output}")
        else:
            from bert_pretrain.finetune.training import FineTuner, isolated_transformers

            with isolated_transformers():
                _train(FineTuner(prepared_task, model, examples, torch_device), out)
            print(f"model, metrics and predictions: {output}")
        shutil.rmtree(output / TRIALS, ignore_errors=True)
    if warning := files.read_json(output / METRICS).get("warning"):
        print(f"WARNING: {warning}")
    return output


def _check_environment(device: str) -> None:
    packages = ("transformers", "accelerate", "sklearn", "seqeval")
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        what, remedy = f"fine-tuning needs {', '.join(missing)}", 'pip install "bert-pretrain[finetune]"'
        raise ConfigError(what, where="finetune", remedy=remedy)
    if num_ranks() > 1:
        remedy = "start one process, without torchrun"
        raise ConfigError("fine-tuning does not support several processes", where="finetune", remedy=remedy)
    if device not in ("auto", "cpu", "cuda"):
        remedy = "use auto, cpu or cuda; select one of several GPUs with CUDA_VISIBLE_DEVICES=N"
        raise ConfigError(f"unknown device '{device}'", where="--device", remedy=remedy)


def _read(task: Task, inputs: list[LabelledInput]) -> tuple[Task, dict[str, list[Example]]]:
    """Return the task, multi-label if the labels are lists, and the examples of each split."""
    examples = {source.flag.removeprefix("--"): task.read(source) for source in inputs}
    if isinstance(task, Classify) and any(isinstance(example.label, list) for example in examples["train"]):
        task = MultiLabel(task.settings, task.tokenizer)
    task.set_labels(examples["train"], [each for split, rows in examples.items() if split != "train" for each in rows])
    if "validation" not in examples:
        examples["train"], examples["validation"] = _split_train(task, examples["train"])
    print("rows: " + ", ".join(f"{split} {len(rows):,}" for split, rows in examples.items()))
    return task, examples


def _split_train(task: Task, train: list[Example]) -> tuple[list[Example], list[Example]]:
    """Hold out a tenth of the training rows for validation. Rows of a group stay together."""
    group_of = {example.row: example.inputs.get(task.group_by, example.row) for example in train}
    groups = list(dict.fromkeys(group_of.values()))
    if len(groups) < 2:
        unit = task.group_by or "row"
        what = f"there is only one {unit} in {len(train):,} rows, so none can be held out for validation"
        conll = "; in CoNLL, empty lines end sentences" if isinstance(task, Tag) else ""
        raise InputError(what, where="--train", remedy=f"provide more {unit}s, or pass --validation INPUT{conll}")
    classes: dict[Any, set[str]] = {group: set() for group in groups}
    for example in train:
        classes[group_of[example.row]].update(task.classes_of(example))
    order = [groups[i] for i in rng.stream(task.settings.seed, "hold out").permutation(len(groups))]
    held_out = hold_out(order, classes, max(1, round(len(groups) / 10)))
    validation = [example for example in train if group_of[example.row] in held_out]
    print(f"held out for validation: {len(validation):,} of {len(train):,} rows, drawn with seed {task.settings.seed}")
    return [example for example in train if group_of[example.row] not in held_out], validation


def hold_out(order: Sequence[Any], classes: Mapping[Any, set[str]], num_groups: int) -> set[Any]:
    """Return the first `num_groups` groups, with exchanges so that both parts contain each class where possible.

    The other groups form the second part. If a part lacks a class, a group with this class is moved into it from the
    other part, and another group is moved back if possible. A group is moved only if every class of the group remains
    in the part that it leaves.
    """
    places = itertools.count()
    parts = [{group: next(places) for group in groups} for groups in (order[:num_groups], order[num_groups:])]
    counts = [Counter(name for group in part for name in classes[group]) for part in parts]
    groups_of: dict[str, list[Any]] = {}
    for group in order:
        for name in classes[group]:
            groups_of.setdefault(name, []).append(group)

    def removable(groups: Iterable[Any], part: int) -> Iterator[Any]:
        present = (group for group in groups if group in parts[part])
        return (group for group in present if all(counts[part][name] > 1 for name in classes[group]))

    def move(group: Any, part: int) -> None:
        del parts[1 - part][group]
        counts[1 - part].subtract(classes[group])
        parts[part][group] = next(places)
        counts[part].update(classes[group])

    for name in sorted(groups_of):
        for lacking, other in ((0, 1), (1, 0)):
            if not counts[lacking][name] and (found := list(removable(groups_of[name], other))):
                if (returned := next(removable(parts[lacking], lacking), None)) is not None:
                    move(returned, other)
                move(min(found, key=parts[other].__getitem__), lacking)
    return set(parts[0])


def _identity(task: Task, model: Path, examples: dict[str, list[Example]]) -> dict[str, Any]:
    """Return everything that affects the result. Inputs are identified by content, so files may be moved."""
    data = {}
    for split, rows in examples.items():
        digest = hashlib.sha256()
        for example in rows:
            content = json.dumps([example.inputs, example.label], ensure_ascii=False)
            digest.update(content.encode("utf-8", "surrogatepass"))
        data[split] = {"rows": len(rows), "sha256": digest.hexdigest()}
    weights = {"config": files.sha256_file(model / CONFIG), "weights": weights_sha256(model, "MODEL")}
    return {
        "model": weights | {"tokenizer": task.tokenizer.hash},
        "data": data,
        "settings": json.loads(json.dumps(asdict(task.settings))),  # tuples become lists, as in the saved manifest
    }


def _check_finished(output: Path) -> None:
    """Raise DataError if a finished output is damaged."""
    if damage := files.damage_of_folder(output):
        remedy = "restore it from a copy, or fine-tune again with --overwrite (renames the old folder)"
        raise DataError(f"{output} is damaged: {damage}", where="--output", remedy=remedy)


def _train(tuner: "FineTuner", out: Output) -> None:
    """Run the trials and write the best model and its results to the output folder."""
    start, task, examples = time.monotonic(), tuner.task, tuner.examples
    print(f"{tuner.device.type}, {tuner.precision.name} ({tuner.precision.reason}), {torch.get_num_threads()} threads")
    folder = files.local_path((out.folder / TRIALS).resolve(), "--output")  # safetensors does not open other paths
    refits = out.identity["refits"]
    trial = task.settings.with_epochs(len(tuner.windows["train"]))
    report = tuner.train(trial, folder / _TRAIN_ROWS)
    refit_epochs = None
    if refits and tuner.is_overfitted(report):
        print(f"epoch {report['best_epoch']} is kept, because later epochs are worse on the validation rows")
    elif refits:
        print(f"training again for {trial.epochs} epochs on all rows, including the validation rows")
        tuner.train(trial, folder / _ALL_ROWS, on_all_rows=True)
        refit_epochs = trial.epochs
    with files.atomic_folder(folder / _RESULT) as result:
        shutil.copytree(folder / (_ALL_ROWS if refit_epochs else _TRAIN_ROWS) / MODEL, result, dirs_exist_ok=True)
        predictions = {"validation": tuner.predict(folder / _TRAIN_ROWS / MODEL, "validation")}
        if "test" in examples:
            predictions["test"] = tuner.predict(result, "test")
        scores = {
            split: task.score(examples[split], split_predictions)
            for split, split_predictions in predictions.items()
            if all(window.labels for window in tuner.windows[split])
        }
        split = "test" if "test" in scores else "validation"
        baselines = _baselines(tuner, trial, folder, split, refits=refits and split == "test")
        metrics = {
            "task": out.identity["task"],
            "main_metric": task.main_metric,
            **scores,
            **report,
            "refit_epochs": refit_epochs,
            "baselines": baselines,
            "warning": _warning(tuner, split, scores[split][task.main_metric], baselines),
            "seconds": round(time.monotonic() - start, 1),
            "rows": {name: len(rows) for name, rows in examples.items()},
        }
        _write_results(tuner, trial, metrics, predictions, result)
    for file in sorted((folder / _RESULT).iterdir(), key=lambda file: file.name == CONFIG):  # a model has a config.json
        file.replace(out.folder / file.name)
    out.publish({"rows": metrics["rows"], "predictions": list(predictions)[-1], "may_be_none": task.allows_no_answer})
    _print_results(tuner, trial.epochs, metrics, list(predictions))


def _print_results(tuner: "FineTuner", epochs: int | None, metrics: dict[str, Any], splits: list[str]) -> None:
    classes_of, examples = tuner.task.classes_of, tuner.examples
    known = {name for example in examples["train"] for name in classes_of(example)}
    for split in splits:
        if split in metrics:
            scores = "  ".join(f"{name} {value:.4f}" for name, value in metrics[split].items())
            missing = sorted(known - {name for example in examples[split] for name in classes_of(example)})
            more = f" and {len(missing) - 10:,} more" if len(missing) > 10 else ""
            note = f"  (no rows with {', '.join(missing[:10])}{more})" if missing else ""
            print(f"{split}: {scores}{note}")
        else:
            print(f"{split}: not scored, because not all rows have a label")
    for name, score in metrics["baselines"].items():
        print(f"{name}: {100 * score:.1f} %")
    if metrics["refit_epochs"]:
        print(f"trained for {metrics['refit_epochs']} epochs on all rows")
    else:
        print(f"best epoch {metrics['best_epoch']} of {epochs}")


def _baselines(tuner: "FineTuner", trial: Settings, folder: Path, split: str, *, refits: bool) -> dict[str, float]:
    """Return the main metric of each baseline on a split. With `refits`, they train on the validation rows too."""
    task, examples = tuner.task, tuner.examples
    predictions, train = {}, examples["train"] + (examples["validation"] if refits else [])
    if not task.settings.no_baseline and (from_words := task.word_baseline(train, examples[split])) is not None:
        predictions["words alone"] = from_words
    if task.settings.baselines:
        untrained = folder / "untrained"
        report = tuner.train(trial, untrained, untrained=True)
        if refits and not tuner.is_overfitted(report):
            untrained = folder / "untrained-all"
            tuner.train(trial, untrained, untrained=True, on_all_rows=True)
        predictions["the same network untrained"] = tuner.predict(untrained / MODEL, split)
    return {name: task.score(examples[split], each)[task.main_metric] for name, each in predictions.items()}


def _warning(tuner: "FineTuner", split: str, score: float, baselines: dict[str, float]) -> str:
    """Return a warning if the score is no better than a constant, or not clearly better than a baseline; else ""."""
    examples = tuner.examples[split]
    rows, result = f"the {len(examples):,} {split} rows", f"{tuner.task.main_metric} {score:.4f}"
    constant, constant_score = tuner.task.constant_baseline(examples)
    if constant_score == 1.0 and not tuner.task.settings.regression:
        return f"{rows} have only one class, so {result} says nothing: score the model on other rows"
    if score <= constant_score:
        what = f"no sign of learning: {result} on {rows} is no better than {constant} ({constant_score:.4f})"
        return f"{what}. Check the labels; try a larger --learning-rate, more --epochs or more rows"
    best = max(baselines, key=lambda name: baselines[name], default=None)
    if best is None or is_clearly_better(score, baselines[best], len(examples)):
        return ""
    what = f"not clearly better than {best}: {result} versus {baselines[best]:.4f} on {rows}"
    if PRETRAINING in files.read_json(tuner.model / CONFIG):  # the model was pretrained by this package
        return f"{what}. Pretrain it longer on more text, or label more rows"
    return f"{what}. Continue pretraining on similar text (train --init-from), or label more rows"


def _write_results(
    tuner: "FineTuner", trial: Settings, metrics: dict[str, Any], predictions: dict[str, list[Any]], result: Path
) -> None:
    """Write metrics, predictions for the last split, checksums and the model card."""
    task, split = tuner.task, list(predictions)[-1]
    files.write_json(result / METRICS, metrics)
    with (result / "predictions.jsonl").open("w", encoding="utf-8") as file:
        for example, prediction in zip(tuner.examples[split], predictions[split], strict=True):
            file.write(json.dumps(task.record(example, prediction), ensure_ascii=False) + "\n")
    files.write_checksums(result)
    pipeline, scores = task.pipeline_tag, {name: metrics[name] for name in predictions if name in metrics}
    names = dict.fromkeys(name for each in scores.values() for name in each)
    card = render(
        "finetuned_card.md",
        task=metrics["task"], kind="regression" if trial.regression else pipeline.replace("-", " "),
        model_class=task.model_class, base=name_of_folder(tuner.model), rows=metrics["rows"], splits=list(scores),
        scores=[(name, *(f"{each[name]:.4f}" if name in each else "" for each in scores.values())) for name in names],
        settings=asdict(trial) | {"learning_rate": f"{metrics['learning_rate']:g}"},
        baselines={name: f"{score:.4f}" for name, score in metrics["baselines"].items()},
        metric=metrics["main_metric"],
        **{name: metrics[name] for name in ("best_epoch", "refit_epochs", "warning")},
    )  # fmt: skip
    data = ModelCardData(library_name="transformers", pipeline_tag=pipeline, tags=["bert", pipeline, "bert-pretrain"])
    files.write_text(result / CARD, f"---\n{data}\n---\n\n{card}")
