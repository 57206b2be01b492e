"""What `auto` comes to."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bert_pretrain.config import Config, ModelConfig, TrainConfig
from bert_pretrain.errors import ConfigError
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train import hardware

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("flags", "feature"),
    [
        ("fpu avx2 avx512f avx512_bf16", "avx512_bf16"),
        ("fpu avx512_bf16 amx_bf16 amx_tile", "amx_bf16"),
        ("fpu avx2 avx512f", None),
    ],
)
def test_bf16_on_the_cpu_needs_its_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, feature: str | None
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t: none\n")
    assert hardware.cpu_bf16_feature(cpuinfo) == feature
    monkeypatch.setattr(hardware, "cpu_bf16_feature", lambda: feature)
    precision = hardware.choose_precision("auto", CPU)
    assert precision.name == ("bf16" if feature else "fp32")
    assert (feature or "neither") in precision.reason


def test_an_unknown_kind_of_cpu_computes_in_fp32(tmp_path: Path) -> None:
    assert hardware.cpu_bf16_feature(tmp_path / "nothing") is None


def test_a_precision_that_is_given_is_taken() -> None:
    assert hardware.choose_precision("fp16", CPU).dtype == torch.float16


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="this machine has"):
        hardware.choose_device("cuda:99")


def test_micro_batches_are_as_given_or_fit(tiny: Callable[..., Config]) -> None:
    model = BertForPreTraining(tiny().model, 152)
    assert hardware.choose_micro_batch_tokens(TrainConfig(micro_batch_tokens=77), model, 32, CPU) == 77
    assert hardware.choose_micro_batch_tokens(TrainConfig(global_batch_size=2), model, 32, CPU) == 64
    many = hardware.choose_micro_batch_tokens(TrainConfig(global_batch_size=10_000), model, 32, CPU)
    assert many == hardware.CPU_MICRO_BATCH_TOKENS


def test_padding_attention_is_estimated_to_need_more_memory() -> None:
    sizes = [
        hardware.activation_bytes_per_token(
            BertForPreTraining(ModelConfig(num_hidden_layers=2), 10, attention=name), 512
        )
        for name in ("varlen", "padded")
    ]
    assert sizes[0] < sizes[1]
