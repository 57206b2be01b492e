"""First values of the output bias: how often each token occurs (Meister et al., 2023, arXiv 2212.09686)."""

import numpy as np
import torch
from torch import Tensor

from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.text.tokenizer import Tokenizer

UNSEEN_COUNT = 0.1
"""What a token counts that does not occur: its logarithm must be finite."""


def unigram_bias(data: DataFolder, tokenizer: Tokenizer) -> Tensor:
    """Return the logarithm of each token's share of the tokens that may be masked, (vocab_size,), fp32.

    Counted in the first shard of the training split, whose documents are a random sample.
    """
    examples = read_shard(data.path, data.shards("train")[0])
    counts = np.bincount(examples.original_ids, minlength=tokenizer.vocab_size) + UNSEEN_COUNT
    counts[[tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id]] = UNSEEN_COUNT
    return torch.from_numpy(np.log(counts / counts.sum())).float()


def frequency_loss(data: DataFolder, tokenizer: Tokenizer) -> float | None:
    """Return the loss in nats of the training frequencies on the masked tokens held out; None if nothing is held out.

    Of the first shard of each split.
    """
    if not data.rows("validation"):
        return None
    masks = read_shard(data.path, data.shards("validation")[0]).masks
    assert masks is not None
    return -float(unigram_bias(data, tokenizer)[masks.original_ids.astype(np.int64)].mean())
