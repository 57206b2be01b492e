"""Evaluate models in fine-tuning, and compare them with untrained networks and with word counts.

    python scripts/bench_use.py ROWS_FOLDER MODEL... --work OUT [--tasks en_subj en_trec] [--ways ...] [--split test]

ROWS_FOLDER has TASK.train.jsonl and TASK.test.jsonl, with rows of `text` and `label`. Use `--split validation` for all
choices: it scores a tenth of the training rows, a different one for each model. `--split test` scores the test rows.
Pass all models that differ only in the pretraining seed. A way is a method that predicts labels. The table has one row
per task and way: mean, minimum and maximum of the accuracy over the models, the first way minus this way with a 95 %
interval over rows and models, and the median seconds. The ways:

    defaults     `finetune classify` with its defaults
    untrained    the same with randomly initialized weights
    own rate     random weights with AdamW at 3e-4 or 1e-3, the better one on validation rows
    words        logistic regression on word counts; for Chinese, on counts of characters and character pairs
    trainer      the Trainer of `transformers` with the learning rate and epochs in the model card
    features     logistic regression (C = 10) on the mean of the layer that is best on validation rows

Results in OUT/results.jsonl are not repeated. With `--minutes`, the pretraining time of each model, the accuracies are
appended to the file `--record`, and all its records are plotted to a .png file next to it.
"""

import argparse
import itertools
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from matplotlib.figure import Figure
from sklearn.linear_model import LogisticRegression
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForPreTraining, Trainer

from bert_pretrain.finetune.baselines import fit_and_predict_tfidf
from bert_pretrain.finetune.run import METRICS, finetune
from bert_pretrain.finetune.settings import Settings

Rows = list[dict[str, Any]]
Way = Callable[[Path, "Split"], list[str]]  # (model, split) to predicted labels
RECORD = Path(__file__).resolve().parents[1] / "docs" / "use.jsonl"
OWN_RATES = [Settings(learning_rate=rate) for rate in (3e-4, 1e-3)]


class Split:
    """The rows of a task to train on, and the rows to score for one model."""

    def __init__(self, folder: Path, task: str, split: str, model_number: int) -> None:
        rows = read(folder / f"{task}.train.jsonl")
        random.Random(7).shuffle(rows)
        tenth = len(rows) // 10
        begin = model_number % 10 * tenth
        self.model_number = model_number
        self.scored = rows[begin : begin + tenth] if split == "validation" else read(folder / f"{task}.test.jsonl")
        self.train = rows[:begin] + rows[begin + tenth :] if split == "validation" else rows
        self.labels = [str(row["label"]) for row in self.scored]


def read(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: Rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def finetuned(model: Path, split: Split, settings: Sequence[Settings]) -> list[str]:
    """Return the predictions of `finetune classify` with the settings that are best on validation rows."""
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train, test = write(folder / "train.jsonl", split.train), write(folder / "test.jsonl", split.scored)
        for number, each in enumerate(settings):
            output = finetune("classify", model, train=train, test=test, output=folder / str(number), settings=each)
            report = json.loads((output / METRICS).read_text(encoding="utf-8"))
            predictions = [str(row["prediction"]) for row in read(output / "predictions.jsonl")]
            results.append((report["validation"]["accuracy"], predictions))
    return max(results, key=lambda result: result[0])[1]


def with_random_weights(way: Way) -> Way:
    """Return a way that replaces the weights of a model by random ones."""

    def predict(model: Path, split: Split) -> list[str]:
        transformers.set_seed(split.model_number)
        with tempfile.TemporaryDirectory() as folder:
            BertForPreTraining(transformers.AutoConfig.from_pretrained(model)).save_pretrained(folder)
            AutoTokenizer.from_pretrained(model).save_pretrained(folder)
            return way(Path(folder), split)

    return predict


def words(_: Path, split: Split) -> list[str]:
    classes = sorted({str(row["label"]) for row in split.train})
    train, labels = [(row["text"],) for row in split.train], [[str(row["label"])] for row in split.train]
    scores = fit_and_predict_tfidf(train, labels, [(row["text"],) for row in split.scored], classes)
    return [classes[index] for index in scores.argmax(axis=1)]


def trainer(model: Path, split: Split) -> list[str]:
    """Return the predictions of a Trainer as in the example of the model card."""
    card = (model / "README.md").read_text(encoding="utf-8")
    rate, epochs = re.search(r"learning_rate=(\S+), num_train_epochs=(\d+)", card).groups()  # type: ignore[union-attr]
    classes = sorted({str(row["label"]) for row in split.train})
    transformers.set_seed(0)
    network = AutoModelForSequenceClassification.from_pretrained(model, num_labels=len(classes))
    tokenizer = AutoTokenizer.from_pretrained(model)
    inputs = []
    for rows in (split.train, split.scored):
        encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=128)["input_ids"]
        labels = [classes.index(str(row["label"])) for row in rows]
        inputs.append([{"input_ids": ids, "labels": label} for ids, label in zip(encoded, labels, strict=True)])
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, learning_rate=float(rate), num_train_epochs=int(epochs), per_device_train_batch_size=32,
            report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        collator = transformers.DataCollatorWithPadding(tokenizer)
        network_trainer: Any = Trainer(network, arguments, train_dataset=inputs[0], data_collator=collator)
        network_trainer.train()
        scores = network_trainer.predict(inputs[1]).predictions
    return [classes[index] for index in scores.argmax(axis=1)]


def features(model: Path, split: Split) -> list[str]:
    train, scored = mean_vectors(model, split.train), mean_vectors(model, split.scored)
    labels = [str(row["label"]) for row in split.train]
    cut = len(labels) * 9 // 10
    scores = []
    for layer in train:
        fitted = LogisticRegression(C=10, max_iter=1000).fit(layer[:cut], labels[:cut])
        scores.append(fitted.score(layer[cut:], labels[cut:]))
    best = int(np.argmax(scores))
    fitted = LogisticRegression(C=10, max_iter=1000).fit(train[best], labels)
    return [str(label) for label in fitted.predict(scored[best])]


@torch.no_grad()
def mean_vectors(model: Path, rows: Rows) -> list[np.ndarray]:
    """Return the mean vectors of each layer, the embeddings first; each array is (rows, hidden)."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), transformers.AutoModel.from_pretrained(model).eval()
    batches: list[list[np.ndarray]] = []
    for begin in range(0, len(rows), 64):
        texts = [row["text"] for row in rows[begin : begin + 64]]
        batch = tokenizer(texts, truncation=True, max_length=128, padding=True, return_tensors="pt")
        hidden = network(**batch, output_hidden_states=True).hidden_states
        mask = batch["attention_mask"][:, :, None]
        batches.append([((layer * mask).sum(1) / mask.sum(1)).numpy() for layer in hidden])
    return [np.concatenate(layer) for layer in zip(*batches, strict=True)]


defaults: Way = partial(finetuned, settings=[Settings()])
WAYS: Mapping[str, Way] = {
    "defaults": defaults,
    "untrained": with_random_weights(defaults),
    "own rate": with_random_weights(partial(finetuned, settings=OWN_RATES)),
    "words": words,
    "trainer": trainer,
    "features": features,
}


def network_of(model: Path) -> str:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return f"L{config['num_hidden_layers']}-H{config['hidden_size']}"


def interval(correct: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Return the difference of two accuracies in points, and the half-width of its 95 % interval.

    The arrays are booleans, (models, rows). Rows and models are both samples, so their variances are added.
    """
    difference = 100 * (correct.astype(float) - other.astype(float))
    variance = difference.mean(axis=0).var(ddof=1) / difference.shape[1]
    if len(difference) > 1:
        variance += difference.mean(axis=1).var(ddof=1) / len(difference)
    return float(difference.mean()), 1.96 * float(np.sqrt(variance))


# Ways without pretraining, plotted as horizontal lines.
LINES = {"own rate": ("--", "untrained, own best rate"), "words": (":", "word counts")}


def draw(rows: Rows, path: Path) -> None:
    """Plot the accuracies of each task over the minutes of pretraining: mean, minimum and maximum per network."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    times = sorted({row["minutes"] for row in rows})
    figure = Figure(figsize=(4.2 * len(tasks), 3.4), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        scores: dict[str, dict[float, list[float]]] = {}
        for row in sorted(rows, key=lambda row: row["minutes"]):
            name = row["way"] if row["way"] in LINES else f"{row['network']}, {row['way']}"
            if row["task"] == task:
                scores.setdefault(name, {}).setdefault(row["minutes"], []).append(row["accuracy"])
        for number, (name, groups) in enumerate(scores.items()):
            means = [statistics.mean(group) for group in groups.values()]
            if name in LINES:
                style, label = LINES[name]
                axes.axhline(statistics.mean(means), color="gray", linestyle=style, label=label)
                continue
            below = [mean - min(group) for mean, group in zip(means, groups.values(), strict=True)]
            above = [max(group) - mean for mean, group in zip(means, groups.values(), strict=True)]
            axes.errorbar(list(groups), means, yerr=[below, above], marker="os^v"[number % 4], capsize=3, label=name)
        axes.set(title=task, xscale="log", xlabel="minutes of two cores", ylabel="accuracy, %")
        axes.set_xticks(times, [f"{time:g}" for time in times])
        axes.minorticks_off()
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["en_subj", "en_trec"])
    parser.add_argument("--ways", nargs="+", default=["defaults", "untrained", "words"], choices=WAYS)
    parser.add_argument("--minutes", type=float, nargs="+", default=[], help="pretraining time of each model")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--split", choices=("validation", "test"), default="validation")
    args = parser.parse_args()
    if len(args.minutes) not in (0, len(args.models)):
        parser.error("--minutes needs a number for each model")
    args.work.mkdir(parents=True, exist_ok=True)
    results_path = args.work / "results.jsonl"
    results = {tuple(row["key"]): row for row in (read(results_path) if results_path.exists() else [])}
    lines = []
    records: Rows = []
    for task in args.tasks:
        correct: dict[str, list[np.ndarray]] = {way: [] for way in args.ways}
        seconds: dict[str, list[float]] = {way: [] for way in args.ways}
        for (number, model), way in itertools.product(enumerate(args.models), args.ways):
            key, split = (task, str(model), way, args.split), Split(args.rows, task, args.split, number)
            if key not in results:
                began = time.monotonic()
                predicted = WAYS[way](model, split)
                results[key] = {"key": key, "predicted": predicted, "seconds": round(time.monotonic() - began)}
                with results_path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(results[key]) + "\n")
            correct[way].append(np.array(results[key]["predicted"]) == np.array(split.labels))
            seconds[way].append(results[key]["seconds"])
        first = args.ways[0]
        for way in args.ways:
            scores = [100 * float(rows.mean()) for rows in correct[way]]
            for minutes, model, score in zip(args.minutes, args.models, scores, strict=False):
                record = {"task": task, "way": way, "minutes": minutes, "network": network_of(model)}
                records.append({**record, "accuracy": round(score, 1)})
            mean, half = interval(np.stack(correct[first]), np.stack(correct[way]))
            difference = "" if way == first else f"{mean:+.1f} ± {half:.1f}"
            lines.append(
                f"| {task} | {way} | {statistics.mean(scores):.1f} | {min(scores):.1f}–{max(scores):.1f} | "
                f"{difference} | {statistics.median(seconds[way]):.0f} |"
            )
    print(f"\n{len(args.models)} models, {args.split} rows; difference: {first} minus this way, with 95 % interval")
    print("\n| task | way | accuracy, % | min–max | difference | s |")
    print("|---|---|--:|---|---|--:|\n" + "\n".join(lines))
    if args.minutes:
        old = read(args.record) if args.record.exists() else []
        write(args.record, old + [record for record in records if record not in old])
        draw(read(args.record), args.record.with_suffix(".png"))


if __name__ == "__main__":
    main()
