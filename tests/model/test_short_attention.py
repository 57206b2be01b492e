"""The Triton kernels are attention, by Triton's interpreter on the CPU; and where they are used.

The same kernels, compiled, are compared with the definition in `tests/train/test_gpu.py`.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from bert_pretrain.errors import ConfigError
from bert_pretrain.model import attention_backend as backend
from bert_pretrain.model import short_attention
from bert_pretrain.model.short_attention import LONGEST, WIDTHS

DIFFERENCES = """
import json, torch
from bert_pretrain.model.attention_backend import difference_of_short
cases = [(16, 5), (32, 20), (64, 33), (64, 128)]
print(json.dumps({
    str(dtype): [difference_of_short(torch.device("cpu"), dtype, width, longest) for width, longest in cases]
    for dtype in (torch.float16, torch.float32)
}))
"""
CUDA = torch.device("cuda", 0)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is for Linux")
def test_context_and_gradient_are_those_of_attention() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when Triton is imported; it has no bf16
    command = [sys.executable, "-c", DIFFERENCES]
    found = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
    assert all(1e-5 < difference < 1e-3 for difference in found["torch.float16"]), found
    assert all(0 < difference < 1e-6 for difference in found["torch.float32"]), found


@pytest.mark.parametrize(("width", "longest"), [(64, LONGEST + 1), (128, 64)])
def test_blocks_that_the_kernels_do_not_take_are_an_assertion(width: int, longest: int) -> None:
    inputs, bounds = torch.zeros(longest, 3, 1, width), torch.tensor([0, longest])
    with pytest.raises(AssertionError, match="KEYS"):
        short_attention._launch(None, inputs, bounds=bounds, longest=longest, rows=64)


@pytest.mark.parametrize(
    ("width", "longest", "difference", "share", "used", "why"),
    [
        (64, LONGEST, 0.003, 0.55, True, "0.55 of the time"),
        (64, LONGEST, 0.003, 1.2, False, "1.20 of the time"),
        (64, LONGEST, 0.5, 0.55, False, "off by 0.5"),
        (64, LONGEST, float("nan"), 0.55, False, "off by nan"),
        (64, LONGEST + 1, 0.003, 0.55, False, "128 tokens"),
        (8, LONGEST, 0.003, 0.55, False, "heads of 16, 32, 64"),
    ],
)
def test_kernels_are_used_where_they_are_right_and_faster(
    monkeypatch: pytest.MonkeyPatch, width: int, longest: int, difference: float, share: float, used: bool, why: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(backend, "difference_of_short", lambda *_: difference)
    monkeypatch.setattr(backend, "_share_of_flash", lambda *_: share)
    is_better, reason = backend.try_short.__wrapped__(CUDA, torch.bfloat16, width, longest)
    assert is_better == used
    assert why in reason


def test_without_triton_or_where_they_fail_flash_attention_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert backend.try_short.__wrapped__(CUDA, torch.bfloat16, WIDTHS[0], LONGEST) == (
        False, "Triton is not installed",
    )  # fmt: skip
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    is_better, reason = backend.try_short.__wrapped__(CUDA, torch.bfloat16, WIDTHS[0], LONGEST)  # there is no CUDA here
    assert not is_better
    assert "the Triton kernels failed here" in reason


def test_what_leaves_the_card_unusable_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("an illegal memory access")

    for name in ("difference_of_short", "torch.cuda.synchronize"):
        monkeypatch.setattr(f"{backend.__name__}.{name}", fails)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="illegal memory access") as raised:
        backend.try_short.__wrapped__(CUDA, torch.bfloat16, WIDTHS[0], LONGEST)
    assert "varlen" in str(raised.value.remedy)


def test_auto_alone_tries_them_and_only_where_the_longest_sequence_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_varlen_obstacle", lambda *_: None)
    monkeypatch.setattr(backend, "try_short", lambda *_: (True, "faster"))

    def chosen(setting: str, longest: int | None) -> tuple[str, str]:
        options = {"hidden_size": 768, "num_heads": 12, "dropout_rate": 0.0}
        return backend.choose_attention(setting, CUDA, torch.bfloat16, **options, longest=longest)

    assert chosen("auto", 128) == ("triton", "faster")
    assert chosen("auto", None)[0] == chosen("varlen", 128)[0] == "varlen"
    assert chosen("padded", 128)[0] == "padded"
    monkeypatch.setattr(backend, "_varlen_obstacle", lambda *_: "no")
    assert chosen("auto", 128) == ("padded", "no")
    with pytest.raises(ConfigError, match="but no"):
        chosen("varlen", 128)
