"""Windows for sentence order: whole sentences where possible, all text, and two halves of equal length on average."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from bert_pretrain.make_data.pairs import Segments, cut_windows, slices_with_windows, swap_segments

from .test_pairs import DOCUMENTS, halves, text_of

LENGTHS = st.sampled_from([5, 13, 61])
SHORT = st.sampled_from([0.0, 0.1, 1.0])


def cut(documents: list[list[int]], max_tokens: int, short: float = 0.0, seed: int = 0) -> Segments:
    return cut_windows(text_of(documents), max_tokens, short, np.random.default_rng(seed), at_sentences=True)


@given(DOCUMENTS, LENGTHS, SHORT, st.integers(0, 99))
@example([[5, 5], [30]], 13, 0.0, 0)  # an odd number of units of one sentence, cut from the end of the text
@example(  # a last unit is left alone, and the next targets are short
    [[1, 1, 1, 1, 31, 31, 31, 31, 61, 31, 61, 15], [1, 31], [61], [1, 1, 1, 31, 61],
     [1, 1, 1, 31, 7, 1, 32, 80, 80, 30, 63, 19], [4, 2, 35, 61], [1, 1, 1, 1, 31, 28]], 61, 1.0, 81,
)  # fmt: skip
def test_windows_of_whole_sentences_cover_every_token_and_never_leave_their_document(
    documents: list[list[int]], max_tokens: int, short: float, seed: int
) -> None:
    segments, text = cut(documents, max_tokens, short, seed), text_of(documents)
    windows = halves(segments)
    single = int((~slices_with_windows(text, max_tokens)).sum())
    assert np.array_equal(windows.b_start, windows.a_start + windows.a_lengths)
    owner = np.repeat(np.arange(len(documents)), [sum(document) for document in documents])
    covered = np.zeros(len(owner), dtype=bool)
    for row in range(len(segments)):
        a, b, end = windows.a_start[row], windows.b_start[row], windows.b_end[row]
        assert a < b < end
        assert end - a <= max_tokens
        assert set(owner[a:end].tolist()) == {int(text.slices_of(a))}
        covered[a:end] = True
    dropped = [number for number, d in enumerate(documents) if len(d) == 1 and d[0] <= max_tokens // 2]
    assert np.array_equal(~covered, np.isin(owner, dropped))
    assert single == len(dropped)
    assert np.array_equal(np.flatnonzero(~slices_with_windows(text, max_tokens)), dropped)


@given(
    st.lists(st.lists(st.integers(1, 30), min_size=2, max_size=30), min_size=1, max_size=9), SHORT, st.integers(0, 9)
)
def test_sentences_of_half_a_window_are_never_cut_and_only_the_last_ones_are_seen_twice(
    documents: list[list[int]], short: float, seed: int
) -> None:
    text = text_of(documents)
    windows = halves(cut(documents, 61, short, seed))
    bounds = np.concatenate([windows.a_start, windows.b_start, windows.b_end])
    assert np.isin(bounds, text.sentence_starts).all()
    assert text.begins_sentence(windows.b_start).all()
    seen = np.zeros(text.sentence_starts[-1], dtype=int)
    for a, end in zip(windows.a_start, windows.b_end, strict=True):
        seen[a:end] += 1
    assert seen.max() <= 2
    # A last sentence left alone takes sentences before it along: once a document at most, and a window of them.
    for document in range(len(documents)):
        begin, end = text.sentence_starts[text.slice_offsets[document : document + 2]]
        assert (seen[begin:end] == 2).sum() < 61


@given(DOCUMENTS, LENGTHS, SHORT)
def test_windows_are_full_where_text_goes_on(documents: list[list[int]], max_tokens: int, short: float) -> None:
    """Of two neighbouring windows cut to the full length, what the first leaves free is less than the next sentence."""
    text = text_of(documents)
    if max(map(max, documents)) > max_tokens // 2:
        return
    windows = halves(cut(documents[:1], max_tokens))
    for a, end in zip(windows.a_start, windows.b_end, strict=True):
        following = text.sentence_starts[np.searchsorted(text.sentence_starts, end) + 1 :][:1]
        is_last = end == sum(documents[0])
        assert is_last or following[0] - a > max_tokens


def test_a_sentence_above_half_a_window_stays_whole_where_it_fits_with_a_neighbour() -> None:
    windows = halves(cut([[15, 40, 10, 45]], 61))
    assert windows.a_start.tolist() == [0, 55]
    assert windows.b_start.tolist() == [15, 65]
    assert windows.b_end.tolist() == [55, 110]


@given(DOCUMENTS, LENGTHS, st.integers(0, 99))
def test_half_of_the_windows_are_swapped(documents: list[list[int]], max_tokens: int, seed: int) -> None:
    segments = cut(documents, max_tokens, 0.3, seed)
    swapped_segments = swap_segments(segments, np.random.default_rng(seed))
    windows, pairs, labels = halves(segments), halves(swapped_segments), swapped_segments.labels
    assert len(labels) == len(segments)
    assert abs(2 * int(labels.sum()) - len(labels)) <= 1
    in_order, swapped = labels == 0, labels == 1
    assert (pairs.b_start == pairs.a_start + pairs.a_lengths)[in_order].all()
    assert (pairs.a_start == pairs.b_start + pairs.b_lengths)[swapped].all()
    first = np.minimum(pairs.a_start, pairs.b_start)
    assert np.array_equal(first, windows.a_start)
    assert np.array_equal(first + pairs.a_lengths + pairs.b_lengths, windows.b_end)


def test_the_two_sides_of_a_window_are_equally_long() -> None:
    """Cut from the front alone, A would begin with the sentence that did not fit before: longer than most."""
    rng = np.random.default_rng(0)
    windows = halves(cut([rng.integers(4, 30, 400).tolist() for _ in range(100)], 61))
    difference = windows.a_lengths - windows.b_lengths
    error = difference.std() / np.sqrt(len(difference))
    assert abs(difference.mean()) < 4 * error
    from_the_front = halves(cut([rng.integers(4, 30, 40_000).tolist()], 61))
    one_sided = from_the_front.a_lengths - from_the_front.b_lengths
    assert one_sided.mean() > 10 * error
