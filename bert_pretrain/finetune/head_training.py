"""Training of a task's head with the network below it: windows, the Trainer, and predictions of the finished folder."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_pretrain.finetune import training
from bert_pretrain.finetune.task import HeadTask, Job, Window, longest_first, report_counts
from bert_pretrain.train.device.hardware import Precision


@dataclass(frozen=True)
class Split:
    """The examples of one input, and their windows."""

    examples: list[Any]
    windows: list[Window]

    def decode(self, task: HeadTask, logits: Any) -> list[Any]:
        return task.decode(self.examples, self.windows, logits)


class HeadLearner:
    """The `Learner` of `classify`, `tag` and `answer`."""

    def __init__(self, job: Job, task: HeadTask) -> None:
        self.job = job
        self.task = task
        self.splits: dict[str, Split] = {}
        for split, rows in job.examples.items():
            counts: Counter[str] = Counter()
            windows = task.encode(rows, split, counts)
            self.splits[split] = Split(rows, windows if split == "train" else longest_first(windows))
            report_counts(counts, len(rows), split)
        self.train = self.splits.pop("train")
        self.network: Any = None

    def make_trainer(self, folder: Path, precision: Precision) -> Any:
        validation = self.splits["validation"]

        def score(logits: Any) -> dict[str, float]:
            return self.task.score(validation.examples, validation.decode(self.task, logits))

        self.network = training.open_network(self.job.model, self.task, self.job.settings)
        return training.make_trainer(
            self.network, self.job, self.task, self.train.windows, validation.windows, score, folder, precision
        )

    def save(self, folder: Path) -> None:
        self.network.save_pretrained(folder)
        self.job.tokenizer.save(folder, self.network.config.max_position_embeddings)

    def predict(self, folder: Path) -> dict[str, list[Any]]:
        return {
            split: held.decode(self.task, training.predict(folder, self.job, held.windows, split))
            for split, held in self.splits.items()
        }

    def is_scored(self, split: str) -> bool:
        return all(window.labels for window in self.splits[split].windows)
