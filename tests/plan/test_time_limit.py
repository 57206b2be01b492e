"""The used time of a run is counted across interruptions, including SIGKILL."""

import subprocess
import sys
from pathlib import Path

import pytest

from bert_pretrain.errors import DataError
from bert_pretrain.io.files import read_json
from bert_pretrain.plan.time_limit import TimeLimit


def test_count_continues_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run" / "time.json"
    with TimeLimit(100.0, file, used_before_open=30.0) as limit:
        assert limit.used >= 30.0
        assert limit.left <= 70.0
    before = read_json(file)["used_seconds"]
    assert before >= 30.0
    with TimeLimit(100.0, file, used_before_open=5.0) as again:
        assert again.used >= before + 5.0


def test_count_survives_a_kill(tmp_path: Path) -> None:
    file = tmp_path / "time.json"
    code = """
import sys, time
from pathlib import Path
from bert_pretrain.plan import time_limit
time_limit.SECONDS_BETWEEN_WRITES = 0.01
with time_limit.TimeLimit(100.0, Path(sys.argv[1])):
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(file)])
    while not file.exists() or not (used := read_json(file)["used_seconds"]):
        assert process.poll() is None
    process.kill()
    process.wait()
    assert read_json(file)["used_seconds"] >= used > 0


@pytest.mark.parametrize("content", ["", "{}", '{"used_seconds": "much"}', '{"used_seconds": -1}', "[1]"])
def test_file_without_a_valid_time_is_an_error(content: str, tmp_path: Path) -> None:
    file = tmp_path / "time.json"
    file.write_text(content)
    with pytest.raises(DataError, match="time"):
        TimeLimit(100.0, file)
