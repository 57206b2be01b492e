"""Estimate a step on an H100 without a card, from counted bytes and launches.

    python scripts/gpu_count.py

`tests/cuda/layers.py` counts a layer on a pretended device, which needs a C++ compiler and a CPU build of torch. u is
one tensor of tokens × hidden in 16 bits. The constants are from one recorded profile of Base, and the time of a launch
from L4-H256: of the three recorded steps only Large is a test of the estimate.
"""

import ctypes
import os
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PRODUCT_FLOPS, BYTES_PER_SECOND = 708e12, 3.0e12
ATTENTION_U = {"varlen": (6.2, 25.7), "triton": (5.8, 16.6)}
"""Memory traffic of attention to packed sequences of 128, forward and backward (minimum 4 and 7). The second entry
is from times on an H200 with 4.2 TB/s, all others from an H100."""
SCORE_FLOPS = 300e12
"""Speed of attention to more than 128 tokens, where matrix products decide; an assumption."""
LAUNCH_SECONDS, OUTSIDE_LAUNCHES = 42e-6, 226
"""With all that the host does for one, in a step that waits for the host; launches of a step outside its layers."""
AROUND_A_GRAPH = 20
"""Launches of a step that is one CUDA graph: the batch to the device and to the graph's inputs."""
IDLE_SECONDS = 2e-3
"""How long nothing runs between two steps."""
EMBEDDINGS_U = 24
VOCABULARY, MASKED_SHARE, BLOCK_ROWS = 30_528, 0.15, 1024
OPTIMIZER_BYTES, CAST_BYTES, LOGIT_BYTES, DECODER_BYTES = 40, 12, 20, 12
"""Bytes per weight for AdamW and clipping, per weight for casts, per logit, per value of the decoder's gradient."""


@dataclass(frozen=True)
class Step:
    """A step that was recorded; its tokens with the tail."""

    name: str
    layers: int
    hidden: int
    length: int
    tokens: int
    milliseconds: float


RECORDED = (
    Step("Base, 256 × 128", 12, 768, 128, 30_720, 52.1),
    Step("Large, 32 × 512", 24, 1024, 512, 14_592, 85.9),
    Step("L4-H256, 256 × 128", 4, 256, 128, 30_720, 21.0),
)


def unit(step: Step) -> float:
    """Return the bytes of u."""
    return 2.0 * step.tokens * step.hidden


def estimate(step: Step, layer_bytes: float, launches: float, attention_u: float) -> float:
    """Return milliseconds of a step whose layers move so much outside products and attention, and launch so often."""
    masked, matrix = MASKED_SHARE * step.tokens, VOCABULARY * step.hidden
    weights = 12 * step.layers * step.hidden**2
    products = 6.0 * (weights * step.tokens + matrix * masked)
    moved = step.layers * (layer_bytes + attention_u * unit(step)) + EMBEDDINGS_U * unit(step)
    moved += OPTIMIZER_BYTES * (weights + matrix) + LOGIT_BYTES * masked * VOCABULARY
    moved += DECODER_BYTES * matrix * -(-masked // BLOCK_ROWS)
    scores = 14.0 * step.layers * step.tokens * step.length * step.hidden if step.length > 128 else 0.0
    seconds = products / PRODUCT_FLOPS + moved / BYTES_PER_SECOND + scores / SCORE_FLOPS + IDLE_SECONDS
    return 1e3 * max(seconds, (step.layers * launches + OUTSIDE_LAUNCHES) * LAUNCH_SECONDS)


def pretend() -> None:
    """Load the pretended device, which must be there before torch is imported."""
    torch_folder = Path(sysconfig.get_paths()["purelib"]) / "torch"
    library = Path(tempfile.mkdtemp()) / "libhooks.so"
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-shared", "-fPIC", str(REPOSITORY / "tests/cuda/hooks.cpp")]
    command += ["-I", str(torch_folder / "include"), "-L", str(torch_folder / "lib"), "-lc10", "-ltorch_cpu"]
    subprocess.run([*command, f"-Wl,-rpath,{torch_folder / 'lib'}", "-o", str(library)], check=True)
    ctypes.CDLL(str(library))
    sys.path.insert(0, str(REPOSITORY))


def main() -> None:
    pretend()
    from bert_pretrain.model.short_attention import LONGEST
    from tests.cuda.layers import count

    print("| step | layer | u a layer | launches | ms | recorded |\n|---|---|--:|--:|--:|--:|")
    for step in RECORDED:
        ways = [("as recorded", "varlen"), ("now, flash attention", "varlen")]
        ways += [("now", "triton")] if step.length <= LONGEST else []
        for name, attention in ways:
            is_recorded, attention_u = name == "as recorded", sum(ATTENTION_U[attention])
            moved, launches = count(step.hidden, step.tokens, step.length, attention, is_recorded).values()
            if not is_recorded:  # the casts are outside the layer, two launches
                moved, launches = moved + CAST_BYTES * 12 * step.hidden**2, launches + 2
            found = estimate(step, moved, launches, attention_u)
            compared = f"{step.milliseconds} ({found / step.milliseconds - 1:+.0%})" if is_recorded else ""
            shown = moved / unit(step) + attention_u
            print(f"| {step.name} | {name} | {shown:.0f} | {launches:.0f} | {found:.1f} | {compared} |", flush=True)
        whole = (AROUND_A_GRAPH - OUTSIDE_LAUNCHES) / step.layers
        found = estimate(step, moved, whole, attention_u)
        print(f"| | and the step one CUDA graph | {shown:.0f} | – | {found:.1f} | |")


if __name__ == "__main__":
    main()
