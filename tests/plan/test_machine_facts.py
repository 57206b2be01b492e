"""The calibration: what is timed, what is extrapolated, and the speed that follows for other batches."""

import pytest

from bert_pretrain.plan.machine_facts import SIZES, MachineFacts, Size, Speed, measure_machine


def test_without_time_only_the_smallest_network_is_timed_and_the_others_are_extrapolated() -> None:
    facts = measure_machine(0.0, 5000, "cpu")
    assert facts.timed == {SIZES[0]}
    assert set(facts.speeds) == set(SIZES)
    smallest = facts.speeds[SIZES[0]]
    assert smallest.update_seconds > 0
    for size in SIZES[1:]:
        assert facts.speeds[size].flops_per_second == smallest.flops_per_second
    # Twice the width and the same layers: four times the weights, each multiplied by twice the width.
    assert facts.speeds[Size(2, 256)].update_seconds == pytest.approx(8 * smallest.update_seconds)


def test_the_update_counts_less_the_larger_the_batch() -> None:
    size = Size(2, 256)
    flops = size.flops_per_token(8192, 64)
    facts = MachineFacts(2, {size: Speed(1e11, 2048 * flops / 1e11)}, frozenset({size}))
    fastest = 1e11 / flops
    assert facts.tokens_per_second(size, 8192, 64, 2048) == pytest.approx(fastest / 2)
    assert facts.tokens_per_second(size, 8192, 64, 3 * 2048) == pytest.approx(0.75 * fastest)
