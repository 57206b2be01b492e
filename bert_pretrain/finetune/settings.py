"""The settings of fine-tuning: the type, limits, default and meaning of each.

The defaults follow the paper (section 4 and appendix A.3), except for the learning rate and the number of epochs. The
command line makes options of the fields, so pydantic is imported only to check them: `--help` would take twice as long.
"""

import ast
import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from bert_pretrain.errors import ConfigError, first_problem

FORMATS = ("csv", "tsv", "json", "jsonl", "parquet", "conll", "txt")  # formats of files with rows
OPTIONS_OF_TASKS = {  # the settings of each task that the others do not have
    "classify": ("text_field", "pair_field", "label_field", "regression"),
    "tag": ("tokens_field", "tags_field", "tag_names"),
    "answer": ("stride", "max_answer_length"),
}


class Limits:
    """The limits of a number, for pydantic: `gt`, `ge`, `lt` and `le`."""

    def __init__(self, **limits: float) -> None:
        self.limits = limits

    def __get_pydantic_core_schema__(self, kind: Any, schema_of: Callable[[Any], Any]) -> Any:
        return {**schema_of(kind), **self.limits}


PositiveInt = Annotated[int, Limits(ge=1)]
PositiveFloat = Annotated[float, Limits(gt=0)]


@dataclass(frozen=True)
class Settings:
    """The settings of one fine-tuning run. None means that the task or the model decides."""

    __pydantic_config__ = {"allow_inf_nan": False}  # noqa: RUF012

    learning_rate: PositiveFloat | None = None
    """Peak learning rate; default: computed from the weights."""
    epochs: PositiveInt | None = None
    """Number of epochs; default: enough for 1,000 steps, 3 to 10."""
    batch_size: PositiveInt = 32
    """Windows of text per step."""
    warmup_ratio: Annotated[float, Limits(ge=0, lt=1)] = 0.1
    """Warm-up of the learning rate, as a share of all steps."""
    weight_decay: Annotated[float, Limits(ge=0)] = 0.01
    """Weight decay of matrices (not biases, LayerNorm)."""
    max_length: Annotated[int, Limits(ge=16)] | None = None
    """Tokens per window; default: 128 (answer: 384), or fewer as trained."""
    dropout: Annotated[float, Limits(ge=0, le=0.9)] = 0.1
    """Dropout of hidden states and attention."""
    baselines: bool = False
    """Also fine-tune an untrained network of the same size."""
    no_baseline: bool = False
    """Skip the baseline of words alone."""
    seed: Annotated[int, Limits(ge=0, lt=2**32)] = 42
    """Seed for head, data order and split."""
    text_field: str = "text"
    """Column of the text."""
    pair_field: str | None = None
    """Column of a second text."""
    label_field: str = "label"
    """Column of the label."""
    regression: bool = False
    """Predict numbers instead of classes."""
    tokens_field: str = "tokens"
    """Column of the words (name or number)."""
    tags_field: str = "tags"
    """Column of the BIO tags (name or number)."""
    tag_names: tuple[str, ...] = ()
    """Names of numeric tags, from 0 on."""
    stride: Annotated[int, Limits(ge=0)] = 128
    """Tokens shared by adjacent windows; at most a third of a window."""
    max_answer_length: PositiveInt | None = None
    """Maximum answer length in tokens; default: the 99th percentile of the training answers."""

    def check(self, task: str) -> None:
        """Raise ConfigError if the task is unknown or a setting of another task is given."""
        if task not in OPTIONS_OF_TASKS:
            raise ConfigError(f"unknown task '{task}'", where="TASK", remedy=f"choose {', '.join(OPTIONS_OF_TASKS)}")
        for other, names in OPTIONS_OF_TASKS.items():
            for name in names:
                if other != task and getattr(self, name) != getattr(Settings, name):
                    raise ConfigError(
                        f"{flag_of(name)} is an option of '{other}', but the task is '{task}'",
                        where=flag_of(name),
                        remedy="remove it",
                    )

    def resolve(self, task: str, limit: int) -> "Settings":
        """Check all limits, and set `max_length` and `stride` for a model that reads up to `limit` tokens."""
        from pydantic import TypeAdapter, ValidationError

        try:
            settings = TypeAdapter(Settings).validate_python(dataclasses.asdict(self))
        except ValidationError as error:
            raise ConfigError(
                first_problem(error),
                where=flag_of(str(error.errors()[0]["loc"][0])),
                remedy="correct it, or leave it out",
            ) from error
        default = 384 if task == "answer" else 128
        max_length = min(settings.max_length or default, limit)
        if settings.max_length is None and limit < default:
            print(f"maximum length: {limit} tokens; the model is not trained for {default} (--max-length)")
        return dataclasses.replace(settings, max_length=max_length, stride=min(settings.stride, max_length // 3))

    def with_epochs(self, num_windows: int) -> "Settings":
        """Return the settings with `epochs` set, by default from the number of training windows."""
        steps_per_epoch = math.ceil(num_windows / self.batch_size)
        # Small datasets need more epochs: aim for 1,000 steps, within 3 to 10 epochs.
        epochs = self.epochs or min(10, max(3, math.ceil(1000 / steps_per_epoch)))
        return dataclasses.replace(self, epochs=epochs)


def flag_of(name: str) -> str:
    """Return the command-line option of a setting."""
    return "--" + name.replace("_", "-")


def meanings() -> dict[str, str]:
    """Return the docstring of each setting. Pydantic reads those of `config.py` in the same way."""
    module = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    texts: dict[str, str] = {}
    for field, text in itertools.pairwise(classes["Settings"].body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            texts[ast.unparse(field.target)] = ast.literal_eval(text.value)
    return texts
