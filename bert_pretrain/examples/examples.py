"""Training examples as columns: stage 2 writes them, stage 3 reads them.

An example is `[CLS] A [SEP] B [SEP]` or `[CLS] text [SEP]`, without padding. A table stores all examples in a few flat
arrays, so selecting, shuffling and packing are array operations. Columns that an objective does not use are None.
"""

from dataclasses import dataclass

import numpy as np

from bert_pretrain import ragged

IGNORE_INDEX = -100  # label of tokens without a loss: the default `ignore_index` of PyTorch's cross-entropy
UNSEEN_COUNT = 0.1  # added to the count of each token, so that the logarithm of its frequency is finite
DOCUMENT_CORRELATION = 0.03  # of correct predictions in one document: mean of three models, 1,302 pairs, 27 documents


def with_error(
    accuracy: float,
    examples: float | None,
    documents: float | None,
    form: str = ".1%",
) -> str:
    """Format an accuracy, with its standard error if it is computed from fewer than 500 independent examples.

    The examples of one document are correlated, so they count less (Kish, 1965: the design effect of clusters).
    """
    per_document = examples / documents if examples and documents else 1.0
    independent = (examples or 0) / (1 + DOCUMENT_CORRELATION * max(0.0, per_document - 1))
    if not examples or independent >= 500:
        return format(accuracy, form)
    return f"{accuracy:{form}} ± {(accuracy * (1 - accuracy) / independent) ** 0.5:{form}}"


@dataclass(frozen=True)
class Masks:
    """The masked tokens of each example."""

    positions: np.ndarray  # (masked,) uint16, ascending within an example
    original_ids: np.ndarray  # (masked,) like input_ids: the tokens before masking
    offsets: np.ndarray  # (rows + 1,) int64

    def take(self, rows: np.ndarray) -> "Masks":
        """Return the masks of the selected examples, in the order given."""
        positions, offsets = ragged.take(self.positions, self.offsets, rows)
        original_ids, _ = ragged.take(self.original_ids, self.offsets, rows)
        return Masks(positions, original_ids, offsets)


@dataclass(frozen=True)
class Examples:
    """A table of `rows` examples. The offsets delimit each example in the flat arrays.

    The label of a pair is 0 if B follows A and 1 if it does not, as in google-research/bert. For sentence order, it is
    0 if A and B are in order and 1 if they are swapped.
    """

    input_ids: np.ndarray  # (tokens,) uint16, or uint32 for vocabularies above 65,536; masked if there are masks
    offsets: np.ndarray  # (rows + 1,) int64
    segment_b_start: np.ndarray  # (rows,) uint16: index of B's first token in the example; its length if there is no B
    masks: Masks | None = None  # None if masks are drawn during training (`masking: dynamic`)
    next_sentence_label: np.ndarray | None = None  # (rows,) uint8; None if there are no pairs
    # (tokens,) bool: a word starts here; None unless dynamic whole-word masking needs more than the `##` prefixes
    starts_word: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each example, (rows,)."""
        return np.diff(self.offsets)

    @property
    def is_segment_b(self) -> np.ndarray:
        """Whether each token is in segment B, (tokens,) bool."""
        return ragged.positions_within(self.offsets) >= np.repeat(self.segment_b_start, self.lengths)

    @property
    def original_ids(self) -> np.ndarray:
        """The ids before masking, (tokens,)."""
        if self.masks is None:
            return self.input_ids
        ids = self.input_ids.copy()
        ids[self.masked_indices] = self.masks.original_ids
        return ids

    @property
    def masked_indices(self) -> np.ndarray:
        """Indices of the masked tokens in `input_ids`, (masked,). Empty if there are no masks."""
        if self.masks is None:
            return np.zeros(0, dtype=np.int64)
        return self.masks.positions + np.repeat(self.offsets[:-1], np.diff(self.masks.offsets))

    def take(self, rows: np.ndarray) -> "Examples":
        """Return the selected examples, in the order given."""
        lengths = self.lengths[rows]
        indices = ragged.spans(self.offsets[rows], lengths)
        labels = self.next_sentence_label
        return Examples(
            input_ids=self.input_ids[indices],
            offsets=ragged.offsets_of(lengths),
            segment_b_start=self.segment_b_start[rows],
            masks=None if self.masks is None else self.masks.take(rows),
            next_sentence_label=None if labels is None else labels[rows],
            starts_word=None if self.starts_word is None else self.starts_word[indices],
        )

    def columns(self) -> dict[str, np.ndarray]:
        """Return all arrays by name. Two tables are equal if their columns are equal."""
        columns = {"input_ids": self.input_ids, "offsets": self.offsets, "segment_b_start": self.segment_b_start}
        if self.masks is not None:
            columns["masked_lm_positions"] = self.masks.positions
            columns["masked_lm_ids"] = self.masks.original_ids
            columns["masked_offsets"] = self.masks.offsets
        if self.next_sentence_label is not None:
            columns["next_sentence_label"] = self.next_sentence_label
        if self.starts_word is not None:
            columns["starts_word"] = self.starts_word
        return columns


def concatenate(tables: list[Examples]) -> Examples:
    """Concatenate one or more tables that have the same columns."""
    all_columns = [table.columns() for table in tables]
    joined = {}
    for name in all_columns[0]:
        values = [columns[name] for columns in all_columns]
        if name.endswith("offsets"):
            joined[name] = ragged.offsets_of(np.concatenate([np.diff(each) for each in values]))
        else:
            joined[name] = np.concatenate(values)
    masks = None
    if "masked_offsets" in joined:
        masks = Masks(joined["masked_lm_positions"], joined["masked_lm_ids"], joined["masked_offsets"])
    return Examples(
        joined["input_ids"],
        joined["offsets"],
        joined["segment_b_start"],
        masks,
        joined.get("next_sentence_label"),
        joined.get("starts_word"),
    )
