"""Variants of our training step side by side, which only a card can judge; none of them is part of the package.

Each is applied from outside: hooks on modules, options of the compiler, other constants. Each has a process of its own,
forked after the imports, so that neither settings nor memory reach the next one. It takes the same first steps as the
unchanged step, whose losses show whether it still computes the same, and is then timed on one batch. What cannot be
applied here says why.

    python scripts/gpu_variants.py DATA_FOLDER [--variants NAME …] [--json FILE] [--limit SECONDS] [--size 12x768]
"""

import argparse
import importlib
import json
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from gpu_recipe import NotHere, Recipe, Scope, measure
from torch import Tensor, nn

from bert_pretrain.errors import UserError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.batches import Batch
from bert_pretrain.train.device import hardware
from bert_pretrain.train.loss import PretrainingLoss

LARGE_BLOCK_ROWS = 8192


@dataclass(frozen=True)
class Variant:
    """A change to the step, and in words what it is."""

    name: str
    says: str
    change: Callable[[Recipe], object]
    needs_cuda: bool = False
    is_small: bool = False
    """Of a small model, where launching kernels is what takes the time; compared with that model's base."""

    @property
    def label(self) -> str:
        return f"{self.name}, small" if self.is_small else self.name


# ── what variants change ──


def _nothing(recipe: Recipe) -> None:
    """Leave the step as the package makes it."""


def _set(**values: Any) -> Callable[[Recipe], None]:
    """Return a change of fields of the recipe."""

    def change(recipe: Recipe) -> None:
        for name, value in values.items():
            setattr(recipe, name, value)

    return change


def _four_times(share: float) -> Callable[[Recipe], None]:
    """Return a change to four times the examples, in micro-batches of a share of them."""

    def change(recipe: Recipe) -> None:
        recipe.examples *= 4
        recipe.micro_batch_share = share

    return change


def _constants(**values: Any) -> Callable[[Recipe], None]:
    """Return a change of constants of `train/loss.py`."""

    def change(recipe: Recipe) -> None:
        module = importlib.import_module("bert_pretrain.train.loss")
        for name, value in values.items():
            if not hasattr(module, name):
                raise NotHere(f"bert_pretrain/train/loss.py has no {name}")
            setattr(module, name, value)

    return change


def _inductor(**options: Any) -> Callable[[Recipe], None]:
    """Return a change of the compiler's options."""

    def change(recipe: Recipe) -> None:
        import torch._inductor.config as inductor

        for name, value in options.items():
            if not hasattr(inductor, name):
                raise NotHere(f"torch {torch.__version__} has no torch._inductor.config.{name}")
            setattr(inductor, name, value)
        recipe.compiled = True

    return change


def _cuda_graphs(recipe: Recipe) -> None:
    recipe.compiled, recipe.compile_mode = True, "reduce-overhead"
    recipe.before_step = torch.compiler.cudagraph_mark_step_begin


def _residual_in_16_bits(recipe: Recipe) -> None:
    """Let the normalisations of embeddings and layers put out 16 bits, so that the residual sums are in 16 bits too."""
    if recipe.dtype == torch.float32:
        raise NotHere("the precision is fp32")

    def change_model(model: BertForPreTraining) -> None:
        for part in (model.embeddings, model.encoder):
            for module in part.modules():
                if isinstance(module, nn.LayerNorm):
                    module.register_forward_hook(lambda module, inputs, output: output.to(recipe.dtype))

    recipe.change_model = change_model


class _CastTogether(torch.autograd.Function):
    """Cast many weights at once, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        cast = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        torch._foreach_copy_(cast, list(weights))
        return tuple(cast)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
        torch._foreach_copy_(wide, list(gradients))
        return (None, *wide)


class _CastFirst(nn.Module):
    """The losses, before which one operation casts the weights of all linear layers of the encoder."""

    def __init__(self, losses: PretrainingLoss, dtype: torch.dtype) -> None:
        super().__init__()
        self.losses, self.dtype = losses, dtype
        self.names = [
            f"{prefix}.{name}"
            for prefix, module in losses.named_modules()
            if isinstance(module, nn.Linear) and ".encoder." in prefix
            for name, _ in module.named_parameters(recurse=False)
        ]

    def forward(self, batch: Batch) -> Any:
        cast: Any = _CastTogether.apply
        weights = cast(self.dtype, *(self.losses.get_parameter(name) for name in self.names))
        return torch.func.functional_call(self.losses, dict(zip(self.names, weights, strict=True)), (batch,))


def _fused_cast(recipe: Recipe) -> None:
    if recipe.dtype == torch.float32:
        raise NotHere("the precision is fp32")
    recipe.wrap = lambda losses: _CastFirst(losses, recipe.dtype)


UNCHANGED, GRAPHS = "the step as the package makes it", "layers by torch.compile in its mode reduce-overhead"
VARIANTS = (
    Variant("base", UNCHANGED, _nothing),
    Variant("16-bit residual", "hidden states stay in 16 bits between layers", _residual_in_16_bits),
    Variant("not compiled", "train.compile false", _set(compiled=False)),
    Variant(
        "large decoder blocks",
        f"logits of {LARGE_BLOCK_ROWS:,} masked tokens at once",
        _constants(BLOCK_ROWS=LARGE_BLOCK_ROWS, SOFTMAX_ROWS={"cpu": 32, "cuda": LARGE_BLOCK_ROWS}),
    ),
    Variant("batch times four", "in one micro-batch", _four_times(1.0)),
    Variant("batch times four, cut", "in four micro-batches", _four_times(0.25)),
    Variant("micro-batches of a quarter", "the same batch in four micro-batches", _set(micro_batch_share=0.25)),
    Variant("fused cast", "one operation casts all weights of the layers", _fused_cast),
    Variant("base", UNCHANGED, _nothing, is_small=True),
    Variant("CUDA graphs", GRAPHS, _cuda_graphs, needs_cuda=True, is_small=True),
    Variant("not compiled", "train.compile false", _set(compiled=False), is_small=True),
    Variant("combo kernels", "Inductor: combo_kernels", _inductor(combo_kernels=True)),
    Variant("coordinate descent", "Inductor: coordinate_descent_tuning", _inductor(coordinate_descent_tuning=True)),
    Variant("CUDA graphs", GRAPHS, _cuda_graphs, needs_cuda=True),
    Variant("muon", "the optimizer", _set(train={"optimizer": "muon"})),
    Variant("lamb", "the optimizer", _set(train={"optimizer": "lamb"})),
    Variant("dropout", "0.1 of the hidden states", _set(dropout=0.1)),
    Variant("padded attention", "train.attention padded", _set(train={"attention": "padded"})),
    Variant("base again", "how far two runs of the same differ", _nothing),
)


def main() -> None:
    arguments = parse_arguments()
    folder = DataFolder.open(arguments.data)
    vocab_size = max(arguments.vocab_size, folder.tokenizer().vocab_size)
    scope = Scope(
        folder, arguments.device, arguments.precision, vocab_size, arguments.loss_steps, arguments.timed_steps
    )
    deadline = time.monotonic() + arguments.limit
    bases: dict[bool, dict[str, Any]] = {}
    chosen = choose(arguments.variants)
    for number, variant in enumerate(chosen):
        left = deadline - time.monotonic()
        if left < arguments.least:
            rest = ", ".join(one.label for one in chosen[number:])
            report({"variant": rest, "says": "", "outcome": "not run: no time left"}, arguments.json)
            break
        size = arguments.small_size if variant.is_small else arguments.size
        row = in_a_process(scope, variant, size, arguments.examples, min(left, arguments.variant_limit))
        if variant.name == "base" and row["outcome"] == "done":
            bases[variant.is_small] = row
        row = {"variant": variant.label, "says": variant.says, **row, **compared(row, bases.get(variant.is_small))}
        report(row, arguments.json)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--variants", nargs="+", default=None, metavar="NAME", help="all by default")
    parser.add_argument("--size", default="12x768", help="layers x hidden size")
    parser.add_argument("--small-size", default="4x256", help="of the variants for small models")
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=0, help="rows of the embedding, if more than the data's")
    parser.add_argument("--loss-steps", type=int, default=20, help="first steps, whose losses are compared")
    parser.add_argument("--timed-steps", type=int, default=30)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for all")
    parser.add_argument("--variant-limit", type=float, default=120.0, help="seconds for one")
    parser.add_argument("--least", type=float, default=25.0, help="seconds that must be left to start one")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="append the rows as lines of JSON")
    return parser.parse_args()


def choose(names: Sequence[str] | None) -> list[Variant]:
    """Return the variants of the given names in the order of the table, and the bases they are compared with."""
    if names is None:
        return list(VARIANTS)
    labels = [variant.label for variant in VARIANTS]
    unknown = [name for name in names if name not in labels]
    if unknown:
        raise SystemExit(f"unknown variants: {'; '.join(unknown)}. There are: {'; '.join(labels)}")
    wanted = [variant for variant in VARIANTS if variant.label in names]
    sizes = {variant.is_small for variant in wanted}
    return [one for one in VARIANTS if one in wanted or (one.name == "base" and one.is_small in sizes)]


def in_a_process(scope: Scope, variant: Variant, size: str, examples: int, limit: float) -> dict[str, Any]:
    """Measure a variant in a fork of this process, killed after `limit` seconds; returns its row."""
    # A fork saves the imports. It is safe because nothing so far has used CUDA or started a thread of torch's.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(scope, variant, size, examples, sender))
    begin = time.monotonic()
    process.start()
    sender.close()
    row: dict[str, Any] = {"outcome": f"stopped at its limit of {limit:.0f} s"}
    if receiver.poll(limit):
        try:
            row = receiver.recv()
        except EOFError:
            row = {"outcome": "failed: its process died"}
        process.join(5)
    if process.is_alive():
        process.kill()
    process.join()
    return {**row, "seconds": time.monotonic() - begin}


def _child(scope: Scope, variant: Variant, size: str, examples: int, sender: Connection) -> None:
    try:
        device = hardware.choose_device(scope.device)
        if variant.needs_cuda and device.type != "cuda":
            raise NotHere("it needs CUDA")
        recipe = Recipe(size, examples, device, hardware.choose_precision(scope.precision, device).dtype)
        variant.change(recipe)
        row = measure(scope, recipe)
    except (NotHere, UserError) as reason:
        row = {"outcome": f"not possible here: {reason}".split("\n")[0]}
    except Exception as error:
        traceback.print_exc()
        row = {"outcome": f"failed: {type(error).__name__}: {error}".split("\n")[0][:200]}
    sender.send(row)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # else the compiler's workers would be waited for


def compared(row: dict[str, Any], base: dict[str, Any] | None) -> dict[str, Any]:
    """Return how a row relates to the base's: time per example, and losses where the batches are the same."""
    if base is None or row["outcome"] != "done":
        return {}
    found: dict[str, Any] = {"time_over_base": base["examples_per_second"] / row["examples_per_second"]}
    if row["examples"] == base["examples"]:
        differences = [abs(own - other) for own, other in zip(row["losses"], base["losses"], strict=True)]
        # JSON has no number for a loss that is none; null is said to be one in the table.
        found["largest_loss_difference"] = max(differences) if all(map(math.isfinite, differences)) else None
    return found


def report(row: dict[str, Any], path: Path | None) -> None:
    """Print a row, and append it to the file of JSON lines."""
    print(describe(row), flush=True)
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def describe(row: dict[str, Any]) -> str:
    """Return a row as one line of the log."""
    if row["outcome"] != "done":
        return f"{row['variant']}: {row['outcome']}"
    text = (
        f"{row['variant']}: {1e3 * row['step_seconds']:.2f} ms, {row['examples_per_second']:,.0f} examples/s, "
        f"loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}"
    )
    if "time_over_base" in row:
        text += f", {row['time_over_base']:.3f} of base"
    if "largest_loss_difference" in row:
        text += f", largest difference of losses {row['largest_loss_difference']}"
    return text


if __name__ == "__main__":
    main()
