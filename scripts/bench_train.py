"""Our training step against `BertForPreTraining` of transformers: same shapes, same real examples, same precision.

The peer gets its examples padded to the longest length the data allows, as its users pad them, and computes the logits
of every position. Both run forward, backward, clipping and AdamW. Pairs of steps are timed in turn; the table shows
medians, and the spread of the ratio between its quartiles.

    python scripts/bench_train.py DATA_FOLDER [--sizes 2x128 4x256 12x768] [--examples 64] [--pairs 5] [--device cpu]
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from bert_pretrain.config import ModelConfig, TrainConfig
from bert_pretrain.model.attention import choose_attention
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.shards import DataFolder
from bert_pretrain.train.batches import Batch, GlobalBatch, TrainingData
from bert_pretrain.train.hardware import choose_device, choose_micro_batch_tokens, choose_precision
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.optimizer import make_optimizers
from bert_pretrain.train.state import StepSums
from bert_pretrain.train.step import train_step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--sizes", nargs="+", default=["2x128", "4x256"], help="layers x hidden size")
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--dropout", type=float, default=0.1)
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    precision = choose_precision(arguments.precision, device)
    folder = DataFolder.open(arguments.data)
    vocab_size = folder.tokenizer().vocab_size
    print(
        f"{device}, {torch.get_num_threads()} threads, {precision.name}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {arguments.examples} examples of at most {folder.max_seq_length} tokens\n\n"
        "| size | peer examples/s | ours examples/s | ours over peer (quartiles) |\n|---|---|---|---|"
    )
    for size in arguments.sizes:
        layers, hidden = (int(number) for number in size.split("x"))
        model = ModelConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            intermediate_size=4 * hidden,
            hidden_dropout_prob=arguments.dropout,
            attention_probs_dropout_prob=arguments.dropout,
            max_position_embeddings=max(512, folder.max_seq_length),
        )
        our_step, batch = ours(folder, model, vocab_size, device, precision.dtype, arguments.examples)
        peer_step = peer(batch, folder.max_seq_length, model, vocab_size, device, precision.dtype)
        times = np.array([[timed(peer_step, device), timed(our_step, device)] for _ in range(arguments.pairs + 1)])[1:]
        peer_seconds, our_seconds = np.median(times, axis=0)
        low, middle, high = np.quantile(times[:, 0] / times[:, 1], [0.25, 0.5, 0.75])
        rates = f"{arguments.examples / peer_seconds:.1f} | {arguments.examples / our_seconds:.1f}"
        print(f"| L{layers}-H{hidden} | {rates} | {middle:.1f} × ({low:.1f}–{high:.1f}) |", flush=True)


def ours(
    folder: DataFolder, config: ModelConfig, vocab_size: int, device: torch.device, dtype: torch.dtype, examples: int
) -> tuple[Callable[[], None], GlobalBatch]:
    """Return one optimizer step of ours, and the batch it runs on."""
    train = TrainConfig(global_batch_size=examples)
    attention, _ = choose_attention("auto", device, dtype, config.attention_probs_dropout_prob)
    model = BertForPreTraining(config, vocab_size, attention=attention).to(device).train()
    model.initialize(1)
    tokens = choose_micro_batch_tokens(train, model, folder.max_seq_length, device)
    data = TrainingData(folder, seed=1, global_batch_size=examples, micro_batch_tokens=tokens)
    batch = data.global_batch(0)
    batch = replace(batch, micro_batches=[micro.to(device) for micro in batch.micro_batches])
    network, optimizers, sums = PretrainingLoss(model), make_optimizers(model, train), StepSums.zeros(device)

    def step() -> None:
        train_step(
            network, optimizers, batch, sums, seed=1, step=0, learning_rate=1e-4, max_grad_norm=1.0, dtype=dtype
        )  # fmt: skip

    return step, batch


def peer(
    batch: GlobalBatch, length: int, config: ModelConfig, vocab_size: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], None]:
    """Return one optimizer step of `BertForPreTraining` on the same examples, padded."""
    names = config.model_dump()
    model: Any = transformers.BertForPreTraining(transformers.BertConfig(vocab_size=vocab_size, **names))
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    padded = [pad(micro, length) for micro in batch.micro_batches]
    inputs = {name: torch.cat([one[name] for one in padded]).to(device) for name in padded[0]}

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def pad(micro: Batch, length: int) -> dict[str, Tensor]:
    """Return a packed batch as the padded tensors that transformers takes."""
    lengths = np.diff(micro.cu_seqlens.cpu().numpy())
    rows = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    columns = micro.position_ids.cpu()
    shape = (len(lengths), length)
    input_ids, token_types, mask = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    labels = torch.full(shape, -100, dtype=torch.int64)
    input_ids[rows, columns] = micro.input_ids.cpu()
    token_types[rows, columns] = micro.token_type_ids.cpu()
    mask[rows, columns] = 1
    masked = micro.masked_positions.cpu()
    labels[rows[masked], columns[masked]] = micro.masked_labels.cpu()
    assert micro.next_sentence_labels is not None  # the peer has both losses
    return {
        "input_ids": input_ids,
        "token_type_ids": token_types,
        "attention_mask": mask,
        "labels": labels,
        "next_sentence_label": micro.next_sentence_labels.cpu(),
    }


def timed(step: Callable[[], None], device: torch.device) -> float:
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
