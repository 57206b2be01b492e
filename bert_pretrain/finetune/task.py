"""The base class of fine-tuning tasks, and the windows of token ids that a model reads."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bert_pretrain.errors import InputError
from bert_pretrain.examples.examples import IGNORE_INDEX
from bert_pretrain.finetune.rows import INPUT, Example, LabelledInput, UnusableRow
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.texts import UnknownWords

MODEL = "model"  # model folder of a training
MAX_UNKNOWN_LABELS = 0.01  # share of the validation or test labels that the training rows may lack


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
    min_classes = 2  # in the training rows
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
        rows = self.rows(source)
        needs_labels = source.flag not in (INPUT, "--test")
        has_labels = needs_labels or (source.flag == "--test" and all(self.label_column in row.values for row in rows))
        examples = []
        for row in rows:
            try:
                row.inputs = self.inputs_of(row)
                if has_labels:
                    value = row.values.get(self.label_column)
                    is_partial = isinstance(value, list) and None in value  # also negative numbers of a `ClassLabel`
                    row.label = None if is_partial else self.label_of(row, source)
                if needs_labels and row.label is None:
                    raise row.unusable(f"'{self.label_column}' has no label (empty, null or negative)")
                examples.append(row)
            except UnusableRow as error:
                source.skip_row(error)
        source.report(len(examples))
        return examples

    def classes_of(self, label: Any) -> list[str]:
        """Return the classes in a label. A held-out part of the rows should contain every class."""
        return []

    def outputs_of(self, classes: Sequence[str]) -> list[str]:
        """Return the labels in the order of the outputs."""
        return sorted(classes)

    def set_labels(self, train: list[Example], others: list[Example]) -> None:
        """Collect the labels from the training examples, and check that those of the other examples are among them.

        A few of the other labels may be unknown. They are counted as wrong.
        """
        counts = Counter(name for example in train for name in self.classes_of(example.label))
        if len(counts) < self.min_classes:
            raise self.nothing_to_learn(train)
        labelled = [example for example in others if example.label is not None]
        places = [(name, example.where) for example in labelled for name in self.classes_of(example.label)]
        unknown = [(name, where) for name, where in places if name not in counts]
        if len(unknown) > MAX_UNKNOWN_LABELS * len(places):
            name, where = unknown[0]
            raise InputError(
                f"the label {name!r} does not occur in the training rows",
                where=where,
                remedy=f"fix it (known: {', '.join(sorted(counts)[:20])}), or add training rows with it",
            )
        if unknown:
            print(f"labels without training rows, counted as wrong: {', '.join(sorted({name for name, _ in unknown}))}")
        self.labels = self.outputs_of(list(counts))
        print(f"labels: {', '.join(f'{name} {number:,}' for name, number in counts.most_common(20))}")

    def nothing_to_learn(self, train: list[Example]) -> InputError:
        """Return the error that all training rows have the same label."""
        return InputError(
            f"every row has the same label, {train[0].label!r:.40}",
            where=f"{train[0].where} and all other rows",
            remedy="provide training rows with different labels",
        )

    def model_config(self) -> dict[str, Any]:
        """Return the keys of `config.json` that depend on the task."""
        config: dict[str, Any] = {"problem_type": None}  # of MODEL, which may have a head for another task
        if self.labels:
            names = dict(enumerate(self.labels))
            config |= {"id2label": names, "label2id": {name: number for number, name in names.items()}}
        return config

    @abstractmethod
    def encodings(self, examples: list[Example]) -> Iterator[Encoding]:
        """Yield the encoding of each example. Its `overflowing` encodings are further windows."""

    def positions_of(self, encoding: Encoding, *, is_first: bool) -> Sequence[Any]:
        """Return what `decode` needs to map the positions of a window back to the example."""
        return ()

    @abstractmethod
    def targets_of(
        self,
        label: Any,
        positions: Sequence[Any],
        num_tokens: int,
    ) -> dict[str, Any]:
        """Return the label arguments of the model's `forward` for a window."""

    def windows_of(self, examples: list[Example], split: str) -> list[Window]:
        """Return the windows of the examples, in their order, and count their unknown words."""
        has_labels = all(example.label is not None for example in examples)
        windows = []
        for number, (example, encoding) in enumerate(zip(examples, self.encodings(examples), strict=True)):
            example.exceeds_window = bool(encoding.overflowing)
            parts = [encoding] if self.overflow_action == "truncated" else [encoding, *encoding.overflowing]
            texts = example.inputs.get("tokens") or [text for name, text in example.inputs.items() if name != "id"]
            for part in parts:
                self.unknown_words.add(" ".join(texts), part.ids[1:-1])
                positions = self.positions_of(part, is_first=part is encoding)
                labels = self.targets_of(example.label, positions, len(part)) if has_labels else {}
                # Only prediction needs the positions. They take much memory for millions of training windows.
                positions = () if split == "train" else positions
                windows.append(
                    Window(
                        number,
                        part.ids,
                        part.type_ids,
                        labels,
                        positions,
                    )
                )
        return windows

    def report_long_examples(self, examples: list[Example], split: str) -> None:
        """Print how many examples are longer than a window."""
        if num_long := sum(example.exceeds_window for example in examples):
            limit = f"longer than {self.settings.max_length} tokens ({self.overflow_action})"
            print(f"{split}: {num_long:,} of {len(examples):,} rows are {limit}")

    @abstractmethod
    def decode(
        self,
        examples: list[Example],
        windows: list[Window],
        logits: Any,
    ) -> list[Any]:
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
        self,
        texts: Sequence[Any],
        *,
        add_special_tokens: bool = True,
        is_pretokenized: bool = False,
        **truncation: Any,
    ) -> Iterator[Encoding]:
        """Yield the encodings of texts, pairs or lists of words. Special tokens such as `[MASK]` are plain text.

        `truncation` has arguments of `tokenizers.Tokenizer.enable_truncation`. Without them, nothing is truncated.
        """
        backend = Backend.from_str(self.tokenizer.backend.to_str())
        backend.encode_special_tokens = True
        if truncation:
            backend.enable_truncation(**truncation)
        for begin in range(0, len(texts), 1000):  # to keep few encodings in memory
            batch = texts[begin : begin + 1000]
            yield from backend.encode_batch(batch, is_pretokenized, add_special_tokens)


def collate(windows: Sequence[dict[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """Pad the inputs of windows to the longest one and return them as tensors, with an attention mask."""
    padding = {"input_ids": pad_id, "labels": IGNORE_INDEX}
    rows = [{**window, "attention_mask": [1] * len(window["input_ids"])} for window in windows]
    batch = {}
    for name in rows[0]:
        tensors = [torch.tensor(row[name]) for row in rows]
        if tensors[0].dim() == 0:
            batch[name] = torch.stack(tensors)
        else:
            batch[name] = pad_sequence(tensors, batch_first=True, padding_value=padding.get(name, 0))
    return batch
