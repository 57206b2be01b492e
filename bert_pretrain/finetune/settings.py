"""The settings of fine-tuning, checked once; defaults are the paper's (section 4 and appendix A.3)."""

import dataclasses
import math
from dataclasses import dataclass

from bert_pretrain.errors import ConfigError

TASKS = ("classify", "tag", "answer")
FORMATS = ("csv", "tsv", "json", "jsonl", "parquet", "conll")
"""Formats of files of labelled rows; the last is a word and its tag per line."""
MIN_EPOCHS, MAX_EPOCHS, ENOUGH_STEPS = 3, 10, 1000
MAX_LENGTH = {"classify": 128, "tag": 128, "answer": 384}
_FIELDS_OF = {
    "classify": ("text_field", "pair_field", "label_field", "regression"),
    "tag": ("tokens_field", "tags_field", "tag_names"),
    "answer": ("stride", "max_answer_length"),
}
_RANGES = {
    "epochs": (1, math.inf),
    "batch_size": (1, math.inf),
    "warmup_ratio": (0.0, 1.0),
    "weight_decay": (0.0, math.inf),
    "max_length": (16, math.inf),
    "dropout": (0.0, 0.9),
    "seed": (0, 2**32 - 1),
    "stride": (0, math.inf),
    "max_answer_length": (1, math.inf),
}


@dataclass(frozen=True)
class Settings:
    """The settings of one fine-tuning; None where the task or the model decides."""

    learning_rate: tuple[float, ...] = ()
    """Rates to try; without any, the one by width and scale (`model/scale.py`)."""
    epochs: int | None = None
    """None: by the number of rows. The best of them is chosen on validation rows."""
    batch_size: int = 32
    warmup_ratio: float = 0.1
    weight_decay: float = 0.01
    max_length: int | None = None
    """Tokens per window; 128, for `answer` 384, and at most the model's positions."""
    dropout: float | None = None
    """None: as the model says, which is how it was pretrained."""
    baselines: bool = False
    """Whether the same network is fine-tuned untrained, too."""
    no_baseline: bool = False
    """Whether the baseline of word counts, or of each word's most frequent tag, is left out."""
    seed: int = 42
    text_field: str = "text"
    pair_field: str | None = None
    label_field: str = "label"
    regression: bool = False
    tokens_field: str = "tokens"
    tags_field: str = "tags"
    tag_names: tuple[str, ...] = ()
    """Names of the tags 0, 1, …, where tags are numbers and the input does not name them."""
    stride: int | None = None
    """Tokens shared by neighbouring windows of a long context; 128, but at most a third of a window."""
    max_answer_length: int | None = None
    """Tokens; None: the 99th percentile of the training answers."""

    def check(self, task: str) -> None:
        """Refuse values of another task."""
        if task not in TASKS:
            raise ConfigError(f"there is no task '{task}'", where="TASK", remedy=f"choose {', '.join(TASKS)}")
        for owner, names in _FIELDS_OF.items():
            for name in names:
                if owner != task and getattr(self, name) != getattr(Settings, name):
                    what = f"{flag_of(name)} is for the task '{owner}', this is '{task}'"
                    raise ConfigError(what, where=flag_of(name), remedy="leave it out")

    def resolve(self, task: str, positions: int) -> "Settings":
        """Return these settings, checked, with `max_length` and `stride` for a model with that many positions."""
        for rate in self.learning_rate:
            if not 0.0 < rate < math.inf:
                remedy = "give auto, or numbers above 0 joined by commas"
                raise ConfigError(f"it is {rate}", where="--learning-rate", remedy=remedy)
        max_length = self.max_length or min(MAX_LENGTH[task], positions)
        upper = {"max_length": positions, "stride": max_length // 3}
        for name, (low, high) in _RANGES.items():
            value, high = getattr(self, name), upper.get(name, high)
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                note = f", the model has {positions} positions" if name == "max_length" else ""
                bounds = f"{low:g} or more" if high == math.inf else f"between {low:g} and {high:.10g}"
                raise ConfigError(f"it is {value}{note}", where=flag_of(name), remedy=f"give a number, {bounds}")
        stride = min(128, max_length // 3) if self.stride is None else self.stride
        return dataclasses.replace(self, max_length=max_length, stride=stride)

    def trials(self, num_windows: int) -> list["Settings"]:
        """Return the settings that validation rows choose from, for this number of training windows."""
        steps = math.ceil(num_windows / self.batch_size)
        epochs = self.epochs or min(MAX_EPOCHS, max(MIN_EPOCHS, math.ceil(ENOUGH_STEPS / steps)))
        rates: list[tuple[float, ...]] = [(rate,) for rate in self.learning_rate] or [()]
        return [dataclasses.replace(self, learning_rate=rate, epochs=epochs) for rate in rates]


def flag_of(name: str) -> str:
    """Return the flag for a setting."""
    return "--" + name.replace("_", "-")
