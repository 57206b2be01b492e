"""Random numbers as a function of (seed, purpose, coordinates), independent of the call order.

`stream(seed, "mask", copy=2, shard=7)` gives the same numbers in every process, on every machine and for any number
of workers. Only dropout and fine-tuning use torch's global generator, and they seed it first.
"""

import hashlib

import numpy as np


def stream(seed: int, purpose: str, **coordinates: int | str) -> np.random.Generator:
    """Return the generator for a seed, purpose and coordinates."""
    return np.random.Generator(np.random.Philox(key=_key(seed, purpose, coordinates)))


def torch_seed(seed: int, purpose: str, **coordinates: int | str) -> int:
    """Return a 63-bit seed for a torch generator, derived in the same way as `stream`."""
    return _key(seed, purpose, coordinates) >> 65


def uniform(seed: int, purpose: str, elements: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each integer (any shape). Equal integers get equal numbers."""
    key = np.uint64(_key(seed, purpose, {}) & (2**64 - 1))
    mixed = _mix(np.asarray(elements, dtype=np.uint64) ^ key)
    return (mixed >> np.uint64(11)) * 2.0**-53


class Permutation:
    """A pseudo-random permutation of `range(size)` that is computed per element, without a table.

    A Feistel network with four rounds permutes the range up to the next power of four. Values that are not below `size`
    are permuted again (cycle walking). A shard can therefore compute its few values out of billions.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        purpose: str,
        **coordinates: int | str,
    ) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, got size {size}")
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        generator = stream(seed, purpose, **coordinates)
        self._round_keys = generator.integers(0, 2**64, size=4, dtype=np.uint64)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Return the permuted values (int64) of indices in [0, size), of any shape."""
        values = np.asarray(indices, dtype=np.uint64).copy()
        outside = np.ones(values.shape, dtype=bool)
        while outside.any():
            values[outside] = self._feistel(values[outside])
            outside = values >= self.size
        return values.astype(np.int64)

    def _feistel(self, values: np.ndarray) -> np.ndarray:
        bits = np.uint64(self._half_bits)
        low_mask = np.uint64((1 << self._half_bits) - 1)
        left = values >> bits
        right = values & low_mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ key) & low_mask)
        return (left << bits) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """Hash 64-bit integers with the finalizer of SplitMix64 (Steele et al., 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _key(seed: int, purpose: str, coordinates: dict[str, int | str]) -> int:
    sorted_coordinates = "/".join(f"{key}={value}" for key, value in sorted(coordinates.items()))
    name = f"{seed}/{purpose}/{sorted_coordinates}"
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:16], "little")
