"""Ragged arrays: lists of different lengths as an array of values and an array of offsets, without padding.

List i is `values[offsets[i] : offsets[i + 1]]`. Tokens keep this form from the token store to the batch.
"""

import numpy as np


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Convert lengths (lists,) to offsets (lists + 1,) int64."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def lists_of(offsets: np.ndarray) -> np.ndarray:
    """Return the list of every value: [0, 0, 0, 1, 1, …]."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def positions_within(offsets: np.ndarray) -> np.ndarray:
    """Return the position of every value in its list: [0, 1, 2, 0, 1, …]."""
    firsts = np.repeat(offsets[:-1], np.diff(offsets))
    return np.arange(offsets[-1], dtype=np.int64) - firsts


def spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the indices of the spans [start, start + length), concatenated."""
    offsets = offsets_of(lengths)
    shifts = np.repeat(starts - offsets[:-1], lengths)
    return np.arange(offsets[-1], dtype=np.int64) + shifts


def take(values: np.ndarray, offsets: np.ndarray, lists: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and offsets of the lists with the indices `lists`, in this order."""
    starts = offsets[lists]
    lengths = offsets[lists + 1] - starts
    taken = offsets_of(lengths)
    indices = np.repeat(starts - taken[:-1], lengths)
    indices += np.arange(taken[-1])
    return values[indices], taken
