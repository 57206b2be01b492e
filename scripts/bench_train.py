"""Our training step against `BertForPreTraining` of transformers: same shapes, same real examples, same precision.

The peer gets its examples padded to the longest length the data allows, as its users pad them, and computes the logits
of every position; on CUDA it runs eager and compiled. Both run forward, backward, clipping and AdamW. Each has a
process of its own; steps are timed in turn. The table shows medians, and the spread of the ratio between its quartiles.
MFU counts the operations of real tokens, over what a large matrix product reaches here in the same minute, and over the
data sheet's peak of a known card.

    python scripts/bench_train.py DATA_FOLDER [--sizes 2x128 4x256 12x768] [--examples 64] [--pairs 5] [--device cpu]

`--json FILE` appends each row as a line of JSON as well.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bert_pretrain.config import ModelConfig, TrainConfig
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.model.attention import choose_attention
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.batches import Batch, GlobalBatch
from bert_pretrain.train.device import cpu, hardware
from bert_pretrain.train.device.flops import batch_flops, peak_flops
from bert_pretrain.train.loader import Prefetcher, TrainingData
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.optim.optimizer import make_optimizers
from bert_pretrain.train.step import StepSums, train_step

FAR_STEP = 10**6
DATA_STEPS = 20
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Bench:
    """What one table compares."""

    folder: DataFolder
    device: torch.device
    precision: hardware.Precision
    vocab_size: int
    examples: int
    dropout: float

    def model_config(self, size: str) -> ModelConfig:
        """Return the model of a size such as `12x768`."""
        layers, hidden = (int(number) for number in size.split("x"))
        return ModelConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            intermediate_size=4 * hidden,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            max_position_embeddings=max(512, self.folder.max_seq_length),
        )


def main() -> None:
    arguments = parse_arguments()
    device = hardware.choose_device(arguments.device)
    folder = DataFolder.open(arguments.data)
    vocab_size = max(arguments.vocab_size, folder.tokenizer().vocab_size)
    precision = hardware.choose_precision(arguments.precision, device)
    bench = Bench(folder, device, precision, vocab_size, arguments.examples, arguments.dropout)
    if arguments.contestant:
        contend(bench, arguments.sizes[0], arguments.contestant)
        return
    lengths = f"{sum(r.tokens for r in folder.shards('train')) / folder.rows('train'):.0f} real tokens of at most"
    print(
        f"{device_name(device)}, {torch.get_num_threads()} threads, {precision.name}, torch {torch.__version__}, "
        f"transformers {transformers_version()}, {arguments.examples} examples of {lengths} {folder.max_seq_length}, "
        f"{vocab_size} tokens\nlargest matrix product: {product_ceiling(device, precision.dtype) / 1e12:.3g} "
        "TFLOP/s\n\n"
        "| size | step | examples/s | real tokens/s | MFU of the product | of the data sheet | peak memory | ours over"
        " it (quartiles) |\n|---|---|---|---|---|---|---|---|"
    )
    for size in arguments.sizes:
        compare(bench, size, arguments)
    report_reading(bench)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--sizes", nargs="+", default=["2x128", "4x256"], help="layers x hidden size")
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--dropout", type=float, default=0.1, help="0 lets our step use flash attention")
    parser.add_argument("--vocab-size", type=int, default=0, help="rows of the embedding, if more than the data's")
    parser.add_argument("--peers", nargs="+", default=None, choices=["eager", "compiled"])
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="append the rows as lines of JSON")
    parser.add_argument("--contestant", choices=["ours", "eager", "compiled"], help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(bench: Bench, size: str, arguments: argparse.Namespace) -> None:
    """Time one size and print its lines."""
    peers = arguments.peers or (["eager", "compiled"] if bench.device.type == "cuda" else ["eager"])
    if transformers_version() is None:
        print("transformers is not installed: there is no peer")
        peers = []
    batch = training_data(bench, hardware.CPU_MICRO_BATCH_TOKENS).global_batch(0)
    with contextlib.ExitStack() as stack:
        # All start before the first one is asked, so that their imports take no time in turn.
        contestants = {name: stack.enter_context(Contestant(name, size, arguments)) for name in ("ours", *peers)}
        for contestant in contestants.values():
            contestant.warm_up()
        times = {name: np.zeros(arguments.pairs) for name in contestants}
        ceiling = np.zeros(arguments.pairs)
        for pair in range(arguments.pairs):
            ceiling[pair] = product_ceiling(bench.device, bench.precision.dtype)
            for name, contestant in contestants.items():
                times[name][pair] = contestant.ask("step")
        memory = {name: contestant.ask("peak") for name, contestant in contestants.items()}
    for name in contestants:
        row = result_row(bench, size, name, batch, times, float(np.median(ceiling)), memory)
        print(table_line(row), flush=True)
        if arguments.json is not None:
            with arguments.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def result_row(
    bench: Bench,
    size: str,
    name: str,
    batch: GlobalBatch,
    times: dict[str, np.ndarray],
    ceiling: float,
    memory: dict[str, float],
) -> dict[str, Any]:
    """Return one contestant's figures as JSON values, from seconds, FLOP/s of a large product and bytes of memory."""
    seconds = float(np.median(times[name]))
    low, middle, high = (float(value) for value in np.quantile(times[name] / times["ours"], [0.25, 0.5, 0.75]))
    rate = batch_flops(batch, bench.model_config(size), bench.vocab_size) / seconds
    peak = peak_flops(bench.device, bench.precision.dtype)
    return {
        "size": f"L{size.replace('x', '-H')}",
        "max_seq_length": bench.folder.max_seq_length,
        "step": name,
        "examples": batch.num_sequences,
        "tokens": batch.num_tokens,
        "step_seconds": seconds,
        "examples_per_second": batch.num_sequences / seconds,
        "tokens_per_second": batch.num_tokens / seconds,
        "product_flops": ceiling,
        "mfu_of_product": rate / ceiling,
        "mfu": rate / peak if peak else None,
        "peak_memory_bytes": int(memory[name]),
        "memory_over_it": None if name == "ours" else memory["ours"] / memory[name],
        "ours_over_it": None if name == "ours" else middle,
        "ours_over_it_quartiles": None if name == "ours" else [low, high],
        "device": device_name(bench.device),
        "precision": bench.precision.name,
        "torch": torch.__version__,
        "transformers": transformers_version(),
    }


def table_line(row: dict[str, Any]) -> str:
    """Return a row as a line of the Markdown table."""
    ratio, memory = "", f"{row['peak_memory_bytes'] / 2**30:.2f} GiB"
    mfu = "–" if row["mfu"] is None else f"{row['mfu']:.1%}"
    if row["ours_over_it"] is not None:
        low, high = row["ours_over_it_quartiles"]
        ratio = f"{row['ours_over_it']:.2f} × ({low:.2f}–{high:.2f})"
        memory += f" (ours {row['memory_over_it']:.2f} of it)"
    return (
        f"| {row['size']} | {row['step']} | {row['examples_per_second']:.1f} | {row['tokens_per_second']:,.0f} | "
        f"{row['mfu_of_product']:.1%} | {mfu} | {memory} | {ratio} |"
    )


class Contestant:
    """One side of the comparison in a process of its own, so that neither's memory and settings touch the other's."""

    def __init__(self, name: str, size: str, arguments: argparse.Namespace) -> None:
        command = [sys.executable, __file__, str(arguments.data), "--contestant", name, "--sizes", size]
        for option in ("examples", "device", "precision", "dropout", "vocab_size"):
            command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def warm_up(self) -> None:
        """Let it take a few steps, in which kernels are chosen or compiled."""
        for _ in range(WARM_UP_STEPS):
            self.ask("step")

    def ask(self, question: str) -> float:
        """Let it take a `step` and return the seconds, or return its `peak` memory in bytes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(question, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"a contestant left with exit code {self._process.wait()}")
        return float(answer)

    def __enter__(self) -> "Contestant":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate("")


def contend(bench: Bench, size: str, name: str) -> None:
    """Be a contestant: answer the questions that come in, one a line."""
    if name != "ours":
        import transformers  # noqa: F401  (before memory is watched: importing it is no part of a step)
    start_of_memory = watch_memory(bench.device)
    if name == "ours":
        step = ours(bench, size)
    else:
        step = peer(bench, size, training_data(bench, hardware.CPU_MICRO_BATCH_TOKENS).global_batch(0), name)
    for question in sys.stdin:
        is_step = question.strip() == "step"
        print(timed(step, bench.device) if is_step else peak_memory(bench.device) - start_of_memory, flush=True)


def ours(bench: Bench, size: str) -> Callable[[], None]:
    """Return one optimizer step of ours."""
    config, device, dtype = bench.model_config(size), bench.device, bench.precision.dtype
    cpu.owns_process = True
    hardware.keep_freed_memory(device)
    train = TrainConfig(global_batch_size=bench.examples)
    attention, _ = choose_attention(
        "auto", device, dtype, head_size=64, dropout_rate=config.attention_probs_dropout_prob
    )
    compiled, _ = hardware.choose_compile("auto", device, attention)
    model = BertForPreTraining(config, bench.vocab_size, attention=attention).to(device).train()
    model.initialize(1)
    if compiled:
        hardware.compile_layers(model)
    tokens = hardware.choose_micro_batch_tokens(train, model, bench.folder.max_seq_length, device, dtype)
    batch = training_data(bench, tokens, compiled).global_batch(0).to(device)
    network, optimizers = PretrainingLoss(model, compiled=compiled), make_optimizers(model, train)
    sums = StepSums.zeros(device)

    def step() -> None:
        train_step(network, optimizers, batch, sums, seed=1, step=0, learning_rate=1e-4, max_grad_norm=1.0, dtype=dtype)

    return step


def training_data(bench: Bench, tokens: int, compiled: bool = False) -> TrainingData:
    return TrainingData(
        bench.folder, seed=1, global_batch_size=bench.examples, micro_batch_tokens=tokens, static_shapes=compiled
    )


def peer(bench: Bench, size: str, batch: GlobalBatch, name: str) -> Callable[[], None]:
    """Return one optimizer step of `BertForPreTraining` on the same examples, padded."""
    import transformers

    device, dtype, names = bench.device, bench.precision.dtype, bench.model_config(size).model_dump()
    model: Any = transformers.BertForPreTraining(transformers.BertConfig(vocab_size=bench.vocab_size, **names))
    model = model.to(device).train()
    network = torch.compile(model) if name == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    padded = [pad(micro, bench.folder.max_seq_length) for micro in batch.micro_batches]
    inputs = {name: torch.cat([one[name] for one in padded]).to(device) for name in padded[0]}

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = network(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def pad(micro: Batch, length: int) -> dict[str, Tensor]:
    """Return a packed batch of sentence pairs as the padded tensors that transformers takes."""
    assert micro.next_sentence_labels is not None
    lengths = np.diff(micro.cu_seqlens.cpu().numpy())[: micro.num_sequences]
    rows = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    columns = micro.position_ids.cpu()[: micro.num_tokens]
    shape = (len(lengths), length)
    input_ids, token_types, mask = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    labels = torch.full(shape, -100, dtype=torch.int64)
    input_ids[rows, columns] = micro.input_ids.cpu()[: micro.num_tokens]
    token_types[rows, columns] = micro.token_type_ids.cpu()[: micro.num_tokens]
    mask[rows, columns] = 1
    masked = micro.masked_positions.cpu()[: micro.num_predictions]
    labels[rows[masked], columns[masked]] = micro.masked_labels.cpu()
    return {
        "input_ids": input_ids,
        "token_type_ids": token_types,
        "attention_mask": mask,
        "labels": labels,
        "next_sentence_label": micro.next_sentence_labels.cpu(),
    }


def product_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations a second of a large matrix product, the best of a few."""
    size, best = (8192, 0.0) if device.type == "cuda" else (1024, 0.0)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(6):
        best = max(best, 2.0 * size**3 / timed(lambda: torch.mm(left, right), device))
    return best


def watch_memory(device: torch.device) -> int:
    """Return the memory in use, and begin to watch its peak anew."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # else the peak is that of importing
    return resident("VmRSS")


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that were in use at once since watching began; on CPU they are resident memory."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else resident("VmHWM")


def resident(name: str) -> int:
    """Return one of Linux's figures of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def report_reading(bench: Bench) -> None:
    """Print how long a resumed run takes to its first batch, and how fast batches come where nothing else is done."""
    seconds = []
    for step in (0, FAR_STEP):
        begin = time.perf_counter()
        folder = DataFolder.open(bench.folder.path)
        data = training_data(replace(bench, folder=folder), hardware.CPU_MICRO_BATCH_TOKENS)
        data.global_batch(step)
        seconds.append(time.perf_counter() - begin)
    print(
        f"\nfrom opening the data to the first batch: {seconds[0]:.2f} s at step 0, {seconds[1]:.2f} s at step "
        f"{FAR_STEP:,}, {bench.folder.rows('train'):,} examples"
    )
    begin = time.perf_counter()
    reader = Prefetcher(data, 0, DATA_STEPS, bench.device)
    for _ in range(DATA_STEPS):
        reader.next()
    rate = DATA_STEPS * bench.examples / (time.perf_counter() - begin)
    reader.close()
    print(f"batches alone: {rate:,.0f} examples/s; a step that takes longer does not wait for them")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def transformers_version() -> str | None:
    """Return the version of transformers, or None where it is not installed; nothing is imported."""
    return importlib.metadata.version("transformers") if importlib.util.find_spec("transformers") else None


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one step."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
