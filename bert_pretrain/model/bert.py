"""BERT, whole, in reading order: embeddings, encoder, pooler and the two pretraining heads (Devlin et al., 2018).

Sequences are packed: all tokens of a batch stand in one row, (tokens,), with `cu_seqlens` marking where each sequence
begins. So nothing is computed for padding, and the masked-language-model head runs on masked positions only. The
mathematics is that of Hugging Face's `BertForPreTraining`; its names on disk are in `huggingface.py`.
"""

from collections import deque

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bert_pretrain import rng
from bert_pretrain.config import ModelConfig
from bert_pretrain.model.attention import Layout, attend, layout_of
from bert_pretrain.model.dropout import Dropout


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
        return self.dropout(self.layer_norm(hidden))


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
        query_key_value = self.query_key_value(hidden)  # (tokens, 3 * hidden)
        query_key_value = query_key_value.view(hidden.shape[0], 3, self.num_heads, -1)
        dropout = self.dropout if self.training else 0.0
        return self.output(attend(query_key_value, layout, self.backend, dropout))  # (tokens, hidden)


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
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, layout)))
        wide = F.gelu(self.intermediate(hidden))  # (tokens, intermediate); the exact GELU, by erf
        return self.output_norm(hidden + self.dropout(self.output(wide)))  # (tokens, hidden)


class Encoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, backend) for _ in range(config.num_hidden_layers))
        self.activation_checkpointing = False

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        for layer in self.layers:
            if self.activation_checkpointing and self.training:
                # Keeps the layer's input only, and the state of the generators from which dropout draws.
                hidden = checkpoint(layer, hidden, layout, use_reentrant=False)
            else:
                hidden = layer(hidden, layout)
        return hidden


class Pooler(nn.Module):
    """A sequence as one vector: its first token, [CLS], through a dense layer and tanh."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        first = hidden.index_select(0, cu_seqlens[:-1])  # (sequences, hidden)
        return torch.tanh(self.dense(first))


class MaskedLanguageModelHead(nn.Module):
    """Logits over the vocabulary; the decoder's matrix is the word embedding, its bias is its own (section 3.1)."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer_norm(F.gelu(self.dense(hidden)))  # (masked, hidden): what the decoder reads


class NextSentenceHead(nn.Module):
    """Two logits a sequence pair: 0 means that B follows A, 1 that it does not."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, 2)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.dense(pooled)  # (sequences, 2)


class BertForPreTraining(nn.Module):
    """The encoder with both pretraining heads.

    Args:
        config: the sizes and dropout rates.
        vocab_size: tokens in the vocabulary.
        attention: the backend, `padded` or `varlen`, from `choose_attention`.

    The weights are left as PyTorch makes them; call `initialize`, or load some.
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
        """Weights and biases, the tied matrix counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def encode(
        self,
        input_ids: Tensor,  # (tokens,) int
        token_type_ids: Tensor,  # (tokens,) int
        position_ids: Tensor,  # (tokens,) int: begin at 0 in every sequence
        cu_seqlens: Tensor,  # (sequences + 1,) int32
        max_seqlen: int,
    ) -> Tensor:
        """Return the last hidden state of every token, (tokens, hidden)."""
        layout = layout_of(cu_seqlens, max_seqlen, input_ids.shape[0], self.attention_backend)
        return self.encoder(self.embeddings(input_ids, token_type_ids, position_ids), layout)

    def encode_last_layers(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        num_layers: int,
    ) -> list[Tensor]:
        """Return what each of the last `num_layers` layers puts out, the last one last, each (tokens, hidden)."""
        layout = layout_of(cu_seqlens, max_seqlen, input_ids.shape[0], self.attention_backend)
        hidden = self.embeddings(input_ids, token_type_ids, position_ids)
        outputs: deque[Tensor] = deque(maxlen=num_layers)
        for layer in self.encoder.layers:
            hidden = layer(hidden, layout)
            outputs.append(hidden)
        return list(outputs)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        masked_positions: Tensor,  # (masked,) int: indices into the packed tokens
    ) -> tuple[Tensor, Tensor]:
        """Return what the decoder reads at each masked position, (masked, hidden), and the NSP logits (sequences, 2).

        `decode` turns the former into logits; the training loss does so piece by piece, since for a vocabulary of
        30,000 the logits are by far the largest tensor of a step.
        """
        hidden = self.encode(input_ids, token_type_ids, position_ids, cu_seqlens, max_seqlen)
        features = self.mlm_head(hidden.index_select(0, masked_positions))
        return features, self.nsp_head(self.pooler(hidden, cu_seqlens))

    def decode(self, features: Tensor) -> Tensor:
        """Return the masked-language-model logits (masked, vocabulary) of features (masked, hidden)."""
        return F.linear(features, self.embeddings.word_embeddings.weight, self.mlm_head.bias)

    @torch.no_grad()
    def initialize(self, seed: int, names: set[str] | None = None) -> None:
        """Draw fresh weights: every parameter from a stream of its own, so that none depends on the others.

        Matrices are normal with standard deviation `initializer_range`, cut off at two of them, as the paper's own
        code draws them (Hugging Face does not cut); biases are 0, the gains of layer normalisation 1.

        Args:
            seed: of the streams.
            names: parameters to draw; all by default.
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
