"""Initial weights of heads that attend to fixed offsets, for networks with rotary positions.

With constant queries and keys, the attention logit of a head depends only on the distance of two tokens: it is the sum
of a_f cos(theta_f (distance - offset)) over the frequencies theta_f. The amplitudes a_f are chosen so that the softmax
has most of its mass at the offset. The biases of queries and keys hold the constant vectors.

Without biases, all word embeddings but that of [CLS] share a direction, which layer normalization keeps, and queries
and keys read only this direction. The decoder is tied to the embeddings: a shared direction adds the same number to all
of its logits, which changes no probability. It takes a part of the input's length, which costs about 0.07 nats.
"""

import math

import torch
from torch import Tensor, nn

from bert_pretrain import rng
from bert_pretrain.config import ModelConfig
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.model.bert import BertForPreTraining, RotaryAttention
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.train.initial_weights import (
    DECODER_SCALE,
    MIN_POSITIONAL_HEADS,
    WINDOW,
    Cooccurrences,
    WordVectors,
    count_cooccurrences,
    head_offsets,
    keep_lengths,
    relation,
    set_value_and_output,
    word_vectors,
)

LOGIT_RANGE = 20.0  # sum of the amplitudes of a head
AMPLITUDE_STEPS = 400
SHARED_LENGTH = 0.5  # length of the shared direction relative to a word embedding
OUTPUT_RATIO = 2.1  # length of the output of attention relative to a word vector


@torch.no_grad()
def start_rotary(
    model: BertForPreTraining,
    data: DataFolder,
    tokenizer: Tokenizer,
    seed: int,
    *,
    with_cooccurrences: bool,
) -> int:
    """Start an initialized ModernBERT with heads at fixed offsets, as `initial_weights.py` does for BERT.

    With `with_cooccurrences`, also start from counts of neighboring tokens. Return the number of word vectors.
    """
    config = model.config
    hidden = config.hidden_size
    heads = config.num_attention_heads
    generator = torch.Generator().manual_seed(rng.torch_seed(seed, "positional heads"))
    attentions = [module for module in model.encoder.modules() if isinstance(module, RotaryAttention)]
    for attention in attentions:
        keep_lengths(attention.query_key_value.weight[2 * hidden :], generator)
        keep_lengths(attention.output.weight, generator)
    keep_lengths(model.mlm_head.dense.weight, generator)
    num_layers = min(len(attentions), math.ceil(MIN_POSITIONAL_HEADS / heads)) if with_cooccurrences else 1
    positional = attentions[:num_layers]
    embeddings = model.embeddings.word_embeddings.weight
    words = None
    if with_cooccurrences:
        max_offset = math.ceil(num_layers * heads / 2)
        cooccurrences = count_cooccurrences(data, tokenizer, max(WINDOW, max_offset))
        words = word_vectors(cooccurrences, hidden, config.initializer_range, seed)
        embeddings[words.known] = words.vectors[words.known]
    shared = None if config.biases else share_direction(embeddings, tokenizer.cls_id, generator)
    for layer, attention in enumerate(positional):
        _set_query_and_key(attention, config, layer, shared)
    if words is None or not words.vectors.any():
        return 0
    if shared is not None:
        words = words._replace(vectors=_without(words.vectors, shared))
    for layer, attention in enumerate(positional):
        _set_values(attention, cooccurrences, words, layer)
        if shared is not None:
            values = attention.query_key_value.weight[2 * hidden :]
            values.copy_(_without(values, shared))
    nn.init.eye_(model.mlm_head.dense.weight)
    if shared is not None:
        model.mlm_head.dense.weight.sub_(torch.outer(shared, shared))
    model.mlm_head.layer_norm.weight.fill_(DECODER_SCALE)
    return len(words.known)


def _set_values(
    attention: RotaryAttention,
    cooccurrences: Cooccurrences,
    words: WordVectors,
    layer: int,
) -> None:
    """Set value and output projections from the relations of tokens at each head's offset."""
    no_noise = torch.zeros(words.vectors.shape[1], words.vectors.shape[1])  # the input has no position embeddings
    offsets = head_offsets(attention.num_heads, layer)
    relations = [relation(cooccurrences, words, offset, no_noise) for offset in offsets]
    set_value_and_output(attention, relations, words, OUTPUT_RATIO)


def _set_query_and_key(
    attention: RotaryAttention,
    config: ModelConfig,
    layer: int,
    shared: Tensor | None,
) -> None:
    """Let each head attend to its offset: by biases, or by the direction `shared`, (hidden,), of the input."""
    hidden = config.hidden_size
    heads = config.num_attention_heads
    vectors = _constant_vectors(attention, config, head_offsets(heads, layer))
    if shared is None:
        queries, keys, _ = attention.query_key_value.bias.view(3, heads, hidden // heads)
        for head, (query, key) in enumerate(vectors):
            queries[head] = query
            keys[head] = key
        return
    # Mean squared length of the shared part of a layer's input, whose squared length is `hidden`.
    squared = hidden * SHARED_LENGTH**2 / (1 + SHARED_LENGTH**2)
    if layer:
        words = hidden / (1 + SHARED_LENGTH**2)
        squared *= hidden / (hidden + OUTPUT_RATIO**2 * words)
    direction = shared / math.sqrt(squared)
    queries, keys, _ = attention.query_key_value.weight.view(3, heads, hidden // heads, hidden)
    for head, (query, key) in enumerate(vectors):
        queries[head] += query[:, None] * direction
        keys[head] += key[:, None] * direction


def _without(rows: Tensor, direction: Tensor) -> Tensor:
    """Remove the component along a direction of length 1 from each row."""
    return rows - (rows @ direction)[:, None] * direction


def share_direction(embeddings: Tensor, cls_id: int, generator: torch.Generator) -> Tensor:
    """Give all word embeddings but that of [CLS] the same component along a random direction, and return it, (hidden,).

    [CLS] has no part of it, so its heads attend to all tokens about equally.
    """
    direction = torch.randn(embeddings.shape[1], generator=generator)
    shared = nn.functional.normalize(direction - direction.mean(), dim=0)  # layer normalization removes the mean
    length = embeddings.norm(dim=1).mean()
    embeddings.copy_(_without(embeddings, shared))
    cls = embeddings[cls_id].clone()
    embeddings += SHARED_LENGTH * length * shared
    embeddings[cls_id] = cls
    return shared


def _constant_vectors(
    attention: RotaryAttention, config: ModelConfig, offsets: list[int]
) -> list[tuple[Tensor, Tensor]]:
    """Return the constant query and key of each head, (head size,) each."""
    head_size = config.hidden_size // config.num_attention_heads
    theta = config.global_rope_theta if attention.is_global else config.local_rope_theta
    reach = config.max_position_embeddings - 1
    if not attention.is_global:
        reach = min(reach, config.local_attention // 2)
    frequencies = theta ** -(torch.arange(0, head_size, 2) / head_size)
    roots = (_amplitudes(frequencies, reach) * math.sqrt(head_size)).sqrt()  # scores are divided by the root
    key = torch.cat([roots, torch.zeros_like(roots)])
    vectors = []
    for offset in offsets:
        angles = offset * frequencies
        query = torch.cat([roots * angles.cos(), roots * angles.sin()])
        vectors.append((query, key))
    return vectors


@torch.enable_grad()
def _amplitudes(frequencies: Tensor, reach: int) -> Tensor:
    """Return the amplitudes, (frequencies,), with most attention at distance 0 among -reach … reach."""
    cosines = torch.cos(torch.arange(-reach, reach + 1)[:, None] * frequencies)  # (distances, frequencies)
    shares = torch.zeros(len(frequencies), requires_grad=True)
    optimizer = torch.optim.Adam([shares], lr=0.05)
    for _ in range(AMPLITUDE_STEPS):
        optimizer.zero_grad()
        logits = cosines @ (LOGIT_RANGE * shares.softmax(dim=0))
        loss = -logits.log_softmax(dim=0)[reach]
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return (LOGIT_RANGE * shares.softmax(dim=0)).detach()
