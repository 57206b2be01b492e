"""Tests that need a CUDA device: no synchronization inside a step, flash attention, 16 bits, compiled layers, memory.

`tests/cuda` traces the same code without a device.
"""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_pretrain.config import Config, ModelConfig, TrainConfig
from bert_pretrain.model.attention_backend import short_attention_error
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.dropout import dropout
from bert_pretrain.plan.timing import compile_ahead
from bert_pretrain.train import hardware
from bert_pretrain.train.checkpoint import HostBuffers, all_tensors
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.optimizers import make_optimizers
from bert_pretrain.train.state import LossScale, StepSums, TrainState
from tests.train import conftest
from tests.train.conftest import (
    NO_DROPOUT,
    Fit,
    cut,
    cut_alike,
    estimate_memory,
    final_tensors,
    make_examples,
    metrics,
    tiny,
    without_pairs,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CUDA = torch.device("cuda")


MODERN = {**NO_DROPOUT, "architecture": "modernbert", "local_attention": 8, "num_hidden_layers": 4}
WIDE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
LOSS_TOLERANCE = 1e-3
"""Relative, of ten steps in 16 bits: on the CPU bf16 and fp16 stay within 1e-4 of fp32, and the loss falls by 8e-2."""


def make_state(config: Config, *, fp16: bool = False, attention: str = "varlen", compiled: bool = False) -> TrainState:
    scale = LossScale.start(CUDA) if fp16 else None
    return conftest.make_state(config, attention=attention, compiled=compiled, loss_scale=scale, device="cuda")


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """A context in which every call that makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _many_variants(monkeypatch) -> None:
    """Let layers be compiled once for each test that needs it, rather than run uncompiled from the ninth time on."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 64)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "attention", "compiled"),
    [
        ("adamw", torch.bfloat16, "varlen", True),
        ("adamw", torch.bfloat16, "varlen", False),
        ("adamw", torch.float16, "varlen", False),
        ("adamw", torch.float32, "padded", False),
        ("lamb", torch.bfloat16, "varlen", False),
        ("muon", torch.bfloat16, "varlen", False),
        ("adamw", torch.bfloat16, "triton", True),
        ("muon", torch.float16, "triton", False),
    ],
)
def test_no_step_waits_for_the_device(optimizer: str, dtype: torch.dtype, attention: str, compiled: bool) -> None:
    # What is compiled has the sizes of the other tests', so that the compiler's cache has it.
    config, fp16 = tiny(optimizer=optimizer, model=NO_DROPOUT if compiled else None), dtype == torch.float16
    state = make_state(config, attention=attention, compiled=compiled, fp16=fp16)
    # Two micro-batches of several thousand tokens: with few of them other kernels are chosen.
    batch = cut_alike(make_examples(512), 6000, 32, 20.0).with_tensors(torch.Tensor.pin_memory)
    assert len(batch.micro_batches) == 2
    for number in range(2):
        conftest.step(state, batch.to(CUDA), number, dtype)
    with no_waiting():
        conftest.step(state, batch.to(CUDA), 2, dtype)
        with pytest.raises(RuntimeError, match="synchronizing"):
            state.sums.tolist()
    assert StepSums.read(state.sums).skipped == 0


def test_snapshot_does_not_synchronize_and_ignores_later_steps() -> None:
    state = make_state(tiny(model=NO_DROPOUT))
    batch = cut(make_examples(64), 4000).to(CUDA)
    conftest.take_steps(state, [batch] * 2, torch.bfloat16)
    buffers = HostBuffers()
    buffers.copy(all_tensors(state))[1].synchronize()  # locks pages, which takes its time
    expected = {name: tensor.clone() for name, tensor in all_tensors(state).items()}
    with no_waiting():
        snapshot, arrival = buffers.copy(all_tensors(state))
        for number in range(2, 5):
            conftest.step(state, batch, number, torch.bfloat16)
    arrival.synchronize()
    for name, tensor in expected.items():
        assert torch.equal(snapshot[name], tensor.cpu()), name
    for name, parameter in state.model.named_parameters():
        assert not torch.equal(snapshot[name], parameter.cpu()), name


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(NO_DROPOUT, torch.bfloat16), (NO_DROPOUT, torch.float16), (MODERN, torch.bfloat16), (MODERN, torch.float16)],
)
def test_losses_of_flash_attention_and_compiled_layers_match_padded_fp32(
    model: dict[str, Any], dtype: torch.dtype
) -> None:
    def losses(dtype: torch.dtype, attention: str, compiled: bool = False) -> list[float]:
        state = make_state(tiny(model=model), fp16=dtype == torch.float16, attention=attention, compiled=compiled)
        return [sums.loss for sums in conftest.take_steps(state, alike if compiled else batches, dtype, (2e-3,))]

    prepared = without_pairs if model is MODERN else lambda batch: batch
    batches = [prepared(cut(make_examples(32, seed), 400)).to(CUDA) for seed in range(10)]
    alike = [prepared(cut_alike(make_examples(32, seed), 400, 32, 20.0)).to(CUDA) for seed in range(10)]
    exact = losses(torch.float32, "padded")
    assert exact[-1] < 0.95 * exact[0]
    for attention in ("padded", "varlen") if model is MODERN else ("padded", "varlen", "triton"):
        assert losses(dtype, attention) == pytest.approx(exact, rel=LOSS_TOLERANCE)
        if dtype == torch.bfloat16 and attention != "padded":  # one precision is enough to compile
            assert losses(dtype, attention, compiled=True) == pytest.approx(exact, rel=LOSS_TOLERANCE)


def test_bf16_gradients_of_all_attentions_are_close_to_fp32() -> None:
    (micro,) = cut(make_examples(256), 10**6).to(CUDA).micro_batches

    def gradients(dtype: torch.dtype, attention: str, compiled: bool = False) -> dict[str, torch.Tensor]:
        state = make_state(tiny(model={**NO_DROPOUT, **WIDE}), attention=attention, compiled=compiled)
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            mlm_loss, nsp_loss, *_ = state.network.train()(micro)
            (mlm_loss / micro.num_predictions + nsp_loss / micro.num_sequences).backward()
        return {name: p.grad for name, p in state.model.named_parameters() if p.grad is not None}

    exact = gradients(torch.float32, "padded")

    def distance(attention: str, compiled: bool = False) -> float:
        """The norm of all differences over that of the gradient."""
        found = gradients(torch.bfloat16, attention, compiled)
        assert found.keys() == exact.keys()
        squares = sum(float((found[name] - exact[name]).double().square().sum()) for name in exact)
        return (squares / sum(float(one.double().square().sum()) for one in exact.values())) ** 0.5

    padded = distance("padded")
    assert 0 < padded < 0.02
    for attention in ("varlen", "triton"):
        for compiled in (False, True):
            assert distance(attention, compiled) < 1.5 * padded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "longest"), [(16, 5), (32, 100), (64, 16), (64, 32), (64, 64), (64, 128)])
def test_kernels_for_short_sequences_are_right(dtype: torch.dtype, width: int, longest: int) -> None:
    assert short_attention_error(CUDA, dtype, width, longest) < (6e-3 if dtype == torch.bfloat16 else 1e-3)


def test_compiled_dropout_has_its_rate_and_repeats_with_the_seed() -> None:
    drop = torch.compile(lambda values: dropout(values, 0.1), fullgraph=True)
    drop_twice = torch.compile(lambda values: (dropout(values * 2, 0.1), dropout(values * 3, 0.1)), fullgraph=True)
    values = torch.ones(1000, 4096, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    torch.manual_seed(1)
    first = drop(values)
    first.sum().backward()
    torch.manual_seed(1)
    second, third = drop(values), drop(values)
    assert torch.equal(first, second)
    assert not torch.equal(second, third)
    assert (first == 0).double().mean().item() == pytest.approx(26 / 256, abs=1e-3)
    assert torch.equal(values.grad, first)  # the backward pass has the same mask
    assert not torch.equal(*(result == 0 for result in drop_twice(values)))


def test_training_compiles_nothing_after_compile_ahead(fit: Fit) -> None:
    settings = {
        "model": {"attention_probs_dropout_prob": 0.0},
        "device": "cuda",
        "precision": "bf16",
        "max_steps": 3,
        "global_batch_size": 256,
        "micro_batch_tokens": "auto",
    }
    config = tiny(**settings)
    data = config.data.model_copy(update={"max_seq_length": 32})
    vocab = config.vocab.model_copy(update={"size": conftest.VOCAB_SIZE})
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    statistics = torch._dynamo.utils.counters["stats"]
    assert len(list(compile_ahead(config.model_copy(update={"data": data, "vocab": vocab})))) == 2
    assert statistics["unique_graphs"] == 4  # the embeddings, a layer, the masked language model head and the softmax
    fit(**settings)
    assert statistics["unique_graphs"] == 4


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_interrupted_run_resumes_with_the_same_metrics(fit: Fit, tmp_path: Path, precision: str, capsys) -> None:
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("the card has no bf16")
    config = {"device": "cuda", "precision": precision, "peak_lr": 3e-3, "max_steps": 20, "save_every": 8}
    config["compile"] = "auto" if precision == "bf16" else False
    # With dropout of hidden states: other masks after a resumption would be off by far more than the tolerance.
    config["model"] = {"attention_probs_dropout_prob": 0.0}
    straight = fit("straight", **config)
    said = capsys.readouterr().out
    assert ("attention  padded" in said) == (precision == "fp32")
    assert ("compiled   yes" in said) == (precision == "bf16")
    lines = metrics(straight, "loss")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert all(line["peak_memory_bytes"] > 0 for line in lines)
    run = conftest.interrupted_copy(straight, tmp_path / "run", "step-00000016", "step-00000020")
    fit(run, **config)
    compared = {"step", "mlm_loss", "nsp_loss", "grad_norm", "validation_mlm_loss", "validation_nsp_loss"}
    for ours, theirs in zip(metrics(run), metrics(straight), strict=True):
        names = compared & theirs.keys()
        assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=LOSS_TOLERANCE)
    if precision == "fp32":
        # Flash attention and compiled embeddings add up gradients in any order; without them nothing here does.
        torch.testing.assert_close(final_tensors(run), final_tensors(straight), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("checkpointing", "compiled"), [(False, False), (False, True), (True, False)], ids=["plain", "compiled", "again"]
)
def test_memory_estimate_is_close_to_the_measured_peak(checkpointing: bool, compiled: bool) -> None:
    config = ModelConfig(num_hidden_layers=4, max_position_embeddings=32)
    settings = TrainConfig(global_batch_size=1024, activation_checkpointing=checkpointing)
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = BertForPreTraining(config, 30522, attention="varlen").to(CUDA).train()
    model.initialize(1)
    model.encoder.activation_checkpointing = checkpointing
    if compiled:
        hardware.compile_layers(model)
    assert hardware.choose_micro_batch_tokens(settings, model, 32, CUDA, torch.bfloat16) == 1024 * 32
    batch = cut_alike(make_examples(1024), 1024 * 32, 32, 20.0).to(CUDA)
    (micro,) = batch.micro_batches
    state = TrainState(model, PretrainingLoss(model, compiled=compiled), make_optimizers(model, settings), None)
    for number in range(3):
        if number == 2:  # not while kernels are chosen and compiled
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        conftest.step(state, batch, number, torch.bfloat16)
    peak = torch.cuda.max_memory_allocated() - before
    estimate = estimate_memory(settings, model, 32, len(micro.input_ids), dtype=torch.bfloat16)
    least = 0.75 if compiled else 0.85  # compiled layers keep sums in 16 bits
    assert least * estimate < peak < 1.15 * estimate
