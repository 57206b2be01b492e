"""The law's constants are the fit of the runs that the repository holds, and describe them."""

import math
from typing import Any

import pytest

from bert_pretrain.plan import law
from scripts import fit_law

RUNS = fit_law.read_rows(fit_law.RUNS)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_constants_are_what_the_script_fits(language: str) -> None:
    assert law.CURVES[language] == pytest.approx(fit_law.fits(RUNS)[language], rel=0.01, abs=1e-3)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['corpus']} {run['size']} {run['tokens']:,} {run['batch']}")
def test_every_measured_run_is_in_its_expected_range(run: dict[str, Any]) -> None:
    size, tokens = fit_law.size_of(run), run["tokens"] / 1e6
    expected = law.forecast(
        size,
        run["vocab_size"],
        tokens,
        run.get("epochs", 1.0),
        run["language"] == "zh",
        run["tokens"] / run["steps"],
        from_cooccurrences=run.get("init") == "cooccurrences",
    )
    assert expected.mlm_loss[0] <= run["mlm_loss"] <= expected.mlm_loss[1]
    if run["nsp_accuracy"] is not None:
        assert expected.nsp_accuracy[0] <= run["nsp_accuracy"] <= expected.nsp_accuracy[1]
    if not expected.beyond:
        assert expected.mlm_loss[1] / expected.mlm_loss[0] < 1.3


def test_ranges_contain_runs_of_networks_and_batches_that_the_fit_has_not_seen() -> None:
    inside = [inside for *_, inside in fit_law.left_out(RUNS)]
    assert len(inside) > 30
    assert sum(inside) >= 0.9 * len(inside)


def test_more_steps_than_are_needed_at_least_or_a_small_batch_cost_nothing() -> None:
    curve = law.CURVES["en"]
    assert curve.loss(1.0, 10.0, 1e6, 1.0) == pytest.approx(curve.loss(1.0, 10.0), rel=1e-3)
    assert curve.loss(1.0, 10.0, curve.lost_steps) == law.PLATEAU
    losses = [curve.loss(1.0, 2.0, 2e6 / batch, batch) for batch in law.BATCHES]
    assert losses == sorted(losses)
    critical = law.critical_batch(curve.loss(1.0, 1000.0))
    assert curve.loss(1.0, 1000.0, batch_tokens=critical) == pytest.approx(curve.loss(1.0, 500.0))


def test_sizes_tokens_and_batches_that_count_as_measured_are_in_the_runs() -> None:
    english = [run for run in RUNS if run["language"] == "en"]
    assert {fit_law.size_of(run) for run in english if run["steps"] >= 1000} == law.MEASURED_SIZES | law.CONFIRMED_SIZES
    assert max(run["tokens"] for run in english) / 1e6 >= law.MAX_MEASURED_TOKENS
    assert law.MAX_MEASURED_BATCH_TOKENS in {fit_law.batch_of(run) for run in english}


def test_the_floor_falls_with_the_size_as_in_the_paper() -> None:
    table = ((21.2, 5.84), (42.5, 4.68), (84.9, 3.99), (151.0, 3.54), (302.0, 3.23))
    ratios = [law.CURVES["en"].loss(weights, 1e12) / math.log(perplexity) for weights, perplexity in table]
    assert max(ratios) / min(ratios) < 1.06
