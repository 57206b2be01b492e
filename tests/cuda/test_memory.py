"""The estimate of a step's memory is near the peak of a step that is traced on the pretended device."""

from pathlib import Path
from typing import Any

import pytest

from tests.cuda.conftest import Pretended, needs_triton


@pytest.mark.parametrize(
    ("num_layers", "tokens"),
    [
        ("2", 32768),
        pytest.param("all", 8192, marks=pytest.mark.slow),
        pytest.param("all", 131072, marks=pytest.mark.slow),
    ],
)
def test_the_estimate_is_near_the_traced_peak(pretended: Pretended, num_layers: str, tokens: int) -> None:
    check(pretended("memory.peaks", num_layers, tokens))


@needs_triton
@pytest.mark.slow
def test_the_estimate_is_near_the_traced_peak_of_compiled_layers(pretended: Pretended, tmp_path: Path) -> None:
    check(pretended("memory.peaks", "4", 32768, tmp_path))


def check(found: list[dict[str, Any]]) -> None:
    """Compare the estimates with the peaks."""
    assert len(found) == 8
    ratios = {one["name"]: one["estimate"] / one["peak"] for one in found}
    assert {name: ratio for name, ratio in ratios.items() if not 0.85 < ratio < 1.15} == {}
