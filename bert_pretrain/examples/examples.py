"""Examples, which stage 2 writes and stage 3 reads, as columns.

One example is `[CLS] A [SEP] B [SEP]`, or `[CLS] text [SEP]`, without padding. They are a few flat arrays,
so that choosing, shuffling and packing examples are array operations. Columns that an objective does not need are None.
"""

from dataclasses import dataclass

import numpy as np

from bert_pretrain.text import ragged

FEW_EXAMPLES = 500
"""Held-out examples below which an accuracy is shown with its error."""
UNSEEN_COUNT = 0.1
"""Count of a token that does not occur, so that the logarithm of its frequency is finite."""


def with_error(accuracy: float, examples: int | None, form: str = ".1%") -> str:
    """Return an accuracy, of few examples with its standard error."""
    if not examples or examples >= FEW_EXAMPLES:
        return format(accuracy, form)
    return f"{accuracy:{form}} ± {(accuracy * (1 - accuracy) / examples) ** 0.5:{form}}"


@dataclass(frozen=True)
class Masks:
    """The masked tokens of each example."""

    positions: np.ndarray  # (masked,) uint16, ascending within an example
    original_ids: np.ndarray  # (masked,) like input_ids: the tokens before masking
    offsets: np.ndarray  # (rows + 1,) int64

    def take(self, rows: np.ndarray) -> "Masks":
        """Return the masks of the chosen examples in the order given."""
        positions, offsets = ragged.take(self.positions, self.offsets, rows)
        original_ids, _ = ragged.take(self.original_ids, self.offsets, rows)
        return Masks(positions, original_ids, offsets)


@dataclass(frozen=True)
class Examples:
    """Columns of `rows` examples; the offsets delimit each example in the flat arrays."""

    input_ids: np.ndarray  # (tokens,) uint16, or uint32 for vocabularies above 65,536; with masks applied, if any
    offsets: np.ndarray  # (rows + 1,) int64
    segment_b_start: np.ndarray  # (rows,) uint16: index of B's first token in the example, or its length
    masks: Masks | None = None
    """None where masks are drawn in training (`masking: dynamic`)."""
    next_sentence_label: np.ndarray | None = None  # (rows,) uint8
    """0 where B really follows A and 1 where it does not (the polarity of google-research/bert); for sentence order, 0
    where A and B are in order and 1 where they are swapped. None where there are no pairs (`next_sentence: none`)."""
    starts_word: np.ndarray | None = None  # (tokens,) bool: a word begins there
    """Only where whole words are masked in training and the ids alone do not show where words begin."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, (rows,)."""
        return np.diff(self.offsets)

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
        """The places of the masked tokens in `input_ids`, (masked,); none where masks are drawn in training."""
        if self.masks is None:
            return np.zeros(0, dtype=np.int64)
        return self.masks.positions + np.repeat(self.offsets[:-1], np.diff(self.masks.offsets))

    def take(self, rows: np.ndarray) -> "Examples":
        """Return the chosen examples in the order given."""
        places = ragged.spans(self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows])
        return Examples(
            input_ids=self.input_ids[places],
            offsets=ragged.offsets_of(self.lengths[rows]),
            segment_b_start=self.segment_b_start[rows],
            masks=None if self.masks is None else self.masks.take(rows),
            next_sentence_label=None if self.next_sentence_label is None else self.next_sentence_label[rows],
            starts_word=None if self.starts_word is None else self.starts_word[places],
        )

    def columns(self) -> dict[str, np.ndarray]:
        """Return every array by name; examples are equal if these are."""
        masks = self.masks
        columns: dict[str, np.ndarray | None] = {
            "input_ids": self.input_ids,
            "offsets": self.offsets,
            "segment_b_start": self.segment_b_start,
            "masked_lm_positions": None if masks is None else masks.positions,
            "masked_lm_ids": None if masks is None else masks.original_ids,
            "masked_offsets": None if masks is None else masks.offsets,
            "next_sentence_label": self.next_sentence_label,
            "starts_word": self.starts_word,
        }
        return {name: column for name, column in columns.items() if column is not None}


def concatenate(tables: list[Examples]) -> Examples:
    """Join tables of examples that have the same columns, in order; at least one."""
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
    labels, starts_word = joined.get("next_sentence_label"), joined.get("starts_word")
    return Examples(joined["input_ids"], joined["offsets"], joined["segment_b_start"], masks, labels, starts_word)
