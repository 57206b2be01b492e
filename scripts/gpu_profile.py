"""Profile the training step: time by kind of kernel and by kernel, gaps between kernels, launches per step.

On CPU, operators are listed instead of kernels. The trace opens in chrome://tracing or Perfetto.

    python scripts/gpu_profile.py DATA_FOLDER --output FOLDER [--size 12x768] [--examples 256] [--json FILE]
"""

import argparse
import gzip
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_train import Recipe, add_step_arguments, build, device_name, step_times, wait_for
from measure import append_rows, parser_of

MAX_TRACE_BYTES = 10 * 2**20
TEXT_KERNELS, JSON_KERNELS = 40, 12  # kernels listed in profile.txt and in --json, the longest first
VIEWS = "transpose|permute|view|clone|slice|select|split|unbind|expand|t"
KINDS = (
    # The first pattern that matches decides. Inductor names a kernel after the operators it fuses.
    ("attention", r"flash|fmha|scaled_dot_product|sdpa|varlen_attn|^attention_(forward|backward)"),
    ("optimizer and clipping", r"multi_tensor_apply|fused_adam|_foreach_|linalg_vector_norm"),
    ("casts", rf"^triton_poi_fused_(?:(?:_to_copy|{VIEWS})_)+\d+$|direct_copy|_copy_kernel|aten::copy_"),
    ("matrix products", r"^triton_tem|nvjet|gemm|gemv|cutlass|cublas|xmma|splitk|^aten::(add|b|_scaled_)?mm|^mkldnn::"),
    ("norms, softmax, sums", r"^triton_(red|per)|softmax|layer_norm|reduce_kernel|^aten::(sum|amax|argmax|max)\b"),
    ("pointwise", r"^triton_poi|elementwise|^aten::(add|sub|mul|div|gelu|tanh|fill|zero|neg)_?"),
    ("embeddings and indexing", r"embedding|index|gather|scatter|sort|radix|arange|repeat_interleave"),
    ("copies and fills of memory", r"memcpy|memset"),
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for profile.txt and profile-trace.json.gz")
    parser.add_argument("--steps", type=int, default=5)
    add_step_arguments(parser, examples=256, dropout=0.0)
    parser.add_argument("--size", default="12x768", help="layers x hidden size")
    profile(parser.parse_args())


class Event(NamedTuple):
    """A kernel or an operator."""

    name: str
    start: float  # seconds
    duration: float  # seconds


def profile(arguments: argparse.Namespace) -> None:
    recipe = Recipe.of(arguments, arguments.size)
    take, batches = build(recipe, 3)
    for batch in batches:
        take(batch)
    seconds = statistics.median(step_times(lambda: take(batches[0]), 2 * arguments.steps, recipe.device))
    arguments.output.mkdir(parents=True, exist_ok=True)
    trace = arguments.output / "profile-trace.json"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if recipe.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(arguments.steps):
            take(batches[0])
        wait_for(recipe.device)
    profiler.export_chrome_trace(str(trace))
    rows = summarize(events_of(json.loads(trace.read_text())), arguments.steps)
    rows[0]["step_seconds"] = seconds
    title = (
        f"{device_name(recipe.device)}, torch {torch.__version__}, L{arguments.size.replace('x', '-H')}, "
        f"{arguments.examples} examples of at most {recipe.folder.max_seq_length} tokens, {arguments.steps} steps; "
        f"{1e3 * seconds:.2f} ms per step without the profiler; {pack(trace)}"
    )
    text = as_text(rows, title)
    (arguments.output / "profile.txt").write_text(text, encoding="utf-8")
    print(text[: text.index("\n\nkernel")])
    if arguments.json is not None:
        kernels = [row for row in rows if "kernel" in row]
        append_rows(arguments.json, [row for row in rows if row not in kernels[JSON_KERNELS:]])


def events_of(trace: dict[str, Any]) -> list[Event]:
    """Return the kernels and copies on the GPU. Without a GPU, return the operators, nested ones included."""
    complete = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_gpu = [event for event in complete if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    events = on_gpu or [event for event in complete if event.get("cat") == "cpu_op"]
    return [Event(event["name"], 1e-6 * float(event["ts"]), 1e-6 * float(event["dur"])) for event in events]


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def summarize(events: Sequence[Event], steps: int) -> list[dict[str, Any]]:
    """Return rows of times in seconds per step: the total, then each kind, then the longest kernels."""
    kinds: dict[str, float] = {}
    kernels: dict[str, list[float]] = {}
    for event in events:
        kind = kind_of(event.name)
        kinds[kind] = kinds.get(kind, 0.0) + event.duration / steps
        kernels.setdefault(event.name, []).append(event.duration)
    span = max(event.start + event.duration for event in events) - min(event.start for event in events)
    gap_share = 1.0 - busy_seconds(events) / span
    rows: list[dict[str, Any]] = [
        {"profiled_step_seconds": span / steps, "gap_share": gap_share, "launches_per_step": len(events) / steps}
    ]
    total = sum(kinds.values())
    for kind, time in sorted(kinds.items(), key=lambda item: -item[1]):
        rows.append({"kind_of_kernel": kind, "seconds": time, "share": time / total})
    for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:TEXT_KERNELS]:
        time = sum(times) / steps
        row = {"kernel": name[:200], "seconds": time, "share": time / total, "calls_per_step": len(times) / steps}
        rows.append(row)
    return rows


def busy_seconds(events: Iterable[Event]) -> float:
    """Return the time in which at least one event ran."""
    busy, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        busy += max(0.0, event.start + event.duration - max(event.start, end))
        end = max(end, event.start + event.duration)
    return busy


def pack(trace: Path) -> str:
    """Compress a trace, or delete it if it is too large. Return a sentence about it."""
    packed = gzip.compress(trace.read_bytes(), 6)
    trace.unlink()
    if len(packed) > MAX_TRACE_BYTES:
        return f"trace deleted: {len(packed) / 2**20:.0f} MiB compressed"
    trace.with_suffix(".json.gz").write_bytes(packed)
    return f"trace in {trace.name}.gz"


def as_text(rows: Sequence[dict[str, Any]], title: str) -> str:
    total = rows[0]
    lines = [
        title,
        f"{1e3 * total['profiled_step_seconds']:.2f} ms per step under the profiler, {total['gap_share']:.1%} of the "
        f"time in gaps, {total['launches_per_step']:,.0f} launches per step",
    ]
    for key in ("kind_of_kernel", "kernel"):
        lines += ["", f"{key.replace('_', ' '):<80}{'ms/step':>9}{'share':>8}{'calls/step':>14}"]
        lines += [
            f"{row[key][:78]:<80}{1e3 * row['seconds']:>9.3f}{row['share']:>8.1%}{row.get('calls_per_step', ''):>14}"
            for row in rows
            if key in row
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
