"""Evaluate models in fine-tuning, and compare them with untrained networks and with word counts.

    python scripts/bench_use.py ROWS_FOLDER MODEL... --work OUT [--tasks en_subj en_trec] [--ways ...] [--split test]

ROWS_FOLDER has TASK.train.jsonl and TASK.test.jsonl, with rows of `text` and `label`. Use `--split validation` for all
choices: it scores a tenth of the training rows, a different one for each model. `--split test` scores the test rows.
Pass all models that differ only in the pretraining seed. A way is a method that predicts labels. The table has one row
per task and way: mean, minimum and maximum of the accuracy over the models, the first way minus this way with a 95 %
interval over rows and models, and the median seconds. The ways:

    defaults     `finetune classify` with its defaults
    untrained    the same with randomly initialized weights
    words        logistic regression on word counts; for Chinese, on counts of characters and character pairs
    trainer      the Trainer of `transformers` with the learning rate and epochs in the model card

Results in OUT/results.jsonl are not repeated. With `--minutes`, the pretraining time of each model, the accuracies are
appended to the file `--record`, and all its records are plotted to a .png file next to it.
"""

import argparse
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from matplotlib.figure import Figure
from measure import ROOT, Row, append_rows, parser_of, read_rows, spread, table
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForPreTraining, Trainer

from bert_pretrain.finetune.baselines import fit_and_predict_tfidf
from bert_pretrain.finetune.run import finetune

Way = Callable[[Path, "Split"], list[str]]  # (model, split) to predicted labels
RECORD = ROOT / "docs" / "use.jsonl"


class Split:
    """The rows of a task to train on, and the rows to score for one model."""

    def __init__(
        self,
        folder: Path,
        task: str,
        split: str,
        model_number: int,
    ) -> None:
        rows = read_rows(folder / f"{task}.train.jsonl")
        random.Random(7).shuffle(rows)
        tenth = len(rows) // 10
        begin = model_number % 10 * tenth
        self.model_number = model_number
        if split == "validation":
            self.scored = rows[begin : begin + tenth]
            self.train = rows[:begin] + rows[begin + tenth :]
        else:
            self.scored = read_rows(folder / f"{task}.test.jsonl")
            self.train = rows
        self.train_labels = labels_of(self.train)
        self.classes = sorted(set(self.train_labels))


def labels_of(rows: Sequence[Row], key: str = "label") -> list[str]:
    return [str(row[key]) for row in rows]


def finetuned(model: Path, split: Split) -> list[str]:
    """Return the predictions of `finetune classify`."""
    with tempfile.TemporaryDirectory() as name:
        train, test = Path(name, "train.jsonl"), Path(name, "test.jsonl")
        append_rows(train, split.train)
        append_rows(test, split.scored)
        output = Path(name, "tuned")
        finetune(
            "classify",
            model,
            train=str(train),
            test=str(test),
            output=output,
        )
        return labels_of(read_rows(output / "predictions.jsonl"), "prediction")


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
    train, scored = ([(row["text"],) for row in rows] for rows in (split.train, split.scored))
    scores = fit_and_predict_tfidf(train, [[label] for label in split.train_labels], scored, split.classes)
    return [split.classes[index] for index in scores.argmax(axis=1)]


def trainer(model: Path, split: Split) -> list[str]:
    """Return the predictions of a Trainer as in the example of the model card."""
    card = (model / "README.md").read_text(encoding="utf-8")
    rate, epochs = re.search(r"learning_rate=(\S+), num_train_epochs=(\d+)", card).groups()  # type: ignore[union-attr]
    transformers.set_seed(0)
    network = AutoModelForSequenceClassification.from_pretrained(model, num_labels=len(split.classes))
    tokenizer = AutoTokenizer.from_pretrained(model)

    def inputs(rows: Sequence[Row]) -> list[Row]:
        encoded = [tokenizer(row["text"], truncation=True, max_length=128) for row in rows]
        labels = [split.classes.index(label) for label in labels_of(rows)]
        return [{"input_ids": each["input_ids"], "labels": label} for each, label in zip(encoded, labels, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            learning_rate=float(rate),
            num_train_epochs=int(epochs),
            per_device_train_batch_size=32,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        collator = transformers.DataCollatorWithPadding(tokenizer)
        network_trainer: Any = Trainer(network, arguments, train_dataset=inputs(split.train), data_collator=collator)
        network_trainer.train()
        scores = network_trainer.predict(inputs(split.scored)).predictions
    return [split.classes[index] for index in scores.argmax(axis=1)]


WAYS: Mapping[str, Way] = {
    "defaults": finetuned,
    "untrained": with_random_weights(finetuned),
    "words": words,
    "trainer": trainer,
}


def network_of(model: Path) -> str:
    config = transformers.AutoConfig.from_pretrained(model)
    return f"L{config.num_hidden_layers}-H{config.hidden_size}"


def interval(correct: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Return the difference of two accuracies in points, and the half-width of its 95 % interval.

    The arrays are booleans, (models, rows). Rows and models are both samples, so their variances are added.
    """
    difference = 100 * (correct.astype(float) - other.astype(float))
    variance = difference.mean(axis=0).var(ddof=1) / difference.shape[1]
    if len(difference) > 1:
        variance += difference.mean(axis=1).var(ddof=1) / len(difference)
    return float(difference.mean()), 1.96 * float(np.sqrt(variance))


# Ways without pretraining, plotted as horizontal lines. The first is in the records only.
LINES = {"own rate": ("--", "untrained, own best rate"), "words": (":", "word counts")}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Plot the accuracies of each task over the minutes of pretraining: mean, minimum and maximum per network."""
    times = sorted({row["minutes"] for row in rows})
    tasks: dict[str, dict[str, dict[float, list[float]]]] = {}
    for row in sorted(rows, key=lambda row: row["minutes"]):
        name = row["way"] if row["way"] in LINES else f"{row['network']}, {row['way']}"
        curve = tasks.setdefault(row["task"], {}).setdefault(name, {})
        curve.setdefault(row["minutes"], []).append(row["accuracy"])
    figure = Figure(figsize=(4.2 * len(tasks), 3.4), layout="constrained")
    for axes, (task, curves) in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks.items(), strict=True):
        for number, (name, curve) in enumerate(curves.items()):
            means = np.array([statistics.mean(group) for group in curve.values()])
            if name in LINES:
                style, label = LINES[name]
                axes.axhline(means.mean(), color="gray", linestyle=style, label=label)
                continue
            ranges = [means - [*map(min, curve.values())], [*map(max, curve.values())] - means]
            axes.errorbar(
                list(curve),
                means,
                yerr=ranges,
                marker="os^v"[number % 4],
                capsize=3,
                label=name,
            )
        axes.set(title=task, xscale="log", xlabel="minutes of two cores", ylabel="accuracy, %")
        axes.set_xticks(times, [f"{time:g}" for time in times])
        axes.minorticks_off()
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["en_subj", "en_trec"])
    parser.add_argument("--ways", nargs="+", default=["defaults", "untrained", "words"], choices=WAYS)
    parser.add_argument(
        "--minutes",
        type=float,
        nargs="+",
        default=[],
        help="pretraining time of each model",
    )
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--split", choices=("validation", "test"), default="validation")
    options = parser.parse_args()
    if len(options.minutes) not in (0, len(options.models)):
        parser.error("--minutes needs a number for each model")
    return options


def correct_rows(options: argparse.Namespace, task: str, way: str) -> tuple[np.ndarray, list[float]]:
    """Return whether each row is predicted correctly, (models, rows), and the seconds of each model."""
    options.work.mkdir(parents=True, exist_ok=True)
    path = options.work / "results.jsonl"
    path.touch()
    known = {tuple(row["key"]): row for row in read_rows(path)}
    correct, seconds = [], []
    for number, model in enumerate(options.models):
        key = (task, str(model), way, options.split)
        split = Split(options.rows, task, options.split, number)
        if key not in known:
            began = time.monotonic()
            predicted = WAYS[way](model, split)
            known[key] = {"key": key, "predicted": predicted, "seconds": round(time.monotonic() - began)}
            append_rows(path, [known[key]])
        correct.append(np.array(known[key]["predicted"]) == np.array(labels_of(split.scored)))
        seconds.append(known[key]["seconds"])
    return np.stack(correct), seconds


def main() -> None:
    options = parse()
    lines = []
    records: list[Row] = []
    first = options.ways[0]
    for task in options.tasks:
        reference, _ = correct_rows(options, task, first)
        for way in options.ways:
            correct, seconds = correct_rows(options, task, way)
            scores = (100 * correct.mean(axis=1)).tolist()
            for minutes, model, score in zip(options.minutes, options.models, scores, strict=False):
                record = {"task": task, "way": way, "minutes": minutes, "network": network_of(model)}
                records.append({**record, "accuracy": round(score, 1)})
            mean, half = interval(reference, correct)
            difference = "" if way == first else f"{mean:+.1f} ± {half:.1f}"
            accuracy = spread(scores, ".1f", middle=statistics.mean)
            lines.append([task, way, accuracy, difference, f"{statistics.median(seconds):.0f}"])
    print(f"\n{len(options.models)} models, {options.split} rows; difference: {first} minus this way, 95 % interval\n")
    print(table(["task", "way", "accuracy, %", "difference", "s"], lines))
    if options.minutes:
        options.record.touch()
        old = read_rows(options.record)
        append_rows(options.record, [record for record in records if record not in old])
        draw(read_rows(options.record), options.record.with_suffix(".png"))


if __name__ == "__main__":
    main()
