"""Turn text into examples: cut windows, divide them into A and B, balance the labels, and assemble the examples.

`tests/make_data/reference.py` has the same steps in plain Python, without arrays. A test compares the two.

* Next sentence (Devlin et al., 2018, section 3.1, task 2): `cut_at_length`, then `exchange_segment_b`. Windows are
  sorted by the boundary type and length of B. One of every two neighboring windows gets the label 1. Its B is replaced
  by the B of a window from another document, if possible with the same boundary type and about the same length.
* Sentence order (Lan et al., 2019, section 3.1): `cut_at_sentences`, then `swap_segments` of windows with the label 1.
* No pairs (Liu et al., 2019, section 4.2): `pack_sentences` fills examples up to `max_seq_length`, across documents.

Lengths and boundaries hardly reveal the label. The exceptions are corpora of few short documents and, for sentence
order, windows with a part of a very long sentence (docs/data.md).
"""

import bisect
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bert_pretrain import ragged
from bert_pretrain.examples.examples import Examples
from bert_pretrain.make_data.token_store import ShardText, split_long
from bert_pretrain.text.tokenizer import Tokenizer

NUM_SPECIAL = 3  # [CLS] A [SEP] B [SEP]
EXCHANGE_BLOCK = 64  # minimum number of windows in a block; Bs are permuted within each block


class Windows(NamedTuple):
    """Windows of consecutive text, each divided into A and B. A ends where B starts. Positions are in ShardText.ids."""

    a_start: np.ndarray  # (windows,) int64
    b_start: np.ndarray  # (windows,) int64
    end: np.ndarray  # (windows,) int64
    is_cut: np.ndarray  # (windows,) bool: the target length cut B

    @property
    def a_length(self) -> np.ndarray:
        return self.b_start - self.a_start

    @property
    def b_length(self) -> np.ndarray:
        return self.end - self.b_start

    def reversed(self, text_end: int) -> "Windows":
        """Return windows of the reversed text as windows of the text."""
        return Windows(text_end - self.end, text_end - self.b_start, text_end - self.a_start, self.is_cut)


@dataclass(frozen=True)
class Segments:
    """The segments of each example: A and B of a pair or, without pairs, one segment per document."""

    starts: np.ndarray  # (segments,) int64, in ShardText.ids
    lengths: np.ndarray  # (segments,) int64
    offsets: np.ndarray  # (examples + 1,) int64: the segments of each example
    labels: np.ndarray | None = None  # (examples,) uint8, next-sentence labels; None without pairs

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, examples: np.ndarray) -> "Segments":
        """Return the selected examples, in the order given."""
        starts, offsets = ragged.take(self.starts, self.offsets, examples)
        lengths, _ = ragged.take(self.lengths, self.offsets, examples)
        labels = None if self.labels is None else self.labels[examples]
        return Segments(starts, lengths, offsets, labels)


@dataclass(frozen=True)
class Units:
    """The pieces that windows consist of: sentences, or parts of sentences longer than half a window."""

    starts: np.ndarray  # (units + 1,) int64, in ShardText.ids; the last value is the end of the text
    is_inside: np.ndarray  # (units + 1,) bool: the unit starts inside a sentence

    def reversed(self) -> "Units":
        """Return the units of the reversed text."""
        return Units(self.starts[-1] - self.starts[::-1], self.is_inside[::-1])


class Spans(NamedTuple):
    """The units of each slice of a document."""

    first: np.ndarray  # (slices,) int64: the first unit
    slice_end: np.ndarray  # (slices,) int64: the unit after the slice
    end: np.ndarray  # (slices,) int64: the unit after the look-ahead

    @property
    def have_windows(self) -> np.ndarray:
        """Whether each slice has windows, (slices,) bool. A window has at least two units."""
        return (self.slice_end > self.first) & (self.end - self.first >= 2)

    def with_windows(self) -> "Spans":
        """Return the slices that have windows."""
        return Spans(*(column[self.have_windows] for column in self))


def slices_with_windows(text: ShardText, max_tokens: int) -> np.ndarray:
    """Return which slices have windows, (slices,) bool. Other slices are empty or have a single short sentence."""
    _, spans = _units(text, max_tokens)
    return spans.have_windows


def _units(text: ShardText, max_tokens: int) -> tuple[Units, Spans]:
    """Divide text into units, and return the units of each slice as well."""
    starts, first_units = split_long(text.sentence_starts, max_tokens // 2)
    is_inside = np.ones(len(starts), dtype=bool)
    is_inside[first_units[:-1]] = text.is_continuation
    first_sentences = text.slice_offsets[:-1]
    spans = Spans(
        first=first_units[first_sentences],
        slice_end=first_units[first_sentences + text.num_slice_sentences],
        end=first_units[text.slice_offsets[1:]],
    )
    return Units(starts, is_inside), spans


def _draw_targets(
    num: int,
    max_tokens: int,
    short_seq_prob: float,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw target lengths of windows in tokens, and numbers in [0, 1) that choose the start of B, (num,) each.

    A target is `max_tokens` or, with probability `short_seq_prob`, a random number from 2 to `max_tokens`, as in
    google-research/bert.
    """
    is_short = rng.random(num) < short_seq_prob
    short_targets = rng.integers(2, max_tokens + 1, num)
    return np.where(is_short, short_targets, max_tokens), rng.random(num)


def cut_at_length(text: ShardText, max_tokens: int, short_seq_prob: float, rng: np.random.Generator) -> Windows:
    """Cut the whole text into windows that end at their target length, and divide each window into A and B.

    If this cuts a sentence, the next window starts with the same sentence. A window has at least two units, so it may
    exceed a short target. At the end of a document it may be shorter. B starts with a sentence if one starts inside the
    window.
    """
    units, spans = _units(text, max_tokens)
    targets, choices = _draw_targets(len(units.starts), max_tokens, short_seq_prob, rng)
    cuts = _cut_in_rounds(units.starts, spans.with_windows(), targets)
    b_units = _choose_b(units, cuts.first, cuts.after, choices[cuts.draw], only_sentences=False)
    return Windows(units.starts[cuts.first], units.starts[b_units], cuts.end, cuts.is_cut)


class _Cuts(NamedTuple):
    """Windows that are not divided yet. Each column is (windows,)."""

    span: np.ndarray
    first: np.ndarray  # the first unit
    after: np.ndarray  # the first unit that starts at the end of the window or later
    end: np.ndarray  # in ShardText.ids
    is_cut: np.ndarray
    draw: np.ndarray  # the index of the target


def _cut_in_rounds(starts: np.ndarray, spans: Spans, targets: np.ndarray) -> _Cuts:
    """Cut spans into windows of their target lengths, in the order of the spans.

    Each round cuts one window from every span that has text left. A span has at most one window per unit, so its
    windows take the targets of its units.
    """
    span = np.arange(len(spans.first))
    first = spans.first
    draw = spans.first
    rounds: list[_Cuts] = []
    while len(span) or not rounds:  # at least one round, which may be empty
        first = np.minimum(first, spans.end[span] - 2)  # a single last unit is joined with the one before
        text_end = starts[spans.end[span]]
        target_end = starts[first] + targets[draw]
        end = np.minimum(np.maximum(target_end, starts[first + 2]), text_end)
        after = np.searchsorted(starts, end)
        is_cut = (end == target_end) & (end < text_end)
        rounds.append(_Cuts(span, first, after, end, is_cut, draw))
        first = np.where(starts[after] == end, after, after - 1)  # a sentence that was cut starts the next window
        has_more = (end < text_end) & (first < spans.slice_end[span])
        span = span[has_more]
        first = first[has_more]
        draw = draw[has_more] + 1
    cuts = _Cuts(*map(np.concatenate, zip(*rounds, strict=True)))
    order = np.argsort(cuts.span, kind="stable")
    return _Cuts(*(column[order] for column in cuts))


def _choose_b(
    units: Units,
    first: np.ndarray,
    after: np.ndarray,
    choices: np.ndarray,
    *,
    only_sentences: bool,
) -> np.ndarray:
    """Choose the unit that B starts with, between the units `first` and `after` of each window.

    B starts with a sentence if one starts there. With `only_sentences`, all these sentences are equally likely.
    Otherwise, all units are equally likely, and a unit inside a sentence is replaced by one of these sentences.
    """
    chosen = first + 1 + (choices * (after - first - 1)).astype(np.int64)
    sentences = np.flatnonzero(~units.is_inside)
    sentences_before = ragged.offsets_of(~units.is_inside)
    first_sentence = sentences_before[first + 1]
    num_sentences = sentences_before[after] - first_sentence
    is_moved = (only_sentences | units.is_inside[chosen]) & (num_sentences > 0)
    sentence = first_sentence + (choices * num_sentences).astype(np.int64)
    chosen[is_moved] = sentences[sentence[is_moved]]
    return chosen


def cut_at_sentences(text: ShardText, max_tokens: int, short_seq_prob: float, rng: np.random.Generator) -> Windows:
    """Cut the whole text into windows that end with a sentence, and divide each window into A and B at a sentence.

    A B that is cut inside a sentence would reveal that it was swapped with A. The next window starts with the sentence
    that did not fit. Such sentences are long, so A would be longer than B on average. To balance the lengths, every
    other slice is cut from its end, which is the start of the reversed text.
    """
    units, spans = _units(text, max_tokens)
    spans = spans.with_windows()
    ends = np.maximum(spans.slice_end, np.minimum(spans.first + 2, spans.end))  # one sentence uses its look-ahead
    targets, choices = _draw_targets(2 * len(units.starts), max_tokens, short_seq_prob, rng)
    forward = _cut_each(units, spans.first[0::2], ends[0::2], targets, choices, max_tokens)
    num = len(forward.end)
    last = len(units.starts) - 1
    from_end = _cut_each(
        units.reversed(),
        last - ends[1::2],
        last - spans.first[1::2],
        targets[num:],
        choices[num:],
        max_tokens,
    )
    backward = from_end.reversed(units.starts[-1])
    return Windows(*map(np.concatenate, zip(forward, backward, strict=True)))


def _cut_each(
    units: Units,
    firsts: np.ndarray,
    ends: np.ndarray,
    targets: np.ndarray,
    choices: np.ndarray,
    max_tokens: int,
) -> Windows:
    """Cut spans of two or more units, [first, end), into windows that end with a sentence.

    Each window takes the next target and choice.
    """
    starts = units.starts.tolist()
    starts_sentence = ~units.is_inside
    starts_sentence[[0, -1]] = True  # sentences start and end where the text does
    sentences = np.flatnonzero(starts_sentence).tolist()
    next_target = iter(targets.tolist())
    window_first: list[int] = []
    window_end: list[int] = []
    for span_first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
        position = span_first
        while position < end:
            target = next(next_target)
            if position + 1 == end:  # a single last unit is joined with as much of the sentence before as fits
                sentence = max(span_first, sentences[bisect.bisect_left(sentences, position) - 1])
                fitting = bisect.bisect_left(starts, starts[end] - max_tokens, sentence, position - 1)
                position = max(sentence, fitting)
                target = max_tokens  # a shorter target could leave the last unit alone again
            window_first.append(position)
            position = _sentence_end(starts, sentences, position, end, target, max_tokens)
            window_end.append(position)
    first = np.array(window_first, dtype=np.int64)
    after = np.array(window_end, dtype=np.int64)
    b = _choose_b(units, first, after, choices[: len(first)], only_sentences=True)
    return Windows(units.starts[first], units.starts[b], units.starts[after], np.zeros(len(first), dtype=bool))


def _sentence_end(
    starts: list[int],
    sentences: list[int],
    position: int,
    stop: int,
    target: int,
    max_tokens: int,
) -> int:
    """Return the last sentence end within `target` tokens, else the next within `max_tokens`, else a unit end."""
    shortest = position + 2  # a window has at least two units
    fitting = bisect.bisect_right(starts, starts[position] + target, shortest, stop + 1) - 1
    if fitting == stop:
        return stop
    index = bisect.bisect_right(sentences, fitting)
    if sentences[index - 1] >= shortest:
        return sentences[index - 1]
    following = min(sentences[index], stop)
    if starts[following] - starts[position] <= max_tokens:
        return following
    return max(fitting, shortest)


def exchange_segment_b(windows: Windows, text: ShardText, max_tokens: int, rng: np.random.Generator) -> Segments:
    """Give half of the windows (±1) the label 1 and a B from another document.

    Windows of donor slices only provide Bs, and are not returned. Raises ValueError if all windows come from one
    document.
    """
    slices = text.slices_of(windows.a_start)
    document = text.documents[slices]
    num_pairs = int(np.searchsorted(slices, text.num_shard_slices))  # donors come last
    # Boundary type: whether the end of B was cut, and whether B starts inside a sentence.
    boundary = 2 * windows.is_cut + ~text.starts_sentence(windows.b_start)
    order = np.lexsort((rng.random(len(windows.end)), windows.b_length, boundary))
    paired = order[order < num_pairs]
    labels = _balance_labels(len(windows.end), paired, rng)
    partner = np.arange(len(windows.end))
    for kind in range(4):
        members = paired[(labels[paired] == 1) & (boundary[paired] == kind)]
        partner[members] = _choose_partners(members, document, rng)
    same = np.flatnonzero((labels == 1) & (document[partner] == document))
    partner[same] = _choose_nearest_partners(same, order, boundary, document, rng)
    b_start, b_length = _exchange(windows, text, partner[:num_pairs], max_tokens, rng)
    return _pairs(windows, b_start, b_length, labels[:num_pairs])


def swap_segments(windows: Windows, rng: np.random.Generator) -> Segments:
    """Give half of the windows (±1) the label 1 and swap their A and B."""
    order = np.lexsort((rng.random(len(windows.end)), windows.a_length - windows.b_length))
    labels = _balance_labels(len(windows.end), order, rng)
    segments = _pairs(windows, windows.b_start, windows.b_length, labels)
    is_swapped = labels == 1
    for column in (segments.starts, segments.lengths):
        pairs = column.reshape(-1, 2)
        pairs[is_swapped] = pairs[is_swapped, ::-1]
    return segments


def _pairs(windows: Windows, b_start: np.ndarray, b_length: np.ndarray, labels: np.ndarray) -> Segments:
    """Return the segments of pairs: the A of the first windows, and the given Bs."""
    num = len(labels)
    starts = np.stack([windows.a_start[:num], b_start], axis=1)
    lengths = np.stack([windows.a_length[:num], b_length], axis=1)
    offsets = 2 * np.arange(num + 1)
    return Segments(starts.ravel(), lengths.ravel(), offsets, labels)


def _balance_labels(num_windows: int, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return labels (windows,) uint8: one 0 and one 1 for every two neighbors in `order`, and 0 elsewhere."""
    labels = np.zeros(num_windows, dtype=np.uint8)
    coins = rng.integers(0, 2, (len(order) + 1) // 2, dtype=np.uint8)
    labels[order[0::2]] = coins
    labels[order[1::2]] = 1 - coins[: len(order) // 2]
    return labels


def _choose_partners(members: np.ndarray, document: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a partner for each window of `members`, which are sorted by length: permute them within blocks.

    Each block is sorted by document and rotated by the number of windows of its largest document. Then no window gets a
    partner of its own document, unless one document has more than half of the block.
    """
    partners = members.copy()
    num_blocks = max(1, len(members) // EXCHANGE_BLOCK)
    for block in np.array_split(np.arange(len(members)), num_blocks):
        if len(block) < 2:
            continue
        _, owners, counts = np.unique(document[members[block]], return_inverse=True, return_counts=True)
        rank = rng.permutation(len(counts))  # neighboring documents of a corpus are often similar
        by_document = block[np.lexsort((rng.random(len(block)), rank[owners]))]
        partners[by_document] = members[np.roll(by_document, -int(counts.max()))]
    return partners


def _choose_nearest_partners(
    unpaired: np.ndarray,
    order: np.ndarray,
    boundary: np.ndarray,
    document: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return a partner from another document for each unpaired window. Several windows may get the same partner.

    The partner is the nearest window in `order` that has the same boundary type. If that is farther away than
    `4 * EXCHANGE_BLOCK` windows, it is a random window, if possible one whose end of B is cut in the same way.
    Raises ValueError if all windows come from one document.
    """
    partners = unpaired.copy()
    position_of = np.argsort(order)
    for row, window in enumerate(unpaired.tolist()):
        position = position_of[window]
        first = max(0, position - 4 * EXCHANGE_BLOCK)
        near = order[first : position + 4 * EXCHANGE_BLOCK + 1]
        is_similar = (document[near] != document[window]) & (boundary[near] == boundary[window])
        if is_similar.any():
            distances = np.abs(np.arange(first, first + len(near)) - position)
            partners[row] = near[is_similar][distances[is_similar].argmin()]
            continue
        others = np.flatnonzero(document != document[window])
        if len(others) == 0:
            raise ValueError("all windows come from one document")
        similar = others[boundary[others] // 2 == boundary[window] // 2]
        partners[row] = rng.choice(similar if len(similar) else others)
    return partners


def _exchange(
    windows: Windows,
    text: ShardText,
    partner: np.ndarray,
    max_tokens: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Replace the B of each window by the B of its partner. Return the starts and the lengths of the Bs, (pairs,).

    If the old B was cut, the new B gets the length of the old B, as far as its document has text. Otherwise the new B
    keeps its own length. It is truncated to `max_tokens` tokens together with A.
    """
    num_pairs = len(partner)
    start = windows.b_start[partner]
    length = windows.b_length[partner]
    # If the window's B starts inside a sentence, the new B does too: it skips some of its first tokens.
    starts_sentence = text.starts_sentence(windows.b_start)
    is_shortened = ~starts_sentence[:num_pairs] & starts_sentence[partner]
    skipped = rng.integers(1, np.maximum(2, length[is_shortened]))
    skipped = np.minimum(skipped, length[is_shortened] - 1)  # at least one token remains
    start[is_shortened] += skipped
    length[is_shortened] -= skipped
    available = text.slice_ends[text.slices_of(start)] - start
    old_length = np.minimum(windows.b_length[:num_pairs], available)
    length = np.where(windows.is_cut[:num_pairs], old_length, length)
    return start, np.minimum(length, max_tokens - windows.a_length[:num_pairs])


def pack_sentences(text: ShardText, max_seq_length: int) -> Segments:
    """Pack the slices of a text, in order and without look-ahead, into examples of at most `max_seq_length` tokens."""
    capacity = max_seq_length - 2  # without [CLS] and the last [SEP]
    starts, lengths, slices = _packing_units(text, capacity)
    ends_slice = np.diff(slices, append=-1) != 0
    # The units [i, j), with a [SEP] between slices, take before[j] - before[i] - ends_slice[j - 1] tokens.
    before = ragged.offsets_of(lengths + ends_slice)
    next_first = np.searchsorted(before[1:] - ends_slice, before[:-1] + capacity, side="right")
    example_firsts: list[int] = []
    unit = 0
    while unit < len(starts):
        example_firsts.append(unit)
        unit = int(next_first[unit])
    # A segment ends with its example or slice.
    firsts = np.array(example_firsts, dtype=np.int64)
    segments = np.union1d(firsts, np.flatnonzero(ends_slice[:-1]) + 1)
    segment_lengths = np.diff(ragged.offsets_of(lengths)[np.append(segments, len(starts))])
    offsets = np.searchsorted(segments, np.append(firsts, len(starts)))
    return Segments(starts[segments], segment_lengths, offsets)


def _packing_units(text: ShardText, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the start, length and slice of each sentence. A sentence longer than `capacity` is divided into tokens."""
    stored = ragged.spans(text.slice_offsets[:-1], text.num_slice_sentences)
    slices = ragged.lists_of(ragged.offsets_of(text.num_slice_sentences))
    starts_sentence = ~text.is_continuation[stored] | (np.diff(slices, prepend=-1) != 0)
    sentences = np.flatnonzero(starts_sentence)
    lengths = np.add.reduceat(np.diff(text.sentence_starts)[stored], sentences)
    is_long = lengths > capacity
    num_units = np.where(is_long, lengths, 1)
    unit_lengths = np.where(is_long, 1, lengths)
    starts = ragged.spans(text.sentence_starts[stored[sentences]], num_units)
    return starts, np.repeat(unit_lengths, num_units), np.repeat(slices[sentences], num_units)


def assemble(segments: Segments, text: ShardText, tokenizer: Tokenizer) -> Examples:
    """Return unmasked examples: `[CLS]`, then each segment followed by `[SEP]`."""
    segment_offsets = ragged.offsets_of(segments.lengths + 1)
    offsets = segment_offsets[segments.offsets] + np.arange(len(segments) + 1)
    starts = segment_offsets[:-1] + ragged.lists_of(segments.offsets) + 1
    is_text = np.ones(offsets[-1], dtype=bool)
    is_text[offsets[:-1]] = False
    is_text[starts + segments.lengths] = False
    sources = ragged.spans(segments.starts, segments.lengths)
    ids = text.ids[sources]
    input_ids = np.full(offsets[-1], tokenizer.sep_id, dtype=ids.dtype)
    input_ids[offsets[:-1]] = tokenizer.cls_id
    input_ids[is_text] = ids
    starts_word = None
    if text.continues_word is not None:
        starts_word = np.zeros(len(input_ids), dtype=bool)
        starts_word[is_text] = ~(tokenizer.is_subword[ids] | text.continues_word[sources])
        starts_word[starts] = True  # a segment may start inside a word
    # B follows [CLS] A [SEP]. Without pairs there is no B, and its start is the length of the example.
    segment_b_start = np.diff(offsets) if segments.labels is None else segments.lengths[0::2] + 2
    return Examples(input_ids, offsets, segment_b_start.astype(np.uint16), None, segments.labels, starts_word)
