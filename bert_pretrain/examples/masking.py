"""Masked language modelling (Devlin et al., 2018, section 3.1, task 1): tokens to predict, and what replaces them.

Of the maskable tokens (all but [CLS], [SEP] and [PAD]) 15 %, rounded, at least one, are chosen; 80 % of them become
[MASK], 10 % a random word piece, 10 % are kept. With whole-word masking all tokens of a word are chosen together, while
80/10/10 is drawn for each token independently, as in google-research/bert.
`mask` in `tests/make_data/reference.py` is the same in plain Python.
"""

from dataclasses import replace

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.examples.examples import Examples, Masks
from bert_pretrain.text import ragged
from bert_pretrain.text.tokenizer import Tokenizer

_ROWS_AT_ONCE = 2048


def mask_examples(examples: Examples, tokenizer: Tokenizer, config: DataConfig, rng: np.random.Generator) -> Examples:
    """Choose and replace tokens of unmasked examples; returns the masked ones, without `starts_word`.

    Words begin where `examples.starts_word` says so or, where it is None, at every token without `##`.
    """
    input_ids, offsets = examples.input_ids, examples.offsets
    maskable = np.ones(len(input_ids), dtype=bool)
    for special_id in (tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id):
        maskable &= input_ids != special_id
    starts_word = None
    if config.whole_word_mask:
        starts_word = ~tokenizer.is_subword[input_ids] if examples.starts_word is None else examples.starts_word
        starts_word = starts_word & maskable
    positions, counts = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for first in range(0, len(examples), _ROWS_AT_ONCE):
        local = offsets[first : first + _ROWS_AT_ONCE + 1]
        span = slice(local[0], local[-1])
        candidates = _as_matrix(maskable[span], local)
        limit = num_to_mask(candidates.sum(axis=1), config)
        if starts_word is None:
            chosen = _choose_tokens(candidates, limit, rng)
        else:
            chosen = _choose_words(candidates, _as_matrix(starts_word[span], local), limit, rng)
        positions.append(np.flatnonzero(chosen) % chosen.shape[1])
        counts.append(chosen.sum(axis=1))
    masked_offsets = ragged.offsets_of(np.concatenate(counts))
    within = np.concatenate(positions)
    places = within + np.repeat(offsets[:-1], np.diff(masked_offsets))
    shown = input_ids.copy()
    shown[places] = _replacements(input_ids[places], tokenizer, rng)
    masks = Masks(within.astype(np.uint16), input_ids[places], masked_offsets)
    return replace(examples, input_ids=shown, masks=masks, starts_word=None)


def max_predictions(config: DataConfig) -> int:
    """Return how many tokens of an example are predicted at most."""
    return config.max_predictions_per_seq or -int(-config.masked_lm_prob * config.max_seq_length // 1)


def num_to_mask(maskable: np.ndarray, config: DataConfig) -> np.ndarray:
    """Return how many tokens are predicted for each count of maskable ones."""
    wanted = np.maximum(1, np.rint(maskable * config.masked_lm_prob).astype(np.int64))
    return np.minimum(np.minimum(wanted, max_predictions(config)), maskable)


def _replacements(originals: np.ndarray, tokenizer: Tokenizer, rng: np.random.Generator) -> np.ndarray:
    drawn = rng.random(len(originals))
    shown = np.where(drawn < 0.8, originals.dtype.type(tokenizer.mask_id), originals)
    is_random = np.flatnonzero((drawn >= 0.8) & (drawn < 0.9))
    word_pieces = tokenizer.word_piece_ids
    shown[is_random] = word_pieces[rng.integers(0, len(word_pieces), len(is_random))]
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


def _choose_tokens(candidates: np.ndarray, limit: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Choose as many candidates (rows, columns) of each row as its limit (rows,) says, (rows, columns) bool."""
    most = int(limit.max())
    keys, column_mask = _random_keys(candidates, rng)
    if most < keys.shape[1]:
        keys = np.partition(keys, most, axis=1)[:, :most]
    keys.sort(axis=1)
    lowest = keys[np.arange(most) < limit[:, None]] & keys.dtype.type(column_mask)
    chosen = np.zeros_like(candidates)
    chosen[np.repeat(np.arange(len(limit)), limit), lowest] = True
    return chosen


def _choose_words(
    candidates: np.ndarray, begins: np.ndarray, limit: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Choose words, which begin at `begins`, in random order while they fit into the limit, (rows, columns) bool.

    Where not even the shortest word fits, one token of a word is chosen, so that every example has a prediction.
    """
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
    return selected
