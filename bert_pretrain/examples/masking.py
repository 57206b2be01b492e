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


def mask_examples(
    examples: Examples,
    tokenizer: Tokenizer,
    config: DataConfig,
    rng: np.random.Generator,
) -> Examples:
    """Return the examples with masks, and without `starts_word`.

    Whole-word masking takes word starts from `examples.starts_word` or, if it is None, from all tokens without `##`.
    """
    input_ids = examples.input_ids
    is_maskable = np.ones(len(input_ids), dtype=bool)
    for special_id in (tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id):
        is_maskable &= input_ids != special_id
    starts_word = None
    if config.whole_word_mask:
        starts_word = ~tokenizer.is_subword[input_ids] if examples.starts_word is None else examples.starts_word
        starts_word = starts_word & is_maskable
    is_masked = np.zeros(len(input_ids), dtype=bool)
    counts = [np.zeros(0, dtype=np.int64)]
    for first in range(0, len(examples), _BLOCK_ROWS):
        offsets = examples.offsets[first : first + _BLOCK_ROWS + 1]
        block = slice(offsets[0], offsets[-1])
        lengths = np.diff(offsets)
        is_token = np.arange(lengths.max()) < lengths[:, None]  # (rows, longest)
        candidates = _as_matrix(is_maskable[block], is_token)
        limit = num_to_mask(candidates.sum(axis=1), config)
        if starts_word is None:
            chosen = _choose_tokens(candidates, limit, rng)
        else:
            chosen = _choose_words(candidates, _as_matrix(starts_word[block], is_token), limit, rng)
        is_masked[block] = chosen[is_token]
        counts.append(chosen.sum(axis=1))
    masked_offsets = ragged.offsets_of(np.concatenate(counts))
    masked = np.flatnonzero(is_masked)
    positions = masked - examples.offsets[ragged.lists_of(masked_offsets)]
    masks = Masks(positions.astype(np.uint16), input_ids[masked], masked_offsets)
    shown_ids = input_ids.copy()
    shown_ids[masked] = _replacements(masks.original_ids, tokenizer, rng)
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


def _as_matrix(values: np.ndarray, is_token: np.ndarray) -> np.ndarray:
    """Return booleans of all tokens as a matrix (rows, longest), padded with False."""
    matrix = np.zeros_like(is_token)
    matrix[is_token] = values
    return matrix


def _random_order(is_candidate: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return the columns of `count` random candidates of each row in random order, (rows, count).

    If a row has fewer candidates, the numbers after them have no meaning. The columns are sorted by random keys. The
    lowest bits of a candidate's key hold its column, so these keys are unique in a row and every processor sorts them
    alike. Their highest bit is 0. In the keys of non-candidates all bits are 1, so they sort last. With up to 512
    columns, 32-bit keys have enough random bits, and they sort faster.
    """
    rows, columns = is_candidate.shape
    column_bits = max(1, (columns - 1).bit_length())
    bits = 32 if column_bits <= 9 else 64
    dtype = np.dtype(f"uint{bits}")
    column_mask = (1 << column_bits) - 1
    keys = rng.integers(0, 1 << bits, (rows, columns), dtype=dtype)
    keys &= dtype.type((1 << (bits - 1)) - 1 - column_mask)
    keys |= np.arange(columns, dtype=dtype)
    keys[~is_candidate] = (1 << bits) - 1
    if count < columns:
        keys = np.partition(keys, count, axis=1)[:, :count]
    keys.sort(axis=1)
    return keys & dtype.type(column_mask)


def _choose_tokens(candidates: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the chosen tokens, (rows, columns) bool: in each row, `counts` (rows,) random candidates."""
    order = _random_order(candidates, int(counts.max()), rng)
    rows, places = np.nonzero(np.arange(order.shape[1]) < counts[:, None])
    chosen = np.zeros_like(candidates)
    chosen[rows, order[rows, places]] = True
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
    words_in_row = starts.sum(axis=1)
    num_words = int(words_in_row.max())
    word = np.maximum(np.cumsum(starts, axis=1) - 1, 0)  # (rows, columns): of each candidate, in its row
    first_words = num_words * np.arange(len(starts))  # words numbered across all rows
    numbers = (first_words[:, None] + word)[candidates]
    lengths = np.bincount(numbers, minlength=len(starts) * num_words).reshape(len(starts), num_words)
    order = _random_order(lengths > 0, num_words, rng)
    chosen = np.zeros(lengths.shape, dtype=bool)
    used = np.zeros(len(starts), dtype=np.int64)
    for rank in range(num_words):
        open_rows = np.flatnonzero((used < limit) & (rank < words_in_row))
        next_word = order[open_rows, rank]
        sizes = lengths[open_rows, next_word]
        fits = used[open_rows] + sizes <= limit[open_rows]
        chosen[open_rows[fits], next_word[fits]] = True
        used[open_rows[fits]] += sizes[fits]
    selected = candidates & np.take_along_axis(chosen, word, axis=1)
    without = np.flatnonzero(used == 0)
    if len(without):
        selected[without, _random_order(candidates[without], 1, rng)[:, 0]] = True
    return selected
