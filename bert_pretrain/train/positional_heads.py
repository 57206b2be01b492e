"""First weights with which attention begins at neighbouring tokens, where BERT's own begin anywhere.

A trained BERT has heads that attend to the token before or after (Clark et al., 2019; "positional heads" of Voita et
al., 2019). Until they have formed, the loss stays on a plateau: the network knows how frequent tokens are, and little
of their context. Here the heads of the first layer begin as such heads. Only first values differ: all weights are
trained, and the architecture is BERT's.

Position embeddings begin as sinusoids (Vaswani et al., 2017) in a random subspace. Keys read the subspace as it is,
queries turned by an offset, so that their product, the sum of cos(frequency * (key's position - query's position -
offset)), has its peak at the offset. Projections of values, and the heads' own, begin as random matrices that keep
lengths at any width, which `initializer_range` 0.02 does for one of about 1,200.
"""

import math

import torch
from torch import Tensor, nn

from bert_pretrain import rng
from bert_pretrain.model.bert import BertForPreTraining, SelfAttention

PEAK = 4.0
"""Logit of attention at the offset, above the logarithm of the number of positions; elsewhere it is near 0."""
GAIN = 0.7
"""Of a projection: the length of what comes out over the length of what goes in."""


@torch.no_grad()
def start_positional_heads(model: BertForPreTraining, seed: int) -> None:
    """Overwrite first weights of a model, after `initialize`; head h of the first layer attends to -1, 1, -2, 2, …"""
    generator = torch.Generator().manual_seed(rng.torch_seed(seed, "positional heads"))
    config = model.config
    head_size = config.hidden_size // config.num_attention_heads
    # One frequency in each of equal intervals, so that no two positions of a long sequence look alike.
    number = max(1, head_size // 2)
    frequencies = math.pi * (torch.arange(number) + torch.rand(number, generator=generator)) / number
    subspace = nn.init.orthogonal_(torch.empty(2 * number, config.hidden_size), generator=generator)
    positions = model.embeddings.position_embeddings.weight
    angles = torch.arange(len(positions))[:, None] * frequencies  # (positions, frequencies)
    # As long as a token's embedding: half of what the first layer sees is the position.
    length = config.initializer_range * math.sqrt(config.hidden_size / number)
    positions.copy_(length * torch.cat([angles.cos(), angles.sin()], dim=1) @ subspace)
    attentions = [module for module in model.encoder.modules() if isinstance(module, SelfAttention)]
    _turn_heads(attentions[0], frequencies, subspace, PEAK + math.log(len(positions)))
    for attention in attentions:
        for projection in (attention.query_key_value.weight[2 * config.hidden_size :], attention.output.weight):
            _keep_lengths(projection, generator)
    for head in (model.mlm_head, model.pooler, model.nsp_head):
        _keep_lengths(head.dense.weight, generator)


def _turn_heads(attention: SelfAttention, frequencies: Tensor, subspace: Tensor, peak: float) -> None:
    """Add to queries and keys what makes each head attend to its offset."""
    hidden = subspace.shape[1]
    query_key_value = attention.query_key_value.weight.view(3, attention.num_heads, -1, hidden)
    # After the layer normalisation the position's part has the squared length hidden / 2.
    head_size = query_key_value.shape[2]
    scale = math.sqrt(2 * peak * math.sqrt(head_size) / hidden)
    cosines, sines = subspace.chunk(2)  # (frequencies, hidden) each
    for head in range(attention.num_heads):
        offset = (head // 2 + 1) * (1 if head % 2 else -1)
        turn = offset * frequencies[:, None]
        query = torch.cat([turn.cos() * cosines - turn.sin() * sines, turn.sin() * cosines + turn.cos() * sines])
        query_key_value[0, head, : len(query)].add_(scale * query[:head_size])
        query_key_value[1, head, : len(query)].add_(scale * subspace[:head_size])


def _keep_lengths(weight: Tensor, generator: torch.Generator) -> None:
    nn.init.normal_(weight, std=GAIN / math.sqrt(weight.shape[1]), generator=generator)
