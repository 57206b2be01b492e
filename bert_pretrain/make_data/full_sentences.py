"""Full sentences without pairs (Liu et al., 2019, section 4.2): text packed in order up to the length of an example.

An example continues over the end of a document, with an extra [SEP] there. A sentence longer than an example is cut
wherever one is full, so every token is in exactly one example per copy.
"""

import numpy as np

from bert_pretrain.make_data.segments import Segments
from bert_pretrain.make_data.token_store import ShardText
from bert_pretrain.text import ragged


def pack_sentences(text: ShardText, max_seq_length: int) -> Segments:
    """Pack the slices of a text, in their order and without look-ahead, into examples of `max_seq_length` at most."""
    capacity = max_seq_length - 2  # without [CLS] and the last [SEP]
    starts, lengths, slices = _units(text, capacity)
    ends_slice = np.ones(len(slices), dtype=bool)
    ends_slice[:-1] = slices[1:] != slices[:-1]
    # An example of the units [i, j) takes before[j] - before[i], less the [SEP] after unit j - 1, and two.
    before = ragged.offsets_of(lengths + ends_slice)
    following = np.searchsorted(before[1:] - ends_slice, before[:-1] + capacity, side="right")
    firsts, unit = [], 0
    while unit < len(starts):
        firsts.append(unit)
        unit = int(following[unit])
    begins_segment = np.zeros(len(starts), dtype=bool)
    begins_segment[firsts] = True
    begins_segment[1:] |= ends_slice[:-1]
    segments = np.flatnonzero(begins_segment)
    bounds = np.append(segments, len(starts))
    offsets = np.searchsorted(segments, np.append(firsts, len(starts)).astype(np.int64))
    return Segments(starts[segments], np.diff(ragged.offsets_of(lengths)[bounds]), offsets)


def _units(text: ShardText, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what is not divided: start, length and slice of each sentence, or token of one above the capacity."""
    stored = ragged.spans(text.slice_offsets[:-1], text.slice_own_sentences)
    slices = np.repeat(np.arange(len(text.slice_own_sentences)), text.slice_own_sentences)
    begins = ~text.is_continuation[stored]
    begins[:1] = True
    begins[1:] |= slices[1:] != slices[:-1]
    sentences = np.flatnonzero(begins)
    lengths = np.add.reduceat(np.diff(text.sentence_starts)[stored], sentences)
    is_long = lengths > capacity
    units = np.where(is_long, lengths, 1)
    within = ragged.positions_within(ragged.offsets_of(units))
    starts = np.repeat(text.sentence_starts[stored[sentences]], units) + within
    return starts, np.repeat(np.where(is_long, 1, lengths), units), np.repeat(slices[sentences], units)
