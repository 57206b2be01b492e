"""The networks: BERT (Devlin et al., 2018), ModernBERT (Warner et al., 2024), ALBERT (Lan et al., 2019) and ELECTRA
(Clark et al., 2020).

Sequences are packed: the tokens of a batch are concatenated, (tokens,), and `cu_seqlens` has the start of each
sequence. The masked-language-model head runs on masked positions only. Outputs equal those of Hugging Face's classes;
`huggingface.py` and `architectures.py` map the names of the weights.

ModernBERT has rotary positions (Su et al., 2021) instead of position embeddings, no token types, layer normalization
before each block, a gated feed-forward layer (Shazeer, 2020), and attention within a window in two of three layers. It
has no pooler and no head for sentence pairs.

ALBERT is a BERT whose layers are one layer, applied several times. A matrix projects its embeddings, which may be
narrower, on the width of the layer.

ELECTRA is two networks with BERT's layers and the same embeddings: a small generator, which replaces masked tokens, and
a discriminator, which finds the replaced ones. A folder has one of them.
"""

import math
from collections import deque
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bert_pretrain import rng
from bert_pretrain.config import ModelConfig
from bert_pretrain.model.attention import (
    Layout,
    attend_padded,
    attend_varlen,
    gated_gelu,
    linear_chunks,
    linear_gelu,
    make_layout,
    rotate,
    rotated_heads,
    with_rotation,
)
from bert_pretrain.model.dropout import Dropout
from bert_pretrain.model.short_attention import attend_short


def normalized(norm: nn.Module, hidden: Tensor) -> Tensor:
    """Apply layer normalization. Under CUDA autocast, cast the result to 16 bits, as all other hidden states are."""
    result: Tensor = norm(hidden)
    is_autocast = hidden.device.type == "cuda" and torch.is_autocast_enabled("cuda")
    return result.to(torch.get_autocast_dtype("cuda")) if is_autocast else result


def make_norm(config: ModelConfig, width: int | None = None) -> nn.LayerNorm:
    return nn.LayerNorm(width or config.hidden_size, config.layer_norm_eps, bias=config.biases)


class Embeddings(nn.Module):
    """Token embeddings; in BERT, their sum with position and segment embeddings (section 3, figure 2)."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.is_rotary = config.is_modern
        width = config.embedding_width
        self.word_embeddings = nn.Embedding(vocab_size, width)
        if not self.is_rotary:
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.layer_norm = make_norm(config, width)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
    ) -> Tensor:
        hidden = self.word_embeddings(input_ids)  # (tokens, embedding)
        if not self.is_rotary:
            hidden = hidden + self.position_embeddings(position_ids) + self.token_type_embeddings(token_type_ids)
            return self.dropout(normalized(self.layer_norm, hidden))
        return self.dropout(self.layer_norm(hidden))  # in fp32: all layers of a pre-LN network add to this


class SelfAttention(nn.Module):
    """Multi-head self-attention with one fused query, key and value matrix, and the output projection."""

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.backend = backend
        self.dropout = config.attention_probs_dropout_prob
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        num_tokens = hidden.shape[0]
        if self.backend == "varlen":
            parts = linear_chunks(hidden, self.query_key_value)
            query, key, value = (part.view(num_tokens, self.num_heads, -1) for part in parts)
            return self.output(attend_varlen(query, key, value, layout))  # (tokens, hidden)
        query_key_value = self.query_key_value(hidden).view(num_tokens, 3, self.num_heads, -1)
        if self.backend == "triton":
            context = attend_short(query_key_value, layout.cu_seqlens, layout.max_seqlen).flatten(1)
        else:
            context = attend_padded(query_key_value, layout, self.dropout if self.training else 0.0)
        return self.output(context)  # (tokens, hidden)


class Layer(nn.Module):
    """Transformer layer with layer normalization after each residual sum (post-LN)."""

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        self.attention = SelfAttention(config, backend)
        self.attention_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.output_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        hidden = normalized(self.attention_norm, hidden + self.dropout(self.attention(hidden, layout)))
        wide = linear_gelu(hidden, self.intermediate)  # (tokens, intermediate)
        return normalized(self.output_norm, hidden + self.dropout(self.output(wide)))  # (tokens, hidden)


class RotaryAttention(nn.Module):
    """Multi-head self-attention with rotary positions, over the whole sequence (`is_global`) or a window."""

    def __init__(
        self,
        config: ModelConfig,
        backend: str,
        is_global: bool,
    ) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.backend = backend
        self.dropout = config.attention_probs_dropout_prob
        self.is_global = is_global
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.biases)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=config.biases)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        turns = layout.global_turns if self.is_global else layout.local_turns
        assert turns is not None, "the layout of a network with rotary positions has turns"
        if self.backend == "varlen":
            query_key_value = self.query_key_value(hidden).view(hidden.shape[0], 3, self.num_heads, -1)
            query, key, value = query_key_value.unbind(1)
            context = attend_varlen(
                rotate(query, turns),
                rotate(key, turns),
                value,
                layout,
                is_global=self.is_global,
            )
        else:
            query_key_value = rotated_heads(hidden, self.query_key_value, self.num_heads, turns)
            dropout = self.dropout if self.training else 0.0
            context = attend_padded(query_key_value, layout, dropout, is_global=self.is_global)
        return self.output(context)  # (tokens, hidden)


class ModernLayer(nn.Module):
    """Transformer layer with layer normalization before each block (pre-LN) and a gated feed-forward layer (GeGLU).

    The first layer has no normalization before its attention: its input is normalized already.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: str,
        index: int,
    ) -> None:
        super().__init__()
        is_global = index % config.global_attn_every_n_layers == 0
        self.attention_norm = make_norm(config) if index else nn.Identity()
        self.attention = RotaryAttention(config, backend, is_global)
        self.output_norm = make_norm(config)
        self.wide_and_gate = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.biases)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.biases)
        self.attention_dropout = Dropout(config.attention_probs_dropout_prob)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        attended = self.attention(normalized(self.attention_norm, hidden), layout)
        hidden = hidden + self.attention_dropout(attended)
        wide = gated_gelu(normalized(self.output_norm, hidden), self.wide_and_gate)  # (tokens, intermediate)
        return hidden + self.output(self.dropout(wide))  # (tokens, hidden)


class Encoder(nn.Module):
    """Stack of layers. Returns the concatenated outputs of the last `num_last` layers, (tokens, num_last * hidden).

    In ALBERT, `layers` has one layer, which takes the place of all.
    """

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        self.num_layers = config.num_hidden_layers
        self.projection: nn.Module = nn.Identity()
        if config.projects_embeddings:
            self.projection = nn.Linear(config.embedding_width, config.hidden_size)
        indices = range(1 if config.is_albert else self.num_layers)
        if config.is_modern:
            self.layers = nn.ModuleList(ModernLayer(config, backend, index) for index in indices)
        else:
            self.layers = nn.ModuleList(Layer(config, backend) for _ in indices)
        self.final_norm = make_norm(config) if config.is_modern else nn.Identity()
        self.activation_checkpointing = False

    def forward(
        self,
        hidden: Tensor,
        layout: Layout,
        num_last: int = 1,
    ) -> Tensor:
        outputs: deque[Tensor] = deque(maxlen=num_last)
        hidden = self.projection(hidden)  # (tokens, hidden)
        for index in range(self.num_layers):
            layer = self.layers[index % len(self.layers)]
            if self.activation_checkpointing and self.training:
                hidden = checkpoint(layer, hidden, layout, use_reentrant=False)
            else:
                hidden = layer(hidden, layout)
            outputs.append(hidden)
        outputs[-1] = normalized(self.final_norm, hidden)
        return outputs[-1] if num_last == 1 else torch.cat(list(outputs), dim=1)


class Pooler(nn.Module):
    """Dense layer and tanh over the hidden state of [CLS], the first token of each sequence."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        first = hidden.index_select(0, cu_seqlens[:-1])  # (sequences, hidden)
        return torch.tanh(self.dense(first))


class MaskedLanguageModelHead(nn.Module):
    """Dense layer, GELU and layer normalization before the decoder, and the decoder's bias (section 3.1).

    The matrix of the decoder is the word embedding.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_width, bias=config.biases)
        self.layer_norm = make_norm(config, config.embedding_width)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer_norm(F.gelu(self.dense(hidden)))  # (masked, embedding)


class NextSentenceHead(nn.Module):
    """Two logits per sequence pair: class 0 if B follows A, class 1 if B is random."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, 2)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.dense(pooled)  # (sequences, 2)


class ReplacedTokenHead(nn.Module):
    """One logit per token, which is positive if the token seems replaced (Clark et al., 2020, section 2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(F.gelu(self.dense(hidden))).squeeze(1)  # (tokens,)


class Packed(NamedTuple):
    """Packed sequences."""

    input_ids: Tensor  # (tokens,) int64
    token_type_ids: Tensor  # (tokens,) int64: 0 in the first segment, 1 in the second
    position_ids: Tensor  # (tokens,) int64: from 0 in every sequence
    cu_seqlens: Tensor  # (sequences + 1,) int32: cumulative lengths
    max_seqlen: int


class PretrainingOutput(NamedTuple):
    """Output of `BertForPreTraining.forward`, from which both losses are computed."""

    mlm_features: Tensor  # (masked, embedding): input of `decode` at each masked position
    nsp_logits: Tensor | None  # (sequences, 2); None without a head for sentence pairs
    hidden: Tensor  # (tokens, hidden): output of the last layer


class BertForPreTraining(nn.Module):
    """A network with its pretraining heads. `attention` is a backend returned by `choose_attention`.

    Weights have PyTorch's defaults until `initialize` is called or weights are loaded.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        *,
        attention: str = "padded",
    ) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.attention_backend = attention
        self.embeddings = Embeddings(config, vocab_size)
        self.encoder = Encoder(config, attention)
        self.mlm_head = MaskedLanguageModelHead(config, vocab_size)
        self.pooler = Pooler(config) if config.has_pair_heads else None
        self.nsp_head = NextSentenceHead(config) if config.has_pair_heads else None
        self.discriminator_head = ReplacedTokenHead(config) if config.is_electra else None

    @property
    def num_parameters(self) -> int:
        """Number of weights and biases. The tied matrix counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def freeze_pair_heads(self) -> None:
        """Exclude from training what a loss without sentence pairs does not use."""
        for head in (self.pooler, self.nsp_head):
            if head is not None:
                head.requires_grad_(False)

    def encode(
        self,
        packed: Packed,
        num_last: int = 1,
        encoder: Encoder | None = None,
    ) -> Tensor:
        """Return the concatenated outputs of the last `num_last` layers, (tokens, num_last * hidden).

        `encoder` takes the place of the network's own.
        """
        ids, token_types, positions, cu_seqlens, max_seqlen = packed
        layout = make_layout(cu_seqlens, max_seqlen, len(ids), self.attention_backend)
        if self.config.is_modern:
            is_padded = self.attention_backend == "padded"
            layout = with_rotation(layout, positions, self.config, is_padded=is_padded)
        embedded = self.embeddings(ids, token_types, positions)
        encoder = self.encoder if encoder is None else encoder
        return encoder(embedded, layout, num_last)

    def forward(self, packed: Packed, masked_positions: Tensor) -> PretrainingOutput:
        """Return the decoder's input at each masked position, and the next-sentence logits of each sequence.

        `masked_positions`, (masked,) int64, are indices into the packed tokens.

        The masked-language-model logits would be the largest tensor of a step. The training loss therefore computes
        them in blocks; `decode` computes all of them.
        """
        hidden = self.encode(packed)
        mlm_features = self.mlm_head(hidden.index_select(0, masked_positions))
        if self.pooler is None or self.nsp_head is None:
            return PretrainingOutput(mlm_features, None, hidden)
        return PretrainingOutput(mlm_features, self.nsp_head(self.pooler(hidden, packed.cu_seqlens)), hidden)

    def decode(self, mlm_features: Tensor) -> Tensor:
        """Return the masked-language-model logits, (masked, vocabulary)."""
        return F.linear(mlm_features, self.embeddings.word_embeddings.weight, self.mlm_head.bias)

    @torch.no_grad()
    def initialize(self, seed: int, names: set[str] | None = None) -> None:
        """Draw initial weights of all parameters, or of `names`, each from a separate random stream.

        Matrices are normal with standard deviation `initializer_range`, truncated at two standard deviations as in the
        paper's code (Hugging Face does not truncate). Biases are 0 and layer normalization weights 1. In ModernBERT,
        the deviation of matrices whose output is added to the hidden state is divided by the root of 2 * layers.
        """
        for name, parameter in self.named_parameters():
            if names is not None and name not in names:
                continue
            if parameter.dim() == 2:
                generator = torch.Generator().manual_seed(rng.torch_seed(seed, "initialize", name=name))
                deviation = self.config.initializer_range
                if self.config.is_modern and name.endswith("output.weight"):
                    deviation /= math.sqrt(2 * self.config.num_hidden_layers)
                weight = torch.empty(parameter.shape)  # on the CPU, so that every device starts from equal weights
                nn.init.trunc_normal_(
                    weight,
                    0.0,
                    deviation,
                    -2 * deviation,
                    2 * deviation,
                    generator=generator,
                )
                parameter.copy_(weight)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)


class ElectraForPreTraining(BertForPreTraining):
    """A discriminator with its generator, as they are trained. The head for masked tokens is the generator's."""

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        *,
        attention: str = "padded",
    ) -> None:
        super().__init__(config, vocab_size, attention=attention)
        self.generator = Encoder(config.generator, attention)
        self.mlm_head = MaskedLanguageModelHead(config.generator, vocab_size)

    def forward(self, packed: Packed, masked_positions: Tensor) -> PretrainingOutput:
        """Return the outputs of the generator."""
        hidden = self.encode(packed, encoder=self.generator)
        return PretrainingOutput(self.mlm_head(hidden.index_select(0, masked_positions)), None, hidden)

    def discriminate(self, packed: Packed) -> Tensor:
        """Return the discriminator's logit of each token, (tokens,)."""
        hidden = self.encode(packed)
        assert self.discriminator_head is not None
        return self.discriminator_head(hidden)


def make_network(
    config: ModelConfig,
    vocab_size: int,
    attention: str,
    *,
    checkpointing: bool = False,
) -> BertForPreTraining:
    """Return the network to train. With `checkpointing`, layers are computed again in the backward pass."""
    network_class = ElectraForPreTraining if config.is_electra else BertForPreTraining
    network = network_class(config, vocab_size, attention=attention)
    for module in network.modules():
        if isinstance(module, Encoder):
            module.activation_checkpointing = checkpointing
    return network
