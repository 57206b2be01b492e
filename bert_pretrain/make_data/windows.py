"""Windows of text, each split in A and B: cut to the very token for next-sentence pairs, at sentence ends for order.

Whatever the cut, no text is passed over, and no label is known yet. Where one window begins depends on where the one
before ends, but spans do not depend on one another: their windows are cut side by side.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from bert_pretrain import ragged
from bert_pretrain.make_data.token_store import Text, split_long


@dataclass(frozen=True)
class Windows:
    """Windows of text; all but `document` are places in `Text.ids`."""

    document: np.ndarray  # (windows,) int64: which document it comes from
    a_start: np.ndarray  # (windows,) int64
    b_start: np.ndarray  # (windows,) int64: also where A ends
    b_end: np.ndarray  # (windows,) int64
    text_end: np.ndarray  # (windows,) int64: how far the text after B goes
    is_cut: np.ndarray  # (windows,) bool: B was cut to fill the window; otherwise it ends where a sentence does
    splits_sentence: np.ndarray  # (windows,) bool: A and B meet inside a sentence longer than half a window

    def __len__(self) -> int:
        return len(self.document)

    @property
    def b_lengths(self) -> np.ndarray:
        return self.b_end - self.b_start


def spans_with_windows(text: Text, max_tokens: int) -> np.ndarray:
    """Return which spans give windows, (spans,) bool: those of two sentences, or of a long one to be divided."""
    _, first_units = split_long(text.sentence_starts, max_tokens // 2)
    has_text = text.span_own_sentences > 0
    return has_text & (np.diff(first_units[text.span_sentences]) >= 2)


def cut_windows(
    text: Text, documents: np.ndarray, max_tokens: int, short_seq_prob: float, rng: np.random.Generator
) -> tuple[Windows, int]:
    """Cut spans of text into windows of `max_tokens`, or of a random shorter target, and split each at a sentence end.

    No text is passed over: a sentence that a window cut begins the next one, and a last sentence that is left alone is
    taken together with the one before. A sentence longer than half a window is divided for the purpose.

    Args:
        text: the spans.
        documents: the document of each span, (spans,).
        max_tokens: tokens of A and B together at most.
        short_seq_prob: the share of windows with a target between 2 and `max_tokens` (appendix A.2 of the paper trains
            mostly on full windows; google-research/bert makes a tenth of them shorter).

    Returns:
        the windows, and the number of spans without any because they are a single sentence.
    """
    starts, first_units = split_long(text.sentence_starts, max_tokens // 2)
    inside = np.ones(len(starts), dtype=bool)  # whether a unit begins inside a sentence
    inside[first_units[:-1]] = text.is_continuation
    whole = np.flatnonzero(~inside)
    whole_before = ragged.offsets_of(~inside)
    begins = first_units[text.span_sentences[:-1]]
    owns = first_units[text.span_sentences[:-1] + text.span_own_sentences]
    lasts = first_units[text.span_sentences[1:]]
    is_short = rng.random(len(starts)) < short_seq_prob
    targets = np.where(is_short, rng.integers(2, max_tokens + 1, len(starts)), max_tokens)
    places = rng.random(len(starts))
    # All spans take their first window, then those with text left their second one, and so on.
    spans = np.flatnonzero(spans_with_windows(text, max_tokens))
    position, draw = begins[spans], begins[spans]  # a span has no more windows than units, so draws are its own
    rounds = [np.zeros((7, 0), dtype=np.int64)]
    while len(spans):
        position = np.minimum(position, lasts[spans] - 2)
        start, text_end = starts[position], starts[lasts[spans]]
        wanted = start + targets[draw]
        end = np.minimum(np.maximum(wanted, starts[position + 2]), text_end)
        after = np.searchsorted(starts, end)  # the first sentence that begins at `end` or later
        split = position + 1 + (places[draw] * (after - position - 1)).astype(np.int64)
        choices = whole_before[after] - whole_before[position + 1]
        moved = np.flatnonzero(inside[split] & (choices > 0))
        chosen = (places[draw[moved]] * choices[moved]).astype(np.int64)
        split[moved] = whole[whole_before[position[moved] + 1] + chosen]
        is_cut = (wanted == end) & (end < text_end)
        rounds.append(np.stack([spans, start, starts[split], end, text_end, is_cut, inside[split]]))
        position = np.where(starts[after] == end, after, after - 1)
        goes_on = (end < text_end) & (position < owns[spans])
        spans, position, draw = spans[goes_on], position[goes_on], draw[goes_on] + 1
    columns = np.concatenate(rounds, axis=1)
    span, a_start, b_start, b_end, text_end, is_cut, splits_sentence = columns[:, np.argsort(columns[0], kind="stable")]
    single = int(((owns > begins) & (lasts - begins < 2)).sum())
    is_cut, splits_sentence = is_cut.astype(bool), splits_sentence.astype(bool)
    return Windows(documents[span], a_start, b_start, b_end, text_end, is_cut, splits_sentence), single


def cut_whole_windows(
    text: Text, documents: np.ndarray, max_tokens: int, short_seq_prob: float, rng: np.random.Generator
) -> tuple[Windows, int]:
    """Cut spans of text into windows of whole sentences, `max_tokens` or a shorter target at most, and split each.

    Where A and B are swapped, a B that is cut in the middle of a sentence would show it. So windows begin, split and
    end at sentence ends; only a sentence longer than half a window is divided, where it does not fit otherwise. Cutting
    from the front makes the first sentence of a window the one that did not fit into the one before, longer than most:
    every other span is cut from its end, and so neither side of a window is known by its lengths.

    Arguments and result as for `cut_windows`; look-ahead is used only by a span of a single sentence.
    """
    starts, first_units = split_long(text.sentence_starts, max_tokens // 2)
    inside = np.ones(len(starts), dtype=bool)  # whether a unit begins inside a sentence
    inside[first_units[:-1]] = text.is_continuation
    begins = first_units[text.span_sentences[:-1]]
    owns = first_units[text.span_sentences[:-1] + text.span_own_sentences]
    stops = np.maximum(owns, np.minimum(begins + 2, first_units[text.span_sentences[1:]]))
    has_windows = spans_with_windows(text, max_tokens)
    single_sentences = int(((owns > begins) & ~has_windows).sum())
    spans = np.flatnonzero(has_windows)
    draws = 2 * len(starts)
    is_short = rng.random(draws) < short_seq_prob
    targets = np.where(is_short, rng.integers(2, max_tokens + 1, draws), max_tokens).tolist()
    drawn = zip(targets, rng.random(draws).tolist(), strict=True)
    forward, backward = spans[0::2], spans[1::2]
    last, whole = len(starts) - 1, np.flatnonzero(~inside)
    ahead = _fill(starts, whole, zip(begins[forward], stops[forward], strict=True), max_tokens, drawn)
    mirrored = zip(last - stops[backward], last - begins[backward], strict=True)
    behind = _fill(starts[-1] - starts[::-1], last - whole[::-1], mirrored, max_tokens, drawn)
    behind[:, 1:] = last - behind[:, :0:-1]
    cuts = np.concatenate([ahead, behind])
    documents_of = np.concatenate([documents[forward][ahead[:, 0]], documents[backward][behind[:, 0]]])
    a_start, b_start, b_end = starts[cuts[:, 1:].T]
    never = np.zeros(len(cuts), dtype=bool)
    return Windows(documents_of, a_start, b_start, b_end, b_end, never, inside[cuts[:, 2]]), single_sentences


def _fill(
    starts_array: np.ndarray,
    whole_array: np.ndarray,
    spans: Iterable[tuple[int, int]],
    max_tokens: int,
    drawn: Iterable[tuple[int, float]],
) -> np.ndarray:
    """Fill windows with whole units from the beginning of each span on.

    Args:
        starts_array: where each unit begins, and the last one ends, (units + 1,); none is longer than half a window.
        whole_array: the units that begin a sentence, ascending.
        spans: first unit and end of each, two units or more.
        max_tokens: of a window.
        drawn: the target of each window, and a number in [0, 1) that chooses its split.

    Returns:
        for each window the number of its span, and the first unit of A, of B, and after B; (windows, 4).
    """
    starts, whole, draw = starts_array.tolist(), whole_array.tolist(), iter(drawn)
    rows: list[tuple[int, int, int, int]] = []
    for span, (first, stop) in enumerate(spans):
        position = int(first)
        while position < stop:
            if position + 1 == stop:  # a last unit left alone goes with the sentence before, or as much of it as fits
                index = bisect.bisect_left(whole, position)
                sentence = max(int(first), whole[index - 1]) if index else int(first)
                position = max(sentence, bisect.bisect_left(starts, starts[stop] - max_tokens, sentence, position - 1))
            target, place = next(draw)
            end = _window_end(starts, whole, position, int(stop), target, max_tokens)
            low, high = bisect.bisect_left(whole, position + 1), bisect.bisect_left(whole, end)
            if low < high:
                split = whole[low + int(place * (high - low))]
            else:
                split = position + 1 + int(place * (end - position - 1))
            rows.append((span, position, split, end))
            position = end
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


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
