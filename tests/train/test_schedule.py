"""Learning rate schedules, the length of a run, and what is due after a step."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_pretrain.config import TrainConfig
from bert_pretrain.train.distributed import SINGLE_PROCESS
from bert_pretrain.train.schedule import (
    Length,
    RunClock,
    learning_rate,
    learning_rate_by_clock,
    run_length,
    warmup_steps,
)
from bert_pretrain.train.state import Progress


def rates(steps: int, **settings: object) -> list[float]:
    config = TrainConfig.model_validate({"peak_lr": 1.0, **settings})
    return [learning_rate(config, step, steps) for step in range(steps)]


def test_schedules_have_the_documented_shape_and_warm_up() -> None:
    assert rates(8, warmup_steps=2) == pytest.approx([0.5, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    cosine = rates(100, warmup_steps=0, schedule="cosine")
    assert (cosine[0], cosine[50]) == (1.0, pytest.approx(0.5))
    wsd = rates(100, warmup_steps=10, schedule="wsd")
    assert wsd[10:91] == [1.0] * 81
    assert wsd[91:] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    assert rates(100, warmup_steps=10)[:90] == rates(90, warmup_steps=10, schedule_steps=100)
    assert warmup_steps(TrainConfig(), 1000) == 10
    assert warmup_steps(TrainConfig(warmup_ratio=1.0), 1000) == 1000
    assert warmup_steps(TrainConfig(warmup_steps=0), 1000) == 0


@given(
    st.integers(1, 300).flatmap(lambda steps: st.tuples(st.just(steps), st.integers(0, steps))),
    st.sampled_from(["linear", "cosine", "wsd"]),
)
def test_learning_rate_is_positive_and_at_most_the_peak(steps_and_warmup: tuple[int, int], schedule: str) -> None:
    steps, warmup = steps_and_warmup
    values = rates(steps, warmup_steps=warmup, schedule=schedule)
    assert all(0 < value <= 1.0 for value in values)
    assert values[:warmup] == sorted(values[:warmup])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({}, Length(100_000)),
        ({"max_steps": 7}, Length(7)),
        ({"max_epochs": 1.5, "global_batch_size": 100}, Length(15)),
        ({"max_epochs": 0.001, "global_batch_size": 100}, Length(1)),
        ({"max_epochs": 1.5, "global_batch_size": 100, "warmup_steps": 15}, Length(15)),
        ({"max_steps": 7, "warmup_steps": 8, "schedule_steps": 8}, Length(7)),
        ({"time_budget": 60.0}, Length(None, 60.0)),
    ],
)
def test_length_of_a_run(settings: dict[str, float], length: Length) -> None:
    assert run_length(TrainConfig(**settings), 1000) == length


def test_learning_rate_of_a_time_budget_follows_the_clock() -> None:
    config = TrainConfig.model_validate({"peak_lr": 1.0, "time_budget": "100s", "warmup_ratio": 0.1})
    values = [learning_rate_by_clock(config, step, float(step), 100.0) for step in range(100)]
    assert [values[0], *values[9:11], values[55], values[-1]] == pytest.approx([0.01, 1.0, 1.0, 0.5, 1 / 90])
    assert learning_rate_by_clock(config, 200, 101.0, 100.0) == 0.0
    steady = config.model_copy(update={"schedule": "wsd"})
    assert [learning_rate_by_clock(steady, 99, at, 100.0) for at in (50.0, 90.0, 95.0)] == [1.0, 1.0, 0.5]
    long = config.model_copy(update={"warmup_ratio": 1.0})
    assert [learning_rate_by_clock(long, 1, at, 100.0) for at in (24.0, 49.0)] == [0.48, 0.98]


def test_run_ends_at_its_last_step_or_when_its_time_is_up() -> None:
    assert Length(5).is_over(5, 0.0)
    assert not Length(5).is_over(4, 1e9)
    assert not Length(None, 60.0).is_over(10**9, 49.0, reserve=10.0)
    assert Length(None, 60.0).is_over(0, 50.0, reserve=10.0)


def test_a_signal_saves_and_after_a_stop_signal_no_evaluation_delays_the_end() -> None:
    config = TrainConfig(max_steps=11, log_every=2, eval_every=3, save_every=4)
    clock = RunClock(config, Length(11), Progress(step=6), SINGLE_PROCESS, is_start=True, slow_steps_left=1)
    for number, due in (
        (0, ["log", "evaluate"]),
        (signal.SIGUSR1, ["log", "evaluate", "save"]),
        (signal.SIGTERM, ["log", "save"]),
    ):
        clock.advance(number)
        assert clock.due() == due
