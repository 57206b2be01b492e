"""The first screen names what would make the run faster, and nothing where nothing would."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_pretrain.config import Config
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.train.device.hardware import Precision
from bert_pretrain.train.device.hints import Machine, speed_hints
from bert_pretrain.train.distributed import DistContext
from bert_pretrain.train.resolved import resolve_run
from bert_pretrain.train.run import train

CPU_CHOICES: dict[str, Any] = {"device": torch.device("cpu"), "precision": Precision("bf16", ""), "attention": "padded"}
CUDA_CHOICES: dict[str, Any] = {**CPU_CHOICES, "device": torch.device("cuda", 0), "attention": "varlen"}
FP32 = {"precision": Precision("fp32", "")}
CPU_MACHINE = Machine(cores=2, threads=2, best_precision="bf16")
CUDA_MACHINE = Machine(cores=16, threads=8, best_precision="bf16")


HintsOf = Callable[..., str]


@pytest.fixture
def hints_of(data_folder: Path, tmp_path: Path) -> HintsOf:
    """Return the hints for a run of given choices and settings, joined."""
    data = DataFolder.open(data_folder)

    def of(choices: dict[str, Any], machine: Machine, model: dict[str, Any] | None = None, **train: Any) -> str:
        settings = {"global_batch_size": 2000, "device": "cpu", **train}
        config = Config.model_validate({"model": {"attention_probs_dropout_prob": 0.0, **(model or {})}})
        run = resolve_run(config, data, tmp_path, DistContext())
        config = Config.model_validate({"model": config.model.model_dump(), "train": settings})
        return "; ".join(
            speed_hints(replace(run, config=config, **choices), machine, settings.get("micro_batch_tokens", 4096))
        )

    return of


@pytest.fixture(autouse=True)
def capable_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def test_a_run_that_uses_its_machine_gets_no_hint(hints_of: HintsOf) -> None:
    assert hints_of(CPU_CHOICES, CPU_MACHINE) == ""
    assert hints_of(CUDA_CHOICES, CUDA_MACHINE) == ""
    assert hints_of({**CPU_CHOICES, **FP32}, replace(CPU_MACHINE, best_precision="fp32")) == ""


@pytest.mark.parametrize(
    ("choices", "machine", "changes", "hint"),
    [
        (
            {**CPU_CHOICES, **FP32},
            CPU_MACHINE,
            {},
            "train.precision=auto computes in bf16",
        ),
        (CPU_CHOICES, replace(CPU_MACHINE, threads=1), {}, "OMP_NUM_THREADS=2 uses all cores"),
        (CPU_CHOICES, replace(CPU_MACHINE, threads=4), {}, "OMP_NUM_THREADS=2 has a core for each thread"),
        (CPU_CHOICES, CPU_MACHINE, {"compile": True}, "train.compile=auto"),
        (CPU_CHOICES, CPU_MACHINE, {"micro_batch_tokens": 512}, "train.micro_batch_tokens=auto"),
        (CPU_CHOICES, CPU_MACHINE, {"activation_checkpointing": True}, "train.activation_checkpointing=false"),
        (
            {**CUDA_CHOICES, "attention": "padded"},
            CUDA_MACHINE,
            {"model": {"attention_probs_dropout_prob": 0.1}},
            "model.attention_probs_dropout_prob=0",
        ),
        (CUDA_CHOICES, CUDA_MACHINE, {"compile": False}, "train.compile=auto compiles"),
        (CUDA_CHOICES, CUDA_MACHINE, {"global_batch_size": 100}, "train.global_batch_size"),
    ],
)
def test_what_slows_a_run_down_is_named_with_its_key(
    hints_of: HintsOf, choices: dict[str, Any], machine: Machine, changes: dict[str, Any], hint: str
) -> None:
    found = hints_of(choices, machine, **changes)
    assert hint in found
    assert found.count("; ") == 0


def test_ranks_share_the_cores_and_are_not_told_to_take_them_all(hints_of: HintsOf) -> None:
    shared = {**CPU_CHOICES, "dist_context": DistContext(0, 2)}
    assert hints_of(shared, replace(CPU_MACHINE, threads=1)) == ""


def test_the_first_screen_has_one_line_of_hints(
    tiny: Callable[..., Config], data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("bert_pretrain.train.run.this_machine", lambda device: CPU_MACHINE)
    train(tiny(max_steps=1, micro_batch_tokens="auto"), data_folder, tmp_path / "run", dry_run=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("faster")]
    assert lines == ["faster     train.precision=auto computes in bf16"]
