"""Errors keep their three parts, also on the way from a worker process."""

import pickle

import pytest

from bert_pretrain.errors import ConfigError, DataError, InputError, Interrupted, OutputError, UserError


@pytest.mark.parametrize("kind", [UserError, ConfigError, InputError, OutputError, DataError])
def test_a_mistake_crosses_process_borders_whole(kind: type[UserError]) -> None:
    error = pickle.loads(pickle.dumps(kind("what", where="a.yaml:3", remedy="correct it")))
    assert type(error) is kind
    assert (error.what, error.where, error.remedy) == ("what", "a.yaml:3", "correct it")
    assert str(error) == "what\n  where: a.yaml:3\n  hint: correct it"


def test_an_interruption_crosses_process_borders_whole() -> None:
    error = pickle.loads(pickle.dumps(Interrupted(130, "go on so")))
    assert (error.exit_code, error.message) == (130, "go on so")
