"""The recorder sees what makes the host wait, and nothing else."""

from tests.cuda.conftest import Pretended


def test_the_recorder_sees_every_wait(pretended: Pretended) -> None:
    waits, data_dependent, harmless = pretended("mistakes.notes")
    assert all(count > 0 for count, _ in waits), waits
    assert all(count > 0 for _, count in data_dependent), data_dependent
    assert all(counts == [0, 0] for counts in harmless), harmless
