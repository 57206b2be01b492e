"""What would make a run faster on this machine: one line on the first screen of `train`, where there is something."""

from dataclasses import dataclass

import torch

from bert_pretrain.model.attention import choose_attention
from bert_pretrain.parallel.cores import available_cores
from bert_pretrain.train.device import hardware
from bert_pretrain.train.resolved import ResolvedRun

FEW_TOKENS_ON_CUDA = 16_384
"""Tokens a rank and step below which a card of today waits for launches rather than computes; by estimate."""


@dataclass(frozen=True)
class Machine:
    """What the hints need to know of the machine beyond the resolved settings."""

    cores: int
    """That this process may use."""
    threads: int
    """That torch computes with."""
    best_precision: str
    """What `train.precision: auto` would choose."""


def this_machine(device: torch.device) -> Machine:
    """Return the facts of the machine that runs this process."""
    return Machine(available_cores(), torch.get_num_threads(), hardware.choose_precision("auto", device).name)


def speed_hints(run: ResolvedRun, machine: Machine, micro_batch_tokens: int) -> list[str]:
    """Return what the user can change to make the run faster, each with the key or variable to set."""
    train, found = run.config.train, []
    slow = {"fp32": 0, "fp16": 1, "bf16": 1}
    if slow[machine.best_precision] > slow[run.precision.name]:
        found.append(f"train.precision=auto computes in {machine.best_precision}")
    if run.device.type == "cuda":
        found += _on_cuda(run)
    elif run.device.type == "cpu":
        found += _on_cpu(run, machine, micro_batch_tokens)
    if train.activation_checkpointing and run.device.type != "cuda":
        found.append("train.activation_checkpointing=false does not compute the forward pass twice")
    return found


def _on_cuda(run: ResolvedRun) -> list[str]:
    model, train, found = run.config.model, run.config.train, []
    without_dropout, _ = choose_attention(
        train.attention, run.device, run.precision.dtype,
        head_size=model.hidden_size // model.num_attention_heads, dropout_rate=0.0,
    )  # fmt: skip
    if run.attention == "padded" and without_dropout == "varlen":
        found.append("model.attention_probs_dropout_prob=0 allows flash attention without padding, and compiled layers")
    elif run.attention == "varlen" and train.compile is False:
        found.append("train.compile=auto compiles the layers")
    own_tokens = train.global_batch_size * run.data.mean_tokens("train") / run.dist_context.size
    if own_tokens < FEW_TOKENS_ON_CUDA:
        found.append(f"a larger train.global_batch_size fills the card ({own_tokens:,.0f} tokens per step now)")
    return found


def _on_cpu(run: ResolvedRun, machine: Machine, micro_batch_tokens: int) -> list[str]:
    train, found = run.config.train, []
    # Several ranks of one machine share its cores.
    if run.dist_context.size == 1 and machine.threads < machine.cores:
        found.append(f"OMP_NUM_THREADS={machine.cores} uses all cores ({machine.threads} threads now)")
    if machine.threads > machine.cores:
        found.append(f"OMP_NUM_THREADS={machine.cores} has a core for each thread ({machine.threads} threads now)")
    if train.compile is True:
        found.append("train.compile=auto does not compile on CPU, where compiled layers were slower")
    if isinstance(train.micro_batch_tokens, int) and micro_batch_tokens < hardware.CPU_MICRO_BATCH_TOKENS // 2:
        found.append(f"train.micro_batch_tokens=auto computes more than {micro_batch_tokens:,} tokens at once")
    return found
