"""What each of two processes computes for `test_distributed.py`, which starts them by torchrun: `two_ranks.py FOLDER`.

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
from bert_pretrain.train.optimizers import make_optimizers
from bert_pretrain.train.state import TrainState
from bert_pretrain.train.step import train_step
from tests.train.conftest import NO_DROPOUT, make_examples

CASES = {"adamw": torch.float32, "lamb": torch.float32, "muon": torch.float32, "adamw in bf16": torch.bfloat16}


def trained(case: str, dist_context: DistContext) -> dict[str, Tensor]:
    """Return the first gradients, and weights and figures after three steps on 30 examples, without dropout.

    In 16 bits the weights are cast as for compiled layers on CUDA; what would be compiled runs as it is.
    """
    optimizer, dtype = case.partition(" ")[0], CASES[case]
    torch.set_autocast_enabled("cuda", dtype == torch.bfloat16)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    sizes = {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 60}
    train = TrainConfig.model_validate({"optimizer": optimizer})
    model = BertForPreTraining(ModelConfig(**sizes, **NO_DROPOUT, max_position_embeddings=32), 153)
    model.initialize(1)
    network = parallelize(PretrainingLoss(model, compiled=dtype == torch.bfloat16), dist_context)
    state = TrainState.start(model, network, make_optimizers(model, train), None)
    found: dict[str, Tensor] = {}
    for step in range(3):
        batch = cut(make_examples(30, np.random.default_rng(step)), 200, dist_context.rank, dist_context.size)
        with torch.compiler.set_stance("force_eager"):
            train_step(
                state.network, state.optimizers, batch, state.sums, seed=1, step=step, learning_rate=5e-3,
                max_grad_norm=1.0, dtype=dtype, dist_context=dist_context,
            )  # fmt: skip
        if not found:
            found = {f"{case}/gradient/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.set_autocast_enabled("cuda", False)
    found |= {f"{case}/weight/{name}": weight.detach() for name, weight in model.named_parameters()}
    return {**found, f"{case}/sums": state.sums}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    dist_context = DistContext(dist.get_rank(), dist.get_world_size())
    found: dict[str, Tensor] = {}
    for case in CASES:
        found |= trained(case, dist_context)
    save_file(found, folder / f"rank-{dist_context.rank}.safetensors")
    dist.barrier()
    shut_down(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
