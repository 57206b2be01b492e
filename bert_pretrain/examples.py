"""Sentence-pair examples, the record that stage 2 hands to stage 3, as columns.

One example is `[CLS] A [SEP] B [SEP]` after masking, without padding. A table of them is a handful of flat arrays, so
that choosing, shuffling and packing examples are array operations.
"""

from dataclasses import dataclass

import numpy as np

from bert_pretrain import ragged


@dataclass(frozen=True)
class Examples:
    """Columns of `rows` examples; the offsets delimit each example's part of the flat arrays.

    `next_sentence_label` is 0 where B really follows A and 1 where it does not (the polarity of google-research/bert).
    """

    input_ids: np.ndarray  # (tokens,) uint16, or uint32 for vocabularies above 65,536
    offsets: np.ndarray  # (rows + 1,) int64
    segment_b_start: np.ndarray  # (rows,) uint16: index of B's first token within the example
    masked_lm_positions: np.ndarray  # (masked,) uint16, ascending within an example
    masked_lm_ids: np.ndarray  # (masked,) like input_ids: the original tokens there
    masked_offsets: np.ndarray  # (rows + 1,) int64
    next_sentence_label: np.ndarray  # (rows,) uint8

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, (rows,)."""
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> "Examples":
        """Return the chosen examples in the order given."""
        input_ids, offsets = ragged.take(self.input_ids, self.offsets, rows)
        positions, masked_offsets = ragged.take(self.masked_lm_positions, self.masked_offsets, rows)
        masked_ids, _ = ragged.take(self.masked_lm_ids, self.masked_offsets, rows)
        return Examples(
            input_ids=input_ids,
            offsets=offsets,
            segment_b_start=self.segment_b_start[rows],
            masked_lm_positions=positions,
            masked_lm_ids=masked_ids,
            masked_offsets=masked_offsets,
            next_sentence_label=self.next_sentence_label[rows],
        )


def concatenate(tables: list[Examples]) -> Examples:
    """Join tables of examples, in order; at least one."""
    return Examples(
        input_ids=np.concatenate([table.input_ids for table in tables]),
        offsets=ragged.offsets_of(np.concatenate([table.lengths for table in tables])),
        segment_b_start=np.concatenate([table.segment_b_start for table in tables]),
        masked_lm_positions=np.concatenate([table.masked_lm_positions for table in tables]),
        masked_lm_ids=np.concatenate([table.masked_lm_ids for table in tables]),
        masked_offsets=ragged.offsets_of(np.concatenate([np.diff(table.masked_offsets) for table in tables])),
        next_sentence_label=np.concatenate([table.next_sentence_label for table in tables]),
    )
