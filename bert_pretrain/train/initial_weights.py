"""Initial weights: from a teacher, with positional heads, from co-occurrences, and an output bias from frequencies.

A teacher of equal architecture and width provides its embeddings, its heads and evenly spaced layers, including the
first and the last (as in Sanh et al., 2019). One that is narrower provides only its output bias. Any other one provides
its output bias, and its token embeddings projected on principal axes.

Positional heads: in a trained BERT some heads attend to the previous or next token (Clark et al., 2019; Voita et al.,
2019). Before training has formed them, the loss stays near that of a unigram model. Therefore the heads of the first
layer are initialized to attend to fixed offsets. Position embeddings are sinusoids (Vaswani et al., 2017) in a random
subspace. Keys project on this subspace, and queries on the same subspace rotated by the offset. Their product, the sum
of cos(frequency * (key position - query position - offset)), has its maximum at the offset. The value and output
projections of all layers, and the dense layers of pooler and pretraining heads, are drawn again: as random matrices
that scale lengths by GAIN, as an `initializer_range` of 0.02 does at a width of 1,200.

Co-occurrences: word embeddings, positional heads and the layer before the decoder are set so that the logit of a token
at a masked position is about the sum of its pointwise mutual information with each neighbor. With `mlm_bias: unigram`,
its log frequency is added, as in a naive Bayes model. Counting takes seconds, and training need not learn these
statistics.

The pointwise mutual information of a context token and a token is the logarithm of how much more often they occur
together than independent tokens would. Only positive values are kept, and frequencies have exponents below 1, so that
rare tokens count less (Levy, Goldberg and Dagan, 2015). Word vectors are from a randomized SVD (Halko, Martinsson and
Tropp, 2011) of the matrix of all pairs within `WINDOW` positions, weighted by 1 / distance. A relation is a matrix for
one offset, such that the product of context vector, relation and word vector approximates the pointwise mutual
information at this offset.
"""

import math
import re
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bert_pretrain import rng
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.examples import UNSEEN_COUNT
from bert_pretrain.examples.shards import read_shard
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.model.bert import (
    BertForPreTraining,
    ElectraForPreTraining,
    Encoder,
    RotaryAttention,
    SelfAttention,
)
from bert_pretrain.text.tokenizer import Tokenizer

_WORDS = "embeddings.word_embeddings.weight"
_OUTPUT_BIAS = "mlm_head.bias"
PEAK = 4.0  # attention logit at the offset, minus the log of the number of positions; other logits are near 0
GAIN = 0.7  # ratio of the lengths of a projection's output and input
MIN_SINGULAR = 1e-3  # smallest singular value of a relation that is used, as a share of the largest
# Constants of `start_from_cooccurrences`, chosen by held-out loss:
MIN_POSITIONAL_HEADS = 4  # networks with fewer heads per layer have positional heads in several layers
OUTPUT_RATIOS = (2.1, 1.0)  # length of the output of attention relative to a word vector, in the first and other layers
LATER_PEAK = 2.25  # factor of PEAK in layers after the first, where position is a smaller part of the input
DECODER_SCALE = 2.0  # scale of the decoder's input
MAX_TOKENS = 5_000_000  # of the first shards, which hold a random sample of the documents; rounded up to examples
WINDOW = 4
VECTOR_POWERS = (1.0, 0.5)  # of the frequencies of context token and token, for vectors
RELATION_POWERS = (0.75, 0.75)  # the same for relations
VALUE_POWER = 0.5  # exponent of the singular values in word vectors
OVERSAMPLING = 10  # of the randomized SVD
ITERATIONS = 3  # of the randomized SVD
FIT_POWER = 0.75  # exponent of the frequencies in the weights of a relation's least squares
RIDGE = 1e-3  # regularization of these least squares


@torch.no_grad()
def start_from_teacher(model: BertForPreTraining, teacher: BertForPreTraining) -> str:
    """Copy weights of a teacher into an initialized model, and return a description of them for users."""
    weights: dict[str, Tensor] = dict(teacher.named_parameters())
    config = model.config
    same = ("architecture", "hidden_size", "embedding_width")
    if all(getattr(config, name) == getattr(teacher.config, name) for name in same):
        layers = _spaced_layers(config.num_hidden_layers, teacher.config.num_hidden_layers)
        for name, parameter in model.named_parameters():
            source = re.sub(r"(?<=\.layers\.)\d+", lambda index: str(layers[int(index[0])]), name)
            if source not in weights:  # a ModernBERT may lack biases, and its first layer lacks a normalization
                continue
            num_parts = 2 if "wide_and_gate" in name else 1
            for part, of_teacher in zip(parameter.chunk(num_parts), weights[source].chunk(num_parts), strict=True):
                _copy_block(part, of_teacher)
        numbers = ", ".join(str(layer + 1) for layer in layers)
        return f"embeddings, heads, layers {numbers} of {teacher.config.num_hidden_layers}"
    _copy_block(model.mlm_head.bias, weights[_OUTPUT_BIAS])
    if config.embedding_width > teacher.config.embedding_width:
        return "output bias"
    embeddings = _on_principal_axes(weights[_WORDS][: model.vocab_size], config.embedding_width)
    # Scaled like random embeddings, which the other initial weights assume.
    embeddings *= config.initializer_range / embeddings.square().mean().sqrt()
    _copy_block(model.embeddings.word_embeddings.weight, embeddings)
    return f"token embeddings on {config.embedding_width} principal axes, output bias"


def _spaced_layers(number: int, of_teacher: int) -> list[int]:
    """Return evenly spaced layers, from the first to the last. A model of one layer gets the first."""
    gaps = max(number - 1, 1)
    return [round(index * (of_teacher - 1) / gaps) for index in range(number)]


def _copy_block(parameter: Tensor, source: Tensor) -> None:
    """Copy the block that both tensors have: they may differ in the numbers of tokens or positions."""
    block = tuple(slice(min(sizes)) for sizes in zip(parameter.shape, source.shape, strict=True))
    parameter[block] = source[block]


def _on_principal_axes(rows: Tensor, size: int) -> Tensor:
    """Project rows, (rows, hidden), on their first `size` principal axes, (rows, size)."""
    rows = rows.double()
    _, axes = torch.linalg.eigh(rows.T @ rows)  # ascending
    axes = axes[:, -size:].flip(1)
    largest = axes.abs().argmax(dim=0, keepdim=True)
    axes = axes * axes.gather(0, largest).sign()  # libraries differ in the signs of axes
    return (rows @ axes).float()


@torch.no_grad()
def start_positional_heads(model: BertForPreTraining, seed: int, num_layers: int = 1) -> Tensor:
    """Make the heads of an initialized model's first `num_layers` layers attend to the offsets -1, 1, -2, 2, …

    Also replace the position embeddings, the projection of the embeddings, the value and output projections of all
    layers, and the dense layers of pooler and pretraining heads. Both networks of an ELECTRA have such heads. Return an
    orthonormal basis of the subspace of the position embeddings, (at most the head size, embedding).
    """
    generator = torch.Generator().manual_seed(rng.torch_seed(seed, "positional heads"))
    config = model.config
    width = config.embedding_width
    encoders = [model.encoder, model.generator] if isinstance(model, ElectraForPreTraining) else [model.encoder]
    # One random frequency from each of n intervals, so that no two positions of a long sequence are similar.
    n = max(1, config.hidden_size // config.num_attention_heads // 2)
    if len(encoders) > 1:  # at most half of the dimensions of each network, so that tokens have the others
        n = max(1, min(n, width // 4, config.generator.hidden_size // 4))
    frequencies = math.pi * (torch.arange(n) + torch.rand(n, generator=generator)) / n
    subspace = nn.init.orthogonal_(torch.empty(2 * n, width), generator=generator)
    positions = model.embeddings.position_embeddings.weight
    angles = torch.arange(len(positions))[:, None] * frequencies  # (positions, frequencies)
    # Each row has the length of a token embedding, so that position is half of the first layer's input.
    length = config.initializer_range * math.sqrt(width / n)
    positions.copy_(length * torch.cat([angles.cos(), angles.sin()], dim=1) @ subspace)
    for encoder in encoders:
        projected = subspace
        if isinstance(encoder.projection, nn.Linear):
            projected = _keep_subspace(encoder.projection.weight, subspace, generator)
        attentions = _attentions(encoder)
        if encoder is not model.encoder:  # a generator has few heads
            num_layers = math.ceil(MIN_POSITIONAL_HEADS / attentions[0].num_heads)
        for layer, attention in enumerate(attentions[:num_layers]):
            peak = PEAK + math.log(len(positions))
            if layer:
                peak *= LATER_PEAK
            _rotate_heads(
                attention,
                head_offsets(attention.num_heads, layer),
                frequencies,
                projected,
                peak,
            )
        for attention in attentions:
            value = attention.query_key_value.weight[2 * projected.shape[1] :]
            keep_lengths(value, generator)
            keep_lengths(attention.output.weight, generator)
    for head in (model.mlm_head, model.pooler, model.nsp_head, model.discriminator_head):
        if head is not None:
            keep_lengths(head.dense.weight, generator)
    return subspace


def _keep_subspace(weight: Tensor, subspace: Tensor, generator: torch.Generator) -> Tensor:
    """Set a projection, (hidden, embedding), that keeps all of a subspace, and return the projected basis.

    The projection of the subspace is `sqrt(hidden / embedding)` times a rotation, as layer normalization of `hidden`
    dimensions would scale it.
    """
    hidden, width = weight.shape
    others = torch.randn(width, width, generator=generator)
    axes, _ = torch.linalg.qr(torch.cat([subspace.T, others], dim=1))  # the first axes span the subspace
    kept = axes[:, : min(hidden, width)]
    rotation = nn.init.orthogonal_(torch.empty(hidden, kept.shape[1]), generator=generator)
    isometry = rotation @ kept.T
    weight.copy_(math.sqrt(hidden / width) * isometry)
    return subspace @ isometry.T


@torch.no_grad()
def start_from_cooccurrences(
    model: BertForPreTraining,
    data: DataFolder,
    tokenizer: Tokenizer,
    seed: int,
) -> int:
    """Start with positional heads, and from counts of neighboring tokens. Return the number of word vectors."""
    config = model.config
    heads = config.num_attention_heads
    num_layers = min(config.num_hidden_layers, math.ceil(MIN_POSITIONAL_HEADS / heads))
    max_offset = math.ceil(num_layers * heads / 2)
    cooccurrences = count_cooccurrences(data, tokenizer, max(WINDOW, max_offset))
    words = word_vectors(cooccurrences, config.hidden_size, config.initializer_range, seed)
    if not words.vectors.any():
        start_positional_heads(model, seed)
        return 0
    subspace = start_positional_heads(model, seed, num_layers)
    embeddings = model.embeddings.word_embeddings.weight
    positions = model.embeddings.position_embeddings.weight
    embeddings[words.known] = words.vectors[words.known]
    cls = embeddings[tokenizer.cls_id]
    if len(subspace) < config.hidden_size:
        # Without a position, the heads of [CLS] attend to all tokens about equally.
        first = cls + positions[0] + model.embeddings.token_type_embeddings.weight[0]
        cls -= first @ subspace.T @ subspace
    noise = positions.T @ positions / len(positions)  # the heads read it with the word vectors
    for layer, attention in enumerate(_attentions(model.encoder)[:num_layers]):
        relations = [
            relation(cooccurrences, words, offset, noise) for offset in head_offsets(attention.num_heads, layer)
        ]
        ratio = OUTPUT_RATIOS[1 if layer else 0]
        set_value_and_output(attention, relations, words, ratio)
    nn.init.eye_(model.mlm_head.dense.weight)
    model.mlm_head.layer_norm.weight.fill_(DECODER_SCALE)
    return len(words.known)


def set_value_and_output(
    attention: SelfAttention | RotaryAttention,
    relations: list[Tensor],
    words: "WordVectors",
    ratio: float,
) -> None:
    """Set value and output projections, so that each head applies the best low-rank approximation of its relation.

    The root of the sum of squares of the heads' outputs becomes about `ratio` times the length of a word vector. If
    the rank of a relation is smaller than the head, the other dimensions of the head keep their random weights.
    """
    num_heads = len(relations)
    hidden = len(relations[0])
    head_size = hidden // num_heads
    values = attention.query_key_value.weight.view(3, num_heads, head_size, hidden)[2]  # (heads, head_size, hidden)
    outputs = attention.output.weight.view(hidden, num_heads, head_size)
    rows = words.vectors[words.known]
    frequencies = words.frequencies[words.known]
    parts = []
    squares = 0.0
    for matrix in relations:
        left, singular, right = torch.linalg.svd(matrix)
        rank = min(head_size, int((singular > MIN_SINGULAR * singular[0]).sum()))
        root = singular[:rank].sqrt()
        value = (left[:, :rank] * root).T
        output = right[:rank].T * root
        parts.append((value, output))
        lengths = (rows @ value.T @ output.T).norm(dim=1)
        squares += float(frequencies @ lengths / rows.norm(dim=1).max()) ** 2
    scale = math.sqrt(ratio / math.sqrt(squares)) if squares else 0.0
    for head, (value, output) in enumerate(parts):
        values[head, : len(value)] = scale * value
        outputs[:, head, : len(value)] = scale * output


def _attentions(encoder: Encoder) -> list[SelfAttention]:
    return [module for module in encoder.modules() if isinstance(module, SelfAttention)]


def head_offsets(num_heads: int, layer: int) -> list[int]:
    """Return the offset of each positional head of a layer: -1, 1, -2, 2, … from the first layer on."""
    first = layer * num_heads
    offsets = []
    for head in range(first, first + num_heads):
        distance = head // 2 + 1
        offsets.append(distance if head % 2 else -distance)
    return offsets


def _rotate_heads(
    attention: SelfAttention,
    offsets: list[int],
    frequencies: Tensor,
    subspace: Tensor,
    peak: float,
) -> None:
    """Add projections to the query and key matrices, so that each head attends to its offset."""
    hidden = subspace.shape[1]
    queries, keys, _ = attention.query_key_value.weight.view(3, attention.num_heads, -1, hidden)
    head_size = queries.shape[1]
    # After layer normalization the position embedding has the squared length hidden / 2.
    scale = math.sqrt(2 * peak * math.sqrt(head_size) / hidden)
    cosines, sines = subspace.chunk(2)  # (frequencies, hidden) each
    for head, offset in enumerate(offsets):
        cosine = (offset * frequencies[:, None]).cos()
        sine = (offset * frequencies[:, None]).sin()
        rotated = torch.cat([cosine * cosines - sine * sines, sine * cosines + cosine * sines])
        queries[head, : len(rotated)] += scale * rotated[:head_size]
        keys[head, : len(rotated)] += scale * subspace[:head_size]


def keep_lengths(weight: Tensor, generator: torch.Generator) -> None:
    """Draw a random matrix that scales the length of vectors by about `GAIN`."""
    nn.init.normal_(weight, std=GAIN / math.sqrt(weight.shape[1]), generator=generator)


def unigram_bias(data: DataFolder, tokenizer: Tokenizer) -> Tensor:
    """Return the log relative frequency of each token in the first training shard, (vocab_size,) float32.

    `UNSEEN_COUNT` is added to each count. [CLS], [SEP] and [PAD] count as unseen, because they are never masked. The
    output bias starts with these values (Meister et al., 2023).
    """
    examples = read_shard(data.path, data.shards("train")[0])  # a random sample of documents
    counts = np.bincount(examples.original_ids, minlength=tokenizer.vocab_size) + UNSEEN_COUNT
    never_masked = [tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id]
    counts[never_masked] = UNSEEN_COUNT
    return torch.from_numpy(np.log(counts / counts.sum())).float()


@dataclass(frozen=True)
class Cooccurrences:
    """Counts of token pairs by distance, within segments and without special tokens."""

    pairs: list[Tensor]  # for distances 1, 2, …: counts of [left token, right token], (vocab_size, vocab_size) sparse

    def at(self, offset: int) -> Tensor:
        """Return the counts of [context token, token] for contexts at an offset, (vocab_size, vocab_size) sparse."""
        pairs = self.pairs[abs(offset) - 1]
        return pairs if offset < 0 else pairs.t().coalesce()

    def in_window(self) -> Tensor:
        """Return the counts within `WINDOW` positions, weighted by 1 / distance, (vocab_size, vocab_size) sparse."""
        indices = []
        weights = []
        for distance, pairs in enumerate(self.pairs[:WINDOW], start=1):
            indices += [pairs.indices(), pairs.indices().flip(0)]
            weights += 2 * [pairs.values() / distance]
        return _sparse(torch.cat(indices, dim=1), torch.cat(weights), len(self.pairs[0])).coalesce()


def _sparse(
    indices: Tensor,
    values: Tensor,
    size: int,
    *,
    is_coalesced: bool = False,
) -> Tensor:
    return torch.sparse_coo_tensor(
        indices,
        values,
        (size, size),
        is_coalesced=is_coalesced,
        check_invariants=False,
    )


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
    pairs = []
    for distance in progress_bar(range(1, max_distance + 1), desc="co-occurrences", unit="distance"):
        left = ids[:-distance]
        right = ids[distance:]
        in_one_segment = segments[:-distance] == segments[distance:]
        is_pair = in_one_segment & is_counted[left] & is_counted[right]
        keys = left[is_pair] * tokenizer.vocab_size + right[is_pair]
        distinct, counts = np.unique(keys, return_counts=True)
        indices = np.stack(np.divmod(distinct, tokenizer.vocab_size))
        values = torch.from_numpy(counts).float()
        pairs.append(_sparse(torch.from_numpy(indices), values, tokenizer.vocab_size, is_coalesced=True))
    return Cooccurrences(pairs)


def _first_tokens(data: DataFolder) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids in the first examples, (tokens,) int64, and the number of the segment of each."""
    ids = []
    segments = []
    num_tokens = 0
    num_examples = 0
    for record in data.shards("train"):
        examples = read_shard(data.path, record)
        is_first = examples.offsets[:-1] < MAX_TOKENS - num_tokens
        examples = examples.take(np.flatnonzero(is_first))
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
    indices = counts.indices()
    values = counts.values()
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


def word_vectors(
    cooccurrences: Cooccurrences,
    hidden: int,
    deviation: float,
    seed: int,
) -> WordVectors:
    """Return vectors of equal length with root mean square `deviation`, in a random basis.

    The result is equal for equal arguments and numbers of threads.
    """
    counts = cooccurrences.in_window()
    size = len(counts)
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
    scales = squares.clamp_min(0.0) ** (VALUE_POWER / 2.0)
    rows = (axes @ rotation * scales).flip(1)[known, :hidden]
    frequencies = frequencies / frequencies.sum().clamp_min(1.0)
    directions = nn.functional.normalize(rows - frequencies[known] @ rows)
    basis = nn.init.orthogonal_(torch.empty(hidden, hidden), generator=generator)[: rows.shape[1]]
    vectors = torch.zeros(size, hidden)
    vectors[known] = directions @ basis * (deviation * math.sqrt(hidden))
    return WordVectors(vectors, frequencies, known)


def relation(
    cooccurrences: Cooccurrences,
    words: WordVectors,
    offset: int,
    noise: Tensor,
) -> Tensor:
    """Return the relation of contexts at an offset, (hidden, hidden), by weighted least squares.

    The context vectors have additional noise, such as position embeddings, with the covariance `noise`.
    """
    information = _csr(mutual_information(cooccurrences.at(offset), RELATION_POWERS))
    weights = words.frequencies[:, None] ** FIT_POWER
    vectors = words.vectors.double()
    weighted = words.vectors * weights
    products = weighted.double().T @ (information @ weighted).double()
    gram = vectors.T @ weighted.double()  # nearly singular if there are fewer tokens than dimensions
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
    context_gram = gram + weights.sum() * noise
    solution = torch.linalg.solve(gram, products.T)
    return torch.linalg.solve(context_gram, solution.T).float()
