"""Initial weights from co-occurrences: counts, mutual information, word vectors and relations."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.shards import read_shard
from bert_pretrain.train import initial_weights
from bert_pretrain.train.initial_weights import (
    Cooccurrences,
    count_cooccurrences,
    mutual_information,
    relation,
    word_vectors,
)
from tests.train.conftest import FIRST_WORD, NewData, unmasked


def test_counts_are_those_of_a_slow_loop(data_folder: Path, monkeypatch) -> None:
    data = DataFolder.open(data_folder)
    expected: dict[int, Counter[tuple[int, int]]] = {distance: Counter() for distance in (1, 2, 3)}
    num_left = max_tokens = 4000  # ends in an example of the second shard
    for record in data.shards("train"):
        examples = unmasked(read_shard(data_folder, record))
        for row, start_b in enumerate(examples.segment_b_start):
            if num_left <= 0:
                break
            ids = examples.input_ids[examples.offsets[row] : examples.offsets[row + 1]].tolist()
            num_left -= len(ids)
            for segment in (ids[:start_b], ids[start_b:]):
                for distance, pairs in expected.items():
                    found = zip(segment, segment[distance:], strict=False)
                    pairs.update(pair for pair in found if min(pair) >= FIRST_WORD)
    assert num_left < 0
    monkeypatch.setattr(initial_weights, "MAX_TOKENS", max_tokens)
    counted = count_cooccurrences(data, data.tokenizer(), 3)
    for distance, pairs in expected.items():
        matrix = counted.pairs[distance - 1]
        found = zip(map(tuple, matrix.indices().T.tolist()), matrix.values().tolist(), strict=True)
        assert dict(found) == pairs
        left = counted.at(-distance).to_dense()
        assert torch.equal(left, counted.at(distance).to_dense().T)
        assert all(left[pair] == count for pair, count in pairs.items())
    window = counted.in_window().to_dense()
    assert torch.equal(window, window.T)
    torch.testing.assert_close(window, sum(counted.at(i).to_dense() / abs(i) for i in (-3, -2, -1, 1, 2, 3)))


def test_mutual_information_is_positive_and_from_smoothed_frequencies() -> None:
    counts = torch.tensor([[4.0, 0.0, 1.0], [1.0, 6.0, 0.0], [0.0, 2.0, 8.0]])
    rows, columns = counts.sum(1, keepdim=True), counts.sum(0)
    unsmoothed = (counts * counts.sum() / (rows * columns)).log().clamp_min(0.0)
    assert (unsmoothed[counts > 0] == 0).any()
    torch.testing.assert_close(mutual_information(counts.to_sparse(), (1.0, 1.0)).to_dense(), unsmoothed)
    columns = columns**0.5
    smoothed = (counts / (rows * columns / columns.sum())).log().clamp_min(0.0)
    torch.testing.assert_close(mutual_information(counts.to_sparse(), (1.0, 0.5)).to_dense(), smoothed)


def pairs_of(tokens: list[int], vocab_size: int) -> Cooccurrences:
    """Count the neighbors in a text."""
    pairs = torch.tensor(list(itertools.pairwise(tokens))).T
    counts = torch.sparse_coo_tensor(
        pairs, torch.ones(pairs.shape[1]), (vocab_size, vocab_size), check_invariants=False
    )
    return Cooccurrences([counts.coalesce()])


def test_word_vectors_are_similar_for_tokens_with_similar_contexts() -> None:
    generator = np.random.default_rng(0)
    choices = [[1, 2], [3, 4], [5, 6]]  # a text of tokens from these pairs in turn; 0 does not occur
    tokens = [int(generator.choice(choices[position % 3])) for position in range(3000)]
    words = word_vectors(pairs_of(tokens, 7), 6, 0.02, seed=3)
    assert words.known.tolist() == list(range(1, 7))
    assert words.frequencies.sum().item() == pytest.approx(1.0)
    assert not words.vectors[0].any()
    known = words.vectors[1:]
    assert known.square().mean().sqrt().item() == pytest.approx(0.02)
    cosines = torch.nn.functional.cosine_similarity(known[:, None], known[None], dim=2)
    for first in range(6):
        assert set(cosines[first].topk(2).indices.tolist()) == {first, first ^ 1}
    assert torch.equal(words.vectors, word_vectors(pairs_of(tokens, 7), 6, 0.02, seed=3).vectors)
    assert not torch.equal(words.vectors, word_vectors(pairs_of(tokens, 7), 6, 0.02, seed=4).vectors)


def test_relation_scores_the_token_that_follows_a_context_highest() -> None:
    tokens = [*range(1, 13)] * 50  # a circle of twelve tokens
    cooccurrences = pairs_of(tokens, 13)
    words = word_vectors(cooccurrences, 12, 0.02, seed=1)
    noise = 1e-5 * torch.eye(12)
    for offset, expected in ((-1, [*range(2, 13), 1]), (1, [12, *range(1, 12)])):
        scores = words.vectors @ relation(cooccurrences, words, offset, noise) @ words.vectors.T
        assert scores[1:].argmax(dim=1).tolist() == expected
    norms = [relation(cooccurrences, words, -1, factor * noise).norm() for factor in (1, 1e9)]
    assert norms[1] < 1e-3 * norms[0]


def test_text_without_pairs_gives_no_vectors(new_data_folder: NewData, monkeypatch) -> None:
    monkeypatch.setattr(initial_weights, "MAX_TOKENS", 0)
    data = DataFolder.open(new_data_folder())
    cooccurrences = count_cooccurrences(data, data.tokenizer(), 4)
    words = word_vectors(cooccurrences, 16, 0.02, seed=1)
    assert not len(words.known)
    assert not words.vectors.any()
