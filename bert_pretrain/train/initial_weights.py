"""Initial weights: from a teacher, with positional heads, and with an output bias from token frequencies.

A teacher of equal width provides its embeddings, its heads and evenly spaced layers, including the first and the last
(as in Sanh et al., 2019). A wider one provides its output bias, and its token embeddings projected on principal axes.

Positional heads: in a trained BERT some heads attend to the previous or next token (Clark et al., 2019; Voita et al.,
2019). Before training has formed them, the loss stays near that of a unigram model. Therefore the heads of the first
layer are initialized to attend to fixed offsets. Position embeddings are sinusoids (Vaswani et al., 2017) in a random
subspace. Keys project on this subspace, and queries on the same subspace rotated by the offset. Their product, the sum
of cos(frequency * (key position - query position - offset)), has its maximum at the offset. Value and output
projections are random matrices that scale length by GAIN, as an `initializer_range` of 0.02 does at a width of 1,200.
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
PEAK = 4.0  # attention logit at the offset, minus the log of the number of positions; other logits are near 0
GAIN = 0.7  # ratio of the lengths of a projection's output and input


@torch.no_grad()
def start_from_teacher(model: BertForPreTraining, teacher: BertForPreTraining) -> str:
    """Copy weights of a teacher into an initialized model, and return a description of them for users."""
    teacher_weights: dict[str, Tensor] = dict(teacher.named_parameters())
    config, teacher_layers = model.config, teacher.config.num_hidden_layers
    # From the first to the last layer; a model of one layer gets the first.
    gaps = max(config.num_hidden_layers - 1, 1)
    layers = [round(index * (teacher_layers - 1) / gaps) for index in range(config.num_hidden_layers)]
    if config.hidden_size == teacher.config.hidden_size:
        copied = {
            name: teacher_weights[re.sub(r"(?<=\.layers\.)\d+", lambda index: str(layers[int(index[0])]), name)]
            for name, _ in model.named_parameters()
        }
        description = f"embeddings, heads, layers {', '.join(str(i + 1) for i in layers)} of {teacher_layers}"
    else:
        copied, description = {_OUTPUT_BIAS: teacher_weights[_OUTPUT_BIAS]}, "output bias"
        if config.hidden_size < teacher.config.hidden_size:
            embeddings = _on_principal_axes(teacher_weights[_WORDS][: model.vocab_size], config.hidden_size)
            # Scaled like random embeddings, which the other initial weights assume.
            copied[_WORDS] = embeddings * (config.initializer_range / embeddings.square().mean().sqrt())
            description = f"token embeddings on {config.hidden_size} principal axes, {description}"
    for name, tensor in copied.items():
        parameter = model.get_parameter(name)
        block = tuple(map(slice, map(min, parameter.shape, tensor.shape)))
        parameter[block] = tensor[block]
    return description


def _on_principal_axes(rows: Tensor, size: int) -> Tensor:
    """Project rows, (rows, hidden), on their first `size` principal axes, (rows, size)."""
    rows = rows.double()
    _, axes = torch.linalg.eigh(rows.T @ rows)  # ascending
    axes = axes[:, -size:].flip(1)
    signs = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True)).sign()  # libraries differ in the signs of axes
    return (rows @ (axes * signs)).float()


@torch.no_grad()
def start_positional_heads(model: BertForPreTraining, seed: int) -> None:
    """Make the heads of an initialized model's first layer attend to the offsets -1, 1, -2, 2, …"""
    generator = torch.Generator().manual_seed(rng.torch_seed(seed, "positional heads"))
    config = model.config
    head_size = config.hidden_size // config.num_attention_heads
    # One random frequency from each of n intervals, so that no two positions of a long sequence are similar.
    n = max(1, head_size // 2)
    frequencies = math.pi * (torch.arange(n) + torch.rand(n, generator=generator)) / n
    subspace = nn.init.orthogonal_(torch.empty(2 * n, config.hidden_size), generator=generator)
    positions = model.embeddings.position_embeddings.weight
    angles = torch.arange(len(positions))[:, None] * frequencies  # (positions, frequencies)
    # Each row has the length of a token embedding, so that position is half of the first layer's input.
    length = config.initializer_range * math.sqrt(config.hidden_size / n)
    positions.copy_(length * torch.cat([angles.cos(), angles.sin()], dim=1) @ subspace)
    attentions = [module for module in model.encoder.modules() if isinstance(module, SelfAttention)]
    _rotate_heads(attentions[0], frequencies, subspace, PEAK + math.log(len(positions)))
    for attention in attentions:
        for projection in (attention.query_key_value.weight[2 * config.hidden_size :], attention.output.weight):
            _keep_lengths(projection, generator)
    for head in (model.mlm_head, model.pooler, model.nsp_head):
        _keep_lengths(head.dense.weight, generator)


def _rotate_heads(attention: SelfAttention, frequencies: Tensor, subspace: Tensor, peak: float) -> None:
    """Add projections to the query and key matrices, so that each head attends to its offset."""
    hidden = subspace.shape[1]
    query_key_value = attention.query_key_value.weight.view(3, attention.num_heads, -1, hidden)
    # After layer normalization the position embedding has the squared length hidden / 2.
    head_size = query_key_value.shape[2]
    scale = math.sqrt(2 * peak * math.sqrt(head_size) / hidden)
    cosines, sines = subspace.chunk(2)  # (frequencies, hidden) each
    for head in range(attention.num_heads):
        offset = (head // 2 + 1) * (1 if head % 2 else -1)
        angle = offset * frequencies[:, None]
        query = torch.cat([angle.cos() * cosines - angle.sin() * sines, angle.sin() * cosines + angle.cos() * sines])
        query_key_value[0, head, : len(query)].add_(scale * query[:head_size])
        query_key_value[1, head, : len(query)].add_(scale * subspace[:head_size])


def _keep_lengths(weight: Tensor, generator: torch.Generator) -> None:
    """Draw a random matrix that scales the length of vectors by about `GAIN`."""
    nn.init.normal_(weight, std=GAIN / math.sqrt(weight.shape[1]), generator=generator)


def unigram_bias(data: DataFolder, tokenizer: Tokenizer) -> Tensor:
    """Return the log relative frequency of each maskable token, (vocab_size,) (Meister et al., 2023)."""
    examples = read_shard(data.path, data.shards("train")[0])  # a random sample of documents
    counts = np.bincount(examples.original_ids, minlength=tokenizer.vocab_size) + UNSEEN_COUNT
    counts[[tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id]] = UNSEEN_COUNT
    return torch.from_numpy(np.log(counts / counts.sum())).float()
