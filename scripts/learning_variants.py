"""What `bench_learning.py` compares: the recipe of `base`, and changes to it, one at a time.

A variant is settings of the configuration. What the package does not offer is applied from outside, before the training
starts, so that a change which does not pay never enters the package.

    python scripts/learning_variants.py NAME train --data …      as `bert-pretrain train --data …`, with the change
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bert_pretrain import cli
from bert_pretrain.config import TrainConfig
from bert_pretrain.examples import masking
from bert_pretrain.train import loop, step
from bert_pretrain.train import run as train_run
from bert_pretrain.train.optim import muon, optimizer

BASE = {
    "data.max_seq_length": "64",
    "data.dupe_factor": "1",
    "data.masking": "dynamic",
    "model.max_position_embeddings": "64",
    "model.hidden_dropout_prob": "0",
    "model.attention_probs_dropout_prob": "0",
    "train.global_batch_size": "32",
    "train.optimizer": "muon",
    "train.peak_lr": "3e-3",
    "train.warmup_ratio": "0.05",
    "train.weight_decay": "0.01",
}
"""What all variants share unless they say otherwise."""


@dataclass(frozen=True)
class Variant:
    """A change to the recipe, in words and in effect."""

    says: str
    settings: Mapping[str, str] = field(default_factory=dict)
    patch: Callable[[], None] = lambda: None


def _embedding_rate(factor: float) -> Callable[[], None]:
    """Return a patch that multiplies the learning rate of the embeddings, and of the output bias."""

    def patch() -> None:
        make, update = optimizer.make_optimizers, optimizer.update

        def scaled(model: nn.Module, config: TrainConfig) -> optimizer.Optimizers:
            optimizers = make(model, config)
            own = {id(p) for name, p in model.named_parameters() if "embeddings.weight" in name or "head.bias" in name}
            for one in optimizers:
                groups = []
                for group in one.param_groups:
                    for is_own in (False, True):
                        part = [p for p in group["params"] if (id(p) in own) is is_own]
                        if part:
                            groups.append({**group, "params": part, "lr_factor": factor if is_own else 1.0})
                one.param_groups[:] = groups
            return optimizers

        def with_factor(optimizers: optimizer.Optimizers, learning_rate: float, skip: Tensor) -> None:
            for one in optimizers:
                one.register_step_pre_hook(_scale_rates)
            update(optimizers, learning_rate, skip)
            for one in optimizers:
                one._optimizer_step_pre_hooks.clear()

        train_run.make_optimizers = scaled  # type: ignore[attr-defined]
        step.update = with_factor  # type: ignore[attr-defined]

    return patch


def _scale_rates(one: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for group in one.param_groups:
        group["lr"] *= group.get("lr_factor", 1.0)


def _muon_rate(factor: float) -> Callable[[], None]:
    """Return a patch that multiplies the learning rate of the encoder's matrices alone."""

    def patch() -> None:
        apply = muon._apply

        def scaled(bucket: Any, updates: Tensor, skip: Tensor) -> None:
            apply(bucket, updates * factor, skip)

        muon._apply = scaled

    return patch


def _all_masked() -> None:
    """Replace every predicted token by [MASK]."""
    masking._replacements = lambda originals, rule, rng: np.full_like(originals, rule.mask_id)


def _zero_head() -> None:
    """Start the encoder's output projections at zero, so that every layer begins as the identity."""
    make = train_run._make_model

    def zeroed(run: Any, latest: Any, teacher: Any) -> Any:
        model = make(run, latest, teacher)
        if latest is None:
            for name, weight in model.encoder.named_parameters():
                if name.endswith("output.weight"):
                    nn.init.zeros_(weight)
        return model

    train_run._make_model = zeroed


def _triangular() -> None:
    """Orthogonalise by a Cholesky factor and a triangular solve instead of Newton–Schulz iterations."""

    def orthogonalised(matrices: Tensor) -> Tensor:
        current = matrices.float()
        is_tall = current.shape[1] > current.shape[2]
        if is_tall:
            current = current.mT
        current = current / torch.linalg.matrix_norm(current, keepdim=True).clamp(min=1e-7)
        gram = current @ current.mT
        gram.diagonal(dim1=-2, dim2=-1).add_(1e-5)
        current = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), current, upper=False)
        return current.mT if is_tall else current

    muon.orthogonalised = orthogonalised


def _averaged() -> None:
    """Give the final model the mean of the weights at the end of each of the last 20 % of the steps."""
    fit = loop.fit

    def averaging(run: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        sums: dict[str, Tensor] = {}
        number = 0
        take = step.train_step

        def stepping(*step_args: Any, **step_kwargs: Any) -> None:
            nonlocal number
            take(*step_args, **step_kwargs)
            if state.progress.step >= 0.8 * run.length.steps:
                number += 1
                for name, weight in state.model.named_parameters():
                    mean = sums.setdefault(name, torch.zeros_like(weight))
                    mean.lerp_(weight.detach(), 1.0 / number)

        loop.train_step = stepping  # type: ignore[attr-defined]
        fit(run, state, *args, **kwargs)
        with torch.no_grad():
            for name, weight in state.model.named_parameters():
                weight.copy_(sums[name])

    train_run.fit = averaging  # type: ignore[attr-defined]


def _sets(**settings: object) -> dict[str, str]:
    return {name.replace("__", "."): str(value) for name, value in settings.items()}


VARIANTS: dict[str, Variant] = {
    "base": Variant("Muon 3e-3, 32 examples, 15 %, 80/10/10, no dropout, warm-up 5 %, linear to zero"),
    "auto": Variant(
        "as `run auto`: Muon 4e-3, output bias at log unigram frequencies, heads that begin at neighbouring tokens",
        _sets(train__peak_lr=4e-3, train__mlm_bias="unigram", train__init="positional_heads"),
    ),
    "positional-heads": Variant("heads begin at neighbouring tokens", _sets(train__init="positional_heads")),
    "unigram-bias": Variant("output bias starts at log unigram frequencies", _sets(train__mlm_bias="unigram")),
    "mask-20": Variant("masking rate 20 %", _sets(data__masked_lm_prob=0.2)),
    "mask-30": Variant("masking rate 30 %", _sets(data__masked_lm_prob=0.3)),
    "mask-40": Variant("masking rate 40 %", _sets(data__masked_lm_prob=0.4)),
    "all-mask": Variant("100 % [MASK] instead of 80/10/10", patch=_all_masked),
    "whole-words": Variant("whole-word masking", _sets(data__whole_word_mask=True)),
    "lr-1.5e-3": Variant("peak rate 1.5e-3", _sets(train__peak_lr=1.5e-3)),
    "lr-2e-3": Variant("peak rate 2e-3", _sets(train__peak_lr=2e-3)),
    "lr-4e-3": Variant("peak rate 4e-3", _sets(train__peak_lr=4e-3)),
    "lr-5e-3": Variant("peak rate 5e-3", _sets(train__peak_lr=5e-3)),
    "lr-6e-3": Variant("peak rate 6e-3", _sets(train__peak_lr=6e-3)),
    "lr-1e-2": Variant("peak rate 1e-2", _sets(train__peak_lr=1e-2)),
    "adamw-1e-3": Variant("AdamW 1e-3", _sets(train__optimizer="adamw", train__peak_lr=1e-3)),
    "adamw-2e-3": Variant("AdamW 2e-3", _sets(train__optimizer="adamw", train__peak_lr=2e-3)),
    "adamw-3e-3": Variant("AdamW 3e-3", _sets(train__optimizer="adamw", train__peak_lr=3e-3)),
    "adamw-4e-3": Variant("AdamW 4e-3", _sets(train__optimizer="adamw", train__peak_lr=4e-3)),
    "embedding-x2": Variant("embeddings' rate twice the rest", patch=_embedding_rate(2.0)),
    "embedding-x4": Variant("embeddings' rate four times the rest", patch=_embedding_rate(4.0)),
    "embedding-half": Variant("embeddings' rate half the rest", patch=_embedding_rate(0.5)),
    "matrices-x2": Variant("Muon's rate twice the rest", patch=_muon_rate(2.0)),
    "matrices-x4": Variant("Muon's rate four times the rest", patch=_muon_rate(4.0)),
    "matrices-x8": Variant("Muon's rate eight times the rest", patch=_muon_rate(8.0)),
    "matrices-half": Variant("Muon's rate half the rest", patch=_muon_rate(0.5)),
    "warmup-1": Variant("warm-up 1 %", _sets(train__warmup_ratio=0.01)),
    "warmup-15": Variant("warm-up 15 %", _sets(train__warmup_ratio=0.15)),
    "beta2-0.98": Variant("beta2 0.98", _sets(train__betas="[0.9, 0.98]")),
    "decay-0.1": Variant("weight decay 0.1", _sets(train__weight_decay=0.1)),
    "decay-0.3": Variant("weight decay 0.3", _sets(train__weight_decay=0.3)),
    "decay-1": Variant("weight decay 1", _sets(train__weight_decay=1.0)),
    "decay-3": Variant("weight decay 3", _sets(train__weight_decay=3.0)),
    "decay-0": Variant("weight decay 0", _sets(train__weight_decay=0.0)),
    "cosine": Variant("cosine to zero", _sets(train__schedule="cosine")),
    "no-nsp": Variant("no next-sentence pairs", _sets(data__next_sentence="none")),
    "dropout": Variant("dropout 0.1", _sets(model__hidden_dropout_prob=0.1, model__attention_probs_dropout_prob=0.1)),
    "copies-5": Variant("five copies of the pairs", _sets(data__dupe_factor=5)),
    "copies-20": Variant("twenty copies of the pairs", _sets(data__dupe_factor=20)),
    "zero-residual": Variant("output projections start at zero", patch=_zero_head),
    "triangular": Variant("Muon by a triangular solve", patch=_triangular),
    "averaged": Variant("mean of the weights of the last 20 % of the steps", patch=_averaged),
    "length-128": Variant(
        "length 128, half the examples",
        _sets(data__max_seq_length=128, model__max_position_embeddings=128, train__global_batch_size=16),
    ),
}
"""`train.global_batch_size`, sizes and vocabularies are flags of `bench_learning.py`: they change what a step costs."""


def main() -> None:
    name = sys.argv.pop(1)
    for part in name.split("+"):
        VARIANTS[part].patch()
    cli.main()


if __name__ == "__main__":
    main()
