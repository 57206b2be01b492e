"""Compare our training step with `BertForPreTraining` of transformers: same shapes, examples and precision.

With `--architecture modernbert`, compare it with our step of a BERT with as many weights.

The peer pads its examples to the maximum length and computes the logits of all positions. On CUDA it runs eager and
compiled. A step is forward, backward, gradient clipping and AdamW. Both run in separate processes, and their steps are
timed alternately. The table shows medians, and the quartiles of the ratio. MFU counts the operations of real tokens,
relative to the measured speed of a large matrix product and to the peak in the data sheet of known GPUs.

    python scripts/bench_train.py DATA_FOLDER [--sizes 2x128 4x256 12x768] [--examples 64] [--pairs 5] [--device cpu]

`--json FILE` appends the rows to a file.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import ROOT, Row, append_rows, environment, parser_of, table, table_line

from bert_pretrain.config import ModelConfig, TrainConfig
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.io import cores
from bert_pretrain.model import devices
from bert_pretrain.plan.timing import StepRunner
from bert_pretrain.train import hardware
from bert_pretrain.train.cuda_graph import StepGraphs
from bert_pretrain.train.flops import batch_flops, peak_flops
from bert_pretrain.train.loader import TrainingData
from bert_pretrain.train.packing import GlobalBatch

WARM_UP_STEPS = 3
SEED = 1
LEARNING_RATE = 1e-4
COLUMNS = (
    "size",
    "step",
    "examples/s",
    "real tokens/s",
    "MFU by matrix product",
    "MFU by data sheet",
    "peak memory",
    "speedup of ours (quartiles)",
)


@dataclass
class Recipe:
    """The configuration of a training step."""

    folder: DataFolder
    device: torch.device
    precision: devices.Precision
    vocab_size: int
    size: str  # layers x hidden size
    examples: int
    dropout: float
    architecture: str

    @classmethod
    def of(cls, arguments: argparse.Namespace, size: str) -> "Recipe":
        folder = DataFolder.open(arguments.data)
        device = devices.choose_device(arguments.device)
        precision = devices.choose_precision(arguments.precision, device)
        vocab_size = max(arguments.vocab_size, folder.tokenizer().vocab_size)
        return cls(
            folder,
            device,
            precision,
            vocab_size,
            size,
            arguments.examples,
            arguments.dropout,
            arguments.architecture,
        )

    def model_config(self) -> ModelConfig:
        layers, hidden = map(int, self.size.split("x"))
        # A gated layer has three matrices instead of two.
        width = 4 * hidden if self.architecture == "bert" else round(hidden / 3) * 8
        return ModelConfig(
            architecture=self.architecture,  # type: ignore[arg-type]
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            intermediate_size=width,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            max_position_embeddings=max(512, self.folder.max_seq_length),
        )

    def batches(self, tokens: int = hardware.CPU_MICRO_BATCH_TOKENS, compiled: bool = False) -> TrainingData:
        return TrainingData(
            self.folder,
            seed=SEED,
            global_batch_size=self.examples,
            micro_batch_tokens=tokens,
            static_shapes=compiled,
        )


def add_step_arguments(parser: argparse.ArgumentParser, *, examples: int, dropout: float) -> None:
    parser.add_argument("data", type=Path)
    parser.add_argument("--examples", type=int, default=examples)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--dropout", type=float, default=dropout, help="0 allows flash attention in our step")
    parser.add_argument("--vocab-size", type=int, default=0, help="rows of the embedding, if more than in the data")
    parser.add_argument("--architecture", default="bert", choices=["bert", "modernbert"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows as JSON lines")


def main() -> None:
    arguments = parse_arguments()
    recipe = Recipe.of(arguments, arguments.sizes[0])
    if arguments.contestant:
        serve(recipe, arguments.contestant)
        return
    folder, device, precision = recipe.folder, recipe.device, recipe.precision
    mean_tokens = sum(record.tokens for record in folder.shards("train")) / folder.rows("train")
    print(
        f"{device_name(device)}, {torch.get_num_threads()} threads, {precision.name}, torch {torch.__version__}, "
        f"transformers {transformers_version()}, {arguments.examples} examples of {mean_tokens:.0f} real tokens of at "
        f"most {folder.max_seq_length}, {recipe.vocab_size} tokens\n"
        f"large matrix product: {matmul_flops(device, precision.dtype) / 1e12:.3g} TFLOP/s\n\n"
        f"{table(COLUMNS, [])}"
    )
    for size in arguments.sizes:
        compare(Recipe.of(arguments, size), arguments)


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_step_arguments(parser, examples=64, dropout=0.1)
    parser.add_argument(
        "--sizes",
        "--size",
        nargs="+",
        default=["2x128", "4x256"],
        help="layers x hidden size",
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--peers", nargs="+", choices=["eager", "compiled"])
    parser.add_argument("--old", type=Path, metavar="FOLDER", help="checkout of an older commit to compare with")
    parser.add_argument("--contestant", choices=["ours", "eager", "compiled"], help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(recipe: Recipe, arguments: argparse.Namespace) -> None:
    peers = arguments.peers or (["eager", "compiled"] if recipe.device.type == "cuda" else ["eager"])
    if recipe.architecture == "modernbert":
        peers = ["bert"]
    elif transformers_version() is None:
        print("transformers is not installed: only our step is timed")
        peers = []
    if arguments.old is not None:
        peers = ["old", *peers]
    batch = recipe.batches().global_batch(0)
    with contextlib.ExitStack() as stack:
        # Start all processes before the first request, so that they import in parallel.
        contestants = {name: stack.enter_context(start(name, recipe.size, arguments)) for name in ("ours", *peers)}
        for contestant in contestants.values():
            for _ in range(WARM_UP_STEPS):
                request(contestant, "step")
        times = {name: np.zeros(arguments.pairs) for name in contestants}
        flops = np.zeros(arguments.pairs)
        for pair in range(arguments.pairs):
            flops[pair] = matmul_flops(recipe.device, recipe.precision.dtype)
            for name, contestant in contestants.items():
                times[name][pair] = request(contestant, "step")
        memory = {name: request(contestant, "peak") for name, contestant in contestants.items()}
    for name in contestants:
        row = result_row(
            replace(recipe, architecture="bert") if name == "bert" else recipe,
            name,
            batch,
            times[name],
            float(np.median(flops)),
            memory[name],
        )
        if name != "ours":
            row |= ratios(times, memory, name)
        print(table_line(cells(row)), flush=True)
        if arguments.json is not None:
            append_rows(arguments.json, [row])


def result_row(
    recipe: Recipe,
    name: str,
    batch: GlobalBatch,
    times: np.ndarray,
    product_flops: float,
    memory: float,
) -> Row:
    """Return the row of a contestant. In keys that end in `over_it`, "it" is the contestant of the row.

    `times` are in seconds, `product_flops` is the FLOP/s of a large matrix product, `memory` is in bytes.
    """
    seconds = float(np.median(times))
    flops = batch_flops(batch, recipe.model_config(), recipe.vocab_size) / seconds
    peak = peak_flops(recipe.device, recipe.precision.dtype)
    return {
        "size": f"L{recipe.size.replace('x', '-H')}",
        "max_seq_length": recipe.folder.max_seq_length,
        "step": name,
        "examples": batch.num_sequences,
        "tokens": batch.num_tokens,
        "step_seconds": seconds,
        "examples_per_second": batch.num_sequences / seconds,
        "tokens_per_second": batch.num_tokens / seconds,
        "product_flops": product_flops,
        "mfu_of_product": flops / product_flops,
        "mfu": flops / peak if peak else None,
        "peak_memory_bytes": int(memory),
        **dict.fromkeys(("memory_over_it", "ours_over_it", "ours_over_it_quartiles")),
        "device": device_name(recipe.device),
        "precision": recipe.precision.name,
        "torch": torch.__version__,
        "transformers": transformers_version(),
    }


def ratios(times: dict[str, np.ndarray], memory: dict[str, float], name: str) -> Row:
    """Return how ours compares with another contestant."""
    low, middle, high = np.quantile(times[name] / times["ours"], [0.25, 0.5, 0.75]).tolist()
    return {
        "memory_over_it": memory["ours"] / memory[name],
        "ours_over_it": middle,
        "ours_over_it_quartiles": [low, high],
    }


def cells(row: Row) -> list[str]:
    ratio, memory = "", f"{row['peak_memory_bytes'] / 2**30:.2f} GiB"
    if row["ours_over_it"] is not None:
        low, high = row["ours_over_it_quartiles"]
        ratio = f"{row['ours_over_it']:.2f} × ({low:.2f}–{high:.2f})"
        memory += f" (ours: {row['memory_over_it']:.2f} ×)"
    return [
        row["size"],
        row["step"],
        f"{row['examples_per_second']:.1f}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['mfu_of_product']:.1%}",
        "–" if row["mfu"] is None else f"{row['mfu']:.1%}",
        memory,
        ratio,
    ]


# ── contestants: processes, so that the compared steps share neither memory nor settings ──


def start(name: str, size: str, arguments: argparse.Namespace) -> "subprocess.Popen[str]":
    """Start the process of a contestant. It ends when its standard input is closed."""
    checkout = arguments.old.resolve() if name == "old" else ROOT
    script = checkout / "scripts" / "bench_train.py"
    contestant = "ours" if name in ("old", "bert") else name
    command = [sys.executable, str(script), str(arguments.data), "--contestant", contestant, "--sizes", size]
    if name == "ours":
        command += ["--architecture", arguments.architecture]
    for option in ("examples", "device", "precision", "dropout", "vocab_size"):
        command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(checkout=checkout),
    )


def request(contestant: "subprocess.Popen[str]", name: str) -> float:
    """Return the seconds of one "step", or the "peak" memory in bytes."""
    assert contestant.stdin is not None
    assert contestant.stdout is not None
    print(name, file=contestant.stdin, flush=True)
    answer = contestant.stdout.readline()
    if not answer:
        raise SystemExit(f"a benchmark process failed with exit code {contestant.wait()}")
    return float(answer)


def serve(recipe: Recipe, name: str) -> None:
    """Answer each `request`, one per line of the standard input."""
    answers, sys.stdout = sys.stdout, sys.stderr  # only answers may be printed to the standard output
    if name != "ours":
        import transformers  # noqa: F401  (its memory is not part of a step)
    memory_before = initial_memory(recipe.device)
    step: Callable[[], object]
    if name == "ours":
        take, (batch,) = build(recipe, 1)
        step = partial(take, batch)
    else:
        step = peer_step(recipe, compiled=name == "compiled")
    for request in sys.stdin:
        is_step = request.strip() == "step"
        answer = timed(step, recipe.device) if is_step else peak_memory(recipe.device) - memory_before
        print(answer, file=answers, flush=True)


def build(recipe: Recipe, num_batches: int) -> tuple[Callable[[GlobalBatch], None], list[GlobalBatch]]:
    """Return a function that takes our training step, and the first batches on the device."""
    cores.owns_process = True
    devices.configure_cpu(recipe.device)
    train = TrainConfig.model_validate({"global_batch_size": recipe.examples, "precision": recipe.precision.name})
    length = recipe.folder.max_seq_length
    runner = StepRunner(
        recipe.model_config(),
        length,
        recipe.vocab_size,
        train,
        recipe.device,
        is_timed=True,
    )
    graphs = StepGraphs(runner.model, runner.state.optimizers) if runner.is_compiled else None
    data = recipe.batches(runner.micro_batch_tokens(train), runner.is_compiled)

    def take(batch: GlobalBatch) -> None:
        runner.state.sums.zero_()
        runner.step(batch, graphs)

    return take, [data.global_batch(number).to(recipe.device) for number in range(num_batches)]


class Peer:
    """The training step of `BertForPreTraining` of transformers with AdamW. Inputs are padded batches."""

    def __init__(
        self,
        config: Row,
        device: torch.device,
        dtype: torch.dtype,
        *,
        compiled: bool = False,
    ) -> None:
        import transformers

        self.model: Any = transformers.BertForPreTraining(transformers.BertConfig(**config)).train()
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)
        self._network = torch.compile(self.model) if compiled else self.model
        self._autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    def take(self, inputs: dict[str, torch.Tensor]) -> Any:
        """Take a step and return the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast:
            loss = self._network(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss


def peer_step(recipe: Recipe, *, compiled: bool) -> Callable[[], object]:
    """Return the step of a peer on the same examples, padded."""
    config = {"vocab_size": recipe.vocab_size, **recipe.model_config().model_dump()}
    peer = Peer(config, recipe.device, recipe.precision.dtype, compiled=compiled)
    loader = recipe.folder.loader("train", batch_size=recipe.examples, seed=SEED, padding="max_length")
    inputs = {name: values.to(recipe.device) for name, values in next(iter(loader)).items()}
    return partial(peer.take, inputs)


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large matrix product, the best of six."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return max(2.0 * size**3 / timed(lambda: torch.mm(left, right), device) for _ in range(6))


def initial_memory(device: torch.device) -> int:
    """Return the memory in use in bytes. On CPU, also reset its peak, which includes imports."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    return process_memory("VmRSS")


def peak_memory(device: torch.device) -> int:
    """Return the peak of the memory in bytes: allocated on CUDA, resident on CPU."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else process_memory("VmHWM")


def process_memory(name: str) -> int:
    """Return a memory value of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def transformers_version() -> str | None:
    """Return the version of transformers without importing it, or None if it is not installed."""
    return importlib.metadata.version("transformers") if importlib.util.find_spec("transformers") else None


def timed(step: Callable[[], object], device: torch.device) -> float:
    wait_for(device)
    begin = time.perf_counter()
    step()
    wait_for(device)
    return time.perf_counter() - begin


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_times(step: Callable[[], object], number: int, device: torch.device) -> list[float]:
    """Return the seconds of `number` steps after one that is not timed. On CUDA the host does not wait for them."""
    step()
    if device.type != "cuda":
        return [timed(step, device) for _ in range(number)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return [1e-3 * first.elapsed_time(second) for first, second in itertools.pairwise(events)]


if __name__ == "__main__":
    main()
