"""`--dry-run` says what a run would do and how long it would take, and leaves no trace; the memory of a step."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_pretrain.config import Config, ModelConfig, TrainConfig
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError, OutputError
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train import hardware
from bert_pretrain.train.batches import cut
from bert_pretrain.train.hardware import activation_bytes_per_token, estimate_memory
from bert_pretrain.train.loss import pretraining_loss
from bert_pretrain.train.run import train

Tiny = Callable[..., Config]


@pytest.mark.parametrize("length", [{"max_steps": 100}, {"max_steps": None, "time_budget": "24h"}])
def test_a_dry_run_says_what_it_would_take_and_writes_nothing(
    tiny: Tiny, data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], length: dict[str, Any]
) -> None:
    train(tiny(**length), data_folder, tmp_path / "run", dry_run=True)
    out = capsys.readouterr().out
    assert "25,498 parameters" in out
    assert ("for 100 steps" if length.get("max_steps") else "1d 0h for about ") in out.split("time ")[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_meets_the_folder_as_a_run_would_and_leaves_it_as_it_is(
    tiny: Tiny, data_folder: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}

    def dry(config: Config, **options: bool) -> str:
        train(config, data_folder, run, dry_run=True, **options)
        return capsys.readouterr().out

    assert "up to date" in dry(tiny())
    longer = dry(tiny(max_steps=20))
    assert "the run is extended from 12 steps to 20 steps" in longer
    assert "continues from step 12" in longer
    assert "for 8 steps" in longer
    with pytest.raises(OutputError, match="written by another"):
        dry(tiny(peak_lr=2e-3))
    assert "for 12 steps" in dry(tiny(peak_lr=2e-3), overwrite=True)
    with pytest.raises(ConfigError, match="is at step 12 already"):
        dry(tiny(max_steps=8))
    with pytest.raises(OutputError, match="starts over"):
        dry(tiny(max_steps=20), resume=False)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_activations_are_estimated_near_what_autograd_keeps(examples: Callable[..., Any]) -> None:
    config = ModelConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256, max_position_embeddings=32
    )
    model = BertForPreTraining(config, 152)
    model.initialize(0)
    batch = cut(examples(64), 10**6).micro_batches[0]
    kept = {False: 0, True: 0}
    for checkpointing in kept:
        model.encoder.activation_checkpointing = checkpointing
        seen: dict[int, int] = {}

        def keep(tensor: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16),
        ):
            pretraining_loss(model.train(), batch)
        kept[checkpointing] = sum(seen.values())
    assert kept[True] < 0.6 * kept[False]
    estimate = activation_bytes_per_token(model, 32, torch.bfloat16) * batch.num_tokens
    assert 0.5 * kept[False] < estimate < 2.0 * kept[False]


def test_large_trains_on_a_card_of_12_gb() -> None:
    config = load_config("large-12gb")
    with torch.device("meta"):
        model = BertForPreTraining(config.model, 30522, attention="varlen")
    tokens = config.train.micro_batch_tokens
    assert isinstance(tokens, int)
    memory = estimate_memory(config.train, model, 512, tokens, dtype=torch.bfloat16)
    assert memory < 10.5 * 2**30
    assert estimate_memory(TrainConfig(), model, 512, tokens, dtype=torch.bfloat16) > 16 * 2**30


@pytest.mark.parametrize(
    ("gigabytes", "examples", "at_once"), [(12, 256, 128), (24, 256, 256), (24, 1024, 256), (80, 1024, 1024)]
)
def test_a_micro_batch_takes_what_the_card_has_up_to_the_whole_batch(
    monkeypatch: pytest.MonkeyPatch, gigabytes: int, examples: int, at_once: int
) -> None:
    card, cuda, length = gigabytes * 10**9, torch.device("cuda:0"), 128
    # A phase before has left half of the card to PyTorch, which gives it out again.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (card // 2, card))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: card // 2)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    config = TrainConfig(global_batch_size=examples)
    with torch.device("meta"):
        model = BertForPreTraining(ModelConfig(attention_probs_dropout_prob=0.0), 30522, attention="varlen")
    tokens = hardware.choose_micro_batch_tokens(config, model, length, cuda, torch.bfloat16)
    assert at_once <= tokens // length <= examples
    assert estimate_memory(config, model, length, tokens, dtype=torch.bfloat16) < card
    if tokens < examples * length:
        assert estimate_memory(config, model, length, 2 * tokens, dtype=torch.bfloat16) > card
    shared = hardware.choose_micro_batch_tokens(config, model, length, cuda, torch.bfloat16, 4)
    assert shared == min(tokens, examples * length // 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, card))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10**9)
    assert hardware.choose_micro_batch_tokens(config, model, length, cuda, torch.bfloat16) == length


def test_checkpointed_activations_give_the_same_gradients_with_dropout(
    tiny: Tiny, examples: Callable[..., Any]
) -> None:
    model = BertForPreTraining(tiny().model, 152)
    model.initialize(1)
    batch = cut(examples(20), 10**6).micro_batches[0]
    gradients = []
    for checkpointing in (False, True):
        model.encoder.activation_checkpointing = checkpointing
        model.zero_grad()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            pretraining_loss(model.train(), batch).mean(100, 20).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
