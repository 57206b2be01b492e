"""First word embeddings from counts of tokens that occur near one another, so that training need not learn them.

Pairs of tokens within `WINDOW` places of a segment are counted with the weight 1 / distance. Their positive pointwise
mutual information, contexts to the power 0.75 (Levy, Goldberg and Dagan, 2015), is factorized by a randomized SVD. Each
vector gets the length of BERT's first embeddings, and all are turned by a random rotation.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

from bert_pretrain import rng
from bert_pretrain.examples.examples import Examples
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.text.tokenizer import Tokenizer

WINDOW = 4
CONTEXT_POWER, VALUE_POWER = 0.75, 0.5
MAX_TOKENS = 10_000_000  # counted at most; shards hold documents in random order
MAX_PAIRS = 1 << 23  # kept at most; the rarest are dropped above it
OVERSAMPLING, POWER_ITERATIONS = 10, 2  # of the randomized SVD (Halko, Martinsson and Tropp, 2011)
Pairs = tuple[np.ndarray, np.ndarray]
"""Keys `first * vocab_size + second` with first <= second, ascending, and their weights."""


@torch.no_grad()
def start_word_vectors(embeddings: Tensor, data: DataFolder, tokenizer: Tokenizer, std: float, seed: int) -> int:
    """Overwrite the word embeddings, (vocab_size, hidden), of tokens that occur near others; return their number.

    Each row has the root mean square `std`. The vectors are the same for the same data, seed and number of threads.
    """
    size, hidden = embeddings.shape
    matrix = information(count_pairs(data, tokenizer), size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.torch_seed(seed, "word vectors"))
        left, singular, _ = torch.svd_lowrank(matrix, q=min(hidden + OVERSAMPLING, size), niter=POWER_ITERATIONS)
        rotation = nn.init.orthogonal_(torch.empty(hidden, hidden))
    known = torch.unique(matrix.indices()[0])
    vectors = left[known, :hidden] * singular[:hidden] ** VALUE_POWER
    vectors = nn.functional.normalize(vectors) @ rotation[: vectors.shape[1]]
    embeddings[known] = vectors * (std * math.sqrt(hidden))
    return len(known)


def information(pairs: Pairs, size: int) -> Tensor:
    """Return the positive pointwise mutual information of pairs of tokens, a sparse matrix (size, size) in fp32."""
    keys, weights = pairs
    first, second = np.divmod(keys, size)
    totals = np.bincount(first, weights, size) + np.bincount(second, weights, size)
    contexts = totals**CONTEXT_POWER
    rows, columns = np.concatenate([first, second]), np.concatenate([second, first])
    values = np.log(np.tile(weights, 2) * contexts.sum() / (totals[rows] * contexts[columns]))
    kept = values > 0
    kept[len(first) :] &= first != second
    indices = torch.from_numpy(np.stack([rows[kept], columns[kept]]))
    values = torch.from_numpy(values[kept]).float()
    return torch.sparse_coo_tensor(indices, values, (size, size), check_invariants=False).coalesce()


def count_pairs(data: DataFolder, tokenizer: Tokenizer) -> Pairs:
    """Count the pairs of tokens in the first shards of the training split; special tokens are in none."""
    is_real = np.zeros(tokenizer.vocab_size, dtype=bool)
    is_real[tokenizer.word_piece_ids] = True
    pairs: Pairs = (np.zeros(0, dtype=np.int64), np.zeros(0))
    shards = data.shards("train")
    ends = np.cumsum([record.tokens for record in shards])
    chosen = shards[: int(np.searchsorted(ends, MAX_TOKENS)) + 1]
    for record in progress_bar(chosen, desc="word vectors", unit="shard"):
        pairs = _merged([pairs, *_pairs_of(read_shard(data.path, record), is_real)])
        if len(pairs[0]) > MAX_PAIRS:
            heaviest = np.sort(np.argpartition(-pairs[1], MAX_PAIRS // 2)[: MAX_PAIRS // 2])
            pairs = pairs[0][heaviest], pairs[1][heaviest]
    return pairs


def _pairs_of(examples: Examples, is_real: np.ndarray) -> list[Pairs]:
    """Return the pairs of examples for each distance; a pair lies within one segment."""
    ids = examples.original_ids.astype(np.int64)
    within = np.arange(len(ids)) - np.repeat(examples.offsets[:-1], examples.lengths)
    is_b = within >= np.repeat(examples.segment_b_start.astype(np.int64), examples.lengths)
    segments = 2 * np.repeat(np.arange(len(examples)), examples.lengths) + is_b
    real = is_real[ids]
    found = []
    for distance in range(1, WINDOW + 1):
        is_near = (segments[distance:] == segments[:-distance]) & real[distance:] & real[:-distance]
        near = np.flatnonzero(is_near)
        first, second = ids[near], ids[near + distance]
        keys, counts = np.unique(
            np.minimum(first, second) * len(is_real) + np.maximum(first, second), return_counts=True
        )
        found.append((keys, counts / distance))
    return found


def _merged(found: list[Pairs]) -> Pairs:
    """Add up the weights of equal pairs."""
    keys = np.concatenate([keys for keys, _ in found])
    weights = np.concatenate([weights for _, weights in found])
    order = np.argsort(keys, kind="stable")  # fast, since each part is ascending
    keys = keys[order]
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[begins], np.add.reduceat(weights[order], begins) if len(begins) else weights
