"""The settings of fine-tuning.

The defaults follow the paper (section 4 and appendix A.3), except for the learning rate and the number of epochs.
"""

import dataclasses
import math
from dataclasses import dataclass

from bert_pretrain.errors import ConfigError

FORMATS = ("csv", "tsv", "json", "jsonl", "parquet", "conll")  # formats of files with labelled rows
_TASK_FIELDS = {  # the settings of each task that the others do not have
    "classify": ("text_field", "pair_field", "label_field", "regression"),
    "tag": ("tokens_field", "tags_field", "tag_names"),
    "answer": ("stride", "max_answer_length"),
}
_RANGES = {
    "epochs": (1, math.inf), "batch_size": (1, math.inf), "warmup_ratio": (0.0, 1.0), "weight_decay": (0.0, math.inf),
    "dropout": (0.0, 0.9), "seed": (0, 2**32 - 1), "max_length": (16, math.inf), "stride": (0, math.inf),
    "max_answer_length": (1, math.inf),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The settings of one fine-tuning run. None means that the task or the model decides."""

    learning_rate: tuple[float, ...] = ()  # one trial per rate; empty: computed from the model (`model/scale.py`)
    epochs: int | None = None  # None: computed from the number of windows
    batch_size: int = 32
    warmup_ratio: float = 0.1
    weight_decay: float = 0.01
    max_length: int | None = None  # tokens per window; None: 128, or 384 for `answer`, limited by the model
    dropout: float = 0.1  # of hidden states and attention; not that of the model's config.json
    baselines: bool = False  # also fine-tune the same network without pretraining
    no_baseline: bool = False  # skip the baseline of word counts or most frequent tags
    seed: int = 42
    text_field: str = "text"
    pair_field: str | None = None
    label_field: str = "label"
    regression: bool = False
    tokens_field: str = "tokens"
    tags_field: str = "tags"
    tag_names: tuple[str, ...] = ()  # names of the tags 0, 1, …, if the input has only numbers
    stride: int | None = None  # tokens shared by consecutive windows; None: 128, at most a third of a window
    max_answer_length: int | None = None  # tokens; None: the 99th percentile of the training answers

    def check(self, task: str) -> None:
        """Raise ConfigError if the task is unknown or a setting of another task is given."""
        if task not in _TASK_FIELDS:
            raise ConfigError(f"unknown task '{task}'", where="TASK", remedy=f"choose {', '.join(_TASK_FIELDS)}")
        for field_task, names in _TASK_FIELDS.items():
            for name in names:
                if field_task != task and getattr(self, name) != getattr(Settings, name):
                    what = f"{flag_of(name)} is an option of '{field_task}', but the task is '{task}'"
                    raise ConfigError(what, where=flag_of(name), remedy="remove it")

    def resolve(self, task: str, limit: int) -> "Settings":
        """Check all ranges, and set `max_length` and `stride` for a model that reads up to `limit` tokens."""
        for rate in self.learning_rate:
            if not 0.0 < rate < math.inf:
                remedy = "use auto, or numbers above 0 separated by commas"
                raise ConfigError(f"the learning rate is {rate}", where="--learning-rate", remedy=remedy)
        default = 384 if task == "answer" else 128
        max_length = min(self.max_length or default, limit)
        if self.max_length is None and limit < default:
            print(f"maximum length: {limit} tokens; the model is not trained for {default} (--max-length)")
        upper = {"stride": max_length // 3}
        for name, (low, high) in _RANGES.items():
            value, high = getattr(self, name), upper.get(name, high)
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                bounds = f"of at least {low:g}" if high == math.inf else f"between {low:g} and {high:.10g}"
                raise ConfigError(f"the value is {value}", where=flag_of(name), remedy=f"use a number {bounds}")
        stride = min(128, max_length // 3) if self.stride is None else self.stride
        return dataclasses.replace(self, max_length=max_length, stride=stride)

    def trials(self, num_windows: int) -> list["Settings"]:
        """Return a copy of the settings for each learning rate, with `epochs` set from the number of windows."""
        steps_per_epoch = math.ceil(num_windows / self.batch_size)
        # Small datasets need more epochs: aim for 1,000 steps, within 3 to 10 epochs.
        epochs = self.epochs or min(10, max(3, math.ceil(1000 / steps_per_epoch)))
        rates: list[tuple[float, ...]] = [(rate,) for rate in self.learning_rate] or [()]
        return [dataclasses.replace(self, learning_rate=rate, epochs=epochs) for rate in rates]


def flag_of(name: str) -> str:
    """Return the command-line option of a setting."""
    return "--" + name.replace("_", "-")
