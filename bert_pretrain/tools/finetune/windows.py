"""What the model sees at once: a window of token ids with what its loss needs, and their padding to a batch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend
from torch import Tensor

from bert_pretrain.tokenizer import Tokenizer

_TEXTS_AT_ONCE = 1000
IGNORED = -100
"""The label of a position that has none; the loss of `transformers` passes over it."""


@dataclass(frozen=True)
class Window:
    """`[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, all of an example or a part of it."""

    example: int
    """Its place in the list of examples."""
    input_ids: list[int]
    token_type_ids: list[int]
    labels: dict[str, Any]
    """What the loss needs, by the names that the model's `forward` knows; empty for examples without labels."""
    places: Sequence[Any] = field(default=())
    """The task's own note of what stands where."""

    @property
    def inputs(self) -> dict[str, Any]:
        return {"input_ids": self.input_ids, "token_type_ids": self.token_type_ids, **self.labels}


class Task(Protocol):
    """What tells one task from another; `run.py` does the rest."""

    tokenizer: Tokenizer
    model_class: str
    """The class of `transformers` with the task's head."""
    main_metric: str
    """By which the best checkpoint is chosen; larger is better."""
    label_names: tuple[str, ...]
    """The keys of `Window.labels`."""

    def read(self, location: str, flag: str) -> list[Any]:
        """Return the checked examples of an input; raises `InputError`."""

    def settle(self, train: list[Any], validation: list[Any], test: list[Any]) -> None:
        """Take labels from the training examples and hold the others against them; raises `InputError`."""

    def group(self, example: Any) -> str:
        """Return what must not be torn apart when some examples are held out."""

    def content(self, example: Any) -> object:
        """Return all that an example teaches."""

    def has_labels(self, examples: list[Any]) -> bool:
        """Return whether examples can be scored."""

    def head(self) -> dict[str, Any]:
        """Return the keys of `config.json` that the task sets."""

    def encode(self, examples: list[Any], split: str) -> list[Window]:
        """Return the windows of examples; says what was cut or divided."""

    def decode(self, examples: list[Any], windows: list[Window], logits: Any) -> list[Any]:
        """Return a prediction for each example."""

    def score(self, examples: list[Any], predictions: list[Any]) -> dict[str, float]:
        """Return the metrics of predictions."""

    def record(self, example: Any, prediction: Any) -> dict[str, Any]:
        """Return a line of `predictions.jsonl`."""


def encodings(tokenizer: Tokenizer, texts: Sequence[Any], **truncation: Any) -> Iterator[Encoding]:
    """Yield the encodings of texts, or of pairs of them, in which `[MASK]` and the like are text; few are held at once.

    Args:
        tokenizer: of the model.
        texts: texts, which get no special tokens, or pairs, which get `[CLS] A [SEP] B [SEP]`.
        truncation: what the library's `enable_truncation` takes; without it nothing is cut.
    """
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.encode_special_tokens = True
    if truncation:
        backend.enable_truncation(**truncation)
    for begin in range(0, len(texts), _TEXTS_AT_ONCE):
        some = texts[begin : begin + _TEXTS_AT_ONCE]
        yield from backend.encode_batch(some, add_special_tokens=isinstance(some[0], tuple))


def longest_first(windows: list[Window]) -> list[Window]:
    """Order windows for evaluation, so that a batch holds little padding."""
    return sorted(windows, key=lambda window: -len(window.input_ids))


def collator(pad_id: int) -> Callable[[list[dict[str, Any]]], dict[str, Tensor]]:
    """Return what pads the inputs of some windows to the longest of them."""

    def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        lengths = [len(item["input_ids"]) for item in items]
        fillers = {"input_ids": pad_id, "token_type_ids": 0, "labels": IGNORED}
        batch = {"attention_mask": (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()}
        for name in items[0]:
            values = [item[name] for item in items]
            if isinstance(values[0], list):
                values = [value + [fillers[name]] * (max(lengths) - len(value)) for value in values]
            batch[name] = torch.tensor(values)
        return batch

    return collate


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of logits (..., classes)."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def say_cut(count: int, total: int, max_length: int, split: str, how: str) -> None:
    """Tell how many examples did not fit as they are."""
    if count:
        print(f"{split}: {count:,} of {total:,} are longer than {max_length} tokens and were {how}")
