"""Where the text of each example stands, and the examples made of it: `[CLS]`, then segments, a `[SEP]` after each."""

from dataclasses import dataclass

import numpy as np

from bert_pretrain import ragged
from bert_pretrain.examples import Examples
from bert_pretrain.make_data.pairs import Pairs
from bert_pretrain.make_data.token_store import Text
from bert_pretrain.tokenizer import Tokenizer


@dataclass(frozen=True)
class Layout:
    """The segments of examples; `starts` are places in `Text.ids`."""

    starts: np.ndarray  # (segments,) int64
    lengths: np.ndarray  # (segments,) int64
    offsets: np.ndarray  # (examples + 1,) int64: the segments of each example
    segment_b_start: np.ndarray  # (examples,) uint16
    labels: np.ndarray | None  # (examples,) uint8

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, examples: np.ndarray) -> "Layout":
        """Return the chosen examples in the order given."""
        starts, offsets = ragged.take(self.starts, self.offsets, examples)
        lengths, _ = ragged.take(self.lengths, self.offsets, examples)
        labels = None if self.labels is None else self.labels[examples]
        return Layout(starts, lengths, offsets, self.segment_b_start[examples], labels)


def layout_of_pairs(pairs: Pairs) -> Layout:
    """Lay out `[CLS] A [SEP] B [SEP]`."""
    return Layout(
        starts=np.stack([pairs.a_start, pairs.b_start], axis=1).ravel(),
        lengths=np.stack([pairs.a_lengths, pairs.b_lengths], axis=1).ravel(),
        offsets=2 * np.arange(len(pairs.labels) + 1),
        segment_b_start=(pairs.a_lengths + 2).astype(np.uint16),
        labels=pairs.labels,
    )


def assemble(layout: Layout, text: Text, tokenizer: Tokenizer) -> Examples:
    """Fetch the tokens of a layout; the examples are still without masks."""
    rows = np.arange(len(layout) + 1)
    segment_offsets = ragged.offsets_of(layout.lengths + 1)
    offsets = segment_offsets[layout.offsets] + rows
    begins = segment_offsets[:-1] + np.repeat(rows[1:], np.diff(layout.offsets))
    is_text = np.ones(offsets[-1], dtype=bool)
    is_text[offsets[:-1]] = False
    is_text[begins + layout.lengths] = False
    sources = ragged.spans(layout.starts, layout.lengths)
    input_ids = np.full(offsets[-1], tokenizer.sep_id, dtype=text.ids.dtype)
    input_ids[offsets[:-1]] = tokenizer.cls_id
    input_ids[is_text] = text.ids[sources]
    starts_word = None
    if text.continues_word is not None:
        starts_word = np.zeros(len(input_ids), dtype=bool)
        starts_word[is_text] = ~(tokenizer.is_subword[text.ids[sources]] | text.continues_word[sources])
        starts_word[begins] = True  # a segment may begin inside a word
    return Examples(input_ids, offsets, layout.segment_b_start, None, layout.labels, starts_word)
