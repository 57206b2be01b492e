"""What each of two processes computes for `test_ranks.py`, which starts them by torchrun: `two_ranks.py FOLDER`.

Every rank writes what it found to `FOLDER/rank-N.safetensors`. One process computes the same by the same function.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from bert_pretrain.config import ModelConfig, TrainConfig
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.batches import cut
from bert_pretrain.train.distributed import DistContext, parallelize, shut_down
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.optim.optimizer import make_optimizers
from bert_pretrain.train.state import TrainState
from bert_pretrain.train.step import train_step
from tests.train.conftest import make_examples

OPTIMIZERS = ("adamw", "lamb", "muon")


def trained(optimizer: str, dist_context: DistContext) -> dict[str, Tensor]:
    """Return the weights and the figures after three steps on 30 examples, of a model without dropout."""
    sizes = {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 60}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    train = TrainConfig.model_validate({"optimizer": optimizer})
    model = BertForPreTraining(ModelConfig(**sizes, **no_dropout, max_position_embeddings=32), 153)
    model.initialize(1)
    network = parallelize(PretrainingLoss(model), dist_context)
    state = TrainState.start(model, network, make_optimizers(model, train), None)
    for step in range(3):
        batch = cut(make_examples(30, np.random.default_rng(step)), 200, dist_context.rank, dist_context.size)
        train_step(
            state.network, state.optimizers, batch, state.sums, seed=1, step=step, learning_rate=5e-3,
            max_grad_norm=1.0, dtype=torch.float32, dist_context=dist_context,
        )  # fmt: skip
    weights = {f"{optimizer}/{name}": weight.detach() for name, weight in state.model.named_parameters()}
    return {**weights, f"{optimizer}/sums": state.sums}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    dist_context = DistContext(dist.get_rank(), dist.get_world_size())
    found: dict[str, Tensor] = {}
    for optimizer in OPTIMIZERS:
        found |= trained(optimizer, dist_context)
    save_file(found, folder / f"rank-{dist_context.rank}.safetensors")
    dist.barrier()
    shut_down(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
