"""What models are worth in use: fine-tuned with a user's settings, next to the same networks untrained and word counts.

    python scripts/bench_use.py ROWS_FOLDER MODEL... --work OUT [--tasks en_subj en_trec] [--ways ...] [--split test]

ROWS_FOLDER holds TASK.train.jsonl and TASK.test.jsonl, rows with `text` and `label`. Choices are made with
`--split validation`, a tenth of the training rows, another one for each model. `--split test` reads the test rows,
once, at the end. Models that differ only in the seed of pretraining are given together: a line of the table is their
mean, least and most, and the difference of the first way to it with a 95 % interval over rows and models. Ways:

    defaults     `finetune classify` as it is
    untrained    the same with BERT's first weights, others for each model
    own rate     BERT's first weights with AdamW at 3e-4 and 1e-3, the better one on validation rows
    words        logistic regression on word counts (characters and pairs of them for Chinese)
    trainer      the Trainer of `transformers` with the rate and the epochs that the model's card names
    grid         the best of 3 rates, 2 numbers of epochs and 2 dropouts of AdamW on validation rows
    features     logistic regression (C = 10) on the mean of the layer that is best on validation rows; also untrained

What is in OUT/results.jsonl is not repeated. With `--minutes`, those of each model's pretraining, the accuracies are
appended to `--record`, and all records are drawn next to it, a panel for each task.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from matplotlib.figure import Figure
from sklearn.linear_model import LogisticRegression
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForPreTraining, Trainer

from bert_pretrain.finetune.baselines import predict_from_words
from bert_pretrain.finetune.run import METRICS, finetune
from bert_pretrain.finetune.settings import Settings

Rows = list[dict[str, Any]]
RECORD = Path(__file__).resolve().parents[1] / "docs" / "use.jsonl"
GRID = tuple(
    Settings(learning_rate=(3e-4, 1e-3, 2e-3), epochs=epochs, dropout=dropout)
    for epochs, dropout in itertools.product((4, 8), (0.0, 0.1))
)


class Split:
    """The rows of a task: some are held out to choose by, some judge."""

    def __init__(self, folder: Path, task: str, split: str, number: int) -> None:
        rows = read(folder / f"{task}.train.jsonl")
        random.Random(7).shuffle(rows)
        tenth = len(rows) // 10
        begin = number % 10 * tenth
        self.judged = rows[begin : begin + tenth] if split == "validation" else read(folder / f"{task}.test.jsonl")
        self.number = number
        self.train = rows[:begin] + rows[begin + tenth :] if split == "validation" else rows
        self.labels = [str(row["label"]) for row in self.judged]


def read(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: Rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def tuned(model: Path, split: Split, settings: Sequence[Settings]) -> list[str]:
    """Return the predictions of `finetune classify` with those of some settings that are best on validation rows."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train, test = write(folder / "train.jsonl", split.train), write(folder / "test.jsonl", split.judged)
        for number, each in enumerate(settings):
            output = finetune("classify", model, train=train, test=test, output=folder / str(number), settings=each)
            report = json.loads((output / METRICS).read_text(encoding="utf-8"))
            predictions = [str(row["prediction"]) for row in read(output / "predictions.jsonl")]
            found.append((report["validation"]["accuracy"], predictions))
    return max(found, key=lambda one: one[0])[1]


def defaults(model: Path, split: Split) -> list[str]:
    return tuned(model, split, [Settings()])


def grid(model: Path, split: Split) -> list[str]:
    return tuned(model, split, GRID)


def untrained(model: Path, split: Split) -> list[str]:
    with tempfile.TemporaryDirectory() as name:
        return tuned(first_weights(model, Path(name), split), split, [Settings()])


def own_rate(model: Path, split: Split) -> list[str]:
    with tempfile.TemporaryDirectory() as name:
        rates = Settings(learning_rate=(3e-4, 1e-3))
        return tuned(first_weights(model, Path(name), split), split, [rates])


def first_weights(model: Path, folder: Path, split: Split) -> Path:
    """Write the network of a model with BERT's first weights."""
    transformers.set_seed(split.number)
    BertForPreTraining(transformers.AutoConfig.from_pretrained(model)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def words(_: Path, split: Split) -> list[str]:
    classes = sorted({str(row["label"]) for row in split.train})
    train, labels = [(row["text"],) for row in split.train], [str(row["label"]) for row in split.train]
    scores = predict_from_words(train, labels, [(row["text"],) for row in split.judged], classes)
    return [classes[index] for index in scores.argmax(axis=1)]


def trainer(model: Path, split: Split) -> list[str]:
    """Return the predictions of a plain Trainer, as the model's card writes it."""
    card = (model / "README.md").read_text(encoding="utf-8")
    rate, epochs = re.search(r"learning_rate=(\S+), num_train_epochs=(\d+)", card).groups()  # type: ignore[union-attr]
    classes = sorted({str(row["label"]) for row in split.train})
    transformers.set_seed(0)
    network = AutoModelForSequenceClassification.from_pretrained(model, num_labels=len(classes))
    tokenizer = AutoTokenizer.from_pretrained(model)
    inputs = []
    for rows in (split.train, split.judged):
        encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=128)["input_ids"]
        labels = [classes.index(str(row["label"])) for row in rows]
        inputs.append([{"input_ids": ids, "labels": label} for ids, label in zip(encoded, labels, strict=True)])
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, learning_rate=float(rate), num_train_epochs=int(epochs), per_device_train_batch_size=32,
            report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        plain: Any = Trainer(
            network, arguments, train_dataset=inputs[0], data_collator=transformers.DataCollatorWithPadding(tokenizer)
        )
        plain.train()
        scores = plain.predict(inputs[1]).predictions
    return [classes[index] for index in scores.argmax(axis=1)]


def features(model: Path, split: Split) -> list[str]:
    vectors = {name: mean_vectors(model, rows) for name, rows in (("train", split.train), ("judged", split.judged))}
    labels = [str(row["label"]) for row in split.train]
    cut = len(labels) * 9 // 10
    scores = []
    for layer in vectors["train"]:
        fitted = LogisticRegression(C=10, max_iter=1000).fit(layer[:cut], labels[:cut])
        scores.append(fitted.score(layer[cut:], labels[cut:]))
    best = int(np.argmax(scores))
    fitted = LogisticRegression(C=10, max_iter=1000).fit(vectors["train"][best], labels)
    return [str(label) for label in fitted.predict(vectors["judged"][best])]


def features_untrained(model: Path, split: Split) -> list[str]:
    with tempfile.TemporaryDirectory() as name:
        return features(first_weights(model, Path(name), split), split)


@torch.no_grad()
def mean_vectors(model: Path, rows: Rows) -> list[np.ndarray]:
    """Return the mean of each layer, the embeddings first: (rows, hidden) each."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), transformers.AutoModel.from_pretrained(model).eval()
    found: list[list[np.ndarray]] = []
    for begin in range(0, len(rows), 64):
        texts = [row["text"] for row in rows[begin : begin + 64]]
        batch = tokenizer(texts, truncation=True, max_length=128, padding=True, return_tensors="pt")
        hidden = network(**batch, output_hidden_states=True).hidden_states
        mask = batch["attention_mask"][:, :, None]
        found.append([((layer * mask).sum(1) / mask.sum(1)).numpy() for layer in hidden])
    return [np.concatenate(layer) for layer in zip(*found, strict=True)]


WAYS: Mapping[str, Callable[[Path, Split], list[str]]] = {
    "defaults": defaults,
    "untrained": untrained,
    "own rate": own_rate,
    "words": words,
    "trainer": trainer,
    "grid": grid,
    "features": features,
    "features untrained": features_untrained,
}


def network_of(model: Path) -> str:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return f"L{config['num_hidden_layers']}-H{config['hidden_size']}"


def interval(right: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Return the mean difference of (models, rows) booleans in points, and half of its 95 % interval.

    Rows and models are both drawn: their variances add.
    """
    difference = 100 * (right.astype(float) - other.astype(float))
    variance = difference.mean(axis=0).var(ddof=1) / difference.shape[1]
    if len(difference) > 1:
        variance += difference.mean(axis=1).var(ddof=1) / len(difference)
    return float(difference.mean()), 1.96 * float(np.sqrt(variance))


LINES = {"own rate": ("--", "untrained, own best rate"), "words": (":", "word counts")}
"""Ways that no pretraining changes, as lines across the picture."""


def draw(rows: Rows, path: Path) -> None:
    """Draw accuracies in percent by task over the minutes of pretraining: mean, least and most, a line a network."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    times = sorted({row["minutes"] for row in rows})
    figure = Figure(figsize=(4.2 * len(tasks), 3.4), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        scores: dict[str, dict[float, list[float]]] = {}
        for row in rows:
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
    parser.add_argument("--minutes", type=float, nargs="+", default=[], help="of pretraining, one for each model")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--split", choices=("validation", "test"), default="validation")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    kept = args.work / "results.jsonl"
    known = {tuple(one["key"]): one for one in (read(kept) if kept.exists() else [])}
    lines = []
    measured: Rows = []
    for task in args.tasks:
        right: dict[str, list[np.ndarray]] = {way: [] for way in args.ways}
        seconds: dict[str, list[float]] = {way: [] for way in args.ways}
        for (number, model), way in itertools.product(enumerate(args.models), args.ways):
            key, split = (task, str(model), way, args.split), Split(args.rows, task, args.split, number)
            if key not in known:
                began = time.monotonic()
                predicted = WAYS[way](model, split)
                known[key] = {"key": key, "predicted": predicted, "seconds": round(time.monotonic() - began)}
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known[key]) + "\n")
            right[way].append(np.array(known[key]["predicted"]) == np.array(split.labels))
            seconds[way].append(known[key]["seconds"])
        first = args.ways[0]
        for way in args.ways:
            scores = [100 * float(one.mean()) for one in right[way]]
            for minutes, model, score in zip(args.minutes, args.models, scores, strict=False):
                network = network_of(model)
                row = {"task": task, "way": way, "minutes": minutes, "network": network, "accuracy": round(score, 1)}
                measured.append(row)
            mean, half = interval(np.stack(right[first]), np.stack(right[way]))
            less = "" if way == first else f"{mean:+.1f} ± {half:.1f}"
            lines.append(
                f"| {task} | {way} | {statistics.mean(scores):.1f} | {min(scores):.1f}–{max(scores):.1f} | {less} | "
                f"{statistics.median(seconds[way]):.0f} |"
            )
    print(f"\n{len(args.models)} models, {args.split} rows; difference: {first} less the way, with its 95 % interval")
    print("\n| task | way | accuracy, % | least–most | difference | s |")
    print("|---|---|--:|---|---|--:|\n" + "\n".join(lines))
    if args.minutes:
        write(args.record, (read(args.record) if args.record.exists() else []) + measured)
        draw(read(args.record), args.record.with_suffix(".png"))


if __name__ == "__main__":
    main()
