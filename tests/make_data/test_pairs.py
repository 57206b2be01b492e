"""Pairs: labels cannot be told from mere form, and windows pass over no text."""

import random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bert_pretrain import ragged
from bert_pretrain.make_data.pairs import deal_pairs
from bert_pretrain.make_data.token_store import Text, split_long
from bert_pretrain.make_data.windows import cut_windows

from .conftest import label_from_form


def text_of(documents: list[list[int]]) -> Text:
    """Documents given as lists of sentence lengths; each token is its own place."""
    sentences = np.array([length for document in documents for length in document])
    starts = ragged.offsets_of(sentences)
    return Text(
        ids=np.arange(starts[-1]),
        sentence_starts=starts,
        is_continuation=np.zeros(len(sentences), dtype=bool),
        span_sentences=ragged.offsets_of(np.array([len(document) for document in documents])),
        span_own_sentences=np.array([len(document) for document in documents]),
    )


DOCUMENTS = st.lists(st.lists(st.integers(1, 80), min_size=1, max_size=12), min_size=1, max_size=12)


@given(DOCUMENTS, st.sampled_from([5, 13, 61]), st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 99))
def test_windows_cover_every_token_and_never_leave_their_document(
    documents: list[list[int]], max_tokens: int, short: float, seed: int
) -> None:
    text = text_of(documents)
    rng = np.random.default_rng(seed)
    windows, single = cut_windows(text, np.arange(len(documents)), max_tokens, short, rng)
    owner = np.repeat(np.arange(len(documents)), [sum(document) for document in documents])
    covered = np.zeros(len(owner), dtype=bool)
    for row in range(len(windows)):
        a, b, end = windows.a_start[row], windows.b_start[row], windows.b_end[row]
        assert a < b < end <= windows.text_end[row]
        assert end - a <= max_tokens
        assert set(owner[a:end].tolist()) == {int(windows.document[row])}
        covered[a:end] = True
    has_pairs = np.isin(owner, windows.document)
    assert covered[has_pairs].all()
    assert single == len(documents) - len(np.unique(windows.document))
    assert all(len(d) == 1 and d[0] <= max_tokens // 2 for i, d in enumerate(documents) if i not in windows.document)


@given(DOCUMENTS, st.sampled_from([5, 13, 61]), st.integers(0, 99))
def test_dealt_pairs_keep_every_promise(documents: list[list[int]], max_tokens: int, seed: int) -> None:
    text = text_of(documents)
    rng = np.random.default_rng(seed)
    windows, _ = cut_windows(text, np.arange(len(documents)), max_tokens, 0.3, rng)
    assume(len(np.unique(windows.document)) > 1)
    pairs = deal_pairs(windows, max_tokens, len(windows), rng)
    owner = np.repeat(np.arange(len(documents)), [sum(document) for document in documents])
    assert abs(2 * int(pairs.labels.sum()) - len(pairs.labels)) <= 1
    assert (pairs.a_lengths > 0).all()
    assert (pairs.b_lengths > 0).all()
    assert (pairs.a_lengths + pairs.b_lengths <= max_tokens).all()
    assert np.array_equal(pairs.labels == 1, pairs.a_document != pairs.b_document)
    follows = pairs.b_start == pairs.a_start + pairs.a_lengths
    assert follows[pairs.labels == 0].all()
    assert np.array_equal(owner[pairs.b_start], pairs.b_document)
    assert np.array_equal(owner[pairs.b_start + pairs.b_lengths - 1], pairs.b_document)


def test_a_single_document_gives_no_random_b() -> None:
    text = text_of([[5] * 50])
    rng = np.random.default_rng(0)
    windows, _ = cut_windows(text, np.zeros(1, dtype=np.int64), 61, 0.1, rng)
    with pytest.raises(ValueError, match="one document"):
        deal_pairs(windows, 61, len(windows), rng)


@given(st.lists(st.integers(0, 3000), max_size=20), st.integers(1, 300))
def test_long_lists_are_split_into_nearly_equal_pieces(lengths: list[int], limit: int) -> None:
    offsets = ragged.offsets_of(np.array(lengths, dtype=np.int64))
    pieces, first = split_long(offsets, limit)
    assert np.array_equal(pieces[first], offsets)
    for length, begin, end in zip(lengths, first[:-1], first[1:], strict=True):
        sizes = np.diff(pieces[begin : end + 1])
        assert sizes.sum() == length
        assert sizes.max() <= limit
        assert sizes.max() - sizes.min() <= 1


def documents_of(seed: int, count: int, sentences: tuple[int, int], words: tuple[int, int]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randint(*words) for _ in range(draw.randint(*sentences))] for _ in range(count)]


FORMS = {
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


@pytest.mark.parametrize("name", FORMS)
def test_the_label_cannot_be_told_from_form(numbered, name: str) -> None:
    """A classifier on lengths and boundaries, taken from finished shards, is as good as a coin."""
    documents, is_lines, settings = FORMS[name]
    corpus = numbered(documents, is_lines=is_lines)
    scores = []
    for seed in range(3):
        data = corpus.make(
            f"data.seed={seed}", "data.max_seq_length=64", "data.validation_fraction=0", *settings, name=str(seed)
        )
        pairs = corpus.pairs(data, "train")[:8_000]
        assert len(pairs) > 4000
        scores.append(label_from_form(corpus, pairs))
    assert np.mean(scores) < 0.52
