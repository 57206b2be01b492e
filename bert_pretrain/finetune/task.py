"""A task of fine-tuning, and what a model sees of it at once: windows of token ids with labels, padded to batches."""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend
from torch import Tensor

from bert_pretrain.finetune.inputs import LabelledInput
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tables import Row
from bert_pretrain.text.tokenizer import Tokenizer

_TEXTS_AT_ONCE = 1000
IGNORED = -100
"""The label of a position without one, which the loss of `transformers` ignores."""
DIVIDED = "are longer than {} tokens and were divided into overlapping windows"


@dataclass(frozen=True)
class Window:
    """`[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`: all of an example or a part of it."""

    example: int
    """The index of the example."""
    input_ids: list[int]
    token_type_ids: list[int]
    labels: dict[str, Any]
    """By their names in the model's `forward`; empty unless all examples of the split have labels."""
    positions: Sequence[Any] = field(default=())
    """The task's own record of what each position holds."""

    @property
    def inputs(self) -> dict[str, Any]:
        return {"input_ids": self.input_ids, "token_type_ids": self.token_type_ids, **self.labels}


class Task(Protocol):
    """The differences between tasks; `run.py` does the rest."""

    settings: Settings
    tokenizer: Tokenizer
    model_class: str
    """The class of `transformers` that opens the result."""
    may_be_none: bool
    """Whether a question may have no answer."""
    group_field: str
    """Examples with the same value of this field are held out together."""
    main_metric: str
    """It selects the best checkpoint, larger is better."""
    label_names: tuple[str, ...]
    """The keys of `Window.labels`."""

    def read(self, source: LabelledInput) -> list[Any]:
        """Return the checked examples of an input, to which it adds what was repaired; raises `InputError`."""

    def set_labels(self, train: list[Any], validation: list[Any], test: list[Any]) -> None:
        """Take the labels from the training examples and check the others; raises `InputError`."""

    def content(self, example: Any) -> object:
        """Return all of an example that affects training."""

    def score(self, examples: list[Any], predictions: list[Any]) -> dict[str, float]:
        """Return the metrics of predictions, the main one first."""

    def constant(self, examples: list[Any]) -> tuple[str, float]:
        """Return the best constant prediction for examples, and its score by the main metric."""

    def words_alone(self, train: list[Any], examples: list[Any]) -> list[Any] | None:
        """Return predictions that need no network, from the words of the training examples; None if there are none."""

    def record(self, example: Any, prediction: Any) -> dict[str, Any]:
        """Return a line of `predictions.jsonl`."""

    def model_config(self) -> dict[str, Any]:
        """Return the keys of `config.json` that the task sets."""

    def encode(self, examples: list[Any], split: str, counts: Counter[str]) -> list[Window]:
        """Return the windows of examples; counts those that were truncated or divided, by what was done."""

    def decode(self, examples: list[Any], windows: list[Window], logits: Any) -> list[Any]:
        """Return a prediction for each example."""

    def use(self, labels: list[str], may_be_none: bool) -> None:
        """Take the labels of a fine-tuned model, for `predict`, and whether a question may have no answer."""

    def rows(self, source: LabelledInput) -> Iterator[Row]:
        """Yield the rows to predict, which need no labels; raises `InputError`."""

    def unlabelled(self, row: Row, source: LabelledInput) -> Any:
        """Return the example of a row of an input, without its label; raises `InputError`."""

    def columns(self, example: Any, prediction: Any) -> dict[str, Any]:
        """Return what `predict` adds to a row, by the names of the columns."""


def encodings(tokenizer: Tokenizer, texts: Sequence[Any], **truncation: Any) -> Iterator[Encoding]:
    """Yield the encodings of texts or pairs, in which `[MASK]` and the like are plain text; few are held at once.

    Texts get no special tokens, pairs are `[CLS] A [SEP] B [SEP]`. `truncation` are arguments of the library's
    `enable_truncation`; without them nothing is truncated.
    """
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.encode_special_tokens = True
    if truncation:
        backend.enable_truncation(**truncation)
    for begin in range(0, len(texts), _TEXTS_AT_ONCE):
        some = texts[begin : begin + _TEXTS_AT_ONCE]
        yield from backend.encode_batch(some, add_special_tokens=isinstance(some[0], tuple))


def collator(pad_id: int) -> Callable[[list[dict[str, Any]]], dict[str, Tensor]]:
    """Return a function that pads the inputs of some windows to the longest of them."""

    def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        lengths = [len(item["input_ids"]) for item in items]
        padding = {"input_ids": pad_id, "token_type_ids": 0, "labels": IGNORED}
        batch = {"attention_mask": (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()}
        for name in items[0]:
            values = [item[name] for item in items]
            if isinstance(values[0], list):
                values = [value + [padding[name]] * (max(lengths) - len(value)) for value in values]
            batch[name] = torch.tensor(values)
        return batch

    return collate


@contextlib.contextmanager
def quiet_warnings() -> Iterator[None]:
    """Hide what metrics warn of, such as rows of one class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of logits (..., classes)."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def report_counts(counts: Counter[str], total: int, split: str) -> None:
    """Print what `Task.encode` has counted."""
    for what, count in sorted(counts.items()):
        if count:
            print(f"{split}: {count:,} of {total:,} {what}")
