"""Sentences that recur are counted in bounded memory, whatever the blocks in which they arrive."""

import numpy as np
import pytest

from bert_pretrain.examples import ragged
from bert_pretrain.make_data.repeats import MAX_COUNTERS, MIN_TOKENS, RepeatCounter, repeated_tokens

VOCAB = 500


def sentences(number: int, seed: int = 0, length: int = 12) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(10, VOCAB, size=(number, length)))


def counted(texts: list[np.ndarray], at_once: int = 1000) -> RepeatCounter:
    counter = RepeatCounter(VOCAB)
    for begin in range(0, len(texts), at_once):
        block = texts[begin : begin + at_once]
        counter.add(np.concatenate(block), ragged.offsets_of(np.array([len(each) for each in block])))
    return counter


def shuffled(texts: list[np.ndarray]) -> list[np.ndarray]:
    return [texts[number] for number in np.random.default_rng(1).permutation(len(texts))]


def test_text_without_repeats_has_none() -> None:
    assert counted(sentences(3000)).repeats() == []


def test_navigation_is_found_among_more_sentences_than_there_are_counters() -> None:
    navigation = sentences(50, seed=1, length=8)
    texts = shuffled([*sentences(100 * MAX_COUNTERS), *(line for line in navigation for _ in range(400))])
    tokens = repeated_tokens(counted(texts).repeats())
    assert 0.95 * 50 * 399 * 8 <= tokens <= 50 * 399 * 8  # never too many


def test_the_counts_depend_neither_on_blocks_nor_on_how_store_shards_were_cut() -> None:
    texts = shuffled([*sentences(900), *sentences(20, seed=2) * 30])
    whole = counted(texts).repeats()
    assert whole == counted(texts, at_once=7).repeats()
    parts = [*counted(texts[:700]).repeats(), *counted(texts[700:]).repeats()]
    assert repeated_tokens(parts) == repeated_tokens(whole) == 20 * 29 * 12


def test_short_sentences_and_copies_of_few_documents_are_no_repeats() -> None:
    short = sentences(5, length=MIN_TOKENS - 1) * 100
    assert counted(short).repeats() == []
    assert repeated_tokens(counted(sentences(300) * 4).repeats()) == 0


def test_the_same_tokens_in_another_order_are_another_sentence() -> None:
    forwards = sentences(1)[0]
    repeats = counted([forwards, forwards[::-1], forwards]).repeats()
    assert [(count, tokens) for _, count, tokens in repeats] == [(2, 12)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_store_shard_of_hardly_any_sentence_is_counted(number: int) -> None:
    counter = RepeatCounter(VOCAB)
    texts = sentences(number)
    counter.add(np.concatenate([np.zeros(0, dtype=np.int64), *texts]), ragged.offsets_of(np.full(number, 12)))
    assert counter.repeats() == []
