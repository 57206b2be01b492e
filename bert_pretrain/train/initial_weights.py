"""Initial weights: from a teacher, with positional heads, and an output bias at the frequencies of the tokens.

A teacher of equal width gives its embeddings, heads and a selection of its layers, spread from the first to the last
(as Sanh et al., 2019); a wider one its token embeddings on their principal axes, and its output bias.

Positional heads: a trained BERT has heads that attend to the token before or after (Clark et al., 2019; Voita et al.,
2019). Until they have formed, the loss stays on a plateau, where the network knows the frequencies of tokens and little
of their context. Here the heads of the first layer are initialized as such heads. Position embeddings are sinusoids
(Vaswani et al., 2017) in a random subspace; keys read the subspace as it is, queries rotated by an offset: their
product, the sum of cos(frequency * (key's position - query's position - offset)), peaks at the offset. Value and output
projections are random matrices that keep lengths at any width, which `initializer_range` 0.02 does for a width of about
1,200. The architecture is BERT's, and all weights are trained.
"""

import math
import re

import numpy as np
import torch
from torch import Tensor, nn

from bert_pretrain import rng
from bert_pretrain.examples.examples import UNSEEN_COUNT
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.model.bert import BertForPreTraining, SelfAttention
from bert_pretrain.text.tokenizer import Tokenizer

_WORDS, _OUTPUT_BIAS = "embeddings.word_embeddings.weight", "mlm_head.bias"
PEAK = 4.0  # attention logit at the offset, above the logarithm of the number of positions; elsewhere it is near 0
GAIN = 0.7  # length of a projection's output over that of its input


@torch.no_grad()
def start_from_teacher(model: BertForPreTraining, teacher: BertForPreTraining) -> str:
    """Overwrite first weights of a model, after `initialize`; returns, for users, what was taken."""
    found: dict[str, Tensor] = dict(teacher.named_parameters())
    own, theirs = model.config, teacher.config
    # Spread evenly from the first to the last; for one, the first.
    last, gaps = theirs.num_hidden_layers - 1, max(own.num_hidden_layers - 1, 1)
    chosen = [round(index * last / gaps) for index in range(own.num_hidden_layers)]
    if own.hidden_size == theirs.hidden_size:
        taken = {
            name: found[re.sub(r"(?<=\.layers\.)\d+", lambda number: str(chosen[int(number[0])]), name)]
            for name, _ in model.named_parameters()
        }
        what = f"embeddings, heads, and of {theirs.num_hidden_layers} layers {', '.join(str(i + 1) for i in chosen)}"
    else:
        taken, what = {_OUTPUT_BIAS: found[_OUTPUT_BIAS]}, "output bias"
        if own.hidden_size < theirs.hidden_size:
            embeddings = _on_principal_axes(found[_WORDS][: model.vocab_size], own.hidden_size)
            # At the scale of random ones, for which the other initial weights are made.
            taken[_WORDS] = embeddings * (own.initializer_range / embeddings.square().mean().sqrt())
            what = f"token embeddings on {own.hidden_size} principal axes, {what}"
    for name, tensor in taken.items():
        parameter = model.get_parameter(name)
        block = tuple(map(slice, map(min, parameter.shape, tensor.shape)))
        parameter[block] = tensor[block]
    return what


def _on_principal_axes(rows: Tensor, size: int) -> Tensor:
    """Return rows, (rows, hidden), in the coordinates of their `size` principal axes, (rows, size)."""
    rows = rows.double()
    _, axes = torch.linalg.eigh(rows.T @ rows)  # ascending
    axes = axes[:, -size:].flip(1)
    signs = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True)).sign()  # which of the two is up to the library
    return (rows @ (axes * signs)).float()


@torch.no_grad()
def start_positional_heads(model: BertForPreTraining, seed: int) -> None:
    """Overwrite initial weights, after `initialize`; head h of the first layer attends to -1, 1, -2, 2, …"""
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
    _rotate_heads(attentions[0], frequencies, subspace, PEAK + math.log(len(positions)))
    for attention in attentions:
        for projection in (attention.query_key_value.weight[2 * config.hidden_size :], attention.output.weight):
            _keep_lengths(projection, generator)
    for head in (model.mlm_head, model.pooler, model.nsp_head):
        _keep_lengths(head.dense.weight, generator)


def _rotate_heads(attention: SelfAttention, frequencies: Tensor, subspace: Tensor, peak: float) -> None:
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


def unigram_bias(data: DataFolder, tokenizer: Tokenizer) -> Tensor:
    """Return the log frequency of each token among those that may be masked, (vocab_size,) (Meister et al., 2023).

    It is counted in the first shard of the training split, whose documents are a random sample.
    """
    examples = read_shard(data.path, data.shards("train")[0])
    counts = np.bincount(examples.original_ids, minlength=tokenizer.vocab_size) + UNSEEN_COUNT
    counts[[tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id]] = UNSEEN_COUNT
    return torch.from_numpy(np.log(counts / counts.sum())).float()
