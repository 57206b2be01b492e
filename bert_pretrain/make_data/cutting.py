"""Windows: text cut to examples of A and B, without skipping any text; every B still follows its A.

For next-sentence prediction a window ends exactly where it is full, for sentence order where a sentence ends. The two
share all but the loop over windows. In the former, the random numbers of a slice of text are its own, so the k-th
windows of all slices are cut at once, by arrays. In the latter, each window takes the next random number, whichever
slice it comes from, so they are cut one after another; arrays would give other examples than shards already have.
"""

import bisect
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from bert_pretrain.make_data.segments import Segments, make_pairs
from bert_pretrain.make_data.token_store import ShardText, split_long
from bert_pretrain.text import ragged


class _Units(NamedTuple):
    """What windows consist of: sentences, those longer than half a window divided."""

    starts: np.ndarray  # (units + 1,) where each unit begins in ShardText.ids, and the last one ends
    is_inside: np.ndarray  # (units + 1,) bool: begins inside a sentence
    first: np.ndarray  # (slices,) the first unit of each slice of text
    own_end: np.ndarray  # (slices,) where its own units end; what follows is look-ahead
    end: np.ndarray  # (slices,)

    @property
    def has_windows(self) -> np.ndarray:
        """Which slices give windows, (slices,) bool: those of two sentences, or of a long one to be divided."""
        return (self.own_end > self.first) & (self.end - self.first >= 2)


def slices_with_windows(text: ShardText, max_tokens: int) -> np.ndarray:
    """Return which slices of a text give windows, (slices,) bool; others have a single sentence, or none."""
    return _divide(text, max_tokens).has_windows


def _divide(text: ShardText, max_tokens: int) -> _Units:
    starts, first_units = split_long(text.sentence_starts, max_tokens // 2)
    is_inside = np.ones(len(starts), dtype=bool)
    is_inside[first_units[:-1]] = text.is_continuation
    first = text.slice_offsets[:-1]
    own_end, end = first + text.slice_own_sentences, text.slice_offsets[1:]
    return _Units(starts, is_inside, first_units[first], first_units[own_end], first_units[end])


def cut_full_windows(text: ShardText, max_tokens: int, short_seq_prob: float, rng: np.random.Generator) -> Segments:
    """Cut text into windows of `max_tokens`, or of a random shorter target, and divide each at a sentence end.

    A sentence that a window cut begins the next one, and a last sentence that is left alone is taken together with the
    one before. A and B meet inside a sentence only where a window holds no sentence end.

    A and B have `max_tokens` together at most. The share `short_seq_prob` of the windows has a target between 2 and
    `max_tokens` (appendix A.2 of the paper trains mostly on full windows; google-research/bert makes a tenth of them
    shorter).
    """
    units = _divide(text, max_tokens)
    starts, slices = units.starts, np.flatnonzero(units.has_windows)
    targets, places = _draw(len(starts), max_tokens, short_seq_prob, rng)
    # All slices take their first window, then those with text left their second one, and so on.
    position, draw = units.first[slices], units.first[slices]  # a slice has no more windows than units
    rounds = [np.zeros((6, 0), dtype=np.int64)]
    while len(slices):
        position = np.minimum(position, units.end[slices] - 2)
        wanted, text_end = starts[position] + targets[draw], starts[units.end[slices]]
        end = np.minimum(np.maximum(wanted, starts[position + 2]), text_end)
        after = np.searchsorted(starts, end)  # the first unit that begins at `end` or later
        is_cut = (wanted == end) & (end < text_end)
        rounds.append(np.stack([slices, position, after, end, is_cut, draw]))
        position = np.where(starts[after] == end, after, after - 1)
        has_more = (end < text_end) & (position < units.own_end[slices])
        slices, position, draw = slices[has_more], position[has_more], draw[has_more] + 1
    columns = np.concatenate(rounds, axis=1)
    _, first, after, end, is_cut, draw = columns[:, np.argsort(columns[0], kind="stable")]
    split = _choose_splits(units.is_inside, first, after, places[draw], only_sentences=False)
    return _windows(starts[first], starts[split], end, is_cut.astype(bool))


def cut_at_sentences(text: ShardText, max_tokens: int, short_seq_prob: float, rng: np.random.Generator) -> Segments:
    """Cut text into windows of whole sentences, `max_tokens` or a shorter target at most, and divide each.

    Where A and B are swapped, a B cut inside a sentence would reveal it. So windows begin, divide and end at sentence
    ends; only a sentence longer than half a window is divided, where it does not fit otherwise. Cutting from the front
    makes the first sentence of a window the one that did not fit before, longer than most: every other slice is cut
    from its end, so that A is as long as B on average.

    Arguments as for `cut_full_windows`; look-ahead is used only by a slice of a single sentence.
    """
    units = _divide(text, max_tokens)
    starts, is_inside, last = units.starts, units.is_inside, len(units.starts) - 1
    targets, places = _draw(2 * len(starts), max_tokens, short_seq_prob, rng)
    stops = np.maximum(units.own_end, np.minimum(units.first + 2, units.end))
    slices = np.flatnonzero(units.has_windows)
    forward, backward = slices[0::2], slices[1::2]
    next_target = iter(targets.tolist())
    spans = zip(units.first[forward].tolist(), stops[forward].tolist(), strict=True)
    first, after = _fill(starts, is_inside, spans, max_tokens, next_target)
    split = _choose_splits(is_inside, first, after, places[: len(first)], only_sentences=True)
    mirrored = zip((last - stops[backward]).tolist(), (last - units.first[backward]).tolist(), strict=True)
    behind, before = _fill(starts[-1] - starts[::-1], is_inside[::-1], mirrored, max_tokens, next_target)
    places = places[len(first) : len(first) + len(behind)]
    mirrored_split = _choose_splits(is_inside[::-1], behind, before, places, only_sentences=True)
    first, split, after = (
        starts[np.concatenate([ahead, last - mirror])]
        for ahead, mirror in ((first, before), (split, mirrored_split), (after, behind))
    )
    return _windows(first, split, after, np.zeros(len(first), dtype=bool))


def _draw(
    number: int, max_tokens: int, short_seq_prob: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the target length of each window, and a number in [0, 1) that chooses where its B begins."""
    is_short = rng.random(number) < short_seq_prob
    targets = np.where(is_short, rng.integers(2, max_tokens + 1, number), max_tokens)
    return targets, rng.random(number)


def _windows(start: np.ndarray, split: np.ndarray, end: np.ndarray, is_cut: np.ndarray) -> Segments:
    return make_pairs(start, split - start, split, end - split, np.zeros(len(start), dtype=np.uint8), is_cut)


def _choose_splits(
    is_inside: np.ndarray, first: np.ndarray, after: np.ndarray, places: np.ndarray, *, only_sentences: bool
) -> np.ndarray:
    """Return the unit that B begins with, of the units (first, after) of each window.

    It begins a sentence, if any does there. With `only_sentences` all sentences are equally likely, otherwise those
    that are not divided, and a divided one by its units.
    """
    whole, whole_before = np.flatnonzero(~is_inside), ragged.offsets_of(~is_inside)
    split = first + 1 + (places * (after - first - 1)).astype(np.int64)
    choices = whole_before[after] - whole_before[first + 1]
    moved = np.flatnonzero((only_sentences | is_inside[split]) & (choices > 0))
    chosen = (places[moved] * choices[moved]).astype(np.int64)
    split[moved] = whole[whole_before[first[moved] + 1] + chosen]
    return split


def _fill(
    starts_array: np.ndarray,
    is_inside: np.ndarray,
    spans: Iterable[tuple[int, int]],
    max_tokens: int,
    targets: Iterator[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Fill windows with whole units from the beginning of each span of units on.

    Units are as in `_Units`, none longer than half a window; a span is its first unit and its end, two units or more.
    Returns for each window the first unit, and the one after it.
    """
    starts, whole = starts_array.tolist(), np.flatnonzero(~is_inside).tolist()
    rows: list[tuple[int, int]] = []
    for first, stop in spans:
        position = first
        while position < stop:
            target = next(targets)
            if position + 1 == stop:  # a last unit left alone goes with the sentence before, or as much of it as fits
                index = bisect.bisect_left(whole, position)
                sentence = max(first, whole[index - 1]) if index else first
                position = max(sentence, bisect.bisect_left(starts, starts[stop] - max_tokens, sentence, position - 1))
                target = max_tokens  # a shorter one could leave the last unit alone again
            end = _window_end(starts, whole, position, stop, target, max_tokens)
            rows.append((position, end))
            position = end
    first_units, ends = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    return first_units, ends


def _window_end(starts: list[int], whole: list[int], position: int, stop: int, target: int, max_tokens: int) -> int:
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
