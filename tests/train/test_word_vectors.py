"""Initial word embeddings from co-occurrence counts."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.train import word_vectors
from bert_pretrain.train.word_vectors import WINDOW, count_pairs, init_word_vectors, pointwise_mutual_information

from .conftest import Fit


def count_slowly(data: DataFolder) -> Counter[tuple[int, int]]:
    special = set(range(data.tokenizer().vocab_size)) - set(data.tokenizer().word_piece_ids.tolist())
    counts: Counter[tuple[int, int]] = Counter()
    for record in data.shards("train"):
        examples = read_shard(data.path, record)
        for begin, end, middle in zip(examples.offsets, examples.offsets[1:], examples.segment_b_start, strict=False):
            ids = examples.original_ids[begin:end].tolist()
            for segment in (ids[:middle], ids[middle:]):
                for place, first in enumerate(segment):
                    for distance, second in enumerate(segment[place + 1 : place + 1 + WINDOW], start=1):
                        if not {first, second} & special:
                            counts[min(first, second), max(first, second)] += 1 / distance
    return counts


def test_pairs_are_counted_within_segments_by_distance(data_folder: Path, monkeypatch) -> None:
    data = DataFolder.open(data_folder)
    keys, weights = count_pairs(data, data.tokenizer())
    expected = count_slowly(data)
    size = data.tokenizer().vocab_size
    assert {(int(key) // size, int(key) % size) for key in keys} == set(expected)
    assert np.allclose(weights, [expected[int(key) // size, int(key) % size] for key in keys])
    assert (np.diff(keys) > 0).all()
    monkeypatch.setattr(word_vectors, "MAX_PAIRS", len(keys) // 2)
    kept, heavy = count_pairs(data, data.tokenizer())
    assert 0 < len(kept) <= len(keys) // 2
    assert heavy.min() >= np.sort(weights)[-len(keys) // 2]


def test_information_is_positive_and_symmetric() -> None:
    size = 5
    pairs = (np.array([0 * size + 1, 1 * size + 1, 2 * size + 3]), np.array([4.0, 1.0, 2.0]))
    matrix = pointwise_mutual_information(pairs, size).to_dense()
    assert (matrix >= 0).all()
    assert matrix[2, 3] > 0
    assert matrix[3, 2] == pytest.approx(matrix[2, 3])  # both have the same total
    assert matrix[4].sum() == 0


def test_tokens_with_the_same_neighbors_get_similar_vectors(data_folder: Path, monkeypatch) -> None:
    # "a" and "b" both occur next to 10, 11, 12; "c" next to 20, 21, 22.
    size = 40
    neighbors = {1: (10, 11, 12), 2: (10, 11, 12), 3: (20, 21, 22), 4: (20, 21, 23)}
    keys = np.array(sorted(token * size + near for token, all_near in neighbors.items() for near in all_near))
    monkeypatch.setattr(word_vectors, "count_pairs", lambda *_: (keys, np.ones(len(keys))))
    data = DataFolder.open(data_folder)
    first, again = torch.full((size, 8), 9.0), torch.full((size, 8), 9.0)
    number = init_word_vectors(first, data, data.tokenizer(), 0.02, 7)
    init_word_vectors(again, data, data.tokenizer(), 0.02, 7)
    assert torch.equal(first, again)
    assert number == 11
    assert (first[30:] == 9.0).all()  # tokens without counts keep their weights
    vectors = first[[1, 2, 3]]
    assert vectors.square().mean(dim=1).sqrt().tolist() == pytest.approx([0.02] * 3)
    alike, unlike = torch.cosine_similarity(vectors[0], vectors[1:], dim=1).tolist()
    assert alike > 0.99 > 0.5 > unlike


def test_run_starts_with_word_vectors_and_reports_them(fit: Fit, capsys) -> None:
    fit(max_steps=1, init="word_vectors")
    assert "from counts of their neighbours" in capsys.readouterr().out
