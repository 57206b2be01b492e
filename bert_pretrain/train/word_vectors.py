"""Initial word embeddings from co-occurrence counts.

Pairs of tokens within `WINDOW` positions of a segment are counted with weight 1 / distance. Their positive pointwise
mutual information, with context counts to the power 0.75 (Levy, Goldberg and Dagan, 2015), is factorized by a
randomized SVD. The vectors are scaled to the length of BERT's random embeddings and rotated randomly.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

from bert_pretrain import rng
from bert_pretrain.examples.examples import Examples
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.text import ragged
from bert_pretrain.text.tokenizer import Tokenizer

WINDOW = 4
CONTEXT_POWER, VALUE_POWER = 0.75, 0.5
MAX_TOKENS = 10_000_000  # of the first shards, which hold random documents
MAX_PAIRS = 1 << 23  # in memory; above it, the rarest pairs are dropped
OVERSAMPLING, POWER_ITERATIONS = 10, 2  # of the randomized SVD (Halko, Martinsson and Tropp, 2011)
Pairs = tuple[np.ndarray, np.ndarray]  # ascending keys `first * vocab_size + second`, first <= second; their weights


@torch.no_grad()
def init_word_vectors(embeddings: Tensor, data: DataFolder, tokenizer: Tokenizer, std: float, seed: int) -> int:
    """Overwrite the embeddings, (vocab_size, hidden), of tokens that co-occur, and return their number.

    Rows get the root mean square `std`. The result is deterministic for the same data, seed and number of threads.
    """
    size, hidden = embeddings.shape
    matrix = pointwise_mutual_information(count_pairs(data, tokenizer), size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.torch_seed(seed, "word vectors"))
        left, singular, _ = torch.svd_lowrank(matrix, q=min(hidden + OVERSAMPLING, size), niter=POWER_ITERATIONS)
        rotation = nn.init.orthogonal_(torch.empty(hidden, hidden))
    known = torch.unique(matrix.indices()[0])
    vectors = left[known, :hidden] * singular[:hidden] ** VALUE_POWER
    vectors = nn.functional.normalize(vectors) @ rotation[: vectors.shape[1]]
    embeddings[known] = vectors * (std * math.sqrt(hidden))
    return len(known)


def pointwise_mutual_information(pairs: Pairs, size: int) -> Tensor:
    """Return the positive pointwise mutual information of token pairs, a sparse fp32 matrix, (size, size)."""
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
    """Count the token pairs in the first shards of the training split, without special tokens."""
    is_real = np.zeros(tokenizer.vocab_size, dtype=bool)
    is_real[tokenizer.word_piece_ids] = True
    pairs: Pairs = (np.zeros(0, dtype=np.int64), np.zeros(0))
    shards = data.shards("train")
    ends = np.cumsum([record.tokens for record in shards])
    shards = shards[: int(np.searchsorted(ends, MAX_TOKENS)) + 1]
    for record in progress_bar(shards, desc="word vectors", unit="shard"):
        pairs = _merged([pairs, *_pairs_of(read_shard(data.path, record), is_real)])
        if len(pairs[0]) > MAX_PAIRS:
            heaviest = np.sort(np.argpartition(-pairs[1], MAX_PAIRS // 2)[: MAX_PAIRS // 2])
            pairs = pairs[0][heaviest], pairs[1][heaviest]
    return pairs


def _pairs_of(examples: Examples, is_real: np.ndarray) -> list[Pairs]:
    """Return the token pairs of examples within segments, for each distance."""
    ids = examples.original_ids.astype(np.int64)
    positions = ragged.positions_within(examples.offsets)
    is_b = positions >= np.repeat(examples.segment_b_start.astype(np.int64), examples.lengths)
    segments = 2 * np.repeat(np.arange(len(examples)), examples.lengths) + is_b
    real = is_real[ids]
    pairs = []
    for distance in range(1, WINDOW + 1):
        is_pair = (segments[distance:] == segments[:-distance]) & real[distance:] & real[:-distance]
        first, second = ids[:-distance][is_pair], ids[distance:][is_pair]
        keys = np.minimum(first, second) * len(is_real) + np.maximum(first, second)
        keys, counts = np.unique(keys, return_counts=True)
        pairs.append((keys, counts / distance))
    return pairs


def _merged(parts: list[Pairs]) -> Pairs:
    """Merge pairs, and add the weights of equal ones."""
    keys = np.concatenate([keys for keys, _ in parts])
    weights = np.concatenate([weights for _, weights in parts])
    order = np.argsort(keys, kind="stable")  # fast, since each part is ascending
    keys = keys[order]
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[begins], np.add.reduceat(weights[order], begins) if len(begins) else weights
