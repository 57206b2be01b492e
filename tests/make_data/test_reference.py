"""The arrays of the package do what the plain Python of `reference.py` says: same invariants, same statistics."""

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from bert_pretrain.config import DataConfig
from bert_pretrain.examples.masking import mask_examples
from bert_pretrain.make_data.pairs import assemble, cut_windows, shuffle_segment_b
from bert_pretrain.text.tokenizer import Tokenizer

from . import reference
from .test_pairs import documents_of, halves, text_of

MAX_TOKENS, SHORT = 61, 0.1
FIRST_ID, NUM_IDS = 104, 60_000
CORPORA = {
    "stories": documents_of(11, 400, (5, 60), (3, 30)),
    "short documents": documents_of(12, 2500, (1, 8), (3, 30)),
}


@dataclass
class Figures:
    """What a set of examples comes to, by either implementation."""

    windows: list[tuple[int, int]] = field(default_factory=list)  # (length of A, length of B)
    labels: list[int] = field(default_factory=list)
    documents: list[tuple[int, int]] = field(default_factory=list)  # of A, of B
    follows: list[bool] = field(default_factory=list)  # B is the text after A
    covered: set[int] = field(default_factory=set)  # tokens of A, and of a true B
    masked: int = 0
    maskable: int = 0
    shown: dict[str, int] = field(default_factory=lambda: {"mask": 0, "random": 0, "original": 0})

    def add(self, a: list[int], b: list[int], label: int, owner: np.ndarray) -> None:
        self.windows.append((len(a), len(b)))
        self.labels.append(label)
        self.documents.append((int(owner[a[0]]), int(owner[b[0]])))
        self.follows.append(b[0] == a[-1] + 1)
        self.covered.update(a, b if label == 0 else ())
        for segment in (a, b):
            assert segment == list(range(segment[0], segment[0] + len(segment)))  # consecutive text
            assert len(set(owner[segment].tolist())) == 1

    def count_mask(self, original: int, shown: int, mask_id: int) -> None:
        kind = "mask" if shown == mask_id else "original" if shown == original else "random"
        self.shown[kind] += 1
        self.masked += 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokens = ["[PAD]", *(f"[unused{n}]" for n in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return Tokenizer([*tokens, *(f"w{n}" for n in range(NUM_IDS))], lowercase=True, strip_accents=None,
                     handle_chinese_chars=True)  # fmt: skip


def owners(documents: list[list[int]]) -> np.ndarray:
    return np.repeat(np.arange(len(documents)), [sum(document) for document in documents])


def by_reference(documents: list[list[int]], tokenizer: Tokenizer, seed: int) -> Figures:
    draw, figures, owner, place = random.Random(seed), Figures(), owners(documents), 0
    windows = []
    for number, lengths in enumerate(documents):
        sentences = []
        for length in lengths:
            sentences.append(list(range(place, place + length)))  # a token is its place in the corpus
            place += length
        windows += reference.cut_windows(number, sentences, MAX_TOKENS, SHORT, draw)
    word_pieces = tokenizer.word_piece_ids.tolist()
    special = {tokenizer.cls_id, tokenizer.sep_id}
    for pair in reference.make_pairs(windows, MAX_TOKENS, draw):
        figures.add(pair.a, pair.b, pair.label, owner)
        a, b = ([FIRST_ID + token % NUM_IDS for token in segment] for segment in (pair.a, pair.b))
        input_ids = [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id]
        shown, originals = reference.mask(input_ids, special, tokenizer.mask_id, word_pieces, 0.15, draw)
        figures.maskable += len(a) + len(b)
        for position, original in originals.items():
            figures.count_mask(original, shown[position], tokenizer.mask_id)
    return figures


def by_arrays(documents: list[list[int]], tokenizer: Tokenizer, seed: int) -> Figures:
    rng, figures, owner, text = np.random.default_rng(seed), Figures(), owners(documents), text_of(documents)
    segments = shuffle_segment_b(cut_windows(text, MAX_TOKENS, SHORT, rng, at_sentences=False), text, MAX_TOKENS, rng)
    pairs = halves(segments)
    for row, label in enumerate(segments.labels.tolist()):
        a, b = (
            list(range(start, start + length))
            for start, length in (
                (pairs.a_start[row], pairs.a_lengths[row]),
                (pairs.b_start[row], pairs.b_lengths[row]),
            )
        )
        figures.add(a, b, label, owner)
    ids = (FIRST_ID + text.ids % NUM_IDS).astype(np.uint16)
    unmasked = assemble(segments, replace(text, ids=ids), tokenizer)
    examples = mask_examples(unmasked, tokenizer, DataConfig(max_seq_length=64), rng)
    assert examples.masks is not None
    positions = np.repeat(examples.offsets[:-1], np.diff(examples.masks.offsets)) + examples.masks.positions
    figures.maskable = int(sum(a + b for a, b in figures.windows))
    for original, shown in zip(unmasked.input_ids[positions], examples.input_ids[positions], strict=True):
        figures.count_mask(int(original), int(shown), tokenizer.mask_id)
    return figures


def check_invariants(figures: Figures, documents: list[list[int]]) -> None:
    assert abs(2 * sum(figures.labels) - len(figures.labels)) <= 1
    for label, (a, b), follows in zip(figures.labels, figures.documents, figures.follows, strict=True):
        assert (a != b) == (label == 1)
        assert follows or label == 1
    assert all(a > 0 and b > 0 and a + b <= MAX_TOKENS for a, b in figures.windows)
    # Every token of a document of two sentences is in an A, or in a B that was exchanged.
    in_windows = sum(sum(document) for document in documents if len(document) > 1)
    assert len(figures.covered) > 0.7 * in_windows
    assert sum(figures.shown.values()) == figures.masked


@pytest.mark.parametrize("corpus", CORPORA)
def test_both_implementations_keep_the_invariants_and_have_the_same_statistics(
    corpus: str, tokenizer: Tokenizer
) -> None:
    found = [
        [implementation(CORPORA[corpus], tokenizer, seed) for seed in range(3)]
        for implementation in (by_reference, by_arrays)
    ]
    for each in found:
        check_invariants(each[0], CORPORA[corpus])

    def close(figure, tolerance: float) -> None:
        plain, arrays = (np.mean([figure(figures) for figures in each]) for each in found)
        assert plain == pytest.approx(arrays, rel=tolerance), (plain, arrays)

    close(lambda f: len(f.windows), 0.01)
    close(lambda f: np.mean([a + b for a, b in f.windows]), 0.01)
    close(lambda f: np.mean([a for a, _ in f.windows]), 0.02)
    close(lambda f: np.std([b for _, b in f.windows]), 0.02)
    for label in (0, 1):  # by label too: it must not show in the lengths
        close(
            lambda f, k=label: np.mean([b for (_, b), one in zip(f.windows, f.labels, strict=True) if one == k]), 0.02
        )
    close(lambda f: np.mean([a + b == MAX_TOKENS for a, b in f.windows]), 0.02)
    close(lambda f: len(f.covered), 0.02)
    close(lambda f: f.masked / f.maskable, 0.005)
    for kind, share in (("mask", 0.8), ("random", 0.1), ("original", 0.1)):
        close(lambda f, k=kind: f.shown[k] / f.masked, 0.05)
        assert found[0][0].shown[kind] / found[0][0].masked == pytest.approx(share, abs=0.01)
