"""`run auto` against the usual way: who learns more from the same text, and in what share of the time?

The usual way is what a practitioner runs: `BertForPreTraining` of `transformers` from scratch, padded batches of 64
examples of 128 tokens, a vocabulary of 30,522, AdamW 5e-4, weight decay 0.01, warm-up 6 %, linear decay, dropout 0.1,
four layers of 256. Its vocabulary and data come from this package and do not count in its time. `run auto` gets a share
of the time, for everything. Both are scored on the documents of the test split that `bench_learning.py` holds out.
On a machine that other work shares, `--cpu-time` gives the usual way its minutes in processor time: the minutes times
the number of threads. `run auto` always counts wall-clock time.

    python scripts/bench_auto.py CORPUS --work OUT --minutes 20 --share 0.1 [--seeds 1 2 3] [--language en]
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_learning import call, score_of, split_corpus
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertForPreTraining

from bert_pretrain import load_data
from bert_pretrain.train import hardware

BATCH, LENGTH, VOCAB_SIZE = 64, 128, 30522
PEAK_LR, WEIGHT_DECAY, WARMUP_SHARE = 5e-4, 0.01, 0.06
LAYERS, HIDDEN = 4, 256


def main() -> None:
    options = parse_arguments()
    folder = options.work / options.corpus.name.split(".")[0]
    texts = split_corpus(options.corpus, folder)
    data = usual_data(folder, texts["train"], options)
    if options.usual_only is not None:
        train_usual(data, options.usual_only, options)
        return
    rows = []
    for seed in options.seeds:
        for name in options.ways:
            train = {"usual": usual, "auto": auto}[name]
            model = options.work / f"{name}-{options.corpus.name.split('.')[0]}-{options.minutes:g}m-s{seed}"
            seconds = train(model, texts["train"], seed, options)
            found = model / "train" / "model" if name == "auto" else model
            rows.append(
                {"way": name, "seed": seed, "seconds": seconds, "score": score_of(found, texts["test"], options)}
            )
            print(json.dumps(rows[-1]), flush=True)
    scores = {name: [row["score"] for row in rows if row["way"] == name] for name in options.ways}
    for name, values in scores.items():
        print(f"{name}: {np.mean(values):.4f} ({min(values):.4f}–{max(values):.4f}) nats per byte of masked words")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("corpus", type=Path, help="sentence lines, plain or .xz")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--language", default="en")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training in the usual way")
    parser.add_argument("--share", type=float, default=0.1, help="of that time, for run auto, all stages included")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--ways", nargs="+", choices=["usual", "auto"], default=["usual", "auto"])
    parser.add_argument("--cpu-time", action="store_true", help="count processor time for the usual way")
    parser.add_argument("--contexts", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--usual-only", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


def usual_data(folder: Path, text: Path, options: argparse.Namespace) -> Path:
    """Make vocabulary and data of the usual way, once."""
    vocab, data, log = folder / f"vocab-{VOCAB_SIZE}", folder / f"usual-{LENGTH}", folder / "usual.log"
    shared = {"data.language": options.language}
    if not (vocab / "manifest.json").exists():
        call(["vocab", str(text), "--output", str(vocab)], {**shared, "vocab.size": str(VOCAB_SIZE)}, log)
    if not (data / "manifest.json").exists():
        settings = {**shared, "data.max_seq_length": str(LENGTH), "data.dupe_factor": "1"}
        call(["make-data", str(text), "--vocab", str(vocab), "--output", str(data)], settings, log)
    return data


def usual(model: Path, _text: Path, seed: int, options: argparse.Namespace) -> float:
    """Train in the usual way in a process of its own; returns its seconds."""
    if (model / "seconds.json").exists():
        return float(json.loads((model / "seconds.json").read_text()))
    command = [sys.executable, __file__, str(options.corpus), "--work", str(options.work), "--usual-only", str(model)]
    command += ["--minutes", str(options.minutes), "--seed", str(seed), "--device", options.device]
    command += ["--language", options.language, "--threads", str(options.threads)]
    subprocess.run([*command, *(["--cpu-time"] if options.cpu_time else [])], check=True)
    return float(json.loads((model / "seconds.json").read_text()))


def auto(model: Path, text: Path, seed: int, options: argparse.Namespace) -> float:
    """Train by `run auto`; returns its seconds, those of the whole command."""
    begin = time.perf_counter()
    seconds = 60 * options.minutes * options.share
    arguments = ["run", "auto", str(text), "--time", f"{seconds:g}s", "--output", str(model)]
    settings = {"train.seed": str(seed), "train.device": options.device}
    call(arguments, settings, model.with_name(f"{model.name}.log"))
    return time.perf_counter() - begin


def train_usual(data: Path, output: Path, options: argparse.Namespace) -> None:
    """Train `BertForPreTraining` for so many minutes, and save it."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    seconds, clock = 60 * options.minutes, time.perf_counter
    if options.cpu_time:
        seconds, clock = seconds * options.threads, time.process_time
    device = hardware.choose_device(options.device)
    dtype = hardware.choose_precision("auto", device).dtype
    config = BertConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HIDDEN // 64,
        intermediate_size=4 * HIDDEN, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model: Any = BertForPreTraining(config).train()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=WEIGHT_DECAY)
    begin, wall_begin = clock(), time.perf_counter()
    for step, batch in enumerate(batches(data, options.seed), 1):
        passed = (clock() - begin) / seconds
        if passed >= 1.0:
            break
        rate = PEAK_LR * min((passed + 1e-3) / WARMUP_SHARE, (1.0 - passed) / (1.0 - WARMUP_SHARE))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = model(**{name: values.to(device) for name, values in batch.items()}).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"usual way: step {step}, loss {loss.item():.3f}, {passed:.0%} of the time", flush=True)
    print(f"usual way: {step:,} steps of {BATCH} examples", flush=True)
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(data / "tokenizer").save_pretrained(output)
    (output / "seconds.json").write_text(json.dumps(time.perf_counter() - wall_begin))


def batches(data: Path, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield padded batches without end, in a new order every epoch."""
    folder = load_data(data)
    for epoch in itertools.count():
        yield from folder.loader("train", batch_size=BATCH, epoch=epoch, seed=seed, padding="max_length")


if __name__ == "__main__":
    main()
