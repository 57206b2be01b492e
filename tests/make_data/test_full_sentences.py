"""Full sentences: every token once and in order, sentences whole, one [SEP] more where a document ends."""

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bert_pretrain.make_data.pairs import assemble, pack_sentences
from bert_pretrain.make_data.token_store import ShardText
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.wordpiece import special_tokens

from .test_pairs import DOCUMENTS, text_of

LENGTHS = st.sampled_from([8, 16, 64])


TOKENIZER = Tokenizer(special_tokens(0), lowercase=True, strip_accents=None, handle_chinese_chars=True)


def rows_of(documents: list[list[int]], max_seq_length: int, text: ShardText | None = None) -> list[list[range]]:
    """The segments of each example, as ranges of tokens."""
    text = text or text_of(documents)
    packed = pack_sentences(text, max_seq_length)
    segments = [range(start, start + length) for start, length in zip(packed.starts, packed.lengths, strict=True)]
    assert packed.labels is None
    assert [len(segment) > 0 for segment in segments] == [True] * len(segments)
    rows = [segments[begin:end] for begin, end in itertools.pairwise(packed.offsets)]
    examples = assemble(packed, text, TOKENIZER)
    assert examples.lengths.tolist() == [1 + sum(len(segment) + 1 for segment in row) for row in rows]
    assert np.array_equal(examples.segment_b_start, examples.lengths)  # no B: its start is the length
    return rows


@given(DOCUMENTS, LENGTHS)
def test_every_token_stands_once_and_in_order(documents: list[list[int]], max_seq_length: int) -> None:
    rows = rows_of(documents, max_seq_length)
    tokens = [token for row in rows for segment in row for token in segment]
    assert tokens == list(range(sum(map(sum, documents))))
    assert all(1 + sum(len(segment) + 1 for segment in row) <= max_seq_length for row in rows)


@given(DOCUMENTS, LENGTHS)
def test_segments_are_those_of_documents_and_sentences_that_fit_stay_whole(
    documents: list[list[int]], max_seq_length: int
) -> None:
    owner = np.repeat(np.arange(len(documents)), [sum(document) for document in documents])
    lengths = [length for document in documents for length in document]
    is_inside = np.concatenate([np.arange(length) > 0 for length in lengths])
    is_long = np.repeat(np.array(lengths) > max_seq_length - 2, lengths)
    rows = rows_of(documents, max_seq_length)
    for row in rows:
        of = [set(owner[list(segment)].tolist()) for segment in row]
        assert all(len(documents_of) == 1 for documents_of in of)
        assert len(set.union(*of)) == len(row)  # a [SEP] stands where a document ends, and nowhere else
        begin = row[0][0]
        assert not is_inside[begin] or is_long[begin]


@given(DOCUMENTS, LENGTHS)
def test_an_example_is_full_where_text_goes_on(documents: list[list[int]], max_seq_length: int) -> None:
    lengths = [length for document in documents for length in document]
    starts = dict(zip(np.cumsum([0, *lengths]).tolist(), lengths, strict=False))
    ends = set(np.cumsum([sum(document) for document in documents]).tolist())
    for row, following in itertools.pairwise(rows_of(documents, max_seq_length)):
        free = max_seq_length - (1 + sum(len(segment) + 1 for segment in row))
        token = following[0][0]
        is_whole = starts.get(token, max_seq_length) <= max_seq_length - 2
        needed = starts[token] if is_whole else 1  # of a sentence too long for any example a token fits in
        assert free < needed + (token in ends)


def test_a_sentence_cut_by_the_store_is_one_sentence_and_look_ahead_is_left_out() -> None:
    text = text_of([[6, 6, 6, 6], [5]])
    divided = np.array([False, True, False, False, False])
    own = np.array([3, 1])
    text = replace(text, is_continuation=divided, slice_own_sentences=own)
    rows = rows_of([], 16, text)
    assert rows == [[range(0, 12)], [range(12, 18), range(24, 29)]]


def test_no_text_gives_no_examples() -> None:
    empty = replace(text_of([[5]]), slice_own_sentences=np.array([0]))
    assert rows_of([], 16, empty) == []
