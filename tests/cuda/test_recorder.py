"""The recorder sees what makes the host wait, and nothing else."""

from tests.cuda.conftest import Pretended


def test_the_recorder_sees_every_wait(pretended: Pretended) -> None:
    noted = pretended("mistakes.notes")
    assert {name: counts for name, counts in noted["waits"].items() if not counts[0]} == {}
    assert {name: counts for name, counts in noted["data_dependent"].items() if not counts[1]} == {}
    assert {name: counts for name, counts in noted["harmless"].items() if counts != [0, 0]} == {}
