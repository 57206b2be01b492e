"""`finetune`: read and check, train with the best epoch kept, predict, and write a Hugging Face folder.

Work goes on in `OUTPUT.partial`; `OUTPUT` appears when all is done, with `metrics.json` and `predictions.jsonl` beside
the model. The same command again continues, or finds it done.
"""

import contextlib
import glob
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bert_pretrain import manifest, rng
from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.files import (
    atomic_folder,
    exclusive,
    is_bookkeeping,
    move_aside,
    sha256_file,
    write_json,
    write_text,
)
from bert_pretrain.model.huggingface import CARD, CONFIG
from bert_pretrain.model.weights import weights_sha256
from bert_pretrain.tokenizer import Tokenizer
from bert_pretrain.tools.finetune.answer import Answer
from bert_pretrain.tools.finetune.card import finetuned_card
from bert_pretrain.tools.finetune.classify import Classify
from bert_pretrain.tools.finetune.settings import Settings
from bert_pretrain.tools.finetune.tag import Tag
from bert_pretrain.tools.finetune.windows import Task, Window, longest_first
from bert_pretrain.tools.inference import open_bert
from bert_pretrain.train.hardware import choose_device, choose_precision

if TYPE_CHECKING:
    from types import ModuleType

KIND = "finetune"
_PACKAGES = ("transformers", "accelerate", "sklearn", "seqeval")


@dataclass(frozen=True)
class Split:
    """The examples of one input, and what the model sees of them."""

    examples: list[Any]
    windows: list[Window]

    @property
    def seen(self) -> tuple[list[Any], list[Window]]:
        return self.examples, self.windows


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
) -> Path:
    """Fine-tune a BERT folder on a task.

    Args:
        task: `classify`, `tag` or `answer`.
        model: any BERT folder with its tokenizer.
        train: a table of labelled rows, as docs/finetuning.md lays out; `validation` and `test` likewise.
        output: the Hugging Face folder to write.
        validation: by which the best epoch is chosen; a tenth of the training rows by default.
        test: predicted by the best epoch, and scored if labelled.
        settings: all else.
        device: `auto`, `cpu` or `cuda`.
        overwrite: move another output aside instead of refusing it.

    Returns:
        The folder that was written.

    Raises:
        UserError: for everything that a person can mend.
    """
    chosen = settings or Settings()
    chosen.check(task)
    output = output if output.name not in ("", "..") else output.resolve()
    _check_surroundings(device)
    opened = open_bert(model, TrainConfig(device="cpu"))  # only for the checks it makes
    tokenizer = opened.tokenizer
    chosen = chosen.resolve(task, opened.max_length)
    kinds: dict[str, type[Classify] | type[Tag] | type[Answer]] = {"classify": Classify, "tag": Tag, "answer": Answer}
    head: Task = kinds[task](chosen, tokenizer)
    examples = _read(head, {"train": train, "validation": validation, "test": test}, chosen.seed)
    identity = _identity(task, head, model, examples, chosen)
    work = output.with_name(f"{output.name}.partial")
    with _workplace(work):
        if _is_done(output, work, identity, overwrite):
            shutil.rmtree(work)
            print(f"up to date: {output}")
            return output
        for leftover in output.parent.glob(f".{glob.escape(output.name)}.*.tmp"):  # of a run killed while writing
            shutil.rmtree(leftover)
        _train(Setting(head, model, tokenizer, examples, chosen, identity, choose_device(device)), work, output)
        shutil.rmtree(work)
    return output


@contextlib.contextmanager
def _workplace(work: Path) -> Iterator[None]:
    """Hold the folder of work, and leave none behind where nothing was done."""
    try:
        with exclusive(work):
            yield
    finally:
        with contextlib.suppress(OSError):
            work.rmdir()


def _check_surroundings(device: str) -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"fine-tuning needs {', '.join(missing)}",
            where="finetune",
            remedy='pip install "bert-pretrain[finetune]"',
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("torchrun starts several processes", where="finetune", remedy="start one, without torchrun")
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"the device is '{device}'",
            where="--device",
            remedy="give auto, cpu or cuda; of several cards CUDA_VISIBLE_DEVICES=N chooses one",
        )


def _read(task: Task, inputs: dict[str, str | None], seed: int) -> dict[str, list[Any]]:
    """Return the examples of each split that there is; without an input for validation a tenth of train is held out."""
    examples = {split: task.read(source, f"--{split}") for split, source in inputs.items() if source is not None}
    task.settle(examples["train"], examples.get("validation", []), examples.get("test", []))
    if "validation" not in examples:
        train = examples["train"]
        groups = list(dict.fromkeys(task.group(example) for example in train))
        if len(groups) < 2:
            raise InputError(
                "nothing can be held out of so little", where="--train", remedy="give more, or --validation INPUT"
            )
        order = rng.stream(seed, "hold out").permutation(len(groups))
        held = {groups[number] for number in order[: max(1, round(len(groups) / 10))]}
        examples["validation"] = [example for example in train if task.group(example) in held]
        examples["train"] = [example for example in train if task.group(example) not in held]
        num_held = len(examples["validation"])
        print(f"held out for validation: {num_held:,} of {len(train):,} rows, drawn with seed {seed}")
    print("rows: " + ", ".join(f"{split} {len(rows):,}" for split, rows in examples.items()))
    return examples


def _identity(task: str, head: Task, model: Path, examples: dict[str, list[Any]], settings: Settings) -> dict[str, Any]:
    """Return all that changes the result; inputs by what they teach, so that they may move."""
    rows = {}
    for split, each in examples.items():
        digest = hashlib.sha256()
        for example in each:
            digest.update(json.dumps(head.content(example), ensure_ascii=False).encode("utf-8", "surrogatepass"))
        rows[split] = {"rows": len(each), "sha256": digest.hexdigest()}
    weights = {"config": sha256_file(model / CONFIG), "weights": weights_sha256(model, "MODEL")}
    return {
        "task": task,
        "model": weights | {"tokenizer": head.tokenizer.hash},
        "data": rows,
        "settings": asdict(settings),
    }


def _is_done(output: Path, work: Path, identity: dict[str, Any], overwrite: bool) -> bool:
    """Claim the output and the folder of work beside it; return whether the same command has finished before."""
    there = output.exists() and any(not is_bookkeeping(path) for path in output.iterdir())
    if there and overwrite:
        print(f"moved what was there aside: {move_aside(output)}")
    elif there:
        return manifest.claim(output, KIND, identity) is manifest.Progress.COMPLETE
    manifest.claim(work, KIND, identity, overwrite=overwrite)
    return False


@dataclass(frozen=True)
class Setting:
    """All that training needs, read and checked."""

    task: Task
    model: Path
    tokenizer: Tokenizer
    examples: dict[str, list[Any]]
    settings: Settings
    identity: dict[str, Any]
    device: torch.device


def _train(setting: Setting, work: Path, output: Path) -> None:
    """Train in `work` and put the result at `output`."""
    training: ModuleType = importlib.import_module("bert_pretrain.tools.finetune.training")  # imports transformers
    began = time.monotonic()
    task, settings = setting.task, setting.settings
    splits = {split: Split(rows, task.encode(rows, split)) for split, rows in setting.examples.items()}
    for split in splits.keys() - {"train"}:
        splits[split] = replace(splits[split], windows=longest_first(splits[split].windows))
    validation = splits["validation"]
    precision = choose_precision("auto", setting.device)
    print(f"{setting.device.type}, {precision.name} ({precision.reason}), {torch.get_num_threads()} threads")
    with training.quiet():
        network = training.open_network(setting.model, task, settings)
        trainer = training.make_trainer(
            network,
            task,
            settings,
            setting.tokenizer,
            splits["train"].windows,
            validation.windows,
            lambda logits: task.score(validation.examples, task.decode(*validation.seen, logits)),
            work / "checkpoints",
            setting.device,
            precision,
        )
        report = training.fit(trainer, work / "checkpoints")
        with atomic_folder(output) as result:
            network.save_pretrained(result)
            setting.tokenizer.save(result, network.config.max_position_embeddings)
            found = {}
            for split, held in splits.items():
                if split != "train":
                    logits = training.predict(result, task, held.windows, settings, setting.device, split)
                    found[split] = task.decode(*held.seen, logits)
            scores = _scores(task, splits, found)
            _write_findings(setting, scores, {**report, "seconds": round(time.monotonic() - began, 1)}, found, result)
    for split, figures in scores.items():
        print(f"{split}: " + "  ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    print(f"best epoch {report['best_epoch']} of {settings.epochs}; model, metrics.json, predictions.jsonl: {output}")


def _scores(task: Task, splits: dict[str, Split], found: dict[str, list[Any]]) -> dict[str, dict[str, float]]:
    """Return the metrics of the splits that have labels."""
    scores = {}
    for split, predictions in found.items():
        if task.has_labels(splits[split].examples):
            scores[split] = task.score(splits[split].examples, predictions)
        else:
            print(f"not all rows of --{split} have a label, so they are predicted, not scored")
    return scores


def _write_findings(
    setting: Setting, scores: dict[str, Any], report: dict[str, Any], found: dict[str, list[Any]], result: Path
) -> None:
    """Write metrics, the predictions of the last split, and the manifest last."""
    predicted = "test" if "test" in found else "validation"
    rows = {split: len(examples) for split, examples in setting.examples.items()}
    head = {"task": setting.identity["task"], "main_metric": setting.task.main_metric}
    write_json(result / "metrics.json", {**head, **scores, **report, "rows": rows})
    folder = setting.model.resolve()
    base = folder.parent.name if folder.name == "model" else folder.name  # RUN/model is known by its run
    task, settings = setting.task, asdict(setting.settings)
    card = finetuned_card(head["task"], task.model_class, base, rows, scores, settings, report["best_epoch"])
    write_text(result / CARD, card)
    with (result / "predictions.jsonl").open("w", encoding="utf-8") as file:
        for example, prediction in zip(setting.examples[predicted], found[predicted], strict=True):
            file.write(json.dumps(setting.task.record(example, prediction), ensure_ascii=False) + "\n")
    manifest.complete(result, KIND, setting.identity, {"rows": rows, "predictions": predicted})
