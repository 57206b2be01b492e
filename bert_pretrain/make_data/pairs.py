"""Turn text into examples: divide windows of text into A and B, balance the labels, and assemble the examples.

`tests/make_data/reference.py` is the same algorithm in plain Python, without arrays. A test compares the two.

* Next sentence (Devlin et al., 2018, section 3.1, task 2): windows are sorted by the boundary type and length of B.
  One of every two neighboring windows gets the label 1. Its B is replaced by the B of a window from another document,
  if possible with the same boundary type and about the same length.
* Sentence order (Lan et al., 2019, section 3.1): windows with the label 1 swap their A and B.
* No pairs (Liu et al., 2019, section 4.2): full sentences are packed up to `max_seq_length`, across documents.

Lengths and boundaries hardly reveal the label. The exceptions are corpora of few short documents and, for sentence
order, windows with a part of a very long sentence (docs/data.md).
"""

import bisect
from dataclasses import dataclass

import numpy as np

from bert_pretrain import ragged
from bert_pretrain.examples.examples import Examples
from bert_pretrain.make_data.token_store import ShardText, split_long
from bert_pretrain.text.tokenizer import Tokenizer

NUM_SPECIAL = 3  # [CLS] A [SEP] B [SEP]
EXCHANGE_BLOCK = 64  # minimum number of windows in a block; Bs are permuted within each block


@dataclass(frozen=True)
class Segments:
    """The segments of each example: A and B of a pair or, without pairs, one segment per document."""

    starts: np.ndarray  # (segments,) int64, in ShardText.ids
    lengths: np.ndarray  # (segments,) int64
    offsets: np.ndarray  # (examples + 1,) int64: the segments of each example
    labels: np.ndarray | None = None  # (examples,) uint8, next-sentence labels; None until they are assigned
    is_cut: np.ndarray | None = None  # (examples,) bool: B was cut to fill a window; None after Bs are exchanged

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, examples: np.ndarray) -> "Segments":
        """Return the selected examples, in the order given."""
        starts, offsets = ragged.take(self.starts, self.offsets, examples)
        lengths, _ = ragged.take(self.lengths, self.offsets, examples)
        return Segments(starts, lengths, offsets, None if self.labels is None else self.labels[examples])


def make_pairs(
    starts: np.ndarray, lengths: np.ndarray, labels: np.ndarray | None = None, is_cut: np.ndarray | None = None
) -> Segments:
    """Return the segments of pairs, given the starts and lengths of A and B, (pairs, 2)."""
    return Segments(starts.ravel(), lengths.ravel(), 2 * np.arange(len(starts) + 1), labels, is_cut)


def cut_windows(
    text: ShardText, max_tokens: int, short_seq_prob: float, rng: np.random.Generator, *, at_sentences: bool
) -> Segments:
    """Cut the whole text into windows, and divide each window into A and B.

    The target length of a window is `max_tokens` or, with probability `short_seq_prob`, a random number from 2 to
    `max_tokens`, as in google-research/bert. A window has at least two units (see `_units`), so it may exceed a short
    target. At the end of a document it may be shorter. B starts with a sentence if one starts inside the window.

    By default, a window ends at its target length. If this cuts a sentence, the next window starts with the same
    sentence. With `at_sentences`, a window ends with a sentence, because a B that is cut inside a sentence would reveal
    that it was swapped with A. The next window then starts with the sentence that did not fit. Such sentences are long,
    so A would be longer than B on average. To balance the lengths, every other slice is cut from its end.
    """
    starts, is_inside, spans = _units(text, max_tokens)
    spans = spans[:, _have_windows(spans)]
    num_draws = 2 * len(starts) if at_sentences else len(starts)
    is_short = rng.random(num_draws) < short_seq_prob
    targets = np.where(is_short, rng.integers(2, max_tokens + 1, num_draws), max_tokens)
    choices = rng.random(num_draws)
    if not at_sentences:
        first, after, stop, is_cut, draw = _full_windows(starts, spans, targets)
        split = _choose_splits(is_inside, first, after, choices[draw], only_sentences=False)
        bounds = np.stack([starts[first], starts[split], stop], axis=1)
        return make_pairs(bounds[:, :2], np.diff(bounds, axis=1), is_cut=is_cut.astype(bool))
    spans[1] = np.maximum(spans[1], np.minimum(spans[0] + 2, spans[2]))  # a single sentence uses its look-ahead
    columns: list[np.ndarray] = []
    last, num_windows = len(starts) - 1, 0
    for is_mirrored in (False, True):
        half = last - spans[1::-1, 1::2] if is_mirrored else spans[:2, 0::2]
        units, inside = (starts[-1] - starts[::-1], is_inside[::-1]) if is_mirrored else (starts, is_inside)
        first, after = _sentence_windows(units, inside, half, targets[num_windows:], max_tokens)
        split = _choose_splits(inside, first, after, choices[num_windows:][: len(first)], only_sentences=True)
        columns.append(last - np.stack([after, split, first]) if is_mirrored else np.stack([first, split, after]))
        num_windows += len(first)
    bounds = starts[np.concatenate(columns, axis=1).T]
    return make_pairs(bounds[:, :2], np.diff(bounds, axis=1))


def slices_with_windows(text: ShardText, max_tokens: int) -> np.ndarray:
    """Return which slices have windows, (slices,) bool. Other slices are empty or have a single short sentence."""
    return _have_windows(_units(text, max_tokens)[2])


def _units(text: ShardText, max_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Divide text into the units of windows. Sentences longer than half a window are divided into several units.

    Returns:
        starts: the start of each unit in `ShardText.ids`, then the end of the last unit, (units + 1,).
        is_inside: whether the unit starts inside a sentence, (units + 1,) bool.
        spans: the first unit of each slice, the end of its units, and the end of its look-ahead, (3, slices).
    """
    starts, first_units = split_long(text.sentence_starts, max_tokens // 2)
    is_inside = np.ones(len(starts), dtype=bool)
    is_inside[first_units[:-1]] = text.is_continuation
    firsts, ends = text.slice_offsets[:-1], text.slice_offsets[1:]
    return starts, is_inside, first_units[np.stack([firsts, firsts + text.num_slice_sentences, ends])]


def _have_windows(spans: np.ndarray) -> np.ndarray:
    return (spans[1] > spans[0]) & (spans[2] - spans[0] >= 2)


def _full_windows(starts: np.ndarray, spans: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Cut spans of units, (3, spans) as from `_units`, into windows that end where they reach their target length.

    Returns five rows, (5, windows): the first unit, the unit after the window, its end in ids, whether its target
    length cut it there, and the index of that target. Each round cuts one window from every span that has text left.
    """
    rows, (first, slice_end, end) = np.arange(spans.shape[1]), spans
    position, draw = first, first  # a span has at most one window per unit, so units index the targets
    rounds = [np.zeros((6, 0), dtype=np.int64)]
    while len(rows):
        position = np.minimum(position, end[rows] - 2)  # a single last unit is joined with the one before
        wanted, text_end = starts[position] + targets[draw], starts[end[rows]]
        stop = np.minimum(np.maximum(wanted, starts[position + 2]), text_end)
        after = np.searchsorted(starts, stop)  # the first unit that starts at `stop` or later
        rounds.append(np.stack([rows, position, after, stop, (wanted == stop) & (stop < text_end), draw]))
        position = np.where(starts[after] == stop, after, after - 1)
        has_more = (stop < text_end) & (position < slice_end[rows])
        rows, position, draw = rows[has_more], position[has_more], draw[has_more] + 1
    columns = np.concatenate(rounds, axis=1)
    return columns[1:, np.argsort(columns[0], kind="stable")]


def _sentence_windows(
    starts_array: np.ndarray, is_inside: np.ndarray, spans: np.ndarray, targets: np.ndarray, max_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut spans of two or more units, given as (first, end), (2, spans), into windows that end with a sentence.

    Returns the first unit of each window, and the unit after the window. Each window takes the next target length.
    """
    starts, sentences, next_target = starts_array.tolist(), np.flatnonzero(~is_inside).tolist(), iter(targets.tolist())
    rows: list[tuple[int, int]] = []
    for first, end in spans.T.tolist():
        position = first
        while position < end:
            target = next(next_target)
            if position + 1 == end:  # a single last unit is joined with as much of the sentence before as fits
                index = bisect.bisect_left(sentences, position)
                sentence = max(first, sentences[index - 1]) if index else first
                position = max(sentence, bisect.bisect_left(starts, starts[end] - max_tokens, sentence, position - 1))
                target = max_tokens  # a shorter target could leave the last unit alone again
            after = _sentence_end(starts, sentences, position, end, target, max_tokens)
            rows.append((position, after))
            position = after
    first_units, ends = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    return first_units, ends


def _choose_splits(
    is_inside: np.ndarray, first: np.ndarray, after: np.ndarray, choices: np.ndarray, *, only_sentences: bool
) -> np.ndarray:
    """Choose the unit that B starts with, between the units `first` and `after` of each window.

    B starts with a sentence if one starts there. With `only_sentences`, all these sentences are equally likely.
    Otherwise, all units are equally likely, and a unit inside a sentence is replaced by one of these sentences.
    """
    sentences, sentences_before = np.flatnonzero(~is_inside), ragged.offsets_of(~is_inside)
    split = first + 1 + (choices * (after - first - 1)).astype(np.int64)
    num_sentences = sentences_before[after] - sentences_before[first + 1]
    moved = np.flatnonzero((only_sentences | is_inside[split]) & (num_sentences > 0))
    chosen = (choices[moved] * num_sentences[moved]).astype(np.int64)
    split[moved] = sentences[sentences_before[first[moved] + 1] + chosen]
    return split


def _sentence_end(
    starts: list[int], sentences: list[int], position: int, stop: int, target: int, max_tokens: int
) -> int:
    """Return the last sentence end within `target` tokens, else the next within `max_tokens`, else a unit end."""
    shortest = position + 2  # a window has at least two units
    fitting = bisect.bisect_right(starts, starts[position] + target, shortest, stop + 1) - 1
    if fitting == stop:
        return stop
    index = bisect.bisect_right(sentences, fitting)
    if index and sentences[index - 1] >= shortest:
        return sentences[index - 1]
    index = bisect.bisect_left(sentences, shortest)
    following = min(sentences[index], stop) if index < len(sentences) else stop
    if starts[following] - starts[position] <= max_tokens:
        return following
    return max(fitting, shortest)


def shuffle_segment_b(windows: Segments, text: ShardText, max_tokens: int, rng: np.random.Generator) -> Segments:
    """Give half of the windows (±1) the label 1 and a B from another document.

    Windows of donor slices only provide Bs, and are not returned. Raises ValueError if all windows come from one
    document.
    """
    assert windows.is_cut is not None
    slices = text.slices_of(windows.starts[0::2])
    document, num_paired = text.documents[slices], int(np.searchsorted(slices, text.num_shard_slices))
    # Boundary type: whether the end of B was cut, and whether B starts inside a sentence.
    boundary = 2 * windows.is_cut + ~text.starts_sentence(windows.starts[1::2])
    order = np.lexsort((rng.random(len(windows)), windows.lengths[1::2], boundary))
    paired = order[order < num_paired]
    labels = _balanced_labels(len(windows), paired, rng)
    partner = np.arange(len(windows))
    for kind in range(4):
        members = paired[(labels[paired] == 1) & (boundary[paired] == kind)]
        partner[members] = _permute(members, document, rng)
    same = np.flatnonzero((labels == 1) & (document[partner] == document))
    if len(same):
        partner[same] = _fallback_partners(same, order, boundary, document, rng)
    return make_pairs(*_exchange_bs(windows, text, partner[:num_paired], max_tokens, rng), labels[:num_paired])


def swap_segments(windows: Segments, rng: np.random.Generator) -> Segments:
    """Give half of the windows (±1) the label 1 and swap their A and B."""
    starts, lengths = windows.starts.reshape(-1, 2), windows.lengths.reshape(-1, 2)
    order = np.lexsort((rng.random(len(windows)), lengths[:, 0] - lengths[:, 1]))
    labels = _balanced_labels(len(windows), order, rng)
    columns = np.stack([labels, 1 - labels], axis=1)
    starts, lengths = (np.take_along_axis(values, columns, axis=1) for values in (starts, lengths))
    return make_pairs(starts, lengths, labels)


def _balanced_labels(num_windows: int, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return labels (windows,) uint8: one 0 and one 1 for every two neighbors in `order`, and 0 elsewhere."""
    labels = np.zeros(num_windows, dtype=np.uint8)
    coins = rng.integers(0, 2, (len(order) + 1) // 2, dtype=np.uint8)
    labels[order[0::2]] = coins
    labels[order[1::2]] = 1 - coins[: len(order) // 2]
    return labels


def _permute(members: np.ndarray, document: np.ndarray, rng: np.random.Generator) -> np.ndarray:
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


def _fallback_partners(
    unpaired: np.ndarray, order: np.ndarray, boundary: np.ndarray, document: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return a partner from another document for each unpaired window. Several windows may get the same partner.

    The partner is the nearest window in `order` that has the same boundary type. If that is farther away than
    `4 * EXCHANGE_BLOCK` windows, it is a random window, if possible one whose end of B is cut in the same way.
    Raises ValueError if all windows come from one document.
    """
    partners = unpaired.copy()
    for kind in np.unique(boundary[unpaired]):
        same_type = order[boundary[order] == kind]
        owners = document[same_type]
        changes = np.flatnonzero(owners[1:] != owners[:-1]) + 1  # where a run of windows of one document ends
        positions = np.flatnonzero(np.isin(same_type, unpaired))
        run = np.searchsorted(changes, positions, side="right")
        # The windows next to the run, before and after it. The first and the last bound are outside of the array.
        bounds = np.concatenate([[-len(same_type)], changes, [2 * len(same_type)]])
        before, after = bounds[run] - 1, bounds[run + 1]
        nearest = np.where(positions - before <= after - positions, before, after)
        is_near = (np.abs(nearest - positions) <= 4 * EXCHANGE_BLOCK) & (nearest >= 0) & (nearest < len(same_type))
        partners[np.searchsorted(unpaired, same_type[positions[is_near]])] = same_type[nearest[is_near]]
    for row in np.flatnonzero(document[partners] == document[unpaired]):
        others = np.flatnonzero(document != document[unpaired[row]])
        if len(others) == 0:
            raise ValueError("all windows come from one document")
        similar = others[boundary[others] // 2 == boundary[unpaired[row]] // 2]
        partners[row] = rng.choice(similar if len(similar) else others)
    return partners


def _exchange_bs(
    windows: Segments, text: ShardText, partner: np.ndarray, max_tokens: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Replace the B of each window by the B of its partner. Return the starts and the lengths of A and B, (pairs, 2).

    If the old B was cut, the new B gets the length of the old B, as far as its document has text. Otherwise the new B
    keeps its own length. It is truncated to `max_tokens` tokens together with A.
    """
    assert windows.is_cut is not None
    num_pairs = len(partner)
    a_starts, a_lengths = windows.starts[0::2][:num_pairs], windows.lengths[0::2][:num_pairs]
    b_starts, b_lengths = windows.starts[1::2], windows.lengths[1::2]
    starts_sentence = text.starts_sentence(b_starts)
    starts, lengths = b_starts[partner], b_lengths[partner]
    # If the window's B starts inside a sentence, the new B does too: it skips some of its first tokens.
    is_inside = ~starts_sentence[:num_pairs] & starts_sentence[partner]
    skipped = rng.integers(1, np.maximum(2, lengths[is_inside]))
    skipped = np.minimum(skipped, lengths[is_inside] - 1)  # at least one token remains
    starts[is_inside] += skipped
    lengths[is_inside] -= skipped
    available = text.slice_ends[text.slices_of(starts)] - starts
    lengths = np.where(windows.is_cut[:num_pairs], np.minimum(b_lengths[:num_pairs], available), lengths)
    lengths = np.minimum(lengths, max_tokens - a_lengths)
    return np.stack([a_starts, starts], axis=1), np.stack([a_lengths, lengths], axis=1)


def pack_sentences(text: ShardText, max_seq_length: int) -> Segments:
    """Pack the slices of a text, in order and without look-ahead, into examples of at most `max_seq_length` tokens."""
    capacity = max_seq_length - 2  # without [CLS] and the last [SEP]
    starts, lengths, slices = _packing_units(text, capacity)
    ends_slice = np.diff(slices, append=-1) != 0
    # The units [i, j), with a [SEP] between slices, take before[j] - before[i] - ends_slice[j - 1] tokens.
    before = ragged.offsets_of(lengths + ends_slice)
    next_first = np.searchsorted(before[1:] - ends_slice, before[:-1] + capacity, side="right")
    example_starts, unit = list[int](), 0
    while unit < len(starts):
        example_starts.append(unit)
        unit = int(next_first[unit])
    firsts = np.array(example_starts, dtype=np.int64)
    segments = np.union1d(firsts, np.flatnonzero(ends_slice[:-1]) + 1)  # a segment ends with its example or slice
    bounds = np.append(segments, len(starts))
    offsets = np.searchsorted(segments, np.append(firsts, len(starts)))
    return Segments(starts[segments], np.diff(ragged.offsets_of(lengths)[bounds]), offsets)


def _packing_units(text: ShardText, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the start, length and slice of each sentence. A sentence longer than `capacity` is divided into tokens."""
    stored = ragged.spans(text.slice_offsets[:-1], text.num_slice_sentences)
    slices = np.repeat(np.arange(len(text.num_slice_sentences)), text.num_slice_sentences)
    sentences = np.flatnonzero(~text.is_continuation[stored] | (np.diff(slices, prepend=-1) != 0))
    lengths = np.add.reduceat(np.diff(text.sentence_starts)[stored], sentences)
    is_long = lengths > capacity
    num_units = np.where(is_long, lengths, 1)
    within = ragged.positions_within(ragged.offsets_of(num_units))
    starts = np.repeat(text.sentence_starts[stored[sentences]], num_units) + within
    return starts, np.repeat(np.where(is_long, 1, lengths), num_units), np.repeat(slices[sentences], num_units)


def assemble(segments: Segments, text: ShardText, tokenizer: Tokenizer) -> Examples:
    """Return unmasked examples: `[CLS]`, then each segment followed by `[SEP]`."""
    rows = np.arange(len(segments) + 1)
    segment_offsets = ragged.offsets_of(segments.lengths + 1)
    offsets = segment_offsets[segments.offsets] + rows
    starts = segment_offsets[:-1] + np.repeat(rows[1:], np.diff(segments.offsets))
    is_text = np.ones(offsets[-1], dtype=bool)
    is_text[offsets[:-1]] = False
    is_text[starts + segments.lengths] = False
    sources = ragged.spans(segments.starts, segments.lengths)
    input_ids = np.full(offsets[-1], tokenizer.sep_id, dtype=text.ids.dtype)
    input_ids[offsets[:-1]] = tokenizer.cls_id
    input_ids[is_text] = text.ids[sources]
    starts_word = None
    if text.continues_word is not None:
        starts_word = np.zeros(len(input_ids), dtype=bool)
        starts_word[is_text] = ~(tokenizer.is_subword[text.ids[sources]] | text.continues_word[sources])
        starts_word[starts] = True  # a segment may start inside a word
    # B follows [CLS] A [SEP]. Without pairs there is no B, and its start is the length of the example.
    segment_b_start = np.diff(offsets) if segments.labels is None else segments.lengths[0::2] + 2
    return Examples(input_ids, offsets, segment_b_start.astype(np.uint16), None, segments.labels, starts_word)
