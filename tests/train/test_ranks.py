"""A step that ranks share: what two processes compute is what one would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bert_pretrain.train.distributed import SINGLE_PROCESS
from tests.train.two_ranks import CASES, trained

Found = list[dict[str, Tensor]]
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What both ranks computed, by name."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(REPOSITORY / "tests" / "train" / "two_ranks.py"), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FutureWarning" not in done.stderr
    return [load_file(folder / f"rank-{rank}.safetensors") for rank in range(2)]


def test_both_ranks_have_the_same_bits(found: Found) -> None:
    assert found[0].keys() == found[1].keys()
    assert not [name for name in found[1] if not torch.equal(found[0][name], found[1][name])]


@pytest.mark.parametrize("case", [case for case in CASES if "bf16" not in case])
def test_steps_of_two_ranks_are_those_of_one(found: Found, case: str) -> None:
    tolerance = 1e-2 if case == "muon" else 1e-4
    for name, expected in trained(case, SINGLE_PROCESS).items():
        torch.testing.assert_close(found[0][name], expected, atol=tolerance, rtol=tolerance)


def test_gradients_of_two_ranks_through_weights_in_16_bits_are_those_of_one(found: Found) -> None:
    case = "adamw in bf16"
    one = trained(case, SINGLE_PROCESS)
    gradients = {name: gradient for name, gradient in one.items() if "/gradient/" in name}
    apart = sum(float((found[0][name] - gradient).square().sum()) for name, gradient in gradients.items())
    assert apart**0.5 < 0.01 * sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
    torch.testing.assert_close(found[0][f"{case}/sums"], one[f"{case}/sums"], atol=0.1, rtol=1e-3)
