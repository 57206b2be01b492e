"""The estimate of a step's memory is near the peak of a step that is traced on the pretended device."""

import pytest

from tests.cuda.conftest import Pretended


@pytest.mark.parametrize(
    ("num_layers", "tokens"),
    [
        ("2", 32768),
        pytest.param("all", 8192, marks=pytest.mark.slow),
        pytest.param("all", 131072, marks=pytest.mark.slow),
    ],
)
def test_the_estimate_is_near_the_traced_peak(pretended: Pretended, num_layers: str, tokens: int) -> None:
    ratios = {one["name"]: one["estimate"] / one["peak"] for one in pretended("memory.peaks", num_layers, tokens)}
    assert len(ratios) == 2
    assert {name: ratio for name, ratio in ratios.items() if not 0.85 < ratio < 1.15} == {}
