"""A vectorized hash table from short byte strings to numbers."""

import numpy as np

KEY_BYTES = 8
MAX_KEY_BYTES = 32
_AFTER_BYTES = ~np.array([(1 << (8 * count)) - 1 for count in range(KEY_BYTES + 1)], dtype=np.uint64)


class KeyTable:
    """A hash table from keys of one or several 64-bit words to numbers, with operations on arrays of keys.

    It uses open addressing with linear probing. If several new keys of an array hash to the same slot, the last one
    written takes it, and the other keys probe the next slot.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._size = 0
        self._allocate(1 << 16)

    def _allocate(self, capacity: int) -> None:
        self._shift = np.uint64(64 - capacity.bit_length() + 1)
        self._keys = [np.zeros(capacity, dtype=np.uint64) for _ in range(self.columns)]
        self._numbers = np.full(capacity, -1, dtype=np.int32)

    def find(self, keys: list[np.ndarray]) -> np.ndarray:
        """Return the number of each key, (keys,) int32, or -1 if it is absent. `keys` are columns of (keys,) uint64."""
        slots = self._slots(keys)
        numbers = self._numbers.take(slots)
        pending = np.flatnonzero(~self._holds(slots, keys) & (numbers >= 0))
        slots = slots[pending]
        while len(pending):
            slots = self._next(slots)
            candidates = self._numbers[slots]
            numbers[pending] = candidates
            is_here = self._holds(slots, [key[pending] for key in keys])
            elsewhere = np.flatnonzero(~is_here & (candidates >= 0))
            pending = pending[elsewhere]
            slots = slots[elsewhere]
        return numbers

    def insert(self, keys: list[np.ndarray], next_number: int) -> tuple[np.ndarray, np.ndarray]:
        """Insert absent keys and number them from `next_number`. Duplicate keys have the same number.

        Returns the number of each key (keys,) int32, and the index in `keys` of each new number.
        """
        min_capacity = 2 * (self._size + len(keys[0]))
        if min_capacity > len(self._numbers):
            self._grow(1 << (min_capacity - 1).bit_length())
        slots, new = self._occupy(keys)
        self._numbers[slots[new]] = np.arange(next_number, next_number + len(new))
        self._size += len(new)
        return self._numbers[slots], new

    def _grow(self, capacity: int) -> None:
        used = np.flatnonzero(self._numbers >= 0)
        keys = [column[used] for column in self._keys]
        numbers = self._numbers[used]
        self._allocate(capacity)
        slots, _ = self._occupy(keys)
        self._numbers[slots] = numbers

    def _occupy(self, keys: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Assign a slot to each key. Return the slots, and the indices of the keys that took an empty slot."""
        slots = self._slots(keys)
        taken = np.empty_like(slots)
        pending = np.arange(len(slots))
        first = [pending[:0]]
        while len(pending):
            empty = np.flatnonzero(self._numbers[slots] < 0)
            self._numbers[slots[empty]] = empty  # claims the slots; the last write wins
            winners = empty[self._numbers[slots[empty]] == empty]
            first.append(pending[winners])
            for column, key in zip(self._keys, keys, strict=True):
                column[slots[winners]] = key[pending[winners]]
            is_here = self._holds(slots, [key[pending] for key in keys])
            taken[pending[is_here]] = slots[is_here]
            pending = pending[~is_here]
            slots = self._next(slots[~is_here])
        return taken, np.concatenate(first)

    def _holds(self, slots: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
        is_equal = self._keys[0].take(slots) == keys[0]
        for column, key in zip(self._keys[1:], keys[1:], strict=True):
            is_equal &= column.take(slots) == key
        return is_equal

    def _next(self, slots: np.ndarray) -> np.ndarray:
        return (slots + 1) & (len(self._numbers) - 1)

    def _slots(self, keys: list[np.ndarray]) -> np.ndarray:
        mixed = keys[0] * np.uint64(0x9E3779B97F4A7C15)
        for key in keys[1:]:
            mixed ^= mixed >> np.uint64(32)
            mixed += key
            mixed *= np.uint64(0x94D049BB133111EB)
        mixed >>= self._shift
        return mixed.view(np.int64)


def word_keys(text: np.ndarray, starts: np.ndarray, lengths: np.ndarray, columns: int) -> list[np.ndarray]:
    """Return the bytes of words as 64-bit integers: `columns` arrays of (words,) uint64, padded with the byte 0xFF."""
    loads = np.ndarray((len(text) - KEY_BYTES + 1,), dtype="<u8", buffer=text, strides=(1,))
    keys = []
    for first in range(0, columns * KEY_BYTES, KEY_BYTES):
        num_bytes = np.clip(lengths - first, 0, KEY_BYTES)
        keys.append(loads[starts + first] | _AFTER_BYTES[num_bytes])
    return keys
