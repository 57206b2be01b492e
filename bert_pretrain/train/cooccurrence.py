"""Word vectors, and relations of neighboring tokens, from co-occurrence counts.

The pointwise mutual information of a context token and a token is the logarithm of how much more often they occur
together than independent tokens would. Only positive values are kept, and frequencies have exponents below 1, so that
rare tokens count less (Levy, Goldberg and Dagan, 2015).

Word vectors are from a randomized SVD (Halko, Martinsson and Tropp, 2011) of the matrix of all pairs within `WINDOW`
positions, weighted by 1 / distance. A relation is a matrix for one offset, such that the product of context vector,
relation and word vector approximates the pointwise mutual information at this offset.
"""

import math
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bert_pretrain import rng
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.shards import read_shard
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.text.tokenizer import Tokenizer

MAX_TOKENS = 5_000_000  # of the first shards, which hold a random sample of the documents; rounded up to examples
WINDOW = 4
VECTOR_POWERS, RELATION_POWERS = (1.0, 0.5), (0.75, 0.75)  # of frequencies, for vectors and for relations
VALUE_POWER = 0.5  # exponent of the singular values in word vectors
OVERSAMPLING, ITERATIONS = 10, 3  # of the randomized SVD
FIT_POWER, RIDGE = 0.75, 1e-3  # least squares of a relation: exponent of the frequencies in weights, regularization


@dataclass(frozen=True)
class Cooccurrences:
    """Counts of token pairs by distance, within segments and without special tokens."""

    vocab_size: int
    pairs: list[np.ndarray]  # for distances 1, 2, …: the distinct pairs, left and right token, (2, pairs) int64
    counts: list[np.ndarray]  # for distances 1, 2, …: the count of each pair, (pairs,) int64

    def at(self, offset: int) -> Tensor:
        """Return the counts of [context token, token] for contexts at an offset, (vocab_size, vocab_size) sparse."""
        pairs = self.pairs[abs(offset) - 1]
        return self._matrix(pairs if offset < 0 else pairs[::-1], self.counts[abs(offset) - 1])

    def in_window(self) -> Tensor:
        """Return the counts within `WINDOW` positions, weighted by 1 / distance, (vocab_size, vocab_size) sparse."""
        pairs = [pairs[::order] for pairs in self.pairs[:WINDOW] for order in (1, -1)]
        counts = [counts / distance for distance, counts in enumerate(self.counts[:WINDOW], 1) for _ in range(2)]
        return self._matrix(np.concatenate(pairs, axis=1), np.concatenate(counts))

    def _matrix(self, pairs: np.ndarray, values: np.ndarray) -> Tensor:
        return _sparse(
            torch.from_numpy(np.ascontiguousarray(pairs)), torch.from_numpy(values).float(), self.vocab_size
        ).coalesce()


def _sparse(indices: Tensor, values: Tensor, size: int, *, is_coalesced: bool = False) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, (size, size), is_coalesced=is_coalesced, check_invariants=False)


class WordVectors(NamedTuple):
    """Vectors of tokens that have counts. The rows of other tokens are zero."""

    vectors: Tensor  # (vocab_size, hidden)
    frequencies: Tensor  # (vocab_size,): sums to one
    known: Tensor  # (known,) int64: tokens that have a vector


def count_cooccurrences(data: DataFolder, tokenizer: Tokenizer, max_distance: int) -> Cooccurrences:
    """Count the pairs at distances up to `max_distance` in the first tokens of the training split."""
    is_counted = np.zeros(tokenizer.vocab_size, dtype=bool)
    is_counted[tokenizer.word_piece_ids] = True
    ids, segments = _first_tokens(data)
    pairs, counts = [], []
    for distance in progress_bar(range(1, max_distance + 1), desc="co-occurrences", unit="distance"):
        left, right = ids[:-distance], ids[distance:]
        is_pair = (segments[:-distance] == segments[distance:]) & is_counted[left] & is_counted[right]
        keys = left[is_pair] * tokenizer.vocab_size + right[is_pair]
        distinct, count = np.unique(keys, return_counts=True)
        pairs.append(np.stack(np.divmod(distinct, tokenizer.vocab_size)))
        counts.append(count)
    return Cooccurrences(tokenizer.vocab_size, pairs, counts)


def _first_tokens(data: DataFolder) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids in the first examples, (tokens,) int64, and the number of the segment of each."""
    ids, segments, num_tokens, num_examples = [], [], 0, 0
    for record in data.shards("train"):
        examples = read_shard(data.path, record)
        examples = examples.take(np.flatnonzero(examples.offsets[:-1] < MAX_TOKENS - num_tokens))
        ids.append(examples.original_ids.astype(np.int64))
        rows = np.repeat(np.arange(len(examples)) + num_examples, examples.lengths)
        segments.append(2 * rows + examples.is_segment_b)
        num_tokens += len(rows)
        num_examples += len(examples)
        if num_tokens >= MAX_TOKENS:
            break
    return np.concatenate(ids), np.concatenate(segments)


def mutual_information(counts: Tensor, powers: tuple[float, float]) -> Tensor:
    """Return the positive pointwise mutual information of sparse counts, (vocab_size, vocab_size), as a sparse matrix.

    `powers` are the exponents of the frequencies of row and column tokens.
    """
    indices, values = counts.indices(), counts.values()
    expected = values.sum()
    for tokens, power in zip(indices, powers, strict=True):
        smoothed = torch.bincount(tokens, values, len(counts)) ** power
        expected = expected * (smoothed / smoothed.sum())[tokens]
    information = (values / expected).log()
    kept = information > 0
    return _sparse(indices[:, kept], information[kept], len(counts), is_coalesced=True)


def _csr(matrix: Tensor) -> Tensor:
    """Convert a sparse matrix to compressed rows. Products with these use all threads."""
    with warnings.catch_warnings(action="ignore"):  # torch calls the layout a beta feature
        return matrix.to_sparse_csr()


def word_vectors(cooccurrences: Cooccurrences, hidden: int, deviation: float, seed: int) -> WordVectors:
    """Return vectors of equal length with root mean square `deviation`, in a random basis.

    The result is equal for equal arguments and numbers of threads.
    """
    size = cooccurrences.vocab_size
    counts = cooccurrences.in_window()
    frequencies = torch.bincount(counts.indices()[0], counts.values(), size)
    known = frequencies.nonzero().squeeze(1)
    matrix = _csr(mutual_information(counts, VECTOR_POWERS))
    transposed = _csr(mutual_information(counts, VECTOR_POWERS[::-1]))  # the counts are symmetric
    generator = torch.Generator().manual_seed(rng.torch_seed(seed, "word vectors"))
    axes = torch.randn(size, min(hidden + OVERSAMPLING, size), generator=generator)
    for _ in range(ITERATIONS):
        axes, _ = torch.linalg.qr(transposed @ axes)
        axes, _ = torch.linalg.qr(matrix @ axes)
    projected = transposed @ axes
    squares, rotation = torch.linalg.eigh(projected.T @ projected)  # ascending squares of the singular values
    rows = (axes @ rotation * squares.clamp_min(0.0) ** (VALUE_POWER / 2.0)).flip(1)[known, :hidden]
    frequencies = frequencies / frequencies.sum().clamp_min(1.0)
    basis = nn.init.orthogonal_(torch.empty(hidden, hidden), generator=generator)[: rows.shape[1]]
    vectors = torch.zeros(size, hidden)
    vectors[known] = nn.functional.normalize(rows - frequencies[known] @ rows) @ basis * (deviation * math.sqrt(hidden))
    return WordVectors(vectors, frequencies, known)


def relation(cooccurrences: Cooccurrences, words: WordVectors, offset: int, noise: Tensor) -> Tensor:
    """Return the relation of contexts at an offset, (hidden, hidden), by weighted least squares.

    The context vectors have additional noise, such as position embeddings, with the covariance `noise`.
    """
    information = _csr(mutual_information(cooccurrences.at(offset), RELATION_POWERS))
    weights = words.frequencies[:, None] ** FIT_POWER
    weighted = words.vectors * weights
    products = weighted.double().T @ (information @ weighted).double()
    gram = words.vectors.double().T @ weighted.double()  # nearly singular if there are fewer tokens than dimensions
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
    return torch.linalg.solve(gram + weights.sum() * noise, torch.linalg.solve(gram, products.T).T).float()
