"""How much memory training takes, by estimate: of weights and optimizer state, of activations, of the logits."""

from dataclasses import dataclass

import torch

from bert_pretrain.config import TrainConfig
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.loss import BLOCK_ROWS
from bert_pretrain.train.optimizer import is_hidden_matrix


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    state: int
    """Weights, gradients and moments in fp32, and 16-bit copies of the weights."""
    activations: int
    """What a micro-batch leaves until its backward pass."""
    logits: int
    """A block of masked rows, and the gradient of the tied matrix."""

    @property
    def total(self) -> int:
        return self.state + self.activations + self.logits


def estimate_memory(
    config: TrainConfig,
    model: BertForPreTraining,
    max_seq_length: int,
    micro_batch_tokens: int,
    *,
    dtype: torch.dtype,
    num_shards: int = 1,
) -> Memory:
    """Estimate the memory of a run.

    Args:
        config: its optimizer and whether activations are kept.
        model: not yet dealt out to ranks.
        max_seq_length: of the data.
        micro_batch_tokens: at once.
        dtype: of the matrix products; in 16 bits they run on copies of the weights.
        num_shards: ranks to which FSDP deals the state out.
    """
    moments = 0
    for name, parameter in model.named_parameters():
        moments += parameter.numel() * (4 if config.optimizer == "muon" and is_hidden_matrix(name) else 8)
    weights = gradients = 4 * model.num_parameters
    # While micro-batches add up their gradients, every rank of FSDP holds them whole.
    state = (weights + moments) // num_shards + gradients + (2 * model.num_parameters if dtype.itemsize == 2 else 0)
    per_token = activation_bytes_per_token(model, max_seq_length, dtype, config.activation_checkpointing)
    width = dtype.itemsize
    logits = BLOCK_ROWS * model.vocab_size * (width + 8) + 8 * model.vocab_size * model.config.hidden_size
    return Memory(state, per_token * micro_batch_tokens, logits)


def activation_bytes_per_token(
    model: BertForPreTraining, max_seq_length: int, dtype: torch.dtype, checkpointing: bool = False
) -> int:
    """Estimate what a token leaves in memory until its backward pass.

    A layer keeps, a token: its two normalisations' inputs and outputs in fp32 (16 H) and, under autocast, the outputs
    again in 16 bits (4 H), query, key, value, context and both projections (6 H values), dropout masks (2 H), and the
    wide activations before and after GELU (2 I values); attention that pads also keeps a row of scores and
    probabilities (4 values a head in all) and of its dropout mask. With checkpointing it keeps its input (4 H), and one
    layer at a time all the rest.
    """
    config, width = model.config, dtype.itemsize
    copies = 4 if width == 2 else 0
    layer = (18 + copies + 6 * width) * config.hidden_size + 2 * width * config.intermediate_size
    if model.attention_backend == "padded":
        layer += (4 * width + 1) * config.num_attention_heads * max_seq_length
    ends = 20 * config.hidden_size
    if checkpointing:
        return config.num_hidden_layers * 4 * config.hidden_size + layer + ends
    return config.num_hidden_layers * layer + ends
