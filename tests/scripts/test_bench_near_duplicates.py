"""The benchmark of near duplicates: its truth is exact, and its report is what was measured."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts import bench_near_duplicates


def test_shingles_are_the_different_runs_of_five_ids() -> None:
    ids = np.array([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 300], dtype=np.uint16)
    runs = {tuple(ids[begin : begin + 5].tolist()) for begin in range(8)}
    found = bench_near_duplicates.shingle_set(ids)
    assert {tuple(np.frombuffer(run, dtype=np.uint16).tolist()) for run in found} == runs
    assert len(runs) == 7
    assert bench_near_duplicates.shingle_set(ids[:3]) == {ids[:3].tobytes()}


def test_it_reports_planted_near_duplicates_by_their_true_similarity(
    english_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--passages", "80", "--words", "100", "--planted", "20", "--random-documents", "300"]
    arguments += ["--corpus", str(english_text), "--work", str(tmp_path), "--json", str(tmp_path / "report.json")]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    bench_near_duplicates.main()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["documents"] == 80 + 6 * 20
    rows = report["by_true_similarity"]
    assert sum(row["documents"] for row in rows) >= 6 * 20
    assert sum(row["left_out"] for row in rows) == sum(report["counts"].values()) > 20
    assert rows[0]["documents"] >= 20  # two words in five replaced
    assert rows[0]["left_out"] == rows[1]["left_out"] == 0
    assert report["random_left_out"] == 0
    found, of = map(int, report["recall"].split(" of "))
    assert 0 <= of - found <= 5
