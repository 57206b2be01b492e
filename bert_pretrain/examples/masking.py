"""Masked language modelling (Devlin et al., 2018, section 3.1, task 1): tokens to predict, and what replaces them.

Of the maskable tokens (all but [CLS], [SEP] and [PAD]) 15 %, rounded, at least one, are chosen; 80 % of them become
[MASK], 10 % a random word piece, 10 % are kept. With whole-word masking all tokens of a word are chosen together, while
80/10/10 is drawn for each token independently, as in google-research/bert.
"""

from dataclasses import dataclass, replace

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.examples.examples import Examples, Masks
from bert_pretrain.text import ragged
from bert_pretrain.text.tokenizer import Tokenizer

_ROWS_AT_ONCE = 2048


@dataclass(frozen=True)
class MaskingRule:
    """What masking needs of the configuration and the vocabulary."""

    masked_lm_prob: float
    max_predictions: int
    whole_word: bool
    mask_id: int
    special_ids: tuple[int, ...]
    """Never masked: [CLS], [SEP], [PAD]."""
    replacement_ids: np.ndarray
    """The ids a random replacement is drawn from: real word pieces, (pieces,)."""
    is_subword: np.ndarray
    """Whether an id continues a word, (vocab_size,) bool."""


def masking_rule(tokenizer: Tokenizer, config: DataConfig) -> MaskingRule:
    """Return the rule that the configuration and vocabulary give."""
    max_predictions = config.max_predictions_per_seq or -int(-config.masked_lm_prob * config.max_seq_length // 1)
    return MaskingRule(
        masked_lm_prob=config.masked_lm_prob,
        max_predictions=max_predictions,
        whole_word=config.whole_word_mask,
        mask_id=tokenizer.mask_id,
        special_ids=(tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id),
        replacement_ids=tokenizer.word_piece_ids,
        is_subword=tokenizer.is_subword,
    )


def mask_examples(examples: Examples, rule: MaskingRule, rng: np.random.Generator) -> Examples:
    """Choose and replace tokens of unmasked examples; returns the masked ones, without `starts_word`.

    Words begin where `examples.starts_word` says so or, where it is None, at every token without `##`.
    """
    input_ids, offsets = examples.input_ids, examples.offsets
    maskable = np.ones(len(input_ids), dtype=bool)
    for special_id in rule.special_ids:
        maskable &= input_ids != special_id
    starts_word = ~rule.is_subword[input_ids] if examples.starts_word is None else examples.starts_word
    choose = _choose_words if rule.whole_word else _choose_tokens
    chosen_positions, chosen_counts = [], []
    for first in range(0, len(examples), _ROWS_AT_ONCE):
        rows = slice(first, min(first + _ROWS_AT_ONCE, len(examples)))
        span = slice(offsets[rows.start], offsets[rows.stop])
        local = offsets[rows.start : rows.stop + 1] - offsets[rows.start]
        positions, counts = choose(maskable[span], maskable[span] & starts_word[span], local, rule, rng)
        chosen_positions.append(positions)
        chosen_counts.append(counts)
    positions = np.concatenate([np.zeros(0, dtype=np.int64), *chosen_positions])
    masked_offsets = ragged.offsets_of(np.concatenate([np.zeros(0, dtype=np.int64), *chosen_counts]))
    places = positions + np.repeat(offsets[:-1], np.diff(masked_offsets))
    originals = input_ids[places]
    replaced = input_ids.copy()
    replaced[places] = _replacements(originals, rule, rng)
    masks = Masks(positions.astype(np.uint16), originals, masked_offsets)
    return replace(examples, input_ids=replaced, masks=masks, starts_word=None)


def num_to_mask(maskable: np.ndarray, rule: MaskingRule) -> np.ndarray:
    """Return how many tokens are predicted for each count of maskable ones."""
    wanted = np.maximum(1, np.rint(maskable * rule.masked_lm_prob).astype(np.int64))
    return np.minimum(np.minimum(wanted, rule.max_predictions), maskable)


def _replacements(originals: np.ndarray, rule: MaskingRule, rng: np.random.Generator) -> np.ndarray:
    drawn = rng.random(len(originals))
    shown = np.where(drawn < 0.8, originals.dtype.type(rule.mask_id), originals)
    is_random = np.flatnonzero((drawn >= 0.8) & (drawn < 0.9))
    shown[is_random] = rule.replacement_ids[rng.integers(0, len(rule.replacement_ids), len(is_random))]
    return shown


def _random_keys(is_candidate: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Return unique random sort keys, the largest value where there is no candidate, (rows, columns).

    The column fills the lowest bits, whose mask is the second value: ties would otherwise be broken differently from
    one processor to another. Where columns are few, 32 bits leave room for randomness, and sort twice as fast.
    """
    rows, columns = is_candidate.shape
    column_bits = max(1, (columns - 1).bit_length())
    bits = 32 if column_bits <= 9 else 64
    dtype = np.dtype(f"uint{bits}")
    mask = (1 << column_bits) - 1
    keys = rng.integers(0, 1 << bits, (rows, columns), dtype=dtype)
    keys &= dtype.type((1 << (bits - 1)) - 1 - mask)
    keys |= np.arange(columns).astype(dtype)
    keys[~is_candidate] = (1 << bits) - 1
    return keys, mask


def _as_matrix(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Pad flat booleans to a matrix (rows, longest) with False."""
    lengths = np.diff(offsets)
    matrix = np.zeros((len(lengths), int(lengths.max())), dtype=bool)
    matrix[np.arange(matrix.shape[1]) < lengths[:, None]] = values
    return matrix


def _choose_tokens(
    maskable: np.ndarray, _starts_word: np.ndarray, offsets: np.ndarray, rule: MaskingRule, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Choose tokens one by one; returns positions within the examples, ascending, and their number for each."""
    candidates = _as_matrix(maskable, offsets)
    counts = num_to_mask(candidates.sum(axis=1), rule)
    most = int(counts.max())
    keys, column_mask = _random_keys(candidates, rng)
    if most < keys.shape[1]:
        keys = np.partition(keys, most, axis=1)[:, :most]
    keys.sort(axis=1)
    taken = np.arange(most) < counts[:, None]
    positions = np.where(taken, keys & keys.dtype.type(column_mask), keys.dtype.type(2**32 - 1))
    positions.sort(axis=1)
    return positions[taken].astype(np.int64), counts


def _choose_words(
    maskable: np.ndarray, starts_word: np.ndarray, offsets: np.ndarray, rule: MaskingRule, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Choose words in random order while they fit into the number of tokens to predict.

    Where not even the shortest word fits, one token of a word is chosen, so that every example has a prediction.
    """
    candidates = _as_matrix(maskable, offsets)
    limit = num_to_mask(candidates.sum(axis=1), rule)
    begins = _as_matrix(starts_word, offsets)
    # A `##` token at the beginning (a window can begin inside a word) belongs to a word that begins there.
    begins[:, 1:] |= candidates[:, 1:] & ~candidates[:, :-1]
    word = np.cumsum(begins, axis=1) - 1  # (rows, columns): the number of each token's word
    rows, num_words = len(begins), int(begins.sum(axis=1).max())
    row_of = np.nonzero(candidates)[0]
    lengths = np.bincount(row_of * num_words + word[candidates], minlength=rows * num_words).reshape(rows, num_words)
    keys, column_mask = _random_keys(lengths > 0, rng)
    keys.sort(axis=1)
    is_word = np.arange(num_words) < (lengths > 0).sum(axis=1)[:, None]
    order = np.where(is_word, keys & keys.dtype.type(column_mask), num_words).astype(np.int64)
    chosen = np.zeros((rows, num_words), dtype=bool)
    used = np.zeros(rows, dtype=np.int64)
    unfilled = np.arange(rows)
    for rank in range(num_words):
        candidate = order[unfilled, rank]
        unfilled, candidate = unfilled[candidate < num_words], candidate[candidate < num_words]
        sizes = lengths[unfilled, candidate]
        fits = used[unfilled] + sizes <= limit[unfilled]
        chosen[unfilled[fits], candidate[fits]] = True
        used[unfilled[fits]] += sizes[fits]
        unfilled = unfilled[used[unfilled] < limit[unfilled]]
        if not len(unfilled):
            break
    selected = candidates & np.take_along_axis(chosen, np.maximum(word, 0), axis=1)
    empty = np.flatnonzero(used == 0)
    if len(empty):
        first = np.argmin(_random_keys(candidates[empty], rng)[0], axis=1)
        selected[empty, first] = True
    positions = np.nonzero(selected)[1]
    return positions, selected.sum(axis=1)
