"""How much memory training takes, by estimate: of weights and optimizer state, of activations, of the logits."""

import torch

from bert_pretrain.config import TrainConfig
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.loss import BLOCK_ROWS
from bert_pretrain.train.optim.optimizer import is_hidden_matrix


def estimate_memory(
    config: TrainConfig,
    model: BertForPreTraining,
    max_seq_length: int,
    micro_batch_tokens: int,
    *,
    dtype: torch.dtype,
) -> int:
    """Estimate the bytes of a run on its device; in 16 bits, matrix products run on copies of the weights."""
    moments = 0
    for name, parameter in model.named_parameters():
        moments += parameter.numel() * (4 if config.optimizer == "muon" and is_hidden_matrix(name) else 8)
    weights = gradients = 4 * model.num_parameters
    state = weights + moments + gradients + (2 * model.num_parameters if dtype.itemsize == 2 else 0)
    kept, backward = _activation_bytes(model, max_seq_length, dtype, config.activation_checkpointing)
    width, hidden_size = dtype.itemsize, model.config.hidden_size
    # Logits in the precision of the product and twice in fp32; the tied matrix in that precision, its gradient twice.
    logits = BLOCK_ROWS * model.vocab_size * (width + 8) + (width + 8) * model.vocab_size * hidden_size
    # A block of masked rows and the backward pass of a layer do not exist at once.
    return state + kept * micro_batch_tokens + max(logits, backward * micro_batch_tokens)


def activation_bytes_per_token(
    model: BertForPreTraining, max_seq_length: int, dtype: torch.dtype, checkpointing: bool = False
) -> int:
    """Estimate what a token takes: what it leaves until its backward pass, and what that takes for one layer."""
    return sum(_activation_bytes(model, max_seq_length, dtype, checkpointing))


def _activation_bytes(
    model: BertForPreTraining, max_seq_length: int, dtype: torch.dtype, checkpointing: bool
) -> tuple[int, int]:
    """Return what a token leaves in memory until its backward pass, and what the backward pass of a layer adds.

    A layer keeps, a token: what its normalisations are given, in fp32 (8 H); what its products are given, query,
    key, value and the attention's projection (7 H values); the wide activations before and after GELU (2 I values); and
    dropout masks (2 H). Attention that pads also keeps its padded context and a row of probabilities a head, with
    dropout twice and with a mask. With checkpointing a layer keeps its input (4 H), and one at a time all the rest.
    Tests trace whole steps and hold the estimate against the peak.
    """
    config, width = model.config, dtype.itemsize
    hidden = config.hidden_size
    masks = 2 if config.hidden_dropout_prob > 0 else 0
    layer = (8 + 7 * width + masks) * hidden + 2 * width * config.intermediate_size
    if model.attention_backend == "padded":
        row = 2 * width + 1 if config.attention_probs_dropout_prob > 0 else width
        layer += width * hidden + row * config.num_attention_heads * max_seq_length
    ends = 8 * hidden  # the embeddings' sum, normalised, and the few masked positions in the head
    backward = 10 * hidden  # the gradients of the hidden states and of a wide activation
    if checkpointing:
        return config.num_hidden_layers * 4 * hidden + ends, layer + backward
    return config.num_hidden_layers * layer + ends, backward
