"""Pairs: lengths and boundaries give no hint of the label, and windows skip no text."""

import random
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bert_pretrain.make_data.pairs import Segments, cut_windows, shuffle_segment_b, slices_with_windows
from bert_pretrain.make_data.token_store import ShardText, split_long
from bert_pretrain.text import ragged

from .conftest import label_from_shape


def text_of(documents: list[list[int]]) -> ShardText:
    """Documents given as lists of sentence lengths; each token is its own place."""
    sentences = np.array([length for document in documents for length in document])
    starts = ragged.offsets_of(sentences)
    return ShardText(
        ids=np.arange(starts[-1]),
        sentence_starts=starts,
        is_continuation=np.zeros(len(sentences), dtype=bool),
        slice_offsets=ragged.offsets_of(np.array([len(document) for document in documents])),
        slice_own_sentences=np.array([len(document) for document in documents]),
        documents=np.arange(len(documents)),
        num_own_slices=len(documents),
    )


class Halves(NamedTuple):
    """Segments of pairs by columns, each (pairs,)."""

    a_start: np.ndarray
    a_lengths: np.ndarray
    b_start: np.ndarray
    b_lengths: np.ndarray

    @property
    def b_end(self) -> np.ndarray:
        return self.b_start + self.b_lengths


def halves(pairs: Segments) -> Halves:
    return Halves(pairs.starts[0::2], pairs.lengths[0::2], pairs.starts[1::2], pairs.lengths[1::2])


DOCUMENTS = st.lists(st.lists(st.integers(1, 80), min_size=1, max_size=12), min_size=1, max_size=12)


@given(DOCUMENTS, st.sampled_from([5, 13, 61]), st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 99))
def test_windows_cover_every_token_and_never_leave_their_document(
    documents: list[list[int]], max_tokens: int, short: float, seed: int
) -> None:
    text = text_of(documents)
    rng = np.random.default_rng(seed)
    cut = cut_windows(text, max_tokens, short, rng, at_sentences=False)
    windows = halves(cut)
    document, text_end = text.slices_of(windows.a_start), np.cumsum([sum(document) for document in documents])
    single = int((~slices_with_windows(text, max_tokens)).sum())
    assert np.array_equal(windows.b_start, windows.a_start + windows.a_lengths)
    owner = np.repeat(np.arange(len(documents)), [sum(document) for document in documents])
    covered = np.zeros(len(owner), dtype=bool)
    for row in range(len(cut)):
        a, b, end = windows.a_start[row], windows.b_start[row], windows.b_end[row]
        assert a < b < end <= text_end[document[row]]
        assert end - a <= max_tokens
        assert set(owner[a:end].tolist()) == {int(document[row])}
        covered[a:end] = True
    has_pairs = np.isin(owner, document)
    assert covered[has_pairs].all()
    assert single == len(documents) - len(np.unique(document))
    assert all(len(d) == 1 and d[0] <= max_tokens // 2 for i, d in enumerate(documents) if i not in document)


@given(DOCUMENTS, st.sampled_from([5, 13, 61]), st.integers(0, 99))
def test_pairs_have_balanced_labels_that_are_true(documents: list[list[int]], max_tokens: int, seed: int) -> None:
    text = text_of(documents)
    rng = np.random.default_rng(seed)
    windows = cut_windows(text, max_tokens, 0.3, rng, at_sentences=False)
    assume(len(np.unique(text.slices_of(windows.starts))) > 1)
    exchanged = shuffle_segment_b(windows, text, max_tokens, rng)
    labels, pairs = exchanged.labels, halves(exchanged)
    owner = np.repeat(np.arange(len(documents)), [sum(document) for document in documents])
    assert len(exchanged) == len(windows)
    assert abs(2 * int(labels.sum()) - len(labels)) <= 1
    assert (pairs.a_lengths > 0).all()
    assert (pairs.b_lengths > 0).all()
    assert (pairs.a_lengths + pairs.b_lengths <= max_tokens).all()
    assert np.array_equal(labels == 1, owner[pairs.a_start] != owner[pairs.b_start])
    follows = pairs.b_start == pairs.a_start + pairs.a_lengths
    assert follows[labels == 0].all()
    assert np.array_equal(owner[pairs.a_start], owner[pairs.a_start + pairs.a_lengths - 1])
    assert np.array_equal(owner[pairs.b_start], owner[pairs.b_end - 1])
    assert np.array_equal(owner[pairs.b_start], text.slices_of(pairs.b_start))


@given(DOCUMENTS, st.integers(1, 11), st.integers(0, 99))
def test_donor_slices_offer_bs_and_give_no_pairs(documents: list[list[int]], num_own: int, seed: int) -> None:
    assume(num_own < len(documents))
    text = replace(text_of(documents), num_own_slices=num_own)
    windows = cut_windows(text, 61, 0.3, np.random.default_rng(seed), at_sentences=False)
    document = text.slices_of(windows.starts[0::2])
    assume(len(np.unique(document)) > 1)
    pairs = shuffle_segment_b(windows, text, 61, np.random.default_rng(seed))
    assert np.array_equal(pairs.starts[0::2], windows.starts[0::2][document < num_own])
    assert abs(2 * int(pairs.labels.sum()) - len(pairs)) <= 1
    assert np.array_equal(pairs.labels == 1, document[document < num_own] != text.slices_of(pairs.starts[1::2]))


def test_a_single_document_gives_no_random_b() -> None:
    text = text_of([[5] * 50])
    rng = np.random.default_rng(0)
    windows = cut_windows(text, 61, 0.1, rng, at_sentences=False)
    with pytest.raises(ValueError, match="one document"):
        shuffle_segment_b(windows, text, 61, rng)


@given(st.lists(st.integers(0, 3000), max_size=20), st.integers(1, 300))
def test_long_lists_are_split_into_nearly_equal_units(lengths: list[int], limit: int) -> None:
    offsets = ragged.offsets_of(np.array(lengths, dtype=np.int64))
    units, first = split_long(offsets, limit)
    assert np.array_equal(units[first], offsets)
    for length, begin, end in zip(lengths, first[:-1], first[1:], strict=True):
        sizes = np.diff(units[begin : end + 1])
        assert sizes.sum() == length
        assert sizes.max() <= limit
        assert sizes.max() - sizes.min() <= 1


def documents_of(seed: int, count: int, sentences: tuple[int, int], words: tuple[int, int]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randint(*words) for _ in range(draw.randint(*sentences))] for _ in range(count)]


SHAPES = {
    "long documents": (documents_of(1, 60, (30, 120), (4, 30)), True, []),
    "documents of 1 to 8 sentences": (documents_of(2, 1200, (1, 8), (3, 40)), True, []),
    "text without sentence ends": (documents_of(3, 100, (1, 1), (300, 3000)), False, []),
    "sentences longer than a window": (documents_of(4, 150, (2, 20), (1, 100)), True, []),
    "one document outweighs all": (
        [*documents_of(5, 200, (2, 8), (4, 30)), *documents_of(6, 1, (5000, 5000), (4, 30))],
        True,
        [],
    ),
    "tiny shards": (documents_of(7, 100, (1, 60), (4, 30)), True, ["data.examples_per_shard=64"]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_lengths_and_boundaries_give_no_hint_of_the_label(numbered, name: str) -> None:
    """A classifier on lengths and boundaries, taken from finished shards, is as good as a coin."""
    documents, is_lines, settings = SHAPES[name]
    corpus = numbered(documents, is_lines=is_lines)
    scores = []
    for seed in range(3):
        data = corpus.make(
            f"data.seed={seed}", "data.max_seq_length=64", "data.validation_fraction=0", *settings, name=str(seed)
        )
        pairs = corpus.pairs(data, "train")[:8_000]
        assert len(pairs) > 4000
        scores.append(label_from_shape(corpus, pairs))
    assert np.mean(scores) < 0.52
