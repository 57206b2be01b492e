"""Our training step on a card: a profile of where its time goes, and variants of it side by side.

`profile` runs a few steps under torch.profiler: kernels by kind and by name, gaps between them, launches per step; on
CPU, where there are no kernels, the operators. The trace opens in chrome://tracing or Perfetto. `variants`
changes the step from outside: other keys, constants, options of the compiler; none is part of the package.
Each has a process of its own. It takes the same first steps as the unchanged step, whose losses show whether it still
computes the same, and is then timed on one batch. What cannot be applied here says why.

    python scripts/gpu_step.py profile DATA_FOLDER --output FOLDER [--size 12x768] [--examples 256] [--json FILE]
    python scripts/gpu_step.py variants DATA_FOLDER [--variants NAME …] [--json FILE] [--limit SECONDS]
"""

import argparse
import gzip
import json
import math
import multiprocessing
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from bench_train import (
    Recipe,
    add_step_arguments,
    append_json,
    build,
    device_name,
    peak_memory,
    step_times,
    watch_memory,
)

from bert_pretrain.errors import UserError
from bert_pretrain.train import loss

MAX_TRACE_BYTES = 10 * 2**20
SHOWN_KERNELS, KERNEL_ROWS = 40, 12
LARGE_BLOCK_ROWS = 8192
VIEWS = "transpose|permute|view|clone|slice|select|split|unbind|expand|t"
KINDS = (
    # The first pattern that is found in a kernel's name decides; Inductor names its kernels after what they fuse.
    ("attention", r"flash|fmha|scaled_dot_product|sdpa|varlen_attn"),
    ("optimizer and clipping", r"multi_tensor_apply|fused_adam|_foreach_|linalg_vector_norm"),
    ("casts", rf"^triton_poi_fused_(?:(?:_to_copy|{VIEWS})_)+\d+$|direct_copy|_copy_kernel|aten::copy_"),
    ("matrix products", r"^triton_tem|nvjet|gemm|gemv|cutlass|cublas|xmma|splitk|^aten::(add|b|_scaled_)?mm|^mkldnn::"),
    ("norms, softmax, sums", r"^triton_(red|per)|softmax|layer_norm|reduce_kernel|^aten::(sum|amax|argmax|max)\b"),
    ("pointwise", r"^triton_poi|elementwise|^aten::(add|sub|mul|div|gelu|tanh|fill|zero|neg)_?"),
    ("embeddings and indexing", r"embedding|index|gather|scatter|sort|radix|arange|repeat_interleave"),
    ("copies and fills of memory", r"memcpy|memset"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(required=True)
    profiled, varied = commands.add_parser("profile"), commands.add_parser("variants")
    profiled.set_defaults(run=profile)
    profiled.add_argument("--output", type=Path, required=True, help="folder of profile.txt, profile-trace.json.gz")
    profiled.add_argument("--steps", type=int, default=5)
    varied.set_defaults(run=compare_variants)
    varied.add_argument("--variants", nargs="+", default=None, metavar="NAME", help="all by default")
    varied.add_argument("--small-size", default="4x256", help="of the variants for small models")
    varied.add_argument("--loss-steps", type=int, default=20, help="first steps, whose losses are compared")
    varied.add_argument("--timed-steps", type=int, default=30)
    varied.add_argument("--limit", type=float, default=3600.0, help="seconds for all")
    varied.add_argument("--variant-limit", type=float, default=120.0, help="seconds for one")
    varied.add_argument("--least", type=float, default=25.0, help="seconds that must be left to start one")
    for command in (profiled, varied):
        add_step_arguments(command, examples=256, dropout=0.0)
        command.add_argument("--size", default="12x768", help="layers x hidden size")
    arguments = parser.parse_args()
    arguments.run(arguments)


# ── profile ──


class Event(NamedTuple):
    """Something that ran; times in seconds."""

    name: str
    start: float
    duration: float


def profile(arguments: argparse.Namespace) -> None:
    """Profile a few steps after others that warm up, and write the tables."""
    recipe = Recipe.of(arguments, arguments.size)
    step, batches = build(recipe, 3)
    for batch in batches:
        step.take(batch)
    seconds = statistics.median(step_times(lambda: step.take(batches[0]), 2 * arguments.steps, recipe.device))
    arguments.output.mkdir(parents=True, exist_ok=True)
    trace = arguments.output / "profile-trace.json"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if recipe.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(arguments.steps):
            step.take(batches[0])
        if recipe.device.type == "cuda":
            torch.cuda.synchronize(recipe.device)
    profiler.export_chrome_trace(str(trace))
    rows = summarize(events_of(json.loads(trace.read_text())), arguments.steps)
    rows[0]["step_seconds"] = seconds
    title = (
        f"{device_name(recipe.device)}, torch {torch.__version__}, L{arguments.size.replace('x', '-H')}, "
        f"{arguments.examples} examples of at most {recipe.folder.max_seq_length} tokens, {arguments.steps} steps; "
        f"{1e3 * seconds:.2f} ms a step without the profiler; {pack(trace)}"
    )
    text = as_text(rows, title)
    (arguments.output / "profile.txt").write_text(text, encoding="utf-8")
    print(text[: text.index("\n\nkernel")])
    kernels = [row for row in rows if "kernel" in row]
    append_json(arguments.json, [row for row in rows if row not in kernels[KERNEL_ROWS:]])


def events_of(trace: dict[str, Any]) -> list[Event]:
    """Return what ran on the card; where nothing did, the operators of the host, also those that others call."""
    complete = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_card = [event for event in complete if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found = on_card or [event for event in complete if event.get("cat") == "cpu_op"]
    return [Event(event["name"], 1e-6 * float(event["ts"]), 1e-6 * float(event["dur"])) for event in found]


def kind_of(name: str) -> str:
    """Return the kind of kernel or operator of a name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def summarize(events: Sequence[Event], steps: int) -> list[dict[str, Any]]:
    """Return rows of seconds per step: the whole, then each kind and the longest kernels, the longest first."""
    kinds: dict[str, float] = {}
    kernels: dict[str, list[float]] = {}
    for event in events:
        kind = kind_of(event.name)
        kinds[kind] = kinds.get(kind, 0.0) + event.duration / steps
        kernels.setdefault(event.name, []).append(event.duration)
    span = max(event.start + event.duration for event in events) - min(event.start for event in events)
    whole = {
        "profiled_step_seconds": span / steps,
        "gap_share": 1.0 - busy_seconds(events) / span,
        "launches_per_step": len(events) / steps,
    }
    total = sum(kinds.values())
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:SHOWN_KERNELS]
    return [
        whole,
        *(
            {"kind_of_kernel": kind, "seconds": time, "share": time / total}
            for kind, time in sorted(kinds.items(), key=lambda item: -item[1])
        ),
        *(
            {
                "kernel": name[:200],
                "seconds": sum(times) / steps,
                "share": sum(times) / steps / total,
                "calls_per_step": len(times) / steps,
            }
            for name, times in longest
        ),
    ]


def busy_seconds(events: Iterable[Event]) -> float:
    """Return the time in which at least one event ran."""
    busy, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        busy += max(0.0, event.start + event.duration - max(event.start, end))
        end = max(end, event.start + event.duration)
    return busy


def pack(trace: Path) -> str:
    """Compress a trace, or delete it where it stays large; returns what was done."""
    packed = gzip.compress(trace.read_bytes(), 6)
    trace.unlink()
    if len(packed) > MAX_TRACE_BYTES:
        return f"the trace is not kept, compressed it has {len(packed) / 2**20:.0f} MiB"
    trace.with_suffix(".json.gz").write_bytes(packed)
    return f"trace in {trace.name}.gz"


def as_text(rows: Sequence[dict[str, Any]], title: str) -> str:
    """Return the tables for reading."""
    whole = rows[0]
    lines = [
        title,
        f"{1e3 * whole['profiled_step_seconds']:.2f} ms a step under the profiler, gaps {whole['gap_share']:.1%} of it"
        f", {whole['launches_per_step']:,.0f} launches a step",
    ]
    for key in ("kind_of_kernel", "kernel"):
        lines += ["", f"{key.replace('_', ' '):<80}ms a step   share  calls a step"]
        lines += [
            f"{row[key][:78]:<80}{1e3 * row['seconds']:>9.3f}{row['share']:>8.1%}{row.get('calls_per_step', ''):>14}"
            for row in rows
            if key in row
        ]
    return "\n".join(lines) + "\n"


# ── variants ──


class NotHere(Exception):
    """A variant that cannot be applied on this machine; the message says why."""


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


def _set(**values: Any) -> Callable[[Recipe], None]:
    """Return a change of fields of the recipe; without any the step is as the package makes it."""
    return lambda recipe: vars(recipe).update(values)


def _four_times(recipe: Recipe) -> None:
    recipe.examples *= 4
    recipe.micro_batch_share = 1.0


def _large_blocks(recipe: Recipe) -> None:
    loss.BLOCK_ROWS = loss.SOFTMAX_ROWS["cuda"] = LARGE_BLOCK_ROWS


def _cuda_graphs(recipe: Recipe) -> None:
    recipe.train, recipe.compile_mode = {"compile": True}, "reduce-overhead"
    recipe.before_step = torch.compiler.cudagraph_mark_step_begin


UNCHANGED, GRAPHS = "the step as the package makes it", "layers by torch.compile in its mode reduce-overhead"
VARIANTS = (
    Variant("base", UNCHANGED, _set()),
    Variant("not compiled", "train.compile false", _set(train={"compile": False})),
    Variant(
        "large decoder blocks",
        f"logits of {LARGE_BLOCK_ROWS:,} masked tokens at once",
        _large_blocks,
    ),
    Variant("batch times four", "in one micro-batch", _four_times),
    Variant("base", UNCHANGED, _set(), is_small=True),
    Variant("CUDA graphs", GRAPHS, _cuda_graphs, needs_cuda=True, is_small=True),
    Variant("CUDA graphs", GRAPHS, _cuda_graphs, needs_cuda=True),
    Variant("muon", "the optimizer", _set(train={"optimizer": "muon"})),
    Variant("lamb", "the optimizer", _set(train={"optimizer": "lamb"})),
    Variant("dropout", "0.1 of the hidden states", _set(dropout=0.1)),
    Variant("padded attention", "train.attention padded", _set(train={"attention": "padded"})),
    Variant("base again", "how far two runs of the same differ", _set()),
)


def compare_variants(arguments: argparse.Namespace) -> None:
    """Measure the variants, each in a process of its own, and print a row for each."""
    deadline = time.monotonic() + arguments.limit
    bases: dict[bool, dict[str, Any]] = {}
    chosen = choose(arguments.variants)
    for number, variant in enumerate(chosen):
        left = deadline - time.monotonic()
        if left < arguments.least:
            rest = ", ".join(one.label for one in chosen[number:])
            report({"variant": rest, "says": "", "outcome": "not run: no time left"}, arguments.json)
            break
        row = in_a_process(arguments, variant, min(left, arguments.variant_limit))
        if variant.name == "base" and row["outcome"] == "done":
            bases[variant.is_small] = row
        row = {"variant": variant.label, "says": variant.says, **row, **compared(row, bases.get(variant.is_small))}
        report(row, arguments.json)


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


def in_a_process(arguments: argparse.Namespace, variant: Variant, limit: float) -> dict[str, Any]:
    """Measure a variant in a fork of this process, killed after `limit` seconds; returns its row."""
    # A fork saves the imports. It is safe because nothing so far has used CUDA or started a thread of torch's.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(arguments, variant, sender))
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


def _child(arguments: argparse.Namespace, variant: Variant, sender: Connection) -> None:
    try:
        recipe = Recipe.of(arguments, arguments.small_size if variant.is_small else arguments.size)
        if variant.needs_cuda and recipe.device.type != "cuda":
            raise NotHere("it needs CUDA")
        variant.change(recipe)
        row = measure(recipe, arguments.loss_steps, arguments.timed_steps)
    except (NotHere, UserError) as reason:
        row = {"outcome": f"not possible here: {reason}".split("\n")[0]}
    except Exception as error:
        traceback.print_exc()
        row = {"outcome": f"failed: {type(error).__name__}: {error}".split("\n")[0][:200]}
    sender.send(row)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # else the compiler's workers would be waited for


def measure(recipe: Recipe, loss_steps: int, timed_steps: int) -> dict[str, Any]:
    """Return a recipe's first losses, the times of its step, and its memory, as JSON values."""
    start_of_memory = watch_memory(recipe.device)
    step, batches = build(recipe, loss_steps)
    begin, losses = time.monotonic(), []
    for batch in batches:
        step.take(batch)
        losses.append(step.loss())
    warm_up_seconds = time.monotonic() - begin
    seconds = step_times(lambda: step.take(batches[0]), timed_steps, recipe.device)
    low, median, high = (float(value) for value in np.quantile(seconds, [0.25, 0.5, 0.75]))
    return {
        "outcome": "done",
        "size": f"L{recipe.size.replace('x', '-H')}",
        "max_seq_length": recipe.folder.max_seq_length,
        "examples": batches[0].num_sequences,
        "micro_batches": len(batches[0].micro_batches),
        "step_seconds": median,
        "step_seconds_quartiles": [low, high],
        "examples_per_second": batches[0].num_sequences / median,
        "peak_memory_bytes": peak_memory(recipe.device) - start_of_memory,
        "losses": losses,
        "warm_up_seconds": warm_up_seconds,
        "device": device_name(recipe.device),
    }


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
    append_json(path, [row])
    if row["outcome"] != "done":
        print(f"{row['variant']}: {row['outcome']}", flush=True)
        return
    milliseconds, losses = 1e3 * row["step_seconds"], row["losses"]
    print(
        f"{row['variant']}: {milliseconds:.2f} ms, {row['examples_per_second']:,.0f} examples/s, "
        f"{row.get('time_over_base', 1.0):.3f} of base, loss {losses[0]:.4f} -> {losses[-1]:.4f}, "
        f"largest difference of losses {row.get('largest_loss_difference')}",
        flush=True,
    )


if __name__ == "__main__":
    main()
