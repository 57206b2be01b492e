"""The package has the same invariants and statistics as the plain Python of `reference.py`."""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from bert_pretrain.config import DataConfig
from bert_pretrain.examples.masking import mask_examples
from bert_pretrain.make_data.pairs import assemble, cut_at_length, exchange_segment_b
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.wordpiece import special_tokens

from . import reference
from .test_pairs import documents_of, owners, text_of

MAX_TOKENS, SHORT = 61, 0.1
FIRST_ID, NUM_IDS = 104, 60_000
CORPORA = {
    "stories": documents_of(11, 400, (5, 60), (3, 30)),
    "short documents": documents_of(12, 2500, (1, 8), (3, 30)),
}


@dataclass
class Metrics:
    """The pairs and mask counts of one implementation."""

    pairs: list[tuple[list[int], list[int], int]] = field(default_factory=list)  # A, B, label; ids are positions
    shown: Counter[str] = field(default_factory=Counter)  # at masked positions: mask, original or random

    def count_mask(self, original: int, shown: int, mask_id: int) -> None:
        self.shown["mask" if shown == mask_id else "original" if shown == original else "random"] += 1

    def lengths(self, *labels: int) -> np.ndarray:
        """Return the lengths of A and B, (pairs, 2)."""
        return np.array([(len(a), len(b)) for a, b, label in self.pairs if label in labels])

    @property
    def covered(self) -> set[int]:
        """Tokens of A and of Bs with the label 0."""
        return {token for a, b, label in self.pairs for token in (*a, *(b if label == 0 else ()))}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokens = [*special_tokens(99), *(f"w{number}" for number in range(NUM_IDS))]
    return Tokenizer(tokens, lowercase=True, strip_accents=None, handle_chinese_chars=True)


def by_reference(documents: list[list[int]], tokenizer: Tokenizer, seed: int) -> Metrics:
    draw, metrics, windows = random.Random(seed), Metrics(), []
    places = iter(range(sum(map(sum, documents))))
    for number, lengths in enumerate(documents):
        sentences = [list(itertools.islice(places, length)) for length in lengths]
        windows += reference.cut_at_length(number, sentences, MAX_TOKENS, SHORT, draw)
    word_pieces, special = tokenizer.word_piece_ids.tolist(), {tokenizer.cls_id, tokenizer.sep_id}
    for pair in reference.exchange_segment_b(windows, MAX_TOKENS, draw):
        metrics.pairs.append((pair.a, pair.b, pair.label))
        a, b = ([FIRST_ID + token % NUM_IDS for token in segment] for segment in (pair.a, pair.b))
        input_ids = [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id]
        shown, originals = reference.mask(input_ids, special, tokenizer.mask_id, word_pieces, 0.15, draw)
        for position, original in originals.items():
            metrics.count_mask(original, shown[position], tokenizer.mask_id)
    return metrics


def by_arrays(documents: list[list[int]], tokenizer: Tokenizer, seed: int) -> Metrics:
    rng, metrics, text = np.random.default_rng(seed), Metrics(), text_of(documents)
    segments = exchange_segment_b(cut_at_length(text, MAX_TOKENS, SHORT, rng), text, MAX_TOKENS, rng)
    spans = [list(range(at, at + length)) for at, length in zip(segments.starts, segments.lengths, strict=True)]
    metrics.pairs = list(zip(spans[0::2], spans[1::2], segments.labels.tolist(), strict=True))
    ids = (FIRST_ID + text.ids % NUM_IDS).astype(np.uint16)
    unmasked = assemble(segments, replace(text, ids=ids), tokenizer)
    examples = mask_examples(unmasked, tokenizer, DataConfig(max_seq_length=64), rng)
    places = examples.masked_indices
    for original, shown in zip(unmasked.input_ids[places], examples.input_ids[places], strict=True):
        metrics.count_mask(int(original), int(shown), tokenizer.mask_id)
    return metrics


def check_invariants(metrics: Metrics, documents: list[list[int]]) -> None:
    owner, labels = owners(documents), [label for _, _, label in metrics.pairs]
    assert abs(2 * sum(labels) - len(labels)) <= 1
    for a, b, label in metrics.pairs:
        assert a
        assert b
        assert len(a) + len(b) <= MAX_TOKENS
        for segment in (a, b):
            assert segment == list(range(segment[0], segment[0] + len(segment)))  # consecutive text
            assert len(set(owner[segment].tolist())) == 1
        assert (owner[a[0]] != owner[b[0]]) == (label == 1)
        assert label == 1 or b[0] == a[-1] + 1
    # The other tokens of documents with two sentences are in exchanged Bs.
    in_windows = sum(sum(document) for document in documents if len(document) > 1)
    assert len(metrics.covered) > 0.7 * in_windows


@pytest.mark.parametrize("corpus", CORPORA)
def test_both_implementations_have_the_same_invariants_and_statistics(corpus, tokenizer) -> None:
    found = [
        [implementation(CORPORA[corpus], tokenizer, seed) for seed in range(3)]
        for implementation in (by_reference, by_arrays)
    ]
    for each in found:
        check_invariants(each[0], CORPORA[corpus])

    def close(measure, tolerance: float) -> None:
        plain, arrays = (np.mean([measure(metrics) for metrics in each]) for each in found)
        assert plain == pytest.approx(arrays, rel=tolerance), (plain, arrays)

    close(lambda f: len(f.pairs), 0.01)
    close(lambda f: f.lengths(0, 1).sum(axis=1).mean(), 0.01)
    close(lambda f: f.lengths(0, 1)[:, 0].mean(), 0.02)
    close(lambda f: f.lengths(0, 1)[:, 1].std(), 0.02)
    for label in (0, 1):  # lengths do not depend on the label
        close(lambda f, k=label: f.lengths(k)[:, 1].mean(), 0.02)
    close(lambda f: (f.lengths(0, 1).sum(axis=1) == MAX_TOKENS).mean(), 0.02)
    close(lambda f: len(f.covered), 0.02)
    close(lambda f: f.shown.total() / f.lengths(0, 1).sum(), 0.005)
    for kind, share in (("mask", 0.8), ("random", 0.1), ("original", 0.1)):
        close(lambda f, k=kind: f.shown[k] / f.shown.total(), 0.05)
        assert found[0][0].shown[kind] / found[0][0].shown.total() == pytest.approx(share, abs=0.01)
