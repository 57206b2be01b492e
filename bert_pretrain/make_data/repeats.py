"""Sentences that recur, such as navigation and licences, counted in bounded memory while text is tokenised.

Misra and Gries's frequent-items counters (1982), updated block by block: whenever there are too many counters, the
largest that does not fit is subtracted from all (Agarwal et al., 2012, "Mergeable summaries"). Counts are never too
large, and a sentence that is more frequent than one in `MAX_COUNTERS` is never lost.
"""

from collections.abc import Iterable

import numpy as np

from bert_pretrain.examples import ragged
from bert_pretrain.rng import stream

MAX_COUNTERS = 1024
SENTENCES_AT_ONCE = 1 << 16
MIN_TOKENS = 4
"""Shorter sentences recur in any text: "Yes.", "Chapter 2"."""
MIN_OCCURRENCES = 10
"""Of a repeated sentence, in all inputs together; fewer are copies of a document rather than navigation."""

Repeat = tuple[int, int, int]
"""A sentence's hash, how often it occurs at least, and its number of tokens."""


class RepeatCounter:
    """The most frequent sentences of a store shard."""

    def __init__(self, vocab_size: int) -> None:
        self._weights = stream(0, "repeats").integers(0, 2**64, size=vocab_size, dtype=np.uint64)
        self._counters = np.zeros((3, 0), dtype=np.int64)  # hash, occurrences, tokens
        self._waiting = np.zeros((3, 0), dtype=np.int64)

    def add(self, ids: np.ndarray, offsets: np.ndarray) -> None:
        """Count sentences: their ids (tokens,), one after the other, and their offsets (sentences + 1,); none empty."""
        if len(offsets) == 1:
            return
        positions = ragged.positions_within(offsets).astype(np.uint64)
        # Odd multipliers lose no bit of a weight, and tell the same words in another order apart.
        hashes = np.add.reduceat(self._weights[ids] * (2 * positions + np.uint64(1)), offsets[:-1])
        lengths = np.diff(offsets)
        new = np.stack([hashes.view(np.int64), np.ones_like(lengths), lengths])[:, lengths >= MIN_TOKENS]
        self._waiting = np.concatenate([self._waiting, new], axis=1)
        # Always the same number of sentences, so that the counts do not depend on how the text was read.
        while self._waiting.shape[1] >= SENTENCES_AT_ONCE:
            self._count(self._waiting[:, :SENTENCES_AT_ONCE])
            self._waiting = self._waiting[:, SENTENCES_AT_ONCE:]

    def _count(self, sentences: np.ndarray) -> None:
        hashes, counts, tokens = np.concatenate([self._counters, sentences], axis=1)
        hashes, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        counts = np.bincount(inverse, weights=counts, minlength=len(first)).astype(np.int64)
        if len(counts) > MAX_COUNTERS:
            counts -= np.partition(counts, -MAX_COUNTERS - 1)[-MAX_COUNTERS - 1]
        self._counters = np.stack([hashes, counts, tokens[first]])[:, counts > 0]

    def repeats(self) -> list[Repeat]:
        """Return the sentences that were counted more than once, by hash; call it once, at the end."""
        self._count(self._waiting)
        return [(sentence, count, tokens) for sentence, count, tokens in self._counters.T.tolist() if count > 1]


def repeated_tokens(repeats: Iterable[Repeat]) -> int:
    """Return how many tokens are in sentences that occurred before, at least, given the repeats of all store shards."""
    counts: dict[int, int] = {}
    lengths: dict[int, int] = {}
    for sentence, count, tokens in repeats:
        counts[sentence] = counts.get(sentence, 0) + count
        lengths[sentence] = tokens
    return sum((count - 1) * lengths[each] for each, count in counts.items() if count >= MIN_OCCURRENCES)
