"""Initial weights: from a teacher, with positional heads, from co-occurrences, and an output bias from frequencies.

A teacher of equal width provides its embeddings, its heads and evenly spaced layers, including the first and the last
(as in Sanh et al., 2019). A wider one provides its output bias, and its token embeddings projected on principal axes. A
narrower one provides only its output bias.

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
statistics. `cooccurrence.py` computes vectors and relations.
"""

import math
import re

import numpy as np
import torch
from torch import Tensor, nn

from bert_pretrain import rng
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.examples import UNSEEN_COUNT
from bert_pretrain.examples.shards import read_shard
from bert_pretrain.model.bert import BertForPreTraining, SelfAttention
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.train.cooccurrence import WINDOW, WordVectors, count_cooccurrences, relation, word_vectors

_WORDS, _OUTPUT_BIAS = "embeddings.word_embeddings.weight", "mlm_head.bias"
PEAK = 4.0  # attention logit at the offset, minus the log of the number of positions; other logits are near 0
GAIN = 0.7  # ratio of the lengths of a projection's output and input
MIN_SINGULAR = 1e-3  # smallest singular value of a relation that is used, as a share of the largest
# Constants of `start_from_cooccurrences`, chosen by held-out loss. MIN_POSITIONAL_HEADS: networks with fewer heads per
# layer have positional heads in several layers. OUTPUT_RATIOS: length of the output of attention relative to a word
# vector, in the first layer and in other layers. LATER_PEAK: factor of PEAK in other layers, where position is a
# smaller part of the input. DECODER_SCALE: scale of the decoder's input.
MIN_POSITIONAL_HEADS, OUTPUT_RATIOS, LATER_PEAK, DECODER_SCALE = 4, (2.1, 1.0), 2.25, 2.0


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
def start_positional_heads(model: BertForPreTraining, seed: int, num_layers: int = 1) -> Tensor:
    """Make the heads of an initialized model's first `num_layers` layers attend to the offsets -1, 1, -2, 2, …

    Also replace the position embeddings, the value and output projections of all layers, and the dense layers of pooler
    and pretraining heads. Return an orthonormal basis of the subspace of the position embeddings, (at most the head
    size, hidden).
    """
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
    attentions = _attentions(model)
    for layer, attention in enumerate(attentions[:num_layers]):
        peak = (PEAK + math.log(len(positions))) * (LATER_PEAK if layer else 1.0)
        _rotate_heads(attention, _offsets(attention, layer), frequencies, subspace, peak)
    for attention in attentions:
        for projection in (attention.query_key_value.weight[2 * config.hidden_size :], attention.output.weight):
            _keep_lengths(projection, generator)
    for head in (model.mlm_head, model.pooler, model.nsp_head):
        _keep_lengths(head.dense.weight, generator)
    return subspace


@torch.no_grad()
def start_from_cooccurrences(model: BertForPreTraining, data: DataFolder, tokenizer: Tokenizer, seed: int) -> int:
    """Start with positional heads, and from counts of neighboring tokens. Return the number of word vectors."""
    config = model.config
    num_layers = min(config.num_hidden_layers, math.ceil(MIN_POSITIONAL_HEADS / config.num_attention_heads))
    max_offset = math.ceil(num_layers * config.num_attention_heads / 2)
    cooccurrences = count_cooccurrences(data, tokenizer, max(WINDOW, max_offset))
    words = word_vectors(cooccurrences, config.hidden_size, config.initializer_range, seed)
    if not words.vectors.any():
        start_positional_heads(model, seed)
        return 0
    subspace = start_positional_heads(model, seed, num_layers)
    embeddings, positions = model.embeddings.word_embeddings.weight, model.embeddings.position_embeddings.weight
    embeddings[words.known] = words.vectors[words.known]
    if len(subspace) < config.hidden_size:
        # Without a position, the heads of [CLS] attend to all tokens about equally.
        first = embeddings[tokenizer.cls_id] + positions[0] + model.embeddings.token_type_embeddings.weight[0]
        embeddings[tokenizer.cls_id] -= first @ subspace.T @ subspace
    noise = positions.T @ positions / len(positions)  # the heads read it with the word vectors
    for layer, attention in enumerate(_attentions(model)[:num_layers]):
        relations = [relation(cooccurrences, words, offset, noise) for offset in _offsets(attention, layer)]
        _set_value_and_output(attention, relations, words, OUTPUT_RATIOS[min(layer, 1)])
    nn.init.eye_(model.mlm_head.dense.weight)
    model.mlm_head.layer_norm.weight.fill_(DECODER_SCALE)
    return len(words.known)


def _set_value_and_output(attention: SelfAttention, relations: list[Tensor], words: WordVectors, ratio: float) -> None:
    """Set value and output projections, so that each head applies the best low-rank approximation of its relation.

    The root of the sum of squares of the heads' outputs becomes about `ratio` times the length of a word vector. If
    the rank of a relation is smaller than the head, the other dimensions of the head keep their random weights.
    """
    hidden, head_size = relations[0].shape[0], relations[0].shape[0] // len(relations)
    # (heads, head_size, hidden) and (hidden, heads, head_size)
    values = attention.query_key_value.weight.view(3, len(relations), head_size, hidden)[2]
    outputs = attention.output.weight.view(hidden, len(relations), head_size)
    rows, frequencies = words.vectors[words.known], words.frequencies[words.known]
    parts, squares = [], 0.0
    for matrix in relations:
        left, singular, right = torch.linalg.svd(matrix)
        rank = min(head_size, int((singular > MIN_SINGULAR * singular[0]).sum()))
        root = singular[:rank].sqrt()
        parts.append(((left[:, :rank] * root).T, right[:rank].T * root))
        lengths = (rows @ parts[-1][0].T @ parts[-1][1].T).norm(dim=1)
        squares += float(frequencies @ lengths / rows.norm(dim=1).max()) ** 2
    scale = math.sqrt(ratio / math.sqrt(squares)) if squares else 0.0
    for head, (value, output) in enumerate(parts):
        values[head, : len(value)] = scale * value
        outputs[:, head, : len(value)] = scale * output


def _attentions(model: BertForPreTraining) -> list[SelfAttention]:
    return [module for module in model.encoder.modules() if isinstance(module, SelfAttention)]


def _offsets(attention: SelfAttention, layer: int) -> list[int]:
    """Return the offset of each positional head of a layer: -1, 1, -2, 2, … from the first layer on."""
    heads = range(layer * attention.num_heads, (layer + 1) * attention.num_heads)
    return [(head // 2 + 1) * (1 if head % 2 else -1) for head in heads]


def _rotate_heads(
    attention: SelfAttention, offsets: list[int], frequencies: Tensor, subspace: Tensor, peak: float
) -> None:
    """Add projections to the query and key matrices, so that each head attends to its offset."""
    hidden = subspace.shape[1]
    query_key_value = attention.query_key_value.weight.view(3, attention.num_heads, -1, hidden)
    # After layer normalization the position embedding has the squared length hidden / 2.
    head_size = query_key_value.shape[2]
    scale = math.sqrt(2 * peak * math.sqrt(head_size) / hidden)
    cosines, sines = subspace.chunk(2)  # (frequencies, hidden) each
    for head, offset in enumerate(offsets):
        angle = offset * frequencies[:, None]
        query = torch.cat([angle.cos() * cosines - angle.sin() * sines, angle.sin() * cosines + angle.cos() * sines])
        query_key_value[0, head, : len(query)].add_(scale * query[:head_size])
        query_key_value[1, head, : len(query)].add_(scale * subspace[:head_size])


def _keep_lengths(weight: Tensor, generator: torch.Generator) -> None:
    """Draw a random matrix that scales the length of vectors by about `GAIN`."""
    nn.init.normal_(weight, std=GAIN / math.sqrt(weight.shape[1]), generator=generator)


def unigram_bias(data: DataFolder, tokenizer: Tokenizer) -> Tensor:
    """Return the log relative frequency of each token in the first training shard, (vocab_size,) float32.

    `UNSEEN_COUNT` is added to each count. [CLS], [SEP] and [PAD] count as unseen, because they are never masked. The
    output bias starts with these values (Meister et al., 2023).
    """
    examples = read_shard(data.path, data.shards("train")[0])  # a random sample of documents
    counts = np.bincount(examples.original_ids, minlength=tokenizer.vocab_size) + UNSEEN_COUNT
    counts[[tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id]] = UNSEEN_COUNT
    return torch.from_numpy(np.log(counts / counts.sum())).float()
