"""The law's constants are the fit of the runs that the repository holds, and describe them."""

import math

import pytest

from bert_pretrain.plan import law
from scripts import fit_law

RUNS = fit_law.read()
ENGLISH = [run for run in RUNS if run["corpus"].startswith("en")]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_constants_are_what_the_script_fits(language: str) -> None:
    assert law.CURVES[language] == pytest.approx(fit_law.fits(RUNS)[language], rel=0.01, abs=1e-3)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['corpus']} {run['size']} {run['tokens']:,}")
def test_every_measured_run_is_in_its_expected_range(run: dict[str, float | str]) -> None:
    size, tokens = fit_law.size_of(run), float(run["tokens"]) / 1e6
    expected = law.forecast(size, law.VOCAB_SIZE, tokens, 1.0, is_chinese=str(run["corpus"]).startswith("zh"))
    assert expected.beyond == "" or tokens > law.MAX_MEASURED_TOKENS
    assert expected.mlm_loss[0] <= float(run["mlm_loss"]) <= expected.mlm_loss[1]
    assert expected.nsp_accuracy[0] <= float(run["nsp_accuracy"]) <= expected.nsp_accuracy[1]
    assert expected.mlm_loss[1] / expected.mlm_loss[0] < 1.3


def test_sizes_and_tokens_that_count_as_measured_are_in_the_runs() -> None:
    assert {fit_law.size_of(run) for run in ENGLISH} == law.MEASURED_SIZES
    assert max(run["tokens"] for run in RUNS) / 1e6 >= law.MAX_MEASURED_TOKENS


def test_the_floor_falls_with_the_size_as_in_the_paper() -> None:
    table = ((21.2, 5.84), (42.5, 4.68), (84.9, 3.99), (151.0, 3.54), (302.0, 3.23))
    ratios = [law.CURVES["en"].loss(weights, 1e12) / math.log(perplexity) for weights, perplexity in table]
    assert max(ratios) / min(ratios) < 1.06
