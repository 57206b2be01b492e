"""Masked language modeling (Devlin et al., 2018, section 3.1, task 1): choose the tokens to predict and replace them.

All tokens except [CLS], [SEP] and [PAD] are maskable. By default, 15% of them (rounded, at least one) are masked: 80%
become [MASK], 10% become a random word piece, and 10% do not change. Whole-word masking masks at most as many tokens,
all tokens of a word together, and still draws 80/10/10 for each token, as in google-research/bert.
`mask` in `tests/make_data/reference.py` implements the rule without whole words in plain Python.
"""

from dataclasses import replace

import numpy as np

from bert_pretrain import ragged
from bert_pretrain.config import DataConfig
from bert_pretrain.examples.examples import Examples, Masks
from bert_pretrain.text.tokenizer import Tokenizer

_BLOCK_ROWS = 2048  # bounds memory; another value gives other masks


def mask_examples(examples: Examples, tokenizer: Tokenizer, config: DataConfig, rng: np.random.Generator) -> Examples:
    """Return the examples with masks, and without `starts_word`.

    Whole-word masking takes word starts from `examples.starts_word` or, if it is None, from all tokens without `##`.
    """
    input_ids = examples.input_ids
    is_maskable = np.ones(len(input_ids), dtype=bool)
    for special_id in (tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id):
        is_maskable &= input_ids != special_id
    starts_word = None
    if config.whole_word_mask:
        starts_word = examples.starts_word
        if starts_word is None:
            starts_word = ~tokenizer.is_subword[input_ids]
        starts_word = starts_word & is_maskable
    positions = [np.zeros(0, dtype=np.int64)]
    counts = [np.zeros(0, dtype=np.int64)]
    for first in range(0, len(examples), _BLOCK_ROWS):
        block_offsets = examples.offsets[first : first + _BLOCK_ROWS + 1]
        block = slice(block_offsets[0], block_offsets[-1])
        candidates = _as_matrix(is_maskable[block], block_offsets)
        limit = num_to_mask(candidates.sum(axis=1), config)
        if starts_word is None:
            chosen = _choose_tokens(candidates, limit, rng)
        else:
            chosen = _choose_words(candidates, _as_matrix(starts_word[block], block_offsets), limit, rng)
        positions.append(np.flatnonzero(chosen) % chosen.shape[1])
        counts.append(chosen.sum(axis=1))
    masked_positions = np.concatenate(positions)
    masked_offsets = ragged.offsets_of(np.concatenate(counts))
    indices = masked_positions + np.repeat(examples.offsets[:-1], np.diff(masked_offsets))
    originals = input_ids[indices]
    shown_ids = input_ids.copy()
    shown_ids[indices] = _replacements(originals, tokenizer, rng)
    masks = Masks(masked_positions.astype(np.uint16), originals, masked_offsets)
    return replace(examples, input_ids=shown_ids, masks=masks, starts_word=None)


def num_to_mask(num_maskable: np.ndarray, config: DataConfig) -> np.ndarray:
    """Return the number of tokens to mask in each example, given its number of maskable tokens."""
    limit = config.max_predictions_per_seq or int(np.ceil(config.masked_lm_prob * config.max_seq_length))
    wanted = np.rint(num_maskable * config.masked_lm_prob).astype(np.int64)
    return np.minimum(np.clip(wanted, 1, limit), num_maskable)


def _replacements(originals: np.ndarray, tokenizer: Tokenizer, rng: np.random.Generator) -> np.ndarray:
    """Return what replaces each token: [MASK] (80 %), a random word piece (10 %) or the same token."""
    drawn = rng.random(len(originals))
    shown = originals.copy()
    shown[drawn < 0.8] = tokenizer.mask_id
    is_random = (drawn >= 0.8) & (drawn < 0.9)
    pieces = tokenizer.word_piece_ids
    shown[is_random] = pieces[rng.integers(0, len(pieces), is_random.sum())]
    return shown


def _random_keys(is_candidate: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Return random sort keys, (rows, columns), and the bit mask that extracts the column from a key.

    The lowest bits of a candidate's key hold its column, so these keys are unique in a row and every processor sorts
    them alike. Their highest bit is 0. In the keys of non-candidates all bits are 1, so they sort last. With up to 512
    columns, 32-bit keys have enough random bits, and they sort faster.
    """
    rows, columns = is_candidate.shape
    column_bits = max(1, (columns - 1).bit_length())
    bits = 32 if column_bits <= 9 else 64
    dtype = np.dtype(f"uint{bits}")
    column_mask = (1 << column_bits) - 1
    keys = rng.integers(0, 1 << bits, (rows, columns), dtype=dtype)
    keys &= dtype.type((1 << (bits - 1)) - 1 - column_mask)
    keys |= np.arange(columns).astype(dtype)
    keys[~is_candidate] = (1 << bits) - 1
    return keys, column_mask


def _as_matrix(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return ragged booleans as a matrix (rows, length of the longest row), padded with False."""
    lengths = np.diff(offsets)
    matrix = np.zeros((len(lengths), int(lengths.max())), dtype=bool)
    matrix[np.arange(matrix.shape[1]) < lengths[:, None]] = values
    return matrix


def _choose_tokens(candidates: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the chosen tokens, (rows, columns) bool: in each row, `counts` (rows,) random candidates."""
    max_count = int(counts.max())
    keys, column_mask = _random_keys(candidates, rng)
    if max_count < keys.shape[1]:
        keys = np.partition(keys, max_count, axis=1)[:, :max_count]
    keys.sort(axis=1)
    lowest = keys[np.arange(max_count) < counts[:, None]]
    rows = np.repeat(np.arange(len(counts)), counts)
    chosen = np.zeros_like(candidates)
    chosen[rows, lowest & keys.dtype.type(column_mask)] = True
    return chosen


def _choose_words(
    candidates: np.ndarray,
    starts: np.ndarray,
    limit: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return the tokens of random words, (rows, columns) bool, at most `limit` (rows,) tokens of each row.

    Words are visited in random order, and a word that exceeds the remaining limit is skipped. If no word fits, one
    random token is chosen, so that every example has a prediction.
    """
    # A segment can start inside a word, so its first token may have `##`. Such a token starts a word here.
    starts[:, 1:] |= candidates[:, 1:] & ~candidates[:, :-1]
    num_rows = len(starts)
    num_words = int(starts.sum(axis=1).max())
    word_index = np.cumsum(starts, axis=1) - 1  # (rows, columns): of each token's word; -1 before the first word
    word = np.nonzero(candidates)[0] * num_words + word_index[candidates]  # of each candidate, among all rows
    lengths = np.bincount(word, minlength=num_rows * num_words).reshape(num_rows, num_words)
    is_word = lengths > 0
    keys, column_mask = _random_keys(is_word, rng)
    keys.sort(axis=1)
    order = keys & keys.dtype.type(column_mask)  # (rows, words), first the words of each row
    words_in_row = is_word.sum(axis=1)
    chosen = np.zeros((num_rows, num_words), dtype=bool)
    used = np.zeros(num_rows, dtype=np.int64)
    for rank in range(num_words):
        rows = np.flatnonzero((used < limit) & (rank < words_in_row))
        if len(rows) == 0:
            break
        next_word = order[rows, rank]
        sizes = lengths[rows, next_word]
        fits = used[rows] + sizes <= limit[rows]
        chosen[rows[fits], next_word[fits]] = True
        used[rows[fits]] += sizes[fits]
    selected = candidates & np.take_along_axis(chosen, np.maximum(word_index, 0), axis=1)
    unmasked = np.flatnonzero(used == 0)
    if len(unmasked):
        keys, _ = _random_keys(candidates[unmasked], rng)
        selected[unmasked, keys.argmin(axis=1)] = True
    return selected
