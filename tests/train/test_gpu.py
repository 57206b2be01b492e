"""What only a CUDA device can show: no waiting inside a step, flash attention, 16 bits, compiled layers, memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_pretrain.config import Config, ModelConfig, TrainConfig
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train import hardware
from bert_pretrain.train.batches import GlobalBatch, cut, cut_alike
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.memory import estimate_memory
from bert_pretrain.train.optimizer import make_optimizers
from bert_pretrain.train.run import train
from bert_pretrain.train.state import StepSums, TrainState
from bert_pretrain.train.step import LossScale, train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
Tiny = Callable[..., Config]
CUDA = torch.device("cuda")
NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


def make_state(config: Config, *, attention: str = "varlen", compiled: bool = False, fp16: bool = False) -> TrainState:
    model = BertForPreTraining(config.model, 152, attention=attention)
    model.initialize(1)
    model.to(CUDA)
    if compiled:
        hardware.compile_layers(model)
    scale = LossScale.start(CUDA) if fp16 else None
    return TrainState.start(
        model, PretrainingLoss(model, compiled=compiled), make_optimizers(model, config.train), scale
    )


def run_steps(state: TrainState, batches: list[GlobalBatch], dtype: torch.dtype) -> list[float]:
    losses = []
    for number, batch in enumerate(batches):
        state.sums.zero_()
        train_step(
            state.network.train(), state.optimizers, batch, state.sums, seed=1, step=number, learning_rate=2e-3,
            max_grad_norm=1.0, dtype=dtype, loss_scale=state.loss_scale,
        )  # fmt: skip
        losses.append(StepSums.read(state.sums).loss)
    return losses


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "muon"])
@pytest.mark.parametrize("compiled", [False, True])
def test_no_step_waits_for_the_device(tiny: Tiny, examples: Callable[..., Any], optimizer: str, compiled: bool) -> None:
    state = make_state(tiny(model=NO_DROPOUT, optimizer=optimizer), compiled=compiled)
    batch = cut_alike(examples(32), 400, 32, 16.5).to(CUDA)
    run_steps(state, [batch] * 2, torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(
            state.network, state.optimizers, batch, state.sums, seed=1, step=2, learning_rate=1e-3, max_grad_norm=1.0,
            dtype=torch.bfloat16,
        )  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_and_compiled_layers_train_as_padding_does(
    tiny: Tiny, examples: Callable[..., Any], dtype: torch.dtype
) -> None:
    batches = [cut(examples(32, seed), 400).to(CUDA) for seed in range(10)]
    alike = [cut_alike(examples(32, seed), 400, 32, 16.5).to(CUDA) for seed in range(10)]
    config, fp16 = tiny(model=NO_DROPOUT), dtype == torch.float16
    padded = run_steps(make_state(config, attention="padded", fp16=fp16), batches, dtype)
    flash = run_steps(make_state(config, fp16=fp16), batches, dtype)
    compiled = run_steps(make_state(config, compiled=True, fp16=fp16), alike, dtype)
    assert flash == pytest.approx(padded, rel=2e-2)
    assert compiled == pytest.approx(padded, rel=2e-2)
    assert flash[-1] < flash[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_run_trains_evaluates_saves_and_continues(
    tiny: Tiny, data_folder: Path, tmp_path: Path, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"device": "cuda", "precision": precision, "peak_lr": 3e-3, "max_steps": 20, "save_every": 8}
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("the card has no bf16")
    run = tmp_path / "run"
    train(tiny(model=NO_DROPOUT, **settings), data_folder, run)
    said = capsys.readouterr().out
    assert ("attention  varlen" in said) == (precision != "fp32")
    assert ("compiled   yes" in said) == (precision != "fp32")
    train(tiny(model=NO_DROPOUT, **{**settings, "max_steps": 30}), data_folder, run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert max(line["step"] for line in lines) == 30
    assert all(line["peak_memory_bytes"] > 0 for line in lines if "loss" in line)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_automatic_micro_batch_fits_and_the_estimate_is_near(
    examples: Callable[..., Any], checkpointing: bool
) -> None:
    config = ModelConfig(
        hidden_size=256, num_hidden_layers=8, num_attention_heads=4, intermediate_size=1024, max_position_embeddings=32
    )
    settings = TrainConfig(global_batch_size=40_000, activation_checkpointing=checkpointing)
    model = BertForPreTraining(config, 30522, attention="varlen").to(CUDA).train()
    model.encoder.activation_checkpointing = checkpointing
    tokens = min(hardware.choose_micro_batch_tokens(settings, model, 32, CUDA, torch.bfloat16), 200_000)
    table = examples(tokens // 16)
    batch = cut(table, tokens).to(CUDA)
    network, optimizers, sums = PretrainingLoss(model), make_optimizers(model, settings), StepSums.zeros(CUDA)
    torch.cuda.reset_peak_memory_stats()
    for number in range(2):
        train_step(
            network, optimizers, batch, sums, seed=1, step=number, learning_rate=1e-4, max_grad_norm=1.0,
            dtype=torch.bfloat16,
        )  # fmt: skip
    estimate = estimate_memory(settings, model, 32, tokens, dtype=torch.bfloat16).total
    assert 0.4 * estimate < torch.cuda.max_memory_allocated() < 1.3 * estimate


def test_a_time_budget_holds_where_the_host_runs_ahead(tiny: Tiny, data_folder: Path, tmp_path: Path) -> None:
    settings = {"device": "cuda", "precision": "auto", "max_steps": None, "log_every": 50, "eval_every": 10**6}
    train(tiny(model=NO_DROPOUT, **settings, time_budget="30s", save_every=10**6), data_folder, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert 20 < record["progress"]["wall_seconds"] < 31
