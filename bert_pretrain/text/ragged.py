"""Lists of unequal length as two arrays: flat values, and offsets where each list begins (and the last one ends).

Tokens are in this form from the token store to the batch: no padding, no Python object per list.
"""

import numpy as np


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return the offsets (lists + 1,) int64 of lists of the given lengths (lists,)."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def positions_within(offsets: np.ndarray) -> np.ndarray:
    """Return, for every flat value, its position in its own list: [0, 1, 2, 0, 1, …]."""
    return np.arange(offsets[-1], dtype=np.int64) - np.repeat(offsets[:-1], np.diff(offsets))


def spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the flat indices of the spans [start, start + length), one after the other."""
    offsets = offsets_of(lengths)
    return np.arange(offsets[-1], dtype=np.int64) + np.repeat(starts - offsets[:-1], lengths)


def take(values: np.ndarray, offsets: np.ndarray, lists: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and offsets of the chosen lists, in the order given."""
    lengths = offsets[lists + 1] - offsets[lists]
    return values[spans(offsets[lists], lengths)], offsets_of(lengths)
