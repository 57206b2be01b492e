"""Segments: which spans of a shard's text make each example, and the examples assembled from them.

Cutting gives a table of segments, pairing changes it, and `assemble` fetches its tokens.
"""

from dataclasses import dataclass

import numpy as np

from bert_pretrain.examples.examples import Examples
from bert_pretrain.make_data.token_store import ShardText
from bert_pretrain.text import ragged
from bert_pretrain.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Segments:
    """The segments of each example: A and B of a pair, or one per document where there are no pairs."""

    starts: np.ndarray  # (segments,) int64, in ShardText.ids
    lengths: np.ndarray  # (segments,) int64
    offsets: np.ndarray  # (examples + 1,) int64: the segments of each example
    labels: np.ndarray | None = None  # (examples,) uint8: see Examples.next_sentence_label; None without pairs
    is_cut: np.ndarray | None = None  # (examples,) bool: B was cut to fill a window; known until Bs are exchanged

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, examples: np.ndarray) -> "Segments":
        """Return the chosen examples in the order given."""
        starts, offsets = ragged.take(self.starts, self.offsets, examples)
        lengths, _ = ragged.take(self.lengths, self.offsets, examples)
        return Segments(starts, lengths, offsets, None if self.labels is None else self.labels[examples])


def make_pairs(
    a_starts: np.ndarray,
    a_lengths: np.ndarray,
    b_starts: np.ndarray,
    b_lengths: np.ndarray,
    labels: np.ndarray,
    is_cut: np.ndarray | None = None,
) -> Segments:
    """Return the segments of pairs; every argument is (pairs,)."""
    starts = np.stack([a_starts, b_starts], axis=1).ravel()
    lengths = np.stack([a_lengths, b_lengths], axis=1).ravel()
    return Segments(starts, lengths, 2 * np.arange(len(labels) + 1), labels, is_cut)


def assemble(segments: Segments, text: ShardText, tokenizer: Tokenizer) -> Examples:
    """Return unmasked examples: `[CLS]`, then the tokens of the segments, with a `[SEP]` after each."""
    rows = np.arange(len(segments) + 1)
    segment_offsets = ragged.offsets_of(segments.lengths + 1)
    offsets = segment_offsets[segments.offsets] + rows
    begins = segment_offsets[:-1] + np.repeat(rows[1:], np.diff(segments.offsets))
    is_text = np.ones(offsets[-1], dtype=bool)
    is_text[offsets[:-1]] = False
    is_text[begins + segments.lengths] = False
    sources = ragged.spans(segments.starts, segments.lengths)
    input_ids = np.full(offsets[-1], tokenizer.sep_id, dtype=text.ids.dtype)
    input_ids[offsets[:-1]] = tokenizer.cls_id
    input_ids[is_text] = text.ids[sources]
    starts_word = None
    if text.continues_word is not None:
        starts_word = np.zeros(len(input_ids), dtype=bool)
        starts_word[is_text] = ~(tokenizer.is_subword[text.ids[sources]] | text.continues_word[sources])
        starts_word[begins] = True  # a segment may begin inside a word
    # B follows [CLS] A [SEP]; without pairs there is no B, and it would begin after the last token.
    segment_b_start = np.diff(offsets) if segments.labels is None else segments.lengths[0::2] + 2
    return Examples(input_ids, offsets, segment_b_start.astype(np.uint16), None, segments.labels, starts_word)
