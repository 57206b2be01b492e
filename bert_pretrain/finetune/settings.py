"""The settings of fine-tuning: type, limits, default and meaning of each; the fields with a meaning are options.

The defaults follow the paper (section 4 and appendix A.3), except for the learning rate and the number of epochs. The
command line shows the meanings, so this module does not import pydantic: `--help` would take twice as long.
"""
# ruff: noqa: RUF009

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Interval

from bert_pretrain.errors import ConfigError, first_problem

FORMATS = ("csv", "tsv", "json", "jsonl", "parquet", "conll")  # formats of files with labelled rows
TASKS = ("classify", "tag", "answer")
PositiveInt = Annotated[int, Ge(1)]
PositiveFloat = Annotated[float, Gt(0)]


def _setting(default: object, meaning: str | None = None, task: str | None = None) -> Any:
    """Return a field with a default value. The other tasks refuse a setting of `task`."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "task": task})


@dataclass(frozen=True)
class Settings:
    """The settings of one fine-tuning run. None means that the task or the model decides."""

    __pydantic_config__ = {"allow_inf_nan": False}  # noqa: RUF012

    learning_rate: tuple[PositiveFloat, ...] = ()  # one trial per rate; empty: computed from the model
    epochs: PositiveInt | None = _setting(None, "Number of epochs; default: enough for 1,000 steps, 3 to 10.")
    batch_size: PositiveInt = _setting(32, "Windows of text per step.")
    warmup_ratio: Annotated[float, Interval(ge=0, le=1)] = _setting(
        0.1, "Warm-up of the learning rate, as a share of all steps."
    )
    weight_decay: Annotated[float, Ge(0)] = _setting(0.01, "Weight decay of matrices (not biases, LayerNorm).")
    max_length: Annotated[int, Ge(16)] | None = _setting(None, "Tokens per window; default: 128, for answer 384.")
    dropout: Annotated[float, Interval(ge=0, le=0.9)] = _setting(0.1, "Dropout of hidden states and attention.")
    baselines: bool = _setting(False, "Also fine-tune an untrained network of the same size.")
    no_baseline: bool = _setting(False, "Skip the baseline of words alone.")
    seed: Annotated[int, Interval(ge=0, lt=2**32)] = _setting(42, "Seed for head, data order and split.")
    text_field: str = _setting("text", "Column of the text.", "classify")
    pair_field: str | None = _setting(None, "Column of a second text.", "classify")
    label_field: str = _setting("label", "Column of the label.", "classify")
    regression: bool = _setting(False, "Predict numbers instead of classes.", "classify")
    tokens_field: str = _setting("tokens", "Column of the words.", "tag")
    tags_field: str = _setting("tags", "Column of the BIO tags.", "tag")
    tag_names: tuple[str, ...] = _setting((), task="tag")  # of the tags 0, 1, …, if the input has only numbers
    stride: Annotated[int, Ge(0)] | None = _setting(None, "Tokens shared by adjacent windows of a context.", "answer")
    max_answer_length: PositiveInt | None = _setting(
        None, "Maximum answer length in tokens; default: the 99th percentile of the training answers.", "answer"
    )

    def check(self, task: str) -> None:
        """Raise ConfigError if the task is unknown or a setting of another task is given."""
        if task not in TASKS:
            raise ConfigError(f"unknown task '{task}'", where="TASK", remedy=f"choose {', '.join(TASKS)}")
        for field in dataclasses.fields(self):
            other = field.metadata.get("task") or task
            if other != task and getattr(self, field.name) != field.default:
                what = f"{flag_of(field.name)} is an option of '{other}', but the task is '{task}'"
                raise ConfigError(what, where=flag_of(field.name), remedy="remove it")

    def resolve(self, task: str, num_positions: int) -> "Settings":
        """Check all limits, and set `max_length` and `stride` for a model with `num_positions` position embeddings."""
        from pydantic import TypeAdapter, ValidationError

        try:
            settings = TypeAdapter(Settings).validate_python(dataclasses.asdict(self))
        except ValidationError as error:
            where = flag_of(str(error.errors()[0]["loc"][0]))
            raise ConfigError(first_problem(error), where=where, remedy="correct it, or leave it out") from error
        max_length = settings.max_length or min(384 if task == "answer" else 128, num_positions)
        _check_limit("max_length", max_length, num_positions, f"the model has {num_positions} positions")
        longest_stride = max_length // 3
        stride = min(128, longest_stride) if settings.stride is None else settings.stride
        _check_limit("stride", stride, longest_stride, f"a third of the window has {longest_stride} tokens")
        return dataclasses.replace(settings, max_length=max_length, stride=stride)

    def trials(self, num_windows: int) -> list["Settings"]:
        """Return a copy of the settings for each learning rate, with `epochs` set from the number of windows."""
        steps_per_epoch = math.ceil(num_windows / self.batch_size)
        # Small datasets need more epochs: aim for 1,000 steps, within 3 to 10 epochs.
        epochs = self.epochs or min(10, max(3, math.ceil(1000 / steps_per_epoch)))
        rates: list[tuple[float, ...]] = [(rate,) for rate in self.learning_rate] or [()]
        return [dataclasses.replace(self, learning_rate=rate, epochs=epochs) for rate in rates]


def _check_limit(name: str, value: int, limit: int, reason: str) -> None:
    if value > limit:
        raise ConfigError(f"the value is {value}, but {reason}", where=flag_of(name), remedy=f"use at most {limit}")


def flag_of(name: str) -> str:
    """Return the command-line option of a setting."""
    return "--" + name.replace("_", "-")
