"""Finding documents with equal token ids, bucket by bucket, so that memory does not grow with their number."""

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np

from bert_pretrain.make_data.token_store import TokenStore

BUCKET_DOCUMENTS = 1 << 22


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
