"""The base class of fine-tuning tasks, and the windows of token ids that a model reads."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend
from torch import Tensor

from bert_pretrain.errors import InputError
from bert_pretrain.examples.examples import IGNORE_INDEX
from bert_pretrain.finetune.rows import INPUT, Example, LabelledInput, UnusableRow
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.texts import UnknownWords

MODEL = "model"  # model folder of a trial


@dataclass(frozen=True)
class Window:
    """`[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, made from an example or a part of it."""

    example: int  # index of the example
    input_ids: list[int]
    token_type_ids: list[int]
    labels: dict[str, Any]  # label arguments of the model's `forward`; empty unless the whole split is labelled
    positions: Sequence[Any] = ()  # maps positions back to the example; the form depends on the task

    @property
    def inputs(self) -> dict[str, Any]:
        return {"input_ids": self.input_ids, "token_type_ids": self.token_type_ids, **self.labels}


class Task(ABC):
    """Base class of the tasks. Holds everything that differs between them."""

    model_class: str  # class of `transformers`
    pipeline_tag: str  # the Hub's name of the task
    label_column: str
    main_metric: str  # selects the best checkpoint; larger is better
    label_names: tuple[str, ...] = ("labels",)  # keys of `Window.labels`
    group_by = ""  # name of an input field; examples with the same value are held out together
    overflow_action = "split into overlapping windows"  # for the message about examples longer than a window

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.labels: list[str] = []  # classes or tags in the order of the outputs; empty for regression and `answer`
        # A regression is trained on `(label - label_mean) / label_deviation`. The finished head predicts labels.
        self.label_mean, self.label_deviation = 0.0, 1.0
        self.allows_no_answer = False
        self.unknown_words = UnknownWords(tokenizer)  # of all examples that became windows

    @abstractmethod
    def rows(self, source: LabelledInput) -> list[Example]:
        """Read the rows of an input without checking their fields."""

    @abstractmethod
    def inputs_of(self, row: Example) -> dict[str, Any]:
        """Return the checked input fields of a row."""

    @abstractmethod
    def label_of(self, row: Example, source: LabelledInput) -> Any:
        """Return the checked label of a row, or None if it has no label."""

    def read(self, source: LabelledInput) -> list[Example]:
        """Read the usable rows of an input with inputs and labels. Print how many were skipped or repaired, and why.

        Raises InputError if the input has no usable rows or, in `finetune`, if more than half of the rows are unusable.
        """
        rows, needs_labels = self.rows(source), source.flag not in (INPUT, "--test")
        has_labels = needs_labels or (source.flag == "--test" and all(self.label_column in row.values for row in rows))
        examples = []
        for row in rows:
            try:
                row.inputs = self.inputs_of(row)
                value = row.values.get(self.label_column)
                is_partial = isinstance(value, list) and None in value  # also negative numbers of a `ClassLabel`
                row.label = self.label_of(row, source) if has_labels and not is_partial else None
                if needs_labels and row.label is None:
                    missing = "a null or a negative number as a label" if is_partial else "no label"
                    what, remedy = f"'{self.label_column}' has {missing}", "label the row, or remove it"
                    raise UnusableRow(what, where=row.where, remedy=remedy)
                examples.append(row)
            except UnusableRow as error:
                source.skip_row(error)
        if source.flag != INPUT and len(errors := source.errors) > len(examples):
            what = f"{errors[0].what}; {len(errors):,} of {len(errors) + len(examples):,} rows cannot be used"
            raise InputError(what, where=errors[0].where, remedy=errors[0].remedy)
        if source.notes:
            notes = (f"{what}: {len(places):,} (first: {places[0]})" for what, places in source.notes.items())
            print(f"{source.flag} {source.location}: {'; '.join(notes)}")
        if not examples:
            where, remedy = f"{source.flag} {source.location}", "provide a table with rows"
            raise InputError("the input has no rows", where=where, remedy=remedy)
        return examples

    def classes_of(self, example: Example) -> list[str]:
        """Return the classes of an example. A held-out part of the rows should contain every class."""
        return []

    @abstractmethod
    def set_labels(self, train: list[Example], others: list[Example]) -> None:
        """Collect the labels from the training examples and check those of the other examples."""

    def model_config(self) -> dict[str, Any]:
        """Return the keys of `config.json` that depend on the task."""
        config: dict[str, Any] = {"problem_type": None}  # of MODEL, which may have a head for another task
        if self.labels:
            names = dict(enumerate(self.labels))
            config |= {"id2label": names, "label2id": {name: number for number, name in names.items()}}
        return config

    @abstractmethod
    def encode(self, examples: list[Example], split: str) -> list[Window]:
        """Return the windows of the examples, in their order."""

    def windows_of(self, examples: list[Example], split: str) -> list[Window]:
        """Return the windows of the examples, and count their unknown words."""
        windows = self.encode(examples, split)
        for window in windows:
            inputs = examples[window.example].inputs
            texts = inputs.get("tokens") or [text for name, text in inputs.items() if name != "id"]
            self.unknown_words.add(" ".join(texts), window.input_ids[1:-1])
        return windows

    def report_long_examples(self, examples: list[Example], split: str) -> None:
        """Print how many examples are longer than a window."""
        if num_long := sum(example.exceeds_window for example in examples):
            limit = f"longer than {self.settings.max_length} tokens ({self.overflow_action})"
            print(f"{split}: {num_long:,} of {len(examples):,} rows are {limit}")

    @abstractmethod
    def decode(self, examples: list[Example], windows: list[Window], logits: Any) -> list[Any]:
        """Return a prediction for each example from the outputs of `FinetunedBert.logits`."""

    @abstractmethod
    def score(self, examples: list[Example], predictions: list[Any]) -> dict[str, float]:
        """Return the metrics of predictions, the main metric first."""

    @abstractmethod
    def constant_baseline(self, examples: list[Example]) -> tuple[str, float]:
        """Return a description of the best constant prediction, and its main metric."""

    def word_baseline(self, train: list[Example], examples: list[Example]) -> list[Any] | None:
        """Return the predictions of a model of word counts, or None if the task has no such model."""
        return None

    @abstractmethod
    def columns(self, prediction: Any) -> dict[str, Any]:
        """Return the columns that `predict` adds to a row, by name."""

    @abstractmethod
    def record(self, example: Example, prediction: Any) -> dict[str, Any]:
        """Return a line of `predictions.jsonl`."""


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[Any], truncation: Any = None, *, add_special_tokens: bool = True
) -> Iterator[Encoding]:
    """Yield the encodings of texts or pairs. Special tokens such as `[MASK]` in the texts are plain text.

    `truncation` is a dict of arguments for `tokenizers.Tokenizer.enable_truncation`, None for no truncation.
    """
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.encode_special_tokens = True
    if truncation:
        backend.enable_truncation(**truncation)
    for begin in range(0, len(texts), 1000):  # to keep few encodings in memory
        yield from backend.encode_batch(texts[begin : begin + 1000], add_special_tokens=add_special_tokens)


def collate(windows: Sequence[dict[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """Pad the inputs of windows to the longest one and return them as tensors."""
    lengths = [len(window["input_ids"]) for window in windows]
    padding = {"input_ids": pad_id, "token_type_ids": 0, "labels": IGNORE_INDEX}
    batch = {"attention_mask": (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()}
    for name in windows[0]:
        values = [window[name] for window in windows]
        if isinstance(values[0], list):
            values = [value + [padding[name]] * (max(lengths) - len(value)) for value in values]
        batch[name] = torch.tensor(values)
    return batch
