"""The time of a run is counted over interruptions, also those that give no warning."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bert_pretrain.errors import DataError
from bert_pretrain.io.files import read_json
from bert_pretrain.plan import time_limit
from bert_pretrain.plan.time_limit import SECONDS_BETWEEN_WRITES, TimeLimit


def test_time_is_counted_on_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run" / "time.json"
    with TimeLimit(100.0, file, used_before_open=30.0) as limit:
        assert limit.used == pytest.approx(30.0, abs=1.0)
        assert limit.left == pytest.approx(70.0, abs=1.0)
    before = read_json(file)["used_seconds"]
    assert 30.0 <= before < 31.0
    with TimeLimit(100.0, file, used_before_open=5.0) as again:
        assert again.used == pytest.approx(before + 5.0, abs=1.0)


def test_a_kill_hides_little_of_the_time_that_was_used(tmp_path: Path) -> None:
    file = tmp_path / "time.json"
    code = (
        "import sys, time; from pathlib import Path; from bert_pretrain.plan.time_limit import TimeLimit\n"
        "with TimeLimit(100.0, Path(sys.argv[1])): print('open', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    begin = time.monotonic()
    time.sleep(2.5 * SECONDS_BETWEEN_WRITES)
    process.kill()
    elapsed = time.monotonic() - begin
    process.wait()
    process.stdout.close()
    used = read_json(file)["used_seconds"]
    assert elapsed - 2 * SECONDS_BETWEEN_WRITES < used <= elapsed + 1.0


def test_the_time_is_written_without_waiting_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushes: list[int] = []
    written = threading.Event()
    pwrite = os.pwrite
    monkeypatch.setattr(os, "fsync", flushes.append)
    monkeypatch.setattr(os, "pwrite", lambda *what: (pwrite(*what), written.set()))
    monkeypatch.setattr(time_limit, "SECONDS_BETWEEN_WRITES", 0.01)
    with TimeLimit(100.0, tmp_path / "time.json"):
        before = len(flushes)
        assert written.wait(10)
        assert len(flushes) == before
    assert len(flushes) > before


@pytest.mark.parametrize("content", ["", "{}", '{"used_seconds": "much"}', '{"used_seconds": -1}', "[1]"])
def test_a_file_that_says_nothing_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "time.json"
    file.write_text(content)
    with pytest.raises(DataError, match=r"used_seconds|how much time|cannot read"):
        TimeLimit(100.0, file)
