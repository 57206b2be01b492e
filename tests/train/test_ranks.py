"""Parts of a step that ranks share: what two processes compute is what one would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bert_pretrain.train.distributed import SINGLE_PROCESS
from bert_pretrain.train.step import StepSums
from tests.train.two_ranks import (
    OPTIMIZERS,
    as_it_is,
    doubled_matrices,
    gradient_norms,
    muon_weights,
    snapshot,
    trained,
)

Found = list[dict[str, Tensor]]
REPOSITORY = Path(__file__).resolve().parents[2]
PARALLEL = ("ddp", "fsdp")


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
    assert {name for name in found[0] if "/snapshot/" not in name} == found[1].keys()
    assert not [name for name in found[1] if not torch.equal(found[0][name], found[1][name])]


def test_the_norm_of_sharded_gradients_is_that_of_whole_ones(found: Found) -> None:
    expected = gradient_norms(as_it_is)
    torch.testing.assert_close(found[0]["norm"], expected["norm"], rtol=1e-6, atol=0.0)
    assert found[0]["norm/inf"].isinf()


@pytest.mark.parametrize("parallel", PARALLEL)
def test_every_matrix_reaches_a_rank_and_returns(found: Found, parallel: str) -> None:
    for name, expected in doubled_matrices(as_it_is).items():
        assert torch.equal(found[0][f"{parallel}/{name}"], expected), name


@pytest.mark.parametrize("parallel", PARALLEL)
def test_muon_on_two_ranks_is_that_of_one(found: Found, parallel: str) -> None:
    for name, expected in muon_weights(as_it_is).items():
        # The momentum has the same bits. Products in bf16 round by the number of matrices taken together; one update
        # is 0.02 * 0.2 * sqrt(36) wide at most.
        tolerance = 0.0 if "momentum" in name else 2**-7 * 0.02 * 0.2 * 6
        torch.testing.assert_close(found[0][f"{parallel}/{name}"], expected, atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_the_first_rank_takes_the_snapshot_of_a_single_process(found: Found, parallel: str) -> None:
    expected = snapshot("none", as_it_is)
    assert len(expected) > 100
    names = {name for name in found[0] if name.startswith(f"{parallel}/snapshot/")}
    assert names == {f"{parallel}/{name}" for name in expected}
    assert not [name for name in expected if not torch.equal(found[0][f"{parallel}/{name}"], expected[name])]
    assert not [name for name in found[1] if "/snapshot/" in name]


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_of_two_ranks_are_those_of_one(found: Found, parallel: str, optimizer: str) -> None:
    tolerance = 1e-2 if optimizer == "muon" else 1e-4
    for name, expected in trained("none", optimizer, SINGLE_PROCESS).items():
        torch.testing.assert_close(found[0][f"{parallel}/{name}"], expected, atol=tolerance, rtol=tolerance)


def test_a_student_on_two_ranks_is_that_of_one(found: Found) -> None:
    for name, expected in trained("none", "adamw", SINGLE_PROCESS, with_teacher=True).items():
        torch.testing.assert_close(found[0][f"taught/{name}"], expected, atol=1e-4, rtol=1e-4)
    assert StepSums(*found[0]["taught/adamw/sums"].tolist()).relation_loss > 0.01
