"""Text to examples: windows of text are divided into A and B, get balanced labels, and are assembled.

`tests/make_data/reference.py` is the same algorithm in plain Python, without arrays; a test compares the two.

Next sentence (Devlin et al., 2018, section 3.1, task 2): windows are ordered by the boundary type and length of their
B, of every two neighbours one gets the label 1, and these exchange their Bs with windows of the same boundary type and
about the same length from other documents. Sentence order (Lan et al., 2019, section 3.1): windows with the label 1
swap their own A and B. So neither lengths nor boundaries give a hint of the label. Without pairs (Liu et al., 2019,
section 4.2), full sentences are packed up to the length of an example, over the ends of documents.
"""

import bisect
from dataclasses import dataclass

import numpy as np

from bert_pretrain.examples.examples import Examples
from bert_pretrain.make_data.token_store import ShardText, split_long
from bert_pretrain.text import ragged
from bert_pretrain.text.tokenizer import Tokenizer

NUM_SPECIAL = 3  # [CLS] A [SEP] B [SEP]
EXCHANGE_BLOCK = 64


@dataclass(frozen=True)
class Segments:
    """The segments of each example: A and B of a pair, or one per document where there are no pairs."""

    starts: np.ndarray  # (segments,) int64, in ShardText.ids
    lengths: np.ndarray  # (segments,) int64
    offsets: np.ndarray  # (examples + 1,) int64: the segments of each example
    labels: np.ndarray | None = None  # (examples,) uint8, next-sentence labels; None until they are assigned
    is_cut: np.ndarray | None = None  # (examples,) bool: B was cut to fill a window; known until Bs are exchanged

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, examples: np.ndarray) -> "Segments":
        """Return the chosen examples in the order given."""
        starts, offsets = ragged.take(self.starts, self.offsets, examples)
        lengths, _ = ragged.take(self.lengths, self.offsets, examples)
        return Segments(starts, lengths, offsets, None if self.labels is None else self.labels[examples])


def make_pairs(
    starts: np.ndarray, lengths: np.ndarray, labels: np.ndarray | None = None, is_cut: np.ndarray | None = None
) -> Segments:
    """Return the segments of pairs, given starts and lengths of A and B, (pairs, 2)."""
    return Segments(starts.ravel(), lengths.ravel(), 2 * np.arange(len(starts) + 1), labels, is_cut)


def cut_windows(
    text: ShardText, max_tokens: int, short_seq_prob: float, rng: np.random.Generator, *, at_sentences: bool
) -> Segments:
    """Cut text into windows of `max_tokens`, or of a random shorter target, without skipping any, and divide each.

    The share `short_seq_prob` of the windows has a target between 2 and `max_tokens` (appendix A.2 of the paper trains
    mostly on full windows; google-research/bert makes a tenth of them shorter). B begins with a sentence, if any begins
    inside the window, and follows A.

    Windows end where they are full, and a sentence that is cut begins the next one; or, with `at_sentences`, where a
    sentence ends, as a B cut inside a sentence would reveal that it was swapped with A. Cutting such windows from the
    front makes the first sentence of one the sentence that did not fit before, longer than most: every other slice is
    cut from its end, so that A is as long as B on average.
    """
    starts, is_inside, spans = _units(text, max_tokens)
    spans = spans[:, _give_windows(spans)]
    number = 2 * len(starts) if at_sentences else len(starts)
    is_short = rng.random(number) < short_seq_prob
    targets = np.where(is_short, rng.integers(2, max_tokens + 1, number), max_tokens)
    choices = rng.random(number)
    if not at_sentences:
        first, after, stop, is_cut, draw = _full_windows(starts, spans, targets)
        split = _choose_splits(is_inside, first, after, choices[draw], only_sentences=False)
        bounds = np.stack([starts[first], starts[split], stop], axis=1)
        return make_pairs(bounds[:, :2], np.diff(bounds, axis=1), is_cut=is_cut.astype(bool))
    spans[1] = np.maximum(spans[1], np.minimum(spans[0] + 2, spans[2]))  # a single sentence uses its look-ahead
    columns: list[np.ndarray] = []
    last = len(starts) - 1
    for is_mirrored in (False, True):
        own = last - spans[1::-1, 1::2] if is_mirrored else spans[:2, 0::2]
        used = sum(each.shape[1] for each in columns)
        units, inside = (starts[-1] - starts[::-1], is_inside[::-1]) if is_mirrored else (starts, is_inside)
        first, after = _sentence_windows(units, inside, own, targets[used:], max_tokens)
        split = _choose_splits(inside, first, after, choices[used : used + len(first)], only_sentences=True)
        columns.append(last - np.stack([after, split, first]) if is_mirrored else np.stack([first, split, after]))
    bounds = starts[np.concatenate(columns, axis=1).T]
    return make_pairs(bounds[:, :2], np.diff(bounds, axis=1))


def slices_with_windows(text: ShardText, max_tokens: int) -> np.ndarray:
    """Return which slices of a text give windows, (slices,) bool; others have a single short sentence, or none."""
    return _give_windows(_units(text, max_tokens)[2])


def _units(text: ShardText, max_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Divide text into the units of windows: sentences, those longer than half a window divided.

    Returns the start of each unit in `ShardText.ids`, and the end of the last, (units + 1,); whether it begins inside a
    sentence, (units + 1,) bool; and of each slice the first unit, the end of its own, and of all, (3, slices).
    """
    starts, first_units = split_long(text.sentence_starts, max_tokens // 2)
    is_inside = np.ones(len(starts), dtype=bool)
    is_inside[first_units[:-1]] = text.is_continuation
    own_sentences = text.slice_offsets[:-1] + text.slice_own_sentences  # what follows is look-ahead
    spans = np.stack([first_units[each] for each in (text.slice_offsets[:-1], own_sentences, text.slice_offsets[1:])])
    return starts, is_inside, spans


def _give_windows(spans: np.ndarray) -> np.ndarray:
    return (spans[1] > spans[0]) & (spans[2] - spans[0] >= 2)


def _full_windows(starts: np.ndarray, spans: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Cut spans of units, (3, spans): the first, the end of its own, and of all.

    Returns of each window the first unit, the one after it, where it ends in ids, whether it was cut there to its
    target, and the number of its target, (5, windows). All spans take their first window, then those with text left
    their second one, and so on: arrays, as the targets of a span are its own.
    """
    rows, (first, own_end, end) = np.arange(spans.shape[1]), spans
    position, draw = first, first  # a span has no more windows than units
    rounds = [np.zeros((6, 0), dtype=np.int64)]
    while len(rows):
        position = np.minimum(position, end[rows] - 2)  # a last sentence left alone is taken with the one before
        wanted, text_end = starts[position] + targets[draw], starts[end[rows]]
        stop = np.minimum(np.maximum(wanted, starts[position + 2]), text_end)
        after = np.searchsorted(starts, stop)  # the first unit that begins there or later
        rounds.append(np.stack([rows, position, after, stop, (wanted == stop) & (stop < text_end), draw]))
        position = np.where(starts[after] == stop, after, after - 1)
        has_more = (stop < text_end) & (position < own_end[rows])
        rows, position, draw = rows[has_more], position[has_more], draw[has_more] + 1
    columns = np.concatenate(rounds, axis=1)
    return columns[1:, np.argsort(columns[0], kind="stable")]


def _sentence_windows(
    starts_array: np.ndarray, is_inside: np.ndarray, spans: np.ndarray, targets: np.ndarray, max_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut spans of units, (2, spans), each two or more; returns of each window the first unit, and the one after it.

    Each window takes the next target, whichever span it comes from, so they are cut one after another.
    """
    starts, whole, next_target = starts_array.tolist(), np.flatnonzero(~is_inside).tolist(), iter(targets.tolist())
    rows: list[tuple[int, int]] = []
    for first, end in spans.T.tolist():
        position = first
        while position < end:
            target = next(next_target)
            if position + 1 == end:  # a last unit left alone goes with the sentence before, or as much of it as fits
                index = bisect.bisect_left(whole, position)
                sentence = max(first, whole[index - 1]) if index else first
                position = max(sentence, bisect.bisect_left(starts, starts[end] - max_tokens, sentence, position - 1))
                target = max_tokens  # a shorter one could leave the last unit alone again
            after = _sentence_end(starts, whole, position, end, target, max_tokens)
            rows.append((position, after))
            position = after
    first_units, ends = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    return first_units, ends


def _choose_splits(
    is_inside: np.ndarray, first: np.ndarray, after: np.ndarray, choices: np.ndarray, *, only_sentences: bool
) -> np.ndarray:
    """Return the unit that B begins with, of the units (first, after) of each window.

    It begins a sentence, if any does there. With `only_sentences` all sentences are equally likely, otherwise those
    that are not divided, and a divided one by its units.
    """
    whole, whole_before = np.flatnonzero(~is_inside), ragged.offsets_of(~is_inside)
    split = first + 1 + (choices * (after - first - 1)).astype(np.int64)
    num_sentences = whole_before[after] - whole_before[first + 1]
    moved = np.flatnonzero((only_sentences | is_inside[split]) & (num_sentences > 0))
    chosen = (choices[moved] * num_sentences[moved]).astype(np.int64)
    split[moved] = whole[whole_before[first[moved] + 1] + chosen]
    return split


def _sentence_end(starts: list[int], whole: list[int], position: int, stop: int, target: int, max_tokens: int) -> int:
    """Return the end of a window of two units or more: the last sentence end within the target, else the next one."""
    fitting = bisect.bisect_right(starts, starts[position] + target, position + 2, stop + 1) - 1
    if fitting == stop:
        return stop
    index = bisect.bisect_right(whole, fitting)
    if index and whole[index - 1] >= position + 2:
        return whole[index - 1]
    index = bisect.bisect_left(whole, position + 2)
    following = min(whole[index], stop) if index < len(whole) else stop
    if starts[following] - starts[position] <= max_tokens:
        return following
    return max(fitting, position + 2)


def shuffle_segment_b(windows: Segments, text: ShardText, max_tokens: int, rng: np.random.Generator) -> Segments:
    """Give half of the windows (±1) the label 1, and a B of another document.

    Windows from donor slices of the text are not paired; they only offer their Bs. A ValueError says that all windows
    come from one document.
    """
    assert windows.is_cut is not None
    slices = text.slices_of(windows.starts[0::2])
    document, num_own = text.documents[slices], int(np.searchsorted(slices, text.num_own_slices))
    # Boundary type: whether B was cut at its end, and whether it begins inside a sentence.
    boundary = 2 * windows.is_cut + ~text.begins_sentence(windows.starts[1::2])
    order = np.lexsort((rng.random(len(windows)), windows.lengths[1::2], boundary))
    own = order[order < num_own]
    labels = _balanced_labels(len(windows), own, rng)
    partner = np.arange(len(windows))
    for kind in range(4):
        members = own[(labels[own] == 1) & (boundary[own] == kind)]
        partner[members] = _permute(members, document, rng)
    unpaired = np.flatnonzero((labels == 1) & (document[partner] == document))
    if len(unpaired):
        partner[unpaired] = _fallback_partners(unpaired, order, boundary, document, rng)
    return _cut_bs(windows, text, partner[:num_own], labels[:num_own], max_tokens, rng)


def swap_segments(windows: Segments, rng: np.random.Generator) -> Segments:
    """Give half of the windows (±1) the label 1, and swap their A and B."""
    starts, lengths = windows.starts.reshape(-1, 2), windows.lengths.reshape(-1, 2)
    order = np.lexsort((rng.random(len(windows)), lengths[:, 0] - lengths[:, 1]))
    labels = _balanced_labels(len(windows), order, rng)
    columns = np.stack([labels, 1 - labels], axis=1)  # 0: the first half, 1: the second
    starts, lengths = (np.take_along_axis(values, columns, axis=1) for values in (starts, lengths))
    return make_pairs(starts, lengths, labels)


def _balanced_labels(number: int, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return labels (number,) uint8: each two neighbours in `order` have a 0 and a 1; others have 0."""
    labels = np.zeros(number, dtype=np.uint8)
    coins = rng.integers(0, 2, (len(order) + 1) // 2, dtype=np.uint8)
    labels[order[0::2]] = coins
    labels[order[1::2]] = 1 - coins[: len(order) // 2]
    return labels


def _permute(members: np.ndarray, document: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Permute windows, in order of length, within blocks, so that few keep a partner of their own document.

    In a block sorted by document, in random order of the documents, a shift by the size of the largest document's group
    leaves no window in its own group, unless that group is more than half of the block; the windows left over need a
    fallback.
    """
    partners = members.copy()
    num_blocks = max(1, len(members) // EXCHANGE_BLOCK)
    for block in np.array_split(np.arange(len(members)), num_blocks):
        if len(block) < 2:
            continue
        _, owners, counts = np.unique(document[members[block]], return_inverse=True, return_counts=True)
        rank = rng.permutation(len(counts))  # not that of the corpus, in which neighbours are often alike
        by_document = block[np.lexsort((rng.random(len(block)), rank[owners]))]
        partners[by_document] = members[np.roll(by_document, -int(counts.max()))]
    return partners


def _fallback_partners(
    unpaired: np.ndarray, order: np.ndarray, boundary: np.ndarray, document: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Find, for windows whose document dominates, the nearest of another document in order of length.

    Its B is then used more than once, as in sampling with replacement. Where none is near, any other one is taken.
    """
    partners = unpaired.copy()
    for kind in np.unique(boundary[unpaired]):
        line = order[boundary[order] == kind]
        owners = document[line]
        changes = np.flatnonzero(owners[1:] != owners[:-1]) + 1  # where a run of one document ends
        places = np.flatnonzero(np.isin(line, unpaired))
        run = np.searchsorted(changes, places, side="right")
        bounds = np.concatenate([[-len(line)], changes, [2 * len(line)]])
        before, behind = bounds[run] - 1, bounds[run + 1]
        nearest = np.where(places - before <= behind - places, before, behind)
        is_near = np.abs(nearest - places) <= 4 * EXCHANGE_BLOCK
        is_near &= (nearest >= 0) & (nearest < len(line))
        partners[np.searchsorted(unpaired, line[places[is_near]])] = line[nearest[is_near]]
    for row in np.flatnonzero(document[partners] == document[unpaired]):
        others = np.flatnonzero(document != document[unpaired[row]])
        if len(others) == 0:
            raise ValueError("all windows come from one document")
        alike = others[boundary[others] // 2 == boundary[unpaired[row]] // 2]
        partners[row] = rng.choice(alike if len(alike) else others)
    return partners


def _cut_bs(
    windows: Segments,
    text: ShardText,
    partner: np.ndarray,
    labels: np.ndarray,
    max_tokens: int,
    rng: np.random.Generator,
) -> Segments:
    """Cut every B, own or exchanged, by one rule: to the length of the window's own B if that was cut, else whole."""
    assert windows.is_cut is not None
    own = np.arange(len(partner))
    a_lengths, b_starts, b_lengths = windows.lengths[0::2], windows.starts[1::2], windows.lengths[1::2]
    begins_sentence = text.begins_sentence(b_starts)
    starts, whole = b_starts[partner], b_lengths[partner]
    # A window that meets its B inside a sentence does so after an exchange too, wherever the other B begins.
    inside = ~begins_sentence[own] & begins_sentence[partner]
    skipped = rng.integers(1, np.maximum(2, whole[inside]))
    skipped = np.minimum(skipped, whole[inside] - 1)  # something of it must be left
    starts[inside] += skipped
    whole[inside] -= skipped
    available = text.slice_ends[text.slices_of(starts)] - starts
    lengths = np.where(windows.is_cut[own], np.minimum(b_lengths[own], available), whole)
    lengths = np.minimum(lengths, max_tokens - a_lengths[own])
    a = slice(len(partner))
    return make_pairs(
        np.stack([windows.starts[0::2][a], starts], axis=1), np.stack([a_lengths[a], lengths], axis=1), labels
    )


def pack_sentences(text: ShardText, max_seq_length: int) -> Segments:
    """Pack the slices of a text, in their order and without look-ahead, into examples of `max_seq_length` at most."""
    capacity = max_seq_length - 2  # without [CLS] and the last [SEP]
    starts, lengths, slices = _undivided(text, capacity)
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


def _undivided(text: ShardText, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
