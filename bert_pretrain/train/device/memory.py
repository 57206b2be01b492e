"""How much memory training takes, by estimate: of weights and optimizer state, of activations, of the logits."""

import torch

from bert_pretrain.config import TrainConfig
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.loss import BLOCK_ROWS
from bert_pretrain.train.optim.optimizer import is_hidden_matrix

USED_SHARE = 0.8
"""Of the memory that is free for activations: the estimate is within 15 % of the peak, and blocks do not fill it."""


def estimate_memory(
    config: TrainConfig,
    model: BertForPreTraining,
    max_seq_length: int,
    micro_batch_tokens: int,
    *,
    dtype: torch.dtype,
) -> int:
    """Estimate the bytes of a run on its device; in 16 bits, matrix products run on copies of the weights."""
    kept, backward = _activation_bytes(model, max_seq_length, dtype, config.activation_checkpointing)
    # A block of masked rows and the backward pass of a layer do not exist at once.
    passing = max(_logits_bytes(model, dtype), backward * micro_batch_tokens)
    return _state_bytes(config, model, dtype) + kept * micro_batch_tokens + passing


def fitting_tokens(
    config: TrainConfig, model: BertForPreTraining, max_seq_length: int, free_bytes: int, *, dtype: torch.dtype
) -> int:
    """Return the tokens of the largest micro-batch that fits, with the state, into free memory."""
    kept, backward = _activation_bytes(model, max_seq_length, dtype, config.activation_checkpointing)
    room = USED_SHARE * (free_bytes - _state_bytes(config, model, dtype))
    with_logits = (room - USED_SHARE * _logits_bytes(model, dtype)) / kept
    return max(0, int(min(with_logits, room / (kept + backward))))


def free_bytes(device: torch.device) -> int:
    """Return the memory of a card that tensors can take, with what PyTorch keeps of freed ones."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _state_bytes(config: TrainConfig, model: BertForPreTraining, dtype: torch.dtype) -> int:
    """Return what weights, gradients and the optimizer's state take."""
    moments = 0
    for name, parameter in model.named_parameters():
        moments += parameter.numel() * (4 if config.optimizer == "muon" and is_hidden_matrix(name) else 8)
    return moments + (8 + (2 if dtype.itemsize == 2 else 0)) * model.num_parameters


def _logits_bytes(model: BertForPreTraining, dtype: torch.dtype) -> int:
    """Return what a block of masked rows takes.

    Logits are in the precision of the product and twice in fp32, as is the gradient of the tied matrix.
    """
    return (dtype.itemsize + 8) * model.vocab_size * (BLOCK_ROWS + model.config.hidden_size)


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
