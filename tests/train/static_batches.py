"""Micro-batches of nearly equal shape from a table of examples, as `TrainingData` cuts them with `static_shapes`."""

import numpy as np

from bert_pretrain.examples.examples import Examples
from bert_pretrain.train.batches import GlobalBatch, assign_evenly, global_batch_of, multiples_of_equal_shares


def cut_alike(
    examples: Examples,
    micro_batch_tokens: int,
    max_seq_length: int,
    mean_tokens: float,
    rank: int = 0,
    num_ranks: int = 1,
) -> GlobalBatch:
    """Return one rank's micro-batches of a global batch."""
    assigned = assign_evenly(examples.lengths, micro_batch_tokens, rank, num_ranks)
    multiples = multiples_of_equal_shares(len(examples), len(assigned) * num_ranks, max_seq_length, mean_tokens)
    return global_batch_of([(examples, np.arange(len(examples)))], assigned, multiples)
