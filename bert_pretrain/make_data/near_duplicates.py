"""Near-duplicate documents: MinHash signatures of 5-token shingles, and locality-sensitive hashing (Broder, 1997).

Signatures are computed from the ids of the token store, one file for each store shard, on all workers. Documents that
agree in a whole band of their signatures are compared by the share of equal values, an unbiased estimate of the
Jaccard similarity of their shingles, and the later one is left out. Bands are worked through one at a time, so that
memory holds a few numbers per document; signatures stay on disk.
"""

import importlib.metadata
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_pretrain.examples import ragged
from bert_pretrain.extras import import_extra
from bert_pretrain.make_data.token_store import TokenStore, map_array
from bert_pretrain.parallel.executor import Pool, run_all
from bert_pretrain.rng import stream
from bert_pretrain.storage.checksums import damage_of_folder, seal_folder
from bert_pretrain.storage.files import atomic_folder

SHINGLE_TOKENS = 5
NUM_HASHES = 128
"""Values of a signature; the standard error of an estimate of 0.8 is 0.035."""
MAX_MISSED = 1e-3
"""The largest chance that two documents of just the similarity asked for agree in no band."""
MAX_LEADERS = 1000
"""Of the documents that agree in a band, each is compared with so many others; pages of one template may be a million,
alike without being near duplicates."""
MAX_TOKENS = 1 << 22
"""Of a longer document the beginning is compared."""
_TOKENS_AT_ONCE = 1 << 20
_DOCUMENTS_AT_ONCE = 1 << 15
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class _Task:
    """A store shard whose documents get signatures."""

    store: TokenStore
    index: int


def check_installed() -> None:
    """Raise a ConfigError where the library for signatures is missing."""
    _minhash()


def _minhash() -> Any:
    return import_extra("rensa", "near-duplicates", "signatures of documents", where="data.near_duplicates").RMinHash


def write_signatures(store: TokenStore, pool: Pool) -> None:
    """Write the signatures of all documents, unless they are there undamaged."""
    tasks = [_Task(store, index) for index in range(store.num_shards)]
    weights = np.diff(store.first_documents).astype(float).tolist()
    run_all(_write, tasks, workers=pool, description="signatures", unit="document", weights=weights)


def signature_folder(store: TokenStore, index: int) -> Path:
    """Return the folder of the signatures of a store shard."""
    return store.folder / f"minhash-{importlib.metadata.version('rensa')}-{index:05d}"


def _write(task: _Task) -> None:
    folder = signature_folder(task.store, task.index)
    if folder.exists() and damage_of_folder(folder) is None:
        return
    with atomic_folder(folder) as temporary:
        rows = [np.zeros((0, NUM_HASHES), dtype=np.uint32), *signatures(task.store, task.index)]
        np.save(temporary / "signatures.npy", np.concatenate(rows))
        seal_folder(temporary)


def signatures(store: TokenStore, index: int) -> Iterator[np.ndarray]:
    """Yield the signatures of the documents of a store shard, in order, (documents, NUM_HASHES) uint32 each time."""
    minhash = _minhash()
    ids = store.map(index, "ids")
    offsets = store.map(index, "sentence_offsets")[store.map(index, "document_offsets")]
    num_documents = len(offsets) - 1
    first = 0
    while first < num_documents:
        last = int(np.searchsorted(offsets, offsets[first] + _TOKENS_AT_ONCE, side="right")) - 1
        last = max(last, first + 1)
        begins, lengths = offsets[first:last], np.minimum(np.diff(offsets[first : last + 1]), MAX_TOKENS)
        hashes, rows = shingles(ids[begins[0] : begins[-1] + lengths[-1]], ragged.offsets_of(lengths))
        found = minhash.digest_matrix_from_flat_token_hashes(hashes, rows, num_perm=NUM_HASHES, seed=1)
        yield np.array(found.to_rows(), dtype=np.uint32)
        first = last


def shingles(ids: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of the shingles of documents, one after the other, (shingles,) uint64, and their offsets.

    A document of fewer than `SHINGLE_TOKENS` tokens is one shingle.

    Args:
        ids: the tokens of the documents, (tokens,); none is empty.
        offsets: (documents + 1,) int64.
    """
    weights = stream(0, "shingles").integers(0, 2**64, size=1 << 16, dtype=np.uint64)
    values = weights[ids & 0xFFFF] + (ids >> 16).astype(np.uint64) * _ODD
    within = ragged.positions_within(offsets)
    remaining = np.repeat(np.diff(offsets), np.diff(offsets)) - within
    hashes = values.copy()
    for distance in range(1, SHINGLE_TOKENS):
        hashes *= _ODD  # so that the order of tokens matters
        hashes[:-distance] += values[distance:] * (remaining[:-distance] > distance)
    hashes ^= hashes >> np.uint64(32)
    is_shingle = (remaining >= SHINGLE_TOKENS) | (within == 0)
    return hashes[is_shingle], ragged.offsets_of(np.maximum(np.diff(offsets) - SHINGLE_TOKENS + 1, 1))


def find_near_duplicates(
    store: TokenStore, threshold: float, left_out: np.ndarray, priority_of: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, Counter[str]]:
    """Return the numbers of documents similar to another one, ascending, and how many there are, by reason.

    The first document of a group is kept, in order of priority, then of number. Each one that is left out was similar
    to an earlier one, which may have been left out itself for a third; no two that stay agree in a band and have an
    estimated similarity of `threshold` or more, unless more than `MAX_LEADERS` others agree in that band.

    Args:
        store: with the signatures of its documents.
        threshold: from which estimated Jaccard similarity on documents are near duplicates.
        left_out: the numbers of documents that take no part, ascending.
        priority_of: the weight of documents, infinity for validation; (numbers,) to (numbers,).
    """
    numbers = np.setdiff1d(np.arange(store.num_documents), left_out, assume_unique=True)
    priorities = priority_of(numbers)
    numbers = numbers[np.argsort(-priorities, kind="stable")]
    is_kept = np.ones(len(numbers), dtype=bool)
    num_leaks = 0
    is_validation = np.isinf(priority_of(numbers))
    num_rows = rows_per_band(threshold)
    for begin in range(0, NUM_HASHES - num_rows + 1, num_rows):
        kept = np.flatnonzero(is_kept)
        keys = _band_keys(store, slice(begin, begin + num_rows))[numbers[kept]]
        order = np.argsort(keys, kind="stable")
        members, runs = kept[order], np.cumsum(np.diff(keys[order], prepend=keys[order[:1]]) != 0)
        is_shared = np.bincount(runs)[runs] > 1 if len(runs) else np.zeros(0, dtype=bool)
        members, runs = members[is_shared], runs[is_shared]
        for some in _whole_runs(runs):
            read = _read(store, numbers[members[some]])
            for leaders, followers in _similar_pairs(members[some], runs[some], read, threshold):
                is_kept[followers] = False
                num_leaks += int((is_validation[leaders] & ~is_validation[followers]).sum())
    gone = np.sort(numbers[~is_kept])
    counts = Counter(near_duplicate_documents=len(gone) - num_leaks, documents_similar_to_validation=num_leaks)
    return gone, +counts


def rows_per_band(threshold: float) -> int:
    """Return how many values of a signature a band has: as many as keep the chance of a miss below `MAX_MISSED`."""
    chances = ((rows, (1 - threshold**rows) ** (NUM_HASHES // rows)) for rows in range(1, NUM_HASHES + 1))
    return max(rows for rows, missed in chances if missed <= MAX_MISSED)


def _whole_runs(runs: np.ndarray) -> Iterator[slice]:
    """Yield slices of so many documents at most; only a run that is longer itself is cut."""
    begin = 0
    while begin < len(runs):
        end = begin + _DOCUMENTS_AT_ONCE
        if end < len(runs) and runs[end] != runs[begin]:
            end = int(np.searchsorted(runs, runs[end]))
        yield slice(begin, end)
        begin = end


def _similar_pairs(
    members: np.ndarray, runs: np.ndarray, signatures: np.ndarray, threshold: float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Compare the first of each run with the others, then the first of those that are left, and so on.

    Yields:
        those that are similar: leaders and followers, both (pairs,) of `members`.
    """
    for _ in range(MAX_LEADERS):
        begins = np.flatnonzero(np.diff(runs, prepend=-1))
        followers = np.setdiff1d(np.arange(len(runs)), begins, assume_unique=True)
        if not len(followers):
            return
        leaders = np.repeat(begins, np.diff(begins, append=len(runs)) - 1)
        num_equal = np.count_nonzero(signatures[leaders] == signatures[followers], axis=1)
        are_similar = num_equal >= threshold * NUM_HASHES
        yield members[leaders[are_similar]], members[followers[are_similar]]
        left = followers[~are_similar]
        members, runs, signatures = members[left], runs[left], signatures[left]


def _band_keys(store: TokenStore, band: slice) -> np.ndarray:
    """Return a hash of a band of the signatures of all documents, (documents,) uint64."""
    keys = np.zeros(store.num_documents, dtype=np.uint64)
    for index, (first, last) in enumerate(itertools.pairwise(store.first_documents)):
        for column in _map(store, index)[:, band].T:
            keys[first:last] = (keys[first:last] + column) * _ODD
            keys[first:last] ^= keys[first:last] >> np.uint64(32)
    return keys


def _read(store: TokenStore, documents: np.ndarray) -> np.ndarray:
    """Return the signatures of documents, (documents, NUM_HASHES) uint32."""
    ascending, rows = np.unique(documents, return_inverse=True)
    bounds = np.searchsorted(ascending, store.first_documents)
    read = [
        _map(store, index)[ascending[bounds[index] : bounds[index + 1]] - store.first_documents[index]]
        for index in np.flatnonzero(np.diff(bounds)).tolist()
    ]
    return np.concatenate(read)[rows]


def _map(store: TokenStore, index: int) -> np.ndarray:
    return np.asarray(map_array(signature_folder(store, index) / "signatures.npy"))
