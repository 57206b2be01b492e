"""A task of fine-tuning: what it reads from rows, and what a model sees of them at once: windows of token ids."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend
from torch import Tensor

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.rows import NEW, Example, LabelledInput, UnusableRow
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.text.tokenizer import Tokenizer

_TEXTS_AT_ONCE = 1000
IGNORED = -100
"""The label of a position without one, which the loss of `transformers` ignores."""


@dataclass(frozen=True)
class Window:
    """`[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`: all of an example or a part of it."""

    example: int
    """The index of the example."""
    input_ids: list[int]
    token_type_ids: list[int]
    labels: dict[str, Any]
    """Labels by argument of the model's `forward`; empty unless all examples of the split have labels."""
    positions: Sequence[Any] = field(default=())
    """The task's own record of what each position holds."""

    @property
    def inputs(self) -> dict[str, Any]:
        return {"input_ids": self.input_ids, "token_type_ids": self.token_type_ids, **self.labels}


class Task(ABC):
    """The differences between tasks; `run.py` and `predict.py` do the rest."""

    model_class: str
    """The class of `transformers` that opens the result."""
    label_column: str
    main_metric: str
    """It selects the best checkpoint; larger is better."""
    label_names: tuple[str, ...] = ("labels",)
    """The keys of `Window.labels`."""
    group = ""
    """Examples with an equal input of this name are held out together."""
    cut = "divided into overlapping windows"
    """How examples longer than a window are handled, for messages."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.labels: list[str] = []
        """Classes or tags, in the order of the model's outputs; empty for regression and `answer`."""
        self.may_be_none = False
        """Whether a question may have no answer."""

    @abstractmethod
    def rows(self, source: LabelledInput) -> list[Example]:
        """Return the rows of an input as they are read."""

    @abstractmethod
    def inputs_of(self, row: Example) -> dict[str, Any]:
        """Return what the task reads from a row, checked."""

    @abstractmethod
    def label_of(self, row: Example, source: LabelledInput) -> Any:
        """Return the checked label of a row, or None if it has none."""

    def read(self, source: LabelledInput) -> list[Example]:
        """Return the rows of an input that can be used, with inputs and labels; print what was left out."""
        rows, needs_labels = self.rows(source), source.flag not in (NEW, "--test")
        has_labels = needs_labels or (source.flag == "--test" and all(self.label_column in row.values for row in rows))
        examples = []
        for row in rows:
            try:
                row.inputs = self.inputs_of(row)
                row.label = self.label_of(row, source) if has_labels else None
                if needs_labels and row.label is None:
                    what, remedy = f"'{self.label_column}' holds no label", "label the row, or remove it"
                    raise UnusableRow(what, where=row.where, remedy=remedy)
                examples.append(row)
            except UnusableRow as error:
                source.leave_out(error)
        if source.flag != NEW and len(errors := source.errors) > len(examples):
            what = f"{errors[0].what}; {len(errors):,} of {len(errors) + len(examples):,} rows cannot be used"
            raise InputError(what, where=errors[0].where, remedy=errors[0].remedy)
        if source.notes:
            notes = (f"{what}: {len(places):,} (first: {places[0]})" for what, places in source.notes.items())
            print(f"{source.flag} {source.location}: {'; '.join(notes)}")
        if not examples:
            where, remedy = f"{source.flag} {source.location}", "give a table with rows"
            raise InputError("it holds no row", where=where, remedy=remedy)
        return examples

    def classes_of(self, example: Example) -> list[str]:
        """Return the classes of a labelled example that both training and validation rows should have."""
        return []

    @abstractmethod
    def set_labels(self, train: list[Example], others: list[Example]) -> None:
        """Take the labels from the training examples and check those of the others."""

    def model_config(self) -> dict[str, Any]:
        """Return the keys of `config.json` that the task sets."""
        names = dict(enumerate(self.labels))
        return {"id2label": names, "label2id": {name: number for number, name in names.items()}} if names else {}

    @abstractmethod
    def encode(self, examples: list[Example], split: str) -> list[Window]:
        """Return the windows of examples, in their order."""

    def report_cut(self, examples: list[Example], split: str) -> None:
        """Print how many examples are longer than a window."""
        if number := sum(example.is_cut for example in examples):
            what = f"{number:,} of {len(examples):,} are longer than {self.settings.max_length} tokens, {self.cut}"
            print(f"{split}: {what}")

    @abstractmethod
    def decode(self, examples: list[Example], windows: list[Window], logits: Any) -> list[Any]:
        """Return a prediction for each example, from the outputs of `FinetunedBert.logits`."""

    @abstractmethod
    def score(self, examples: list[Example], predictions: list[Any]) -> dict[str, float]:
        """Return the metrics of predictions, the main one first."""

    @abstractmethod
    def constant(self, examples: list[Example]) -> tuple[str, float]:
        """Return the best constant prediction for examples, and its score by the main metric."""

    def words_alone(self, train: list[Example], examples: list[Example]) -> list[Any] | None:
        """Return predictions that need no network, from the words of the training examples; None if there are none."""
        return None

    @abstractmethod
    def columns(self, prediction: Any) -> dict[str, Any]:
        """Return what `predict` adds to a row, by the names of the columns."""

    @abstractmethod
    def record(self, example: Example, prediction: Any) -> dict[str, Any]:
        """Return a line of `predictions.jsonl`."""


def encodings(
    tokenizer: Tokenizer, texts: Sequence[Any], truncation: dict[str, Any] | None = None, *, special: bool = True
) -> Iterator[Encoding]:
    """Yield the encodings of texts or pairs, in which `[MASK]` and the like are plain text; few are held at once.

    `truncation` are arguments of the library's `enable_truncation`; without them nothing is truncated. With `special`
    there are [CLS] and [SEP].
    """
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.encode_special_tokens = True
    if truncation:
        backend.enable_truncation(**truncation)
    for begin in range(0, len(texts), _TEXTS_AT_ONCE):
        yield from backend.encode_batch(texts[begin : begin + _TEXTS_AT_ONCE], add_special_tokens=special)


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
