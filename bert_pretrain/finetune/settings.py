"""The settings of fine-tuning, checked once; defaults are the paper's (section 4 and appendix A.3)."""

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bert_pretrain.errors import ConfigError

if TYPE_CHECKING:  # pydantic would make --help slower
    from bert_pretrain.config import TextField

TASKS = ("classify", "tag", "answer")
FORMATS = ("csv", "tsv", "json", "jsonl", "parquet", "conll")
"""Of labelled rows in files; the last is a word and its tag per line."""
DROPOUTS = (0.1, 0.0)
MIN_EPOCHS, MAX_EPOCHS, ENOUGH_STEPS = 3, 10, 1000
MAX_LENGTH = {"classify": 128, "tag": 128, "answer": 384}
MAX_ANSWER_LENGTH = 30
"""Of a model that does not say its own."""
_OWNERS = {
    "text_field": "classify",
    "pair_field": "classify",
    "label_field": "classify",
    "regression": "classify",
    "tokens_field": "tag",
    "tags_field": "tag",
    "stride": "answer",
    "max_answer_length": "answer",
}


@dataclass(frozen=True)
class Settings:
    """The settings of one fine-tuning; None where the task or the model decides."""

    learning_rate: tuple[float, ...] = ()
    """Rates to try; without any, the one by width and scale (`model/scale.py`)."""
    epochs: int | None = None
    """None: by the number of rows. The weights of the best epoch are kept."""
    batch_size: int = 32
    warmup_ratio: float = 0.1
    weight_decay: float = 0.01
    max_length: int | None = None
    """Tokens per window; 128, for `answer` 384, and at most the model's positions."""
    dropout: float | None = None
    """None: with 0.1 and without dropout, of which the better is kept."""
    baselines: bool = False
    """Whether the same network is fine-tuned untrained, too."""
    seed: int = 42
    text_field: "TextField" = "text"
    pair_field: str | None = None
    label_field: str = "label"
    regression: bool = False
    tokens_field: str = "tokens"
    tags_field: str = "tags"
    stride: int | None = None
    """Tokens shared by neighbouring windows of a long context; 128, but at most a third of a window."""
    max_answer_length: int | None = None
    """Tokens; None: the 99th percentile of the training answers."""

    def check(self, task: str) -> None:
        """Refuse values out of range, and those of another task."""
        if task not in TASKS:
            raise ConfigError(f"there is no task '{task}'", where="TASK", remedy=f"choose {', '.join(TASKS)}")
        for name, owner in _OWNERS.items():
            if task != owner and getattr(self, name) != _DEFAULTS[name]:
                raise ConfigError(
                    f"{flag_of(name)} is for the task '{owner}', this is '{task}'",
                    where=flag_of(name),
                    remedy="leave it out",
                )
        self.check_ranges()

    def check_ranges(self) -> None:
        """Refuse values out of range."""
        for rate in self.learning_rate:
            if not (0.0 < rate < math.inf):
                remedy = "give auto, or numbers above 0 joined by commas"
                raise ConfigError(f"it is {rate}", where="--learning-rate", remedy=remedy)
        minimum = {"warmup_ratio": 0.0, "weight_decay": 0.0, "dropout": 0.0}
        minimum |= {"epochs": 1, "batch_size": 1, "max_length": 16, "stride": 0, "max_answer_length": 1, "seed": 0}
        maximum = {"warmup_ratio": 1.0, "dropout": 0.9, "seed": 2**32 - 1}
        for name, low in minimum.items():
            value, high = getattr(self, name), maximum.get(name, math.inf)
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                bounds = f"{low:g} or more" if high == math.inf else f"between {low:g} and {high:g}"
                raise ConfigError(f"it is {value}", where=flag_of(name), remedy=f"give a number, {bounds}")

    def resolve(self, task: str, positions: int) -> "Settings":
        """Return these settings with `max_length` and `stride` set, for a model with that many positions."""
        if self.max_length is not None and self.max_length > positions:
            raise ConfigError(
                f"--max-length is {self.max_length}, the model has {positions} positions",
                where="--max-length",
                remedy=f"give at most {positions}",
            )
        max_length = self.max_length or min(MAX_LENGTH[task], positions)
        if self.max_length is None and max_length < MAX_LENGTH[task]:
            print(f"the model has {positions} positions, so windows have {max_length} tokens")
        stride = self.stride if self.stride is not None else min(128, max_length // 3)
        if stride > max_length // 3:
            raise ConfigError(
                f"windows of {max_length} tokens would share {stride}, more than a third",
                where="--stride",
                remedy=f"give at most {max_length // 3}",
            )
        return dataclasses.replace(self, max_length=max_length, stride=stride)

    def trials(self, num_windows: int) -> list["Settings"]:
        """Return the settings to fine-tune with, of which validation rows choose, for so many windows of training.

        What is not given takes no more than two trials.
        """
        steps = math.ceil(num_windows / self.batch_size)
        epochs = self.epochs or min(MAX_EPOCHS, max(MIN_EPOCHS, math.ceil(ENOUGH_STEPS / steps)))
        rates: list[tuple[float, ...]] = [(rate,) for rate in self.learning_rate] or [()]
        dropouts = DROPOUTS[: 1 if len(rates) > 1 else 2] if self.dropout is None else [self.dropout]
        return [
            dataclasses.replace(self, learning_rate=rate, dropout=dropout, epochs=epochs)
            for rate in rates
            for dropout in dropouts
        ]


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Settings)}


def flag_of(name: str) -> str:
    """Return the flag for a setting."""
    return "--" + name.replace("_", "-")
