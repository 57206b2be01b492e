"""Full sentences without pairs (Liu et al., 2019, section 4.2): text packed in order up to the length of an example.

An example goes on over the end of a document, with one more [SEP] there. A sentence that no example could hold is cut
wherever one is full; so every token stands in exactly one example a copy.
"""

import numpy as np

from bert_pretrain import ragged
from bert_pretrain.make_data.layout import Layout
from bert_pretrain.make_data.token_store import Text


def pack_sentences(text: Text, max_seq_length: int) -> Layout:
    """Lay out the spans, in their order and without their look-ahead, as examples of `max_seq_length` at most."""
    capacity = max_seq_length - 2  # beside [CLS] and the last [SEP]
    starts, lengths, spans = _units(text, capacity)
    ends_span = np.ones(len(spans), dtype=bool)
    ends_span[:-1] = spans[1:] != spans[:-1]
    # An example of the units [i, j) takes before[j] - before[i], less the [SEP] after unit j - 1, and two.
    before = ragged.offsets_of(lengths + ends_span)
    following = np.searchsorted(before[1:] - ends_span, before[:-1] + capacity, side="right")
    firsts, unit = [], 0
    while unit < len(starts):
        firsts.append(unit)
        unit = int(following[unit])
    begins_segment = np.zeros(len(starts), dtype=bool)
    begins_segment[firsts] = True
    begins_segment[1:] |= ends_span[:-1]
    segments = np.flatnonzero(begins_segment)
    bounds = np.append(segments, len(starts))
    offsets = np.searchsorted(segments, np.append(firsts, len(starts)).astype(np.int64))
    segment_lengths = np.diff(ragged.offsets_of(lengths)[bounds])
    example_lengths = np.diff(ragged.offsets_of(segment_lengths + 1)[offsets]) + 1
    return Layout(starts[segments], segment_lengths, offsets, example_lengths.astype(np.uint16), None)


def _units(text: Text, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what is not to be divided: start, length and span of each sentence, or token of one above the capacity."""
    pieces = ragged.spans(text.span_sentences[:-1], text.span_own_sentences)
    spans = np.repeat(np.arange(len(text.span_own_sentences)), text.span_own_sentences)
    begins = ~text.is_continuation[pieces]
    begins[:1] = True
    begins[1:] |= spans[1:] != spans[:-1]
    sentences = np.flatnonzero(begins)
    lengths = np.add.reduceat(np.diff(text.sentence_starts)[pieces], sentences)
    is_long = lengths > capacity
    units = np.where(is_long, lengths, 1)
    within = ragged.positions_within(ragged.offsets_of(units))
    starts = np.repeat(text.sentence_starts[pieces[sentences]], units) + within
    return starts, np.repeat(np.where(is_long, 1, lengths), units), np.repeat(spans[sentences], units)
