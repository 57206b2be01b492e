"""The pool: results in order, mistakes as they are, and a killed worker is explained."""

import os
import signal

import pytest

from bert_pretrain.errors import InputError, UserError
from bert_pretrain.executor import run_all


def run(function, tasks, workers):
    return run_all(function, tasks, workers=workers, description="test", unit="task")


def double(number: int) -> int:
    return 2 * number


def refuse(number: int) -> int:
    if number == 3:
        raise InputError("three is wrong", where="here", remedy="take four")
    return number


def die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def process(_: int) -> int:
    return os.getpid()


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_tasks(workers: int) -> None:
    assert run(double, range(20), workers) == list(range(0, 40, 2))
    assert run(double, [], workers) == []


def test_one_worker_is_this_process_and_two_are_others() -> None:
    assert set(run(process, range(4), 1)) == {os.getpid()}
    assert os.getpid() not in run(process, range(4), 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_in_a_worker_is_the_users(workers: int) -> None:
    with pytest.raises(InputError, match="three is wrong"):
        run(refuse, range(9), workers)


def test_a_killed_worker_is_explained() -> None:
    with pytest.raises(UserError) as caught:
        run(die, range(9), 2)
    assert "--workers" in caught.value.remedy
