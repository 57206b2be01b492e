"""BERT: embeddings, encoder, pooler and the two pretraining heads (Devlin et al., 2018).

Sequences are packed: the tokens of a batch are concatenated, (tokens,), and `cu_seqlens` has the start of each
sequence. The masked-language-model head runs on masked positions only. Outputs equal those of Hugging Face's
`BertForPreTraining`; `huggingface.py` maps the names of the weights.
"""

from collections import deque
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bert_pretrain import rng
from bert_pretrain.config import ModelConfig
from bert_pretrain.model.attention import Layout, attend_padded, attend_varlen, linear_chunks, linear_gelu, make_layout
from bert_pretrain.model.dropout import Dropout
from bert_pretrain.model.short_attention import attend_short


def normalized(norm: nn.LayerNorm, hidden: Tensor) -> Tensor:
    """Apply layer normalization. Under CUDA autocast, cast the result to 16 bits, as all other hidden states are."""
    result: Tensor = norm(hidden)
    is_autocast = hidden.device.type == "cuda" and torch.is_autocast_enabled("cuda")
    return result.to(torch.get_autocast_dtype("cuda")) if is_autocast else result


class Embeddings(nn.Module):
    """Sum of token, position and segment embeddings (section 3, figure 2)."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
    ) -> Tensor:
        hidden = self.word_embeddings(input_ids)  # (tokens, hidden)
        hidden = hidden + self.position_embeddings(position_ids) + self.token_type_embeddings(token_type_ids)
        return self.dropout(normalized(self.layer_norm, hidden))


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


class Encoder(nn.Module):
    """Stack of layers. Returns the concatenated outputs of the last `num_last` layers, (tokens, num_last * hidden)."""

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, backend) for _ in range(config.num_hidden_layers))
        self.activation_checkpointing = False

    def forward(
        self,
        hidden: Tensor,
        layout: Layout,
        num_last: int = 1,
    ) -> Tensor:
        outputs: deque[Tensor] = deque(maxlen=num_last)
        for layer in self.layers:
            if self.activation_checkpointing and self.training:
                hidden = checkpoint(layer, hidden, layout, use_reentrant=False)
            else:
                hidden = layer(hidden, layout)
            outputs.append(hidden)
        return hidden if num_last == 1 else torch.cat(list(outputs), dim=1)


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
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer_norm(F.gelu(self.dense(hidden)))  # (masked, hidden)


class NextSentenceHead(nn.Module):
    """Two logits per sequence pair: class 0 if B follows A, class 1 if B is random."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, 2)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.dense(pooled)  # (sequences, 2)


class PretrainingOutput(NamedTuple):
    """Output of `BertForPreTraining.forward`, from which both losses are computed."""

    mlm_features: Tensor  # (masked, hidden): input of `decode` at each masked position
    nsp_logits: Tensor  # (sequences, 2)


class BertForPreTraining(nn.Module):
    """BERT with both pretraining heads. `attention` is a backend returned by `choose_attention`.

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
        self.pooler = Pooler(config)
        self.mlm_head = MaskedLanguageModelHead(config, vocab_size)
        self.nsp_head = NextSentenceHead(config)

    @property
    def num_parameters(self) -> int:
        """Number of weights and biases. The tied matrix counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def encode(
        self,
        input_ids: Tensor,  # (tokens,) int
        token_type_ids: Tensor,  # (tokens,) int
        position_ids: Tensor,  # (tokens,) int: 0, 1, 2, … in each sequence
        cu_seqlens: Tensor,  # (sequences + 1,) int32
        max_seqlen: int,
        num_last: int = 1,
    ) -> Tensor:
        """Return the concatenated outputs of the last `num_last` layers, (tokens, num_last * hidden)."""
        layout = make_layout(cu_seqlens, max_seqlen, input_ids.shape[0], self.attention_backend)
        embedded = self.embeddings(input_ids, token_type_ids, position_ids)
        return self.encoder(embedded, layout, num_last)

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

        The masked-language-model logits would be the largest tensor of a step. The training loss therefore computes
        them in blocks; `decode` computes all of them.
        """
        hidden = self.encode(
            input_ids,
            token_type_ids,
            position_ids,
            cu_seqlens,
            max_seqlen,
        )
        mlm_features = self.mlm_head(hidden.index_select(0, masked_positions))
        return PretrainingOutput(mlm_features, self.nsp_head(self.pooler(hidden, cu_seqlens)))

    def decode(self, mlm_features: Tensor) -> Tensor:
        """Return the masked-language-model logits, (masked, vocabulary)."""
        return F.linear(mlm_features, self.embeddings.word_embeddings.weight, self.mlm_head.bias)

    @torch.no_grad()
    def initialize(self, seed: int, names: set[str] | None = None) -> None:
        """Draw initial weights of all parameters, or of `names`, each from a separate random stream.

        Matrices are normal with standard deviation `initializer_range`, truncated at two standard deviations as in the
        paper's code (Hugging Face does not truncate). Biases are 0 and layer normalization weights 1.
        """
        deviation = self.config.initializer_range
        for name, parameter in self.named_parameters():
            if names is not None and name not in names:
                continue
            if parameter.dim() == 2:
                generator = torch.Generator().manual_seed(rng.torch_seed(seed, "initialize", name=name))
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
