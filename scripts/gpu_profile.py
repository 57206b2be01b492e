"""Where the time of our training step goes on a card: kernels by kind and by name, gaps between them, launches a step.

A few steps run under torch.profiler, after others that warm up. The tables come from the events of the trace; on CPU,
where there are no kernels, from the operators' own times. The trace opens in chrome://tracing or Perfetto.

    python scripts/gpu_profile.py DATA_FOLDER --output FOLDER [--size 12x768] [--examples 256] [--json FILE]
"""

import argparse
import gzip
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_train import device_name
from gpu_recipe import Recipe, Scope, build, step_times

from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.train.device import hardware

MAX_TRACE_BYTES = 10 * 2**20
SHOWN_KERNELS, KERNEL_ROWS = 40, 12
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


class Event(NamedTuple):
    """Something that ran; times in seconds."""

    name: str
    start: float
    duration: float


@dataclass(frozen=True)
class Summary:
    """What the events of some steps come to."""

    seconds: float
    """A step, from the first event's start to the last one's end."""
    gap_share: float
    """Of that time, in which nothing ran."""
    launches: float
    """Events a step."""
    kinds: dict[str, float]
    """Kind of event -> seconds a step, the longest first."""
    kernels: list[tuple[str, float, float]]
    """(name, seconds a step, calls a step), the longest first."""


def main() -> None:
    arguments = parse_arguments()
    folder, device = DataFolder.open(arguments.data), hardware.choose_device(arguments.device)
    vocab_size = max(arguments.vocab_size, folder.tokenizer().vocab_size)
    scope = Scope(folder, arguments.device, "auto", vocab_size, loss_steps=3, timed_steps=2 * arguments.steps)
    recipe = Recipe(arguments.size, arguments.examples, device, hardware.choose_precision("auto", device).dtype)
    step, batches = build(scope, recipe)
    for batch in batches:
        step.take(batch)
    seconds = statistics.median(step_times(lambda: step.take(batches[0]), scope.timed_steps, device))
    arguments.output.mkdir(parents=True, exist_ok=True)
    trace = arguments.output / "profile-trace.json"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(arguments.steps):
            step.take(batches[0])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    profiler.export_chrome_trace(str(trace))
    summary = summarize(events_of(json.loads(trace.read_text())), arguments.steps)
    kept = pack(trace)
    title = (
        f"{device_name(device)}, torch {torch.__version__}, L{arguments.size.replace('x', '-H')}, {arguments.examples} "
        f"examples of at most {folder.max_seq_length} tokens, {arguments.steps} steps; {1e3 * seconds:.2f} ms a step "
        f"without the profiler; {kept}"
    )
    text = as_text(summary, title)
    (arguments.output / "profile.txt").write_text(text, encoding="utf-8")
    print(text[: text.index("\n\nkernel")])
    if arguments.json is not None:
        with arguments.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in as_rows(summary, seconds))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder of profile.txt and profile-trace.json.gz")
    parser.add_argument("--size", default="12x768", help="layers x hidden size")
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=0, help="rows of the embedding, if more than the data's")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="append the rows as lines of JSON")
    return parser.parse_args()


def events_of(trace: dict[str, Any]) -> list[Event]:
    """Return what ran on the card; where nothing did, the operators of the host with their own times."""
    complete = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_card = [event for event in complete if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if on_card:
        return [Event(event["name"], 1e-6 * float(event["ts"]), 1e-6 * float(event["dur"])) for event in on_card]
    return _own_times([event for event in complete if event.get("cat") == "cpu_op"])


def _own_times(operators: list[dict[str, Any]]) -> list[Event]:
    """Return operators with the times in which none that they call runs."""
    found: list[Event] = []
    open_ones: list[tuple[Any, float, int]] = []  # (thread, end, index in `found`) of those that others may be inside
    for event in sorted(operators, key=lambda event: (event["tid"], float(event["ts"]), -float(event["dur"]))):
        start, duration = 1e-6 * float(event["ts"]), 1e-6 * float(event["dur"])
        while open_ones and (open_ones[-1][0] != event["tid"] or open_ones[-1][1] <= start):
            open_ones.pop()
        if open_ones:
            caller = found[open_ones[-1][2]]
            found[open_ones[-1][2]] = caller._replace(duration=max(0.0, caller.duration - duration))
        open_ones.append((event["tid"], start + duration, len(found)))
        found.append(Event(event["name"], start, duration))
    return found


def kind_of(name: str) -> str:
    """Return the kind of kernel or operator of a name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def summarize(events: Sequence[Event], steps: int) -> Summary:
    """Add events up, over so many steps."""
    kinds: dict[str, float] = {}
    kernels: dict[str, list[float]] = {}
    for event in events:
        kind = kind_of(event.name)
        kinds[kind] = kinds.get(kind, 0.0) + event.duration / steps
        kernels.setdefault(event.name, []).append(event.duration)
    span = max(event.start + event.duration for event in events) - min(event.start for event in events)
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    return Summary(
        seconds=span / steps,
        gap_share=1.0 - busy_seconds(events) / span,
        launches=len(events) / steps,
        kinds=dict(sorted(kinds.items(), key=lambda item: -item[1])),
        kernels=[(name, sum(durations) / steps, len(durations) / steps) for name, durations in longest],
    )


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


def as_text(summary: Summary, title: str) -> str:
    """Return the tables for reading."""
    total = sum(summary.kinds.values())
    lines = [
        title,
        f"{1e3 * summary.seconds:.2f} ms a step under the profiler, gaps {summary.gap_share:.1%} of it, "
        f"{summary.launches:,.0f} launches a step",
        "",
        f"{'kind':<34}ms a step   share",
        *(f"{kind:<34}{1e3 * time:>9.3f}{time / total:>8.1%}" for kind, time in summary.kinds.items()),
        "",
        f"{'kernel':<80}ms a step   share  calls a step",
        *(
            f"{name[:78]:<80}{1e3 * time:>9.3f}{time / total:>8.1%}{calls:>14.1f}"
            for name, time, calls in summary.kernels[:SHOWN_KERNELS]
        ),
    ]
    return "\n".join(lines) + "\n"


def as_rows(summary: Summary, seconds: float) -> list[dict[str, Any]]:
    """Return the tables as JSON values: one row for the whole, one a kind, one for each of the longest kernels."""
    total = sum(summary.kinds.values())
    whole = {
        "step_seconds": seconds,
        "profiled_step_seconds": summary.seconds,
        "gap_share": summary.gap_share,
        "launches_per_step": summary.launches,
    }
    kinds = [{"kind_of_kernel": kind, "seconds": time, "share": time / total} for kind, time in summary.kinds.items()]
    kernels = [
        {"kernel": name[:200], "seconds": time, "share": time / total, "calls_per_step": calls}
        for name, time, calls in summary.kernels[:KERNEL_ROWS]
    ]
    return [whole, *kinds, *kernels]


if __name__ == "__main__":
    main()
