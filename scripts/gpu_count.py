"""Estimate the time of a training step on an H100 from counted bytes and launches; no GPU is needed.

    python scripts/gpu_count.py

`tests/cuda/layers.py` counts one layer on a fake CUDA device, which needs a C++ compiler and a CPU build of torch.
The unit u is one tensor of tokens × hidden in 16 bits. LAUNCH_SECONDS is fitted to the recorded step of L4-H256, the
other constants to a profile of Base. So only the recorded step of Large tests the estimate.
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
MATMUL_FLOPS, BYTES_PER_SECOND = 708e12, 3.0e12
# Memory traffic of attention over packed sequences of 128 tokens, forward and backward (minimum: 4 and 7 u).
# "triton" was measured on an H200 with 4.2 TB/s, everything else on an H100.
ATTENTION_U = {"varlen": (6.2, 25.7), "triton": (5.8, 16.6)}
SCORE_FLOPS = 300e12  # assumed speed of attention over more than 128 tokens, where matrix products dominate
LAUNCH_SECONDS = 42e-6  # host time per launch in a step bound by the host
OUTSIDE_LAUNCHES = 226  # launches per step outside the layers
GRAPH_LAUNCHES = 20  # launches per step as one CUDA graph: copies of the batch to the device and the graph's inputs
IDLE_SECONDS = 2e-3  # between two steps
EMBEDDINGS_U = 24
VOCABULARY, MASKED_SHARE = 30_528, 0.15
OPTIMIZER_BYTES = 40  # per weight, for AdamW and gradient clipping
CAST_BYTES = 12  # per weight
# By whether the step is a recorded one: bytes per logit, and masked rows in a block, after which the gradient of the
# decoder is read and written.
LOGIT_BYTES, BLOCK_ROWS = {True: 20, False: 8}, {True: 1024, False: 4096}
DECODER_BYTES = 12  # per value of the decoder's gradient


@dataclass(frozen=True)
class Step:
    """A recorded step."""

    name: str
    layers: int
    hidden: int
    length: int
    tokens: int  # including the dummy tail
    milliseconds: float


RECORDED = (
    Step("Base, 256 × 128", 12, 768, 128, 30_720, 52.1),
    Step("Large, 32 × 512", 24, 1024, 512, 14_592, 85.9),
    Step("L4-H256, 256 × 128", 4, 256, 128, 30_720, 21.0),
)


def unit(step: Step) -> float:
    """Return the size of u in bytes."""
    return 2.0 * step.tokens * step.hidden


def estimate(step: Step, layer_bytes: float, launches: float, attention_u: float, is_recorded: bool = False) -> float:
    """Return the milliseconds of a step.

    `layer_bytes` is the memory traffic of a layer outside matrix products and attention; `launches` is per layer.
    """
    masked, matrix = MASKED_SHARE * step.tokens, VOCABULARY * step.hidden
    weights = 12 * step.layers * step.hidden**2
    products = 6.0 * (weights * step.tokens + matrix * masked)
    moved = step.layers * (layer_bytes + attention_u * unit(step)) + EMBEDDINGS_U * unit(step)
    moved += OPTIMIZER_BYTES * (weights + matrix) + LOGIT_BYTES[is_recorded] * masked * VOCABULARY
    moved += DECODER_BYTES * matrix * -(-masked // BLOCK_ROWS[is_recorded])
    scores = 14.0 * step.layers * step.tokens * step.length * step.hidden if step.length > 128 else 0.0
    seconds = products / MATMUL_FLOPS + moved / BYTES_PER_SECOND + scores / SCORE_FLOPS + IDLE_SECONDS
    return 1e3 * max(seconds, (step.layers * launches + OUTSIDE_LAUNCHES) * LAUNCH_SECONDS)


def load_fake_device() -> None:
    """Compile and load the fake CUDA device. Must be called before torch is imported."""
    torch_folder = Path(sysconfig.get_paths()["purelib"]) / "torch"
    library = Path(tempfile.mkdtemp()) / "libhooks.so"
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-shared", "-fPIC", str(REPOSITORY / "tests/cuda/hooks.cpp")]
    command += ["-I", str(torch_folder / "include"), "-L", str(torch_folder / "lib"), "-lc10", "-ltorch_cpu"]
    subprocess.run([*command, f"-Wl,-rpath,{torch_folder / 'lib'}", "-o", str(library)], check=True)
    ctypes.CDLL(str(library))
    sys.path.insert(0, str(REPOSITORY))


def main() -> None:
    load_fake_device()
    from bert_pretrain.model.short_attention import MAX_SEQLEN
    from tests.cuda.layers import count

    print("| step | layer | u per layer | launches per layer | ms | recorded, ms |\n|---|---|--:|--:|--:|--:|")
    for step in RECORDED:
        ways = [("as recorded", "varlen"), ("now, flash attention", "varlen")]
        ways += [("now", "triton")] if step.length <= MAX_SEQLEN else []
        for name, attention in ways:
            is_recorded, attention_u = name == "as recorded", sum(ATTENTION_U[attention])
            moved, launches = count(step.hidden, step.tokens, step.length, attention, is_recorded).values()
            if not is_recorded:  # two launches cast the weights, outside the layer
                moved, launches = moved + CAST_BYTES * 12 * step.hidden**2, launches + 2
            time = estimate(step, moved, launches, attention_u, is_recorded)
            recorded = f"{step.milliseconds} ({time / step.milliseconds - 1:+.0%})" if is_recorded else ""
            traffic = moved / unit(step) + attention_u
            print(f"| {step.name} | {name} | {traffic:.0f} | {launches:.0f} | {time:.1f} | {recorded} |", flush=True)
        # A step of GRAPH_LAUNCHES launches in total: `estimate` adds OUTSIDE_LAUNCHES.
        time = estimate(step, moved, (GRAPH_LAUNCHES - OUTSIDE_LAUNCHES) / step.layers, attention_u)
        print(f"| | and the step one CUDA graph | {traffic:.0f} | – | {time:.1f} | |")


if __name__ == "__main__":
    main()
