"""The whole of BERT in reading order: embeddings, encoder, pooler and the two pretraining heads (Devlin et al., 2018).

Sequences are packed: all tokens of a batch are in one row, (tokens,), and `cu_seqlens` says where each sequence begins.
Nothing is computed for padding, and the masked-language-model head runs on masked positions only. The mathematics is
that of Hugging Face's `BertForPreTraining`; its names on disk are in `huggingface.py`.
"""

from collections import deque
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bert_pretrain import rng
from bert_pretrain.config import ModelConfig
from bert_pretrain.model.attention import Layout, attend_padded, attend_varlen, gelu_of, layout_of, three_outputs
from bert_pretrain.model.dropout import Dropout
from bert_pretrain.model.short_attention import attend_short


def normalized(norm: nn.LayerNorm, hidden: Tensor) -> Tensor:
    """Normalise; on CUDA under autocast the result has 16 bits, as then have all hidden states between the layers."""
    device = hidden.device.type
    result: Tensor = norm(hidden)
    keeps = device == "cuda" and torch.is_autocast_enabled(device)
    return result.to(torch.get_autocast_dtype(device)) if keeps else result


class Embeddings(nn.Module):
    """The sum of token, position and segment embeddings (section 3, figure 2)."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.word_embeddings(input_ids)  # (tokens, hidden)
        hidden = hidden + self.position_embeddings(position_ids) + self.token_type_embeddings(token_type_ids)
        return self.dropout(normalized(self.layer_norm, hidden))


class SelfAttention(nn.Module):
    """Multi-head self-attention with its output projection; query, key and value are one matrix in memory."""

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.backend = backend
        self.dropout = config.attention_probs_dropout_prob
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        num_tokens = hidden.shape[0]
        if self.backend == "triton":
            query_key_value = self.query_key_value(hidden).view(num_tokens, 3, self.num_heads, -1)
            context = attend_short(query_key_value, layout.cu_seqlens, layout.max_seqlen).flatten(1)
        elif self.backend == "varlen":
            parts = three_outputs(hidden, self.query_key_value)
            query, key, value = (part.view(num_tokens, self.num_heads, -1) for part in parts)
            context = attend_varlen(query, key, value, layout)
        else:
            query_key_value = self.query_key_value(hidden).view(num_tokens, 3, self.num_heads, -1)
            context = attend_padded(query_key_value, layout, self.dropout if self.training else 0.0)
        return self.output(context)  # (tokens, hidden)


class Layer(nn.Module):
    """One transformer layer; layer normalisation comes after each residual sum, as in the original."""

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
        wide = gelu_of(hidden, self.intermediate)  # (tokens, intermediate)
        return normalized(self.output_norm, hidden + self.dropout(self.output(wide)))  # (tokens, hidden)


class Encoder(nn.Module):
    """The stack of layers; returns the outputs of the last `num_last`, concatenated: (tokens, num_last * hidden)."""

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, backend) for _ in range(config.num_hidden_layers))
        self.activation_checkpointing = False

    def forward(self, hidden: Tensor, layout: Layout, num_last: int = 1) -> Tensor:
        outputs: deque[Tensor] = deque(maxlen=num_last)
        for layer in self.layers:
            if self.activation_checkpointing and self.training:
                # Keeps only the layer's input, and the state of the generators that dropout draws from.
                hidden = checkpoint(layer, hidden, layout, use_reentrant=False)
            else:
                hidden = layer(hidden, layout)
            outputs.append(hidden)
        return hidden if num_last == 1 else torch.cat(list(outputs), dim=1)


class Pooler(nn.Module):
    """One vector per sequence: the hidden state of its first token, [CLS], through a dense layer and tanh."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        first = hidden.index_select(0, cu_seqlens[:-1])  # (sequences, hidden)
        return torch.tanh(self.dense(first))


class MaskedLanguageModelHead(nn.Module):
    """The transform before the decoder, whose matrix is the word embedding; its bias is kept here (section 3.1)."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer_norm(F.gelu(self.dense(hidden)))  # (masked, hidden)


class NextSentenceHead(nn.Module):
    """Two logits per sequence pair: class 0 means that B follows A, class 1 that it does not."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, 2)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.dense(pooled)  # (sequences, 2)


class PretrainingOutput(NamedTuple):
    """Outputs that both pretraining losses need."""

    mlm_features: Tensor  # (masked, hidden): the decoder's input at each masked position; `decode` gives the logits
    nsp_logits: Tensor  # (sequences, 2)


class BertForPreTraining(nn.Module):
    """The encoder with both pretraining heads; `attention` is the backend that `choose_attention` returns.

    The weights are PyTorch's defaults; call `initialize`, or load some.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, *, attention: str = "padded") -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.attention_backend = attention
        self.embeddings = Embeddings(config, vocab_size)
        self.encoder = Encoder(config, attention)
        self.pooler = Pooler(config)
        self.mlm_head = MaskedLanguageModelHead(config, vocab_size)
        self.nsp_head = NextSentenceHead(config)

    @property
    def num_parameters(self) -> int:
        """Weights and biases; the tied matrix counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def encode(
        self,
        input_ids: Tensor,  # (tokens,) int
        token_type_ids: Tensor,  # (tokens,) int
        position_ids: Tensor,  # (tokens,) int: 0, 1, 2, … in every sequence
        cu_seqlens: Tensor,  # (sequences + 1,) int32
        max_seqlen: int,
        num_layers: int = 1,
    ) -> Tensor:
        """Return the last hidden state of every token, (tokens, hidden).

        With `num_layers`, the outputs of that many last layers, concatenated in order: (tokens, num_layers * hidden).
        """
        layout = layout_of(cu_seqlens, max_seqlen, input_ids.shape[0], self.attention_backend)
        embedded = self.embeddings(input_ids, token_type_ids, position_ids)
        return self.encoder(embedded, layout, num_layers)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        masked_positions: Tensor,  # (masked,) int: indices into the packed tokens
    ) -> PretrainingOutput:
        """Return the decoder's input at each masked position, and the next-sentence logits of each sequence.

        Not the masked-language-model logits: with a vocabulary of 30,000 they are by far the largest tensor of a step,
        so the training loss computes them in blocks; `decode` computes all of them.
        """
        hidden = self.encode(input_ids, token_type_ids, position_ids, cu_seqlens, max_seqlen)
        mlm_features = self.mlm_head(hidden.index_select(0, masked_positions))
        return PretrainingOutput(mlm_features, self.nsp_head(self.pooler(hidden, cu_seqlens)))

    def decode(self, mlm_features: Tensor) -> Tensor:
        """Return the masked-language-model logits, (masked, vocabulary), of `mlm_features`."""
        return F.linear(mlm_features, self.embeddings.word_embeddings.weight, self.mlm_head.bias)

    @torch.no_grad()
    def initialize(self, seed: int, names: set[str] | None = None) -> None:
        """Draw initial weights, each parameter from its own random stream, so that none depends on the others.

        Matrices are normal with standard deviation `initializer_range`, truncated at two of them, as in the paper's own
        code (Hugging Face does not truncate); biases are 0, the gains of layer normalisation 1.

        With `names`, only those parameters are drawn.
        """
        deviation = self.config.initializer_range
        for name, parameter in self.named_parameters():
            if names is not None and name not in names:
                continue
            if parameter.dim() == 2:
                generator = torch.Generator().manual_seed(rng.torch_seed(seed, "initialize", name=name))
                drawn = torch.empty(parameter.shape)  # on the CPU, so that every device starts from equal weights
                nn.init.trunc_normal_(drawn, 0.0, deviation, -2 * deviation, 2 * deviation, generator=generator)
                parameter.copy_(drawn)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
