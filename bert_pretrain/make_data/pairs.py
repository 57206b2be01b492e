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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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

    slice: np.ndarray  # (windows,) int64: the slice of the text that the window is in
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

    def take(self, rows: np.ndarray) -> "Windows":
        """Return the selected windows, in the order given."""
        return Windows(*(column[rows] for column in self))

    @staticmethod
    def concatenate(tables: Sequence["Windows"]) -> "Windows":
        return Windows(*map(np.concatenate, zip(*tables, strict=True)))


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

    @cached_property
    def sentences(self) -> np.ndarray:
        """The units that start a sentence, (sentences,)."""
        return np.flatnonzero(~self.is_inside)

    @cached_property
    def sentences_before(self) -> np.ndarray:
        """The number of sentences that start before each unit, (units + 2,)."""
        return ragged.offsets_of(~self.is_inside)

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


def cut_at_length(
    text: ShardText,
    max_tokens: int,
    short_seq_prob: float,
    rng: np.random.Generator,
) -> Windows:
    """Cut the whole text into windows that end at their target length, and divide each window into A and B.

    If this cuts a sentence, the next window starts with the same sentence. A window has at least two units, so it may
    exceed a short target. At the end of a document it may be shorter. B starts with a sentence if one starts inside the
    window.

    Each round cuts one window from every slice that has text left. A slice has at most one window per unit, so its
    windows take the targets of its units.
    """
    units, spans = _units(text, max_tokens)
    starts = units.starts
    targets, choices = _draw_targets(len(starts), max_tokens, short_seq_prob, rng)
    slices = np.flatnonzero(spans.have_windows)
    first = spans.first[slices]
    draw = first
    rounds: list[Windows] = []
    while len(slices) or not rounds:  # at least one round, which may be empty
        span_end = spans.end[slices]
        first = np.minimum(first, span_end - 2)  # a single last unit is joined with the one before
        target_end = starts[first] + targets[draw]
        end = np.clip(target_end, starts[first + 2], starts[span_end])
        has_rest = end < starts[span_end]
        after = np.searchsorted(starts, end)  # the first unit that starts at the end of the window or later
        b = _choose_b(
            units,
            first,
            after,
            choices[draw],
            only_sentences=False,
        )
        rounds.append(
            Windows(
                slices,
                starts[first],
                starts[b],
                end,
                has_rest & (end == target_end),
            )
        )
        first = np.where(starts[after] == end, after, after - 1)  # a sentence that was cut starts the next window
        has_more = has_rest & (first < spans.slice_end[slices])
        slices = slices[has_more]
        first = first[has_more]
        draw = draw[has_more] + 1
    windows = Windows.concatenate(rounds)
    return windows.take(np.argsort(windows.slice, kind="stable"))


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
    first_sentence = units.sentences_before[first + 1]
    num_sentences = units.sentences_before[after] - first_sentence
    is_moved = (only_sentences | units.is_inside[chosen]) & (num_sentences > 0)
    sentence = first_sentence + (choices * num_sentences).astype(np.int64)
    chosen[is_moved] = units.sentences[sentence[is_moved]]
    return chosen


def cut_at_sentences(
    text: ShardText,
    max_tokens: int,
    short_seq_prob: float,
    rng: np.random.Generator,
) -> Windows:
    """Cut the whole text into windows that end with a sentence, and divide each window into A and B at a sentence.

    A B that is cut inside a sentence would reveal that it was swapped with A. The next window starts with the sentence
    that did not fit. Such sentences are long, so A would be longer than B on average. To balance the lengths, every
    other slice is cut from its end, which is the start of the reversed text.
    """
    units, spans = _units(text, max_tokens)
    ends = np.maximum(spans.slice_end, np.minimum(spans.first + 2, spans.end))  # one sentence uses its look-ahead
    slices = np.flatnonzero(spans.have_windows)
    targets, choices = _draw_targets(2 * len(units.starts), max_tokens, short_seq_prob, rng)
    cutter = _SentenceCutter(units, max_tokens, targets)
    forward = cutter.cut(slices[0::2], spans.first, ends, choices)
    num = len(forward.end)
    last = len(units.starts) - 1
    cutter = _SentenceCutter(units.reversed(), max_tokens, targets[num:])
    mirrored = cutter.cut(slices[1::2], last - ends, last - spans.first, choices[num:])
    text_end = units.starts[-1]
    backward = Windows(
        slice=mirrored.slice,
        a_start=text_end - mirrored.end,
        b_start=text_end - mirrored.b_start,
        end=text_end - mirrored.a_start,
        is_cut=mirrored.is_cut,
    )
    return Windows.concatenate([forward, backward])


class _SentenceCutter:
    """Cuts spans of units into windows that end with a sentence. Each window takes the next target length."""

    def __init__(
        self,
        units: Units,
        max_tokens: int,
        targets: np.ndarray,
    ) -> None:
        self._units = units
        self._max_tokens = max_tokens
        self._targets = iter(targets.tolist())
        self._starts = units.starts.tolist()
        starts_sentence = ~units.is_inside
        starts_sentence[[0, -1]] = True  # sentences start and end where the text does
        self._sentences = np.flatnonzero(starts_sentence).tolist()

    def cut(
        self,
        slices: np.ndarray,
        firsts: np.ndarray,
        ends: np.ndarray,
        choices: np.ndarray,
    ) -> Windows:
        """Cut the spans of some slices, given the first unit and the unit after the span of every slice."""
        rows: list[tuple[int, int, int]] = []
        for number in slices.tolist():
            rows += [(number, first, after) for first, after in self._cut(int(firsts[number]), int(ends[number]))]
        owners, first, after = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        starts = self._units.starts
        b = _choose_b(
            self._units,
            first,
            after,
            choices[: len(rows)],
            only_sentences=True,
        )
        return Windows(
            owners,
            starts[first],
            starts[b],
            starts[after],
            np.zeros(len(rows), dtype=bool),
        )

    def _cut(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the first unit of each window, and the unit after it."""
        position = first
        while position < end:
            target = next(self._targets)
            if position + 1 == end:  # a single last unit is joined with as much of the sentence before as fits
                sentence = max(first, self._sentences[bisect.bisect_left(self._sentences, position) - 1])
                earliest = self._starts[end] - self._max_tokens
                position = max(sentence, bisect.bisect_left(self._starts, earliest, sentence, position - 1))
                target = self._max_tokens  # a shorter target could leave the last unit alone again
            after = self._sentence_end(position, end, target)
            yield position, after
            position = after

    def _sentence_end(
        self,
        first: int,
        stop: int,
        target: int,
    ) -> int:
        """Return the last sentence end within `target` tokens, else the next within `max_tokens`, else a unit end."""
        shortest = first + 2  # a window has at least two units
        fitting = bisect.bisect_right(self._starts, self._starts[first] + target, shortest, stop + 1) - 1
        if fitting == stop:
            return stop
        index = bisect.bisect_right(self._sentences, fitting)
        if self._sentences[index - 1] >= shortest:
            return self._sentences[index - 1]
        following = min(self._sentences[index], stop)
        if self._starts[following] - self._starts[first] <= self._max_tokens:
            return following
        return max(fitting, shortest)


def exchange_segment_b(
    windows: Windows,
    text: ShardText,
    max_tokens: int,
    rng: np.random.Generator,
) -> Segments:
    """Give half of the windows (±1) the label 1 and a B from another document.

    Windows of donor slices only provide Bs, and are not returned. Raises ValueError if all windows come from one
    document.
    """
    num_windows = len(windows.slice)
    num_pairs = int((windows.slice < text.num_shard_slices).sum())  # donors come last
    document = text.documents[windows.slice]
    starts_sentence = text.starts_sentence(windows.b_start)
    # Boundary type: whether the end of B was cut, and whether B starts inside a sentence.
    boundary = 2 * windows.is_cut + ~starts_sentence
    order = np.lexsort((rng.random(num_windows), windows.b_length, boundary))
    paired = order[order < num_pairs]
    labels = _balance_labels(num_windows, paired, rng)
    exchanged = paired[labels[paired] == 1]
    partner = np.arange(num_windows)
    for kind in range(4):
        members = exchanged[boundary[exchanged] == kind]
        partner[members] = _choose_partners(members, document, rng)
    place = np.argsort(order)
    for window in np.flatnonzero((labels == 1) & (document[partner] == document)).tolist():
        partner[window] = _nearest_partner(
            window,
            int(place[window]),
            order,
            boundary,
            document,
            rng,
        )
    own = windows.take(np.arange(num_pairs))
    other = windows.take(partner[:num_pairs])
    # If the window's B starts inside a sentence, the new B does too: it skips some of its first tokens.
    is_shortened = ~starts_sentence[:num_pairs] & starts_sentence[partner[:num_pairs]]
    start = other.b_start
    length = other.b_length
    skipped = rng.integers(1, np.maximum(2, length[is_shortened]))
    skipped = np.minimum(skipped, length[is_shortened] - 1)  # at least one token remains
    start[is_shortened] += skipped
    length[is_shortened] -= skipped
    # If the old B was cut, the new B gets the length of the old B, as far as its document has text.
    old_length = np.minimum(own.b_length, text.slice_ends[other.slice] - start)
    length = np.where(own.is_cut, old_length, length)
    length = np.minimum(length, max_tokens - own.a_length)
    starts = np.stack([own.a_start, start], axis=1)
    return _pairs(starts, np.stack([own.a_length, length], axis=1), labels[:num_pairs])


def swap_segments(windows: Windows, rng: np.random.Generator) -> Segments:
    """Give half of the windows (±1) the label 1 and swap their A and B."""
    num_windows = len(windows.slice)
    order = np.lexsort((rng.random(num_windows), windows.a_length - windows.b_length))
    labels = _balance_labels(num_windows, order, rng)
    starts = np.stack([windows.a_start, windows.b_start], axis=1)
    lengths = np.stack([windows.a_length, windows.b_length], axis=1)
    is_swapped = labels == 1
    starts[is_swapped] = starts[is_swapped, ::-1]
    lengths[is_swapped] = lengths[is_swapped, ::-1]
    return _pairs(starts, lengths, labels)


def _pairs(starts: np.ndarray, lengths: np.ndarray, labels: np.ndarray) -> Segments:
    """Return the segments of pairs, given the starts and lengths of both segments, (pairs, 2) each."""
    return Segments(starts.ravel(), lengths.ravel(), 2 * np.arange(len(labels) + 1), labels)


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


def _nearest_partner(
    window: int,
    place: int,
    order: np.ndarray,
    boundary: np.ndarray,
    document: np.ndarray,
    rng: np.random.Generator,
) -> int:
    """Return the window from another document that is nearest in `order` and has the same boundary type.

    If none is within `4 * EXCHANGE_BLOCK` windows of the `place` of the window in `order`, return a random window of
    another document, if possible one whose end of B is cut in the same way. Several windows may get the same partner.
    Raises ValueError if all windows come from one document.
    """
    first = max(0, place - 4 * EXCHANGE_BLOCK)
    near = order[first : place + 4 * EXCHANGE_BLOCK + 1]
    similar = np.flatnonzero((document[near] != document[window]) & (boundary[near] == boundary[window]))
    if len(similar):
        return int(near[similar[np.abs(first + similar - place).argmin()]])
    others = np.flatnonzero(document != document[window])
    if len(others) == 0:
        raise ValueError("all windows come from one document")
    cut_alike = others[boundary[others] // 2 == boundary[window] // 2]
    return int(rng.choice(cut_alike if len(cut_alike) else others))


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
    slices = np.repeat(np.arange(len(text.documents)), text.num_slice_sentences)
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
    offsets = ragged.offsets_of(segments.lengths)  # of the segments in the text of all examples
    example_starts = offsets[segments.offsets[:-1]]
    # A [SEP] is inserted after each segment, and then a [CLS] before each example.
    places = np.concatenate([offsets[1:], example_starts])
    special_ids = np.repeat([tokenizer.sep_id, tokenizer.cls_id], [len(segments.lengths), len(segments)])
    sources = ragged.spans(segments.starts, segments.lengths)
    ids = text.ids[sources]
    starts_word = None
    if text.continues_word is not None:
        starts_word = ~text.continues_word[sources]
        starts_word[offsets[:-1]] = True  # a segment may start inside a word
        starts_word = np.insert(starts_word, places, False)
    lengths = np.diff(offsets[segments.offsets]) + np.diff(segments.offsets) + 1
    # B follows [CLS] A [SEP]. Without pairs there is no B, and its start is the length of the example.
    segment_b_start = lengths if segments.labels is None else segments.lengths[0::2] + 2
    return Examples(
        input_ids=np.insert(ids, places, special_ids),
        offsets=ragged.offsets_of(lengths),
        segment_b_start=segment_b_start.astype(np.uint16),
        next_sentence_label=segments.labels,
        starts_word=starts_word,
    )
