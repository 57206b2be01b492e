"""The Triton kernels compute attention in Triton's interpreter on the CPU, and are used only if correct and faster.

`tests/train/test_gpu.py` tests the compiled kernels.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from bert_pretrain.config import ModelConfig
from bert_pretrain.errors import ConfigError
from bert_pretrain.model import attention_backend as backend
from bert_pretrain.model import short_attention
from bert_pretrain.model.short_attention import HEAD_SIZES, MAX_SEQLEN

MEASURE_ERRORS = """
import json, torch
from bert_pretrain.model.attention_backend import short_attention_error
cases = [(16, 5), (32, 20), (64, 33), (64, 128)]
print(json.dumps({
    str(dtype): [short_attention_error(torch.device("cpu"), dtype, width, longest) for width, longest in cases]
    for dtype in (torch.float16, torch.float32)
}))
"""
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _clear_caches() -> None:
    for cached in (backend._short_obstacle, backend._time_short):
        cached.cache_clear()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is for Linux")
def test_context_and_gradient_equal_attention() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when Triton is imported; it has no bf16
    command = [sys.executable, "-c", MEASURE_ERRORS]
    errors = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
    assert all(1e-5 < error < 1e-3 for error in errors["torch.float16"]), errors
    assert all(0 < error < 1e-6 for error in errors["torch.float32"]), errors


@pytest.mark.parametrize(("width", "longest"), [(64, MAX_SEQLEN + 1), (128, 64)])
def test_unsupported_blocks_fail_an_assertion(width: int, longest: int) -> None:
    inputs, bounds = torch.zeros(longest, 3, 1, width), torch.tensor([0, longest])
    with pytest.raises(AssertionError, match="KEYS"):
        short_attention._launch(None, inputs, cu_seqlens=bounds, longest=longest, rows=64)


@pytest.mark.parametrize(
    ("width", "longest", "error", "ratio", "used", "reason"),
    [
        (64, MAX_SEQLEN, 0.003, 0.55, True, "0.55 of the time"),
        (64, MAX_SEQLEN, 0.003, 1.2, False, "1.20 of the time"),
        (64, MAX_SEQLEN, 0.5, 0.55, False, "relative error of 0.5"),
        (64, MAX_SEQLEN, float("nan"), 0.55, False, "relative error of nan"),
        (64, MAX_SEQLEN + 1, 0.003, 0.55, False, "128 tokens"),
        (8, MAX_SEQLEN, 0.003, 0.55, False, "head size of 16, 32, 64"),
    ],
)
def test_kernels_are_used_if_correct_and_faster(
    monkeypatch: pytest.MonkeyPatch, width: int, longest: int, error: float, ratio: float, used: bool, reason: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(backend, "short_attention_error", lambda *_: error)
    monkeypatch.setattr(backend, "_time_ratio_to_flash", lambda *_: ratio)
    use_short, message = backend.try_short(CUDA, torch.bfloat16, width, longest)
    assert use_short == used
    assert reason in message
    untimed, _ = backend.try_short(CUDA, torch.bfloat16, width, longest, is_timed=False)
    assert untimed == (used or ratio > 1)


def test_flash_attention_is_used_without_triton_or_if_the_kernels_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert backend.try_short(CUDA, torch.bfloat16, HEAD_SIZES[0], MAX_SEQLEN) == (
        False, "Triton is not installed",
    )  # fmt: skip
    monkeypatch.undo()
    backend._short_obstacle.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    use_short, reason = backend.try_short(CUDA, torch.bfloat16, HEAD_SIZES[0], MAX_SEQLEN)  # there is no CUDA here
    assert not use_short
    assert "the Triton kernels failed" in reason


def test_error_that_leaves_cuda_unusable_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("an illegal memory access")

    for name in ("short_attention_error", "torch.cuda.synchronize"):
        monkeypatch.setattr(f"{backend.__name__}.{name}", fails)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="illegal memory access") as raised:
        backend.try_short(CUDA, torch.bfloat16, HEAD_SIZES[0], MAX_SEQLEN)
    assert "varlen" in str(raised.value.remedy)


def test_only_auto_with_a_known_maximum_length_tries_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_varlen_obstacle", lambda *_: "")
    monkeypatch.setattr(backend, "try_short", lambda *_: (True, "faster"))

    def chosen(setting: str, longest: int | None) -> tuple[str, str]:
        return backend.choose_attention(setting, CUDA, torch.bfloat16, ModelConfig(), longest=longest)

    assert chosen("auto", 128) == ("triton", "faster")
    assert chosen("auto", None)[0] == chosen("varlen", 128)[0] == "varlen"
    assert chosen("padded", 128)[0] == "padded"
    monkeypatch.setattr(backend, "_varlen_obstacle", lambda *_: "no")
    assert chosen("auto", 128) == ("padded", "no")
    with pytest.raises(ConfigError, match="but no"):
        chosen("varlen", 128)
