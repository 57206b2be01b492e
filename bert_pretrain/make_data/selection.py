"""Which documents take part: duplicates are left out, and weighted inputs come in more or fewer of the copies.

Documents are known by their numbers in the token store. The list of those left out is a file that shards map into
memory; it is found bucket by bucket, so that memory is bounded whatever the number of documents.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bert_pretrain import rng
from bert_pretrain.config import DataConfig
from bert_pretrain.io.files import save_array
from bert_pretrain.make_data.token_store import TokenStore

BUCKET_DOCUMENTS = 1 << 22


@dataclass(frozen=True)
class InputShare:
    """What the token store holds of one input."""

    documents: int
    tokens: int
    weight: float
    is_validation: bool


@dataclass(frozen=True)
class Selection:
    """Says of every document in which copies it takes part."""

    left_out_file: Path | None
    """An `.npy` file of the numbers of documents that take part nowhere, ascending; None if all take part."""
    first_documents: tuple[int, ...]
    """The number of the first document of each input, with the total at the end."""
    copies: tuple[float, ...]
    """In how many copies the documents of each input take part; a fraction is the share of them in one more copy."""
    seed: int

    @property
    def left_out(self) -> np.ndarray:
        if self.left_out_file is None:
            return np.zeros(0, dtype=np.int64)
        return np.asarray(np.load(self.left_out_file, mmap_mode="r"))

    def is_left_out(self, numbers: np.ndarray) -> np.ndarray:
        """Return which documents take part nowhere, (numbers,) bool."""
        left_out = self.left_out
        if len(left_out) == 0:
            return np.zeros(len(numbers), dtype=bool)
        rows = np.minimum(np.searchsorted(left_out, numbers), len(left_out) - 1)
        return left_out[rows] == numbers

    def is_in_copy(self, numbers: np.ndarray, copy: int) -> np.ndarray:
        """Return which documents take part in a copy of the training documents, unless left out, (numbers,) bool."""
        left = np.array(self.copies)[self.inputs_of(numbers)] - copy
        return left > rng.uniform(self.seed, "part of a copy", numbers)

    def tokens_of(self, store: TokenStore, numbers: np.ndarray) -> np.ndarray:
        """Return the tokens of documents, ascending, that are not left out, by input; (inputs,)."""
        return self._by_input(store, numbers[~self.is_left_out(numbers)])

    def tokens_of_inputs(self, store: TokenStore, shares: Sequence[InputShare]) -> np.ndarray:
        """Return the tokens of all documents that are not left out, by input; (inputs,)."""
        tokens = np.array([share.tokens for share in shares], dtype=np.int64)
        return tokens - self._by_input(store, self.left_out)

    def _by_input(self, store: TokenStore, numbers: np.ndarray) -> np.ndarray:
        tokens = np.zeros(len(self.copies), dtype=np.int64)
        np.add.at(tokens, self.inputs_of(numbers), store.sizes_of(numbers)[1])
        return tokens

    def tokens_of_copies(self, tokens: np.ndarray) -> list[float]:
        """Return how many of the inputs' tokens, (inputs,), take part in each copy."""
        copies = np.array(self.copies)
        return [float((tokens * np.clip(copies - copy, 0, 1)).sum()) for copy in range(int(np.ceil(copies.max())))]

    def inputs_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the input that each document comes from, (numbers,)."""
        return np.searchsorted(self.first_documents, numbers, side="right") - 1


def select(store: TokenStore, shares: Sequence[InputShare], config: DataConfig) -> tuple[Selection, Counter[str]]:
    """Decide which documents take part; returns that, and how many are left out, by reason.

    The list of duplicates is kept in the store, to which it belongs.
    """
    copies = tuple(0.0 if share.is_validation else config.dupe_factor * share.weight for share in shares)
    ends = np.cumsum([share.documents for share in shares])
    selection = Selection(None, (0, *ends.tolist()), copies, config.seed)
    if not config.drop_duplicates:
        return selection, Counter()
    priorities = np.array([np.inf if share.is_validation else share.weight for share in shares])

    def priority_of(documents: np.ndarray) -> np.ndarray:
        return priorities[selection.inputs_of(documents)]

    numbers, counts = find_duplicates(store, priority_of)
    if len(numbers) == 0:
        return selection, counts
    digest = hashlib.sha256(np.concatenate([ends, priorities]).tobytes()).hexdigest()[:16]
    file = store.folder / f"duplicates-{digest}.npy"
    save_array(file, numbers)
    return replace(selection, left_out_file=file), counts


def find_duplicates(
    store: TokenStore, priority_of: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, Counter[str]]:
    """Return the numbers of documents that equal another one, ascending, and how many there are, by reason.

    Of equal documents one of the highest priority is kept, the first of them. `priority_of` gives the weight of
    documents, infinity for validation; (numbers,) to (numbers,).
    """
    num_buckets = -(-store.num_documents // BUCKET_DOCUMENTS)
    found = [np.zeros(0, dtype=np.int64)]
    counts: Counter[str] = Counter()
    for bucket in range(num_buckets):
        numbers, hashes, lengths = _bucket(store, bucket, num_buckets)
        priorities = priority_of(numbers)
        order = np.lexsort((numbers, -priorities, lengths, hashes))
        numbers, hashes, lengths, priorities = numbers[order], hashes[order], lengths[order], priorities[order]
        is_first = np.ones(len(numbers), dtype=bool)
        is_first[1:] = (hashes[1:] != hashes[:-1]) | (lengths[1:] != lengths[:-1])
        kept = priorities[is_first][np.cumsum(is_first) - 1]  # for each document, the priority of the one that is kept
        num_leaks = int((np.isinf(kept) & ~np.isinf(priorities)).sum())
        counts["documents_also_in_validation"] += num_leaks
        counts["duplicate_documents"] += int((~is_first).sum()) - num_leaks
        found.append(numbers[~is_first])
    return np.sort(np.concatenate(found)), +counts


def _bucket(store: TokenStore, bucket: int, num_buckets: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return number, hash and tokens of the documents whose hash falls in a bucket."""
    numbers, hashes, lengths = [], [], []
    for index, (first, last) in enumerate(itertools.pairwise(store.first_documents)):
        if first == last:
            continue
        document_hashes = store.map(index, "document_hashes")
        own = np.flatnonzero(document_hashes % np.uint64(num_buckets) == bucket)
        numbers.append(own + first)
        hashes.append(document_hashes[own])
        lengths.append(store.document_sizes(index, own)[1])
    return np.concatenate(numbers), np.concatenate(hashes), np.concatenate(lengths)
