"""Masks: number, positions and replacements, compared with the paper and with exact counts."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bert_pretrain import ragged
from bert_pretrain.config import DataConfig
from bert_pretrain.examples.examples import Examples, Masks
from bert_pretrain.examples.masking import mask_examples
from bert_pretrain.text.tokenizer import Tokenizer

PAD, CLS, SEP, MASK, UNUSED, UNK = range(6)
FIRST_PIECE, NUM_IDS = 6, 1006
SUBWORDS = np.arange(NUM_IDS) >= 500
TOKENS = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[UNK]"]
TOKENS += [f"##{number}" if number >= 500 else f"w{number}" for number in range(FIRST_PIECE, NUM_IDS)]
TOKENIZER = Tokenizer(TOKENS, lowercase=True, strip_accents=None, handle_chinese_chars=True)


def rule(probability: float = 0.15, most: int = 10_000, whole_word: bool = False) -> DataConfig:
    return DataConfig(masked_lm_prob=probability, max_predictions_per_seq=most, whole_word_mask=whole_word)


def table(lengths: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return random examples `[CLS] A [SEP] B [SEP]` with the given numbers of maskable tokens."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        pieces = rng.integers(FIRST_PIECE, NUM_IDS, length)
        split = int(rng.integers(0, length + 1))
        rows.append(np.concatenate([[CLS], pieces[:split], [SEP], pieces[split:], [SEP]]))
    return np.concatenate(rows).astype(np.uint16), ragged.offsets_of(np.array([len(row) for row in rows]))


def mask(input_ids: np.ndarray, offsets: np.ndarray, config: DataConfig, seed: int) -> tuple[np.ndarray, Masks]:
    """Return the masked ids and the masks."""
    examples = Examples(input_ids, offsets, np.zeros(len(offsets) - 1, np.uint16))
    masked = mask_examples(examples, TOKENIZER, config, np.random.default_rng(seed))
    return masked.input_ids, masked.masks


def places_of(masks: Masks, offsets: np.ndarray) -> np.ndarray:
    return np.repeat(offsets[:-1], np.diff(masks.offsets)) + masks.positions


def words_of(example: np.ndarray) -> list[list[int]]:
    """Return the positions of each word. Subwords right after [CLS] or [SEP] start a word."""
    words: list[list[int]] = []
    for position, token in enumerate(example.tolist()):
        if token in (CLS, SEP):
            continue
        if SUBWORDS[token] and example[position - 1] not in (CLS, SEP):
            words[-1].append(position)
        else:
            words.append([position])
    return words


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=30)


@given(LENGTHS, st.integers(0, 1000), st.sampled_from([0.15, 0.01, 0.5, 0.99]), st.integers(1, 30), st.booleans())
@example(np.random.default_rng(4).integers(1, 30, 5000).tolist(), 5, 0.15, 10_000, False)  # more than one block of rows
def test_masks_are_sorted_reversible_and_not_on_special_tokens(lengths, seed, probability, most, whole_word) -> None:
    input_ids, offsets = table(lengths, seed)
    before = input_ids.copy()
    shown_ids, masks = mask(input_ids, offsets, rule(probability, most, whole_word), seed)
    assert np.array_equal(input_ids, before)
    places = places_of(masks, offsets)
    assert len(set(places.tolist())) == len(places)
    assert not np.isin(before[places], (CLS, SEP, PAD)).any()
    assert np.array_equal(before[places], masks.original_ids)
    shown_ids[places] = masks.original_ids
    assert np.array_equal(shown_ids, before)
    counts = np.diff(masks.offsets).tolist()
    wanted = [min(most, max(1, round(probability * length))) for length in lengths]
    assert counts == wanted or (whole_word and all(1 <= n <= most for n, most in zip(counts, wanted, strict=True)))
    for begin, end in itertools.pairwise(masks.offsets):
        assert (np.diff(masks.positions[begin:end].astype(int)) > 0).all()


def within(successes: int, trials: int, share: float) -> bool:
    """Return whether a binomial count is within five standard deviations of its mean."""
    return abs(successes - share * trials) < 5 * math.sqrt(trials * share * (1 - share))


@pytest.mark.parametrize("whole_word", [False, True])
def test_replacements_are_80_10_10_and_random_word_pieces(whole_word: bool) -> None:
    input_ids, offsets = table([100] * 4000)
    shown_ids, masks = mask(input_ids, offsets, rule(whole_word=whole_word), 1)
    shown = shown_ids[places_of(masks, offsets)]
    is_mask, is_same, trials = shown == MASK, shown == masks.original_ids, len(shown)
    assert 0.145 < trials / 400_000 <= 0.15
    assert within(int(is_mask.sum()), trials, 0.8)
    assert within(int(is_same.sum()), trials, 0.1 + 0.1 / 1000)
    randoms = shown[~is_mask & ~is_same]
    assert not np.isin(randoms, (PAD, CLS, SEP, MASK, UNUSED, UNK)).any()
    assert len(np.unique(randoms)) > 950
    assert randoms.mean() == pytest.approx((FIRST_PIECE + NUM_IDS - 1) / 2, rel=0.03)


def test_every_position_is_masked_equally_often() -> None:
    input_ids, offsets = table([20] * 20_000)
    _, masks = mask(input_ids, offsets, rule(), 2)
    maskable = ~np.isin(input_ids, (CLS, SEP))
    ranks = (np.cumsum(maskable) - 1)[places_of(masks, offsets)] % 20  # among the maskable tokens of its example
    assert all(within(int(count), 20_000, 3 / 20) for count in np.bincount(ranks, minlength=20))


@given(LENGTHS, st.integers(0, 1000))
def test_whole_word_masking_masks_whole_words(lengths: list[int], seed: int) -> None:
    input_ids, offsets = table(lengths, seed)
    _, masks = mask(input_ids, offsets, rule(whole_word=True), seed)
    for row, length in enumerate(lengths):
        chosen = set(masks.positions[masks.offsets[row] : masks.offsets[row + 1]].tolist())
        words, limit = words_of(input_ids[offsets[row] : offsets[row + 1]]), max(1, round(0.15 * length))
        if min(map(len, words)) > limit:
            assert len(chosen) == 1  # not even the shortest word fits: one token of some word
            continue
        assert all(chosen.issuperset(word) or chosen.isdisjoint(word) for word in words)
        # No further word would have fitted.
        left = [len(word) for word in words if chosen.isdisjoint(word)]
        assert not left or len(chosen) + min(left) > limit
