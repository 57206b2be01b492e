"""`finetune`: reads and checks rows, trains, keeps the best epoch, predicts, and writes a Hugging Face folder.

All work happens in `OUTPUT/.trials`. At the end, the model, `metrics.json` and `predictions.jsonl` are moved to
`OUTPUT`, and the manifest is written. The same command resumes an unfinished run, or does nothing after its end.
"""

import importlib.util
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bert_pretrain import rng
from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import ConfigError, DataError, InputError
from bert_pretrain.finetune.answer import Answer
from bert_pretrain.finetune.baselines import is_clearly_better
from bert_pretrain.finetune.classify import Classify, MultiLabel
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
from bert_pretrain.model.sequences import open_bert
from bert_pretrain.report.render import render
from bert_pretrain.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bert_pretrain.finetune.training import FineTuner  # needs the packages that `_check_environment` looks for

KIND = "finetune"
METRICS = "metrics.json"
TASK_CLASSES: dict[str, Callable[[Settings, Tokenizer], Task]] = {"classify": Classify, "tag": Tag, "answer": Answer}
TRIALS = ".trials"  # folder of unfinished work in the output
Scores = dict[str, dict[str, float]]  # metrics of each split
_RESULT = "result"  # its subfolder of the files of the output


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
    output = output.resolve() if output.is_symlink() or output.name in ("", "..") else output
    _check_environment(device)
    torch_device = choose_device(device)
    settings = settings or Settings()
    # Checks the folder; `FineTuner` opens it again.
    bert = open_bert(model, TrainConfig(device="cpu"), max_length=settings.max_length)
    settings = settings.resolve(task, bert.max_length)
    prepared_task, examples = _read(TASK_CLASSES[task](settings, bert.tokenizer), inputs)
    identity = {"task": task, "refits": validation is None, **_identity(prepared_task, model, examples)}
    out = Output(output, KIND, identity, [model, *(each.location for each in inputs)])
    with out.open(overwrite=overwrite) as state:
        if state is OutputState.COMPLETE:
            if damage := files.damage_of_folder(output):
                raise DataError(
                    f"{output} is damaged: {damage}",
                    where="--output",
                    remedy="restore it from a copy, or fine-tune again with --overwrite (renames the old folder)",
                )
            print(f"up to date: {output}")
        else:
            from bert_pretrain.finetune.training import FineTuner

            _train(FineTuner(prepared_task, model, examples, torch_device), out)
            print(f"model, metrics and predictions: {output}")
        shutil.rmtree(output / TRIALS, ignore_errors=True)
    if warning := files.read_json(output / METRICS).get("warning"):
        print(f"WARNING: {warning}")
    return output


def _check_environment(device: str) -> None:
    packages = ("transformers", "sklearn", "seqeval")
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"fine-tuning needs {', '.join(missing)}",
            where="finetune",
            remedy='pip install "bert-pretrain[finetune]"',
        )
    if num_ranks() > 1:
        raise ConfigError(
            "fine-tuning does not support several processes",
            where="finetune",
            remedy="start one process, without torchrun",
        )
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"unknown device '{device}'",
            where="--device",
            remedy="use auto, cpu or cuda; select one of several GPUs with CUDA_VISIBLE_DEVICES=N",
        )


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
    classes: dict[Any, set[str]] = {group: set() for group in group_of.values()}
    for example in train:
        classes[group_of[example.row]].update(task.classes_of(example.label))
    if len(classes) < 2:
        raise InputError(
            f"there is only one {task.group_by or 'row'}, so none can be held out for validation",
            where="--train",
            remedy="provide more, or pass --validation INPUT; in CoNLL, empty lines end rows",
        )
    groups = list(classes)
    order = [groups[i] for i in rng.stream(task.settings.seed, "hold out").permutation(len(groups))]
    held_out = hold_out(order, classes, max(1, round(len(groups) / 10)))
    validation = [example for example in train if group_of[example.row] in held_out]
    print(f"held out for validation: {len(validation):,} of {len(train):,} rows, drawn with seed {task.settings.seed}")
    return [example for example in train if group_of[example.row] not in held_out], validation


def hold_out(order: Sequence[Any], classes: Mapping[Any, set[str]], num_groups: int) -> set[Any]:
    """Return the first `num_groups` groups or, if they lack a class, others or more that contain it.

    A class with a single group stays in the other part, where possible.
    """
    remaining = Counter(name for group in order for name in classes[group])
    held_out: dict[Any, None] = {}
    found: set[str] = set()

    def hold(group: Any) -> None:
        held_out[group] = None
        found.update(classes[group])
        remaining.subtract(classes[group])

    for group in order:  # one group for each class
        if not classes[group] <= found and all(remaining[name] > 1 for name in classes[group]):
            hold(group)
    for allows_last in (False, True):
        for group in order:
            is_spare = all(remaining[name] > 1 for name in classes[group])
            if len(held_out) < num_groups and group not in held_out and (allows_last or is_spare):
                hold(group)
    return set(held_out)


def _identity(task: Task, model: Path, examples: dict[str, list[Example]]) -> dict[str, Any]:
    """Return everything that affects the result. Inputs are identified by content, so files may be moved."""
    data = {}
    for split, rows in examples.items():
        contents = [[example.inputs, example.label] for example in rows]
        data[split] = {"rows": len(rows), "sha256": files.json_digest(contents)}
    weights = {"config": files.sha256_file(model / CONFIG), "weights": weights_sha256(model, "MODEL")}
    return {
        "model": weights | {"tokenizer": task.tokenizer.hash},
        "data": data,
        "settings": json.loads(json.dumps(asdict(task.settings))),  # tuples become lists, as in the saved manifest
    }


def _train(tuner: "FineTuner", out: Output) -> None:
    """Train, and write the model and its results to the output folder."""
    start, task, examples = time.monotonic(), tuner.task, tuner.examples
    print(f"{tuner.device.type}, {tuner.precision.name} ({tuner.precision.reason}), {torch.get_num_threads()} threads")
    folder = files.local_path((out.folder / TRIALS).resolve(), "--output")  # safetensors does not open other paths
    refits = out.identity["refits"]
    report, model = tuner.train(folder, refits=refits)
    predictions = {"validation": tuner.predict(folder / "train" / MODEL, "validation")}
    if "test" in examples:
        predictions["test"] = tuner.predict(model, "test")
    last_split = list(predictions)[-1]
    scores = {}
    for split, split_predictions in predictions.items():
        if all(example.label is not None for example in examples[split]):
            scores[split] = task.score(examples[split], split_predictions)
    baselines = _baselines(tuner, folder, list(scores)[-1], refits=refits)
    rows = {split: len(split_examples) for split, split_examples in examples.items()}
    metrics = {
        "task": out.identity["task"],
        "main_metric": task.main_metric,
        **scores,
        **report,
        "baselines": baselines,
        "warning": _warning(tuner, scores, baselines),
        "seconds": round(time.monotonic() - start, 1),
        "rows": rows,
    }
    with files.atomic_folder(folder / _RESULT) as result:
        shutil.copytree(model, result, dirs_exist_ok=True)
        files.write_json(result / METRICS, metrics)
        with (result / "predictions.jsonl").open("w", encoding="utf-8") as file:
            for example, prediction in zip(examples[last_split], predictions[last_split], strict=True):
                file.write(json.dumps(task.record(example, prediction), ensure_ascii=False) + "\n")
        files.write_checksums(result)
        files.write_text(result / CARD, _card(tuner, metrics, scores))
    for path in sorted((folder / _RESULT).iterdir(), key=lambda path: path.name == CONFIG):  # a model has a config.json
        path.replace(out.folder / path.name)
    out.publish({"rows": rows, "predictions": last_split, "may_be_none": task.allows_no_answer})
    _print_results(tuner, metrics, scores)


def _print_results(tuner: "FineTuner", metrics: dict[str, Any], scores: Scores) -> None:
    for split, values in scores.items():
        print(f"{split}: {'  '.join(f'{name} {value:.4f}' for name, value in values.items())}")
    if "test" in tuner.examples.keys() - scores:
        print("test: not scored, because not all rows have a label")
    for name, score in metrics["baselines"].items():
        print(f"{name}: {100 * score:.1f} %")
    if metrics["refit_epochs"]:
        print(f"trained for {metrics['refit_epochs']} epochs on all rows")
    else:
        print(f"best epoch {metrics['best_epoch']} of {tuner.settings.epochs}")


def _baselines(
    tuner: "FineTuner",
    folder: Path,
    split: str,
    *,
    refits: bool,
) -> dict[str, float]:
    """Return the main metric of each baseline on a split. For test rows, they train on the same rows as the model."""
    task, examples = tuner.task, tuner.examples
    trains_on_all = refits and split == "test"
    train = examples["train"] + (examples["validation"] if trains_on_all else [])
    predictions = {}
    if not task.settings.no_baseline and (from_words := task.word_baseline(train, examples[split])) is not None:
        predictions["words alone"] = from_words
    if task.settings.baselines:
        _, model = tuner.train(folder / "untrained", refits=trains_on_all, untrained=True)
        predictions["the same network untrained"] = tuner.predict(model, split)
    return {name: task.score(examples[split], each)[task.main_metric] for name, each in predictions.items()}


def _warning(tuner: "FineTuner", scores: Scores, baselines: dict[str, float]) -> str:
    """Return a warning if the score is no better than a constant, or not clearly better than a baseline; else ""."""
    split = list(scores)[-1]
    score, examples = scores[split][tuner.task.main_metric], tuner.examples[split]
    rows, result = f"the {len(examples):,} {split} rows", f"{tuner.task.main_metric} {score:.4f}"
    constant, constant_score = tuner.task.constant_baseline(examples)
    if constant_score == 1.0:
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


def _card(tuner: "FineTuner", metrics: dict[str, Any], scores: Scores) -> str:
    """Return the model card."""
    task, settings = tuner.task, tuner.settings
    names = dict.fromkeys(name for each in scores.values() for name in each)
    table = [(name, *(f"{each.get(name, math.nan):.4f}" for each in scores.values())) for name in names]
    return render(
        "finetuned_card.md",
        pipeline_tag=task.pipeline_tag,
        kind="regression" if settings.regression else task.pipeline_tag.replace("-", " "),
        model_class=task.model_class,
        base=name_of_folder(tuner.model),
        splits=list(scores),
        scores=table,
        settings=asdict(settings) | {"learning_rate": f"{metrics['learning_rate']:g}"},
        metrics=metrics,
    )
