"""Windows skip no text, and lengths and boundaries give no hint of the label."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from bert_pretrain import ragged
from bert_pretrain.make_data.pairs import (
    assemble,
    cut_at_length,
    cut_at_sentences,
    exchange_segment_b,
    pack_sentences,
    slices_with_windows,
)
from bert_pretrain.make_data.token_store import ShardText, split_long
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.wordpiece import special_tokens

from .conftest import label_from_shape


def text_of(documents: list[list[int]]) -> ShardText:
    """Return the text of documents, given as lists of sentence lengths. The id of a token is its position."""
    sentences = np.array([length for document in documents for length in document])
    starts = ragged.offsets_of(sentences)
    return ShardText(
        ids=np.arange(starts[-1]),
        sentence_starts=starts,
        is_continuation=np.zeros(len(sentences), dtype=bool),
        slice_offsets=ragged.offsets_of(np.array([len(document) for document in documents])),
        num_slice_sentences=np.array([len(document) for document in documents]),
        documents=np.arange(len(documents)),
        num_shard_slices=len(documents),
    )


def documents_of(seed: int, count: int, sentences: tuple[int, int], words: tuple[int, int]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randint(*words) for _ in range(draw.randint(*sentences))] for _ in range(count)]


def owners(documents: list[list[int]]) -> np.ndarray:
    """Return the document of each token."""
    return np.repeat(np.arange(len(documents)), [sum(document) for document in documents])


def cut(text: ShardText, max_tokens: int, short: float, seed: int, *, at_sentences: bool) -> np.ndarray:
    """Return the start of A, the start of B and the end of B of each window, (windows, 3)."""
    cut_all = cut_at_sentences if at_sentences else cut_at_length
    windows = cut_all(text, max_tokens, short, np.random.default_rng(seed))
    return np.stack([windows.a_start, windows.b_start, windows.end], axis=1)


DOCUMENTS = st.lists(st.lists(st.integers(1, 80), min_size=1, max_size=12), min_size=1, max_size=12)
MAX_TOKENS, SHORT, SEEDS = st.sampled_from([5, 13, 61]), st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 99)


@pytest.mark.parametrize("at_sentences", [False, True])
@given(DOCUMENTS, MAX_TOKENS, SHORT, SEEDS)
@example([[5, 5], [30]], 13, 0.0, 0)  # an odd number of units in a sentence, cut from the end of the text
@example(  # a last unit is alone, and the next targets are short
    [[1, 1, 1, 1, 31, 31, 31, 31, 61, 31, 61, 15], [1, 31], [61], [1, 1, 1, 31, 61],
     [1, 1, 1, 31, 7, 1, 32, 80, 80, 30, 63, 19], [4, 2, 35, 61], [1, 1, 1, 1, 31, 28]], 61, 1.0, 81,
)  # fmt: skip
def test_windows_cover_every_token_within_documents(at_sentences, documents, max_tokens, short, seed) -> None:
    text, owner = text_of(documents), owners(documents)
    covered = np.zeros(len(owner), dtype=bool)
    for a, b, end in cut(text, max_tokens, short, seed, at_sentences=at_sentences):
        assert a < b < end <= a + max_tokens
        assert len(set(owner[a:end].tolist())) == 1
        covered[a:end] = True
    dropped = [number for number, d in enumerate(documents) if len(d) == 1 and d[0] <= max_tokens // 2]
    assert np.array_equal(~covered, np.isin(owner, dropped))
    assert np.array_equal(np.flatnonzero(~slices_with_windows(text, max_tokens)), dropped)


@given(st.lists(st.lists(st.integers(1, 30), min_size=2, max_size=30), min_size=1, max_size=9), SHORT, SEEDS)
def test_sentence_windows_cut_no_sentence_and_repeat_only_the_last_ones(documents, short, seed) -> None:
    text = text_of(documents)
    windows = cut(text, 61, short, seed, at_sentences=True)
    assert np.isin(windows, text.sentence_starts).all()
    assert text.starts_sentence(windows[:, 1]).all()
    seen = np.zeros(text.sentence_starts[-1], dtype=int)
    for a, _, end in windows:
        seen[a:end] += 1
    assert seen.max() <= 2
    # A single last sentence is joined with sentences before it: once per document, and less than a window.
    for begin, end in itertools.pairwise(text.sentence_starts[text.slice_offsets]):
        assert (seen[begin:end] == 2).sum() < 61


@given(DOCUMENTS, st.integers(1, 11), SEEDS)
def test_donor_slices_give_bs_but_no_pairs(documents: list[list[int]], num_paired: int, seed: int) -> None:
    assume(num_paired < len(documents))
    text = replace(text_of(documents), num_shard_slices=num_paired)
    windows = cut_at_length(text, 61, 0.3, np.random.default_rng(seed))
    document, owner = windows.slice, owners(documents)
    assert np.array_equal(document, owner[windows.a_start])
    assume(len(np.unique(document)) > 1)
    pairs = exchange_segment_b(windows, text, 61, np.random.default_rng(seed))
    assert np.array_equal(pairs.starts[0::2], windows.a_start[document < num_paired])
    assert abs(2 * int(pairs.labels.sum()) - len(pairs)) <= 1
    assert np.array_equal(pairs.labels == 1, document[document < num_paired] != owner[pairs.starts[1::2]])


def test_random_bs_of_a_single_document_are_an_error() -> None:
    text, rng = text_of([[5] * 50]), np.random.default_rng(0)
    with pytest.raises(ValueError, match="one document"):
        exchange_segment_b(cut_at_length(text, 61, 0.1, rng), text, 61, rng)


@given(st.lists(st.integers(0, 3000), max_size=20), st.integers(1, 300))
def test_long_lists_are_split_into_nearly_equal_units(lengths: list[int], limit: int) -> None:
    offsets = ragged.offsets_of(np.array(lengths, dtype=np.int64))
    units, first = split_long(offsets, limit)
    assert np.array_equal(units[first], offsets)
    for length, begin, end in zip(lengths, first[:-1], first[1:], strict=True):
        sizes = np.diff(units[begin : end + 1])
        assert sizes.sum() == length
        assert sizes.max() <= min(limit, sizes.min() + 1)


LONG, SHORTER = documents_of(1, 60, (30, 120), (4, 30)), documents_of(2, 1200, (1, 8), (3, 30))
SHAPES = {
    "nsp-long documents": (LONG, ()),
    "nsp-documents of 1 to 8 sentences": (documents_of(2, 1200, (1, 8), (3, 40)), ()),
    "nsp-text without sentence ends": (documents_of(3, 100, (1, 1), (300, 3000)), ()),
    "nsp-sentences longer than a window": (documents_of(4, 150, (2, 20), (1, 100)), ()),
    "nsp-one document outweighs all": (
        documents_of(5, 200, (2, 8), (4, 30)) + documents_of(6, 1, (5000, 5000), (4, 30)), ()
    ),
    "nsp-tiny shards": (documents_of(7, 100, (1, 60), (4, 30)), ("data.examples_per_shard=64",)),
    # Here no sentence is longer than half a window.
    "sop-long documents": (LONG, ("data.dupe_factor=6",)),
    "sop-documents of 1 to 8 sentences": (SHORTER, ("data.dupe_factor=5",)),
    "sop-shorter windows": (
        documents_of(3, 60, (30, 120), (2, 30)), ("data.dupe_factor=6", "data.short_seq_prob=0.5")
    ),
    "sop-a single document": (documents_of(8, 1, (5000, 5000), (2, 30)), ("data.dupe_factor=6",)),
}  # fmt: skip


SLOW = {"nsp-sentences longer than a window", "nsp-tiny shards", "sop-long documents", "sop-shorter windows"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in SHAPES]
)
def test_lengths_and_boundaries_give_no_hint_of_the_label(numbered, name: str) -> None:
    """A classifier on lengths and boundaries of the examples is as good as chance."""
    (documents, settings), objective = SHAPES[name], name[:3]
    corpus = numbered(documents, is_lines="without sentence ends" not in name)
    always = (f"data.next_sentence={objective}", "data.max_seq_length=64", "data.validation_fraction=0")
    pairs = corpus.pairs(corpus.make(*always, *settings), "train")[:8000]
    assert len(pairs) > 4000
    assert label_from_shape(corpus, pairs) < 0.525
    if objective == "sop":
        assert all(corpus.begins[[pair.a[0], pair.b[0]]].all() for pair in pairs)
        assert all(corpus.ends[[pair.a[-1], pair.b[-1]]].all() for pair in pairs)


MAX_SEQ_LENGTHS = st.sampled_from([8, 16, 64])
TOKENIZER = Tokenizer(special_tokens(0), lowercase=True, strip_accents=None, handle_chinese_chars=True)


def rows_of(text: ShardText, max_seq_length: int) -> list[list[range]]:
    """Return the segments of each example of full sentences as ranges of tokens."""
    packed = pack_sentences(text, max_seq_length)
    segments = [range(start, start + length) for start, length in zip(packed.starts, packed.lengths, strict=True)]
    assert packed.labels is None
    assert all(segments)
    rows = [segments[begin:end] for begin, end in itertools.pairwise(packed.offsets)]
    examples = assemble(packed, text, TOKENIZER)
    cls, sep = TOKENIZER.cls_id, TOKENIZER.sep_id
    expected = [[cls, *(token for segment in row for token in (*segment, sep))] for row in rows]
    assert examples.lengths.tolist() == list(map(len, expected))
    assert examples.input_ids.tolist() == list(itertools.chain(*expected))
    assert np.array_equal(examples.segment_b_start, examples.lengths)  # no B: its start is the length
    return rows


@given(DOCUMENTS, MAX_SEQ_LENGTHS)
def test_full_sentences_have_every_token_once_in_full_examples(documents: list[list[int]], longest: int) -> None:
    owner, lengths = owners(documents), [length for document in documents for length in document]
    is_inside = np.concatenate([np.arange(length) > 0 for length in lengths])
    is_long = np.repeat(np.array(lengths) > longest - 2, lengths)
    starts = dict(zip(np.cumsum([0, *lengths]).tolist(), lengths, strict=False))
    document_ends = set(np.cumsum([sum(document) for document in documents]).tolist())
    rows = rows_of(text_of(documents), longest)
    assert [token for row in rows for segment in row for token in segment] == list(range(len(owner)))
    for row, following in itertools.pairwise([*rows, None]):
        free = longest - (1 + sum(len(segment) + 1 for segment in row))
        assert free >= 0
        found = [set(owner[list(segment)].tolist()) for segment in row]
        # Every segment is text of one document, and every document has one segment.
        assert [len(each) for each in found] == [1] * len(set.union(*found))
        assert not is_inside[row[0][0]] or is_long[row[0][0]]
        if following:
            token = following[0][0]
            is_whole = starts.get(token, longest) <= longest - 2
            assert free < (starts[token] if is_whole else 1) + (token in document_ends)


def test_packing_joins_continued_sentences_and_skips_look_ahead() -> None:
    is_continuation, num_sentences = np.array([False, True, False, False, False]), np.array([3, 1])
    text = replace(text_of([[6, 6, 6, 6], [5]]), is_continuation=is_continuation, num_slice_sentences=num_sentences)
    assert rows_of(text, 16) == [[range(0, 12)], [range(12, 18), range(24, 29)]]
    assert rows_of(replace(text_of([[5]]), num_slice_sentences=np.array([0])), 16) == []
