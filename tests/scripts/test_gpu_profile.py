"""The profile that the check of a GPU takes."""

import gpu_profile
import pytest


def test_a_profile_adds_up_kernels_gaps_and_launches() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": duration, "tid": 7}
        for name, begin, duration in [("nvjet_a", 0, 40), ("flash_fwd", 20, 40), ("nvjet_a", 80, 20), ("Memset", 90, 5)]
    ]
    host = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": -50, "dur": 500, "tid": 1}
    rows = gpu_profile.summarize(gpu_profile.events_of({"traceEvents": [host, *events, {"ph": "M"}]}), steps=2)
    assert rows[0] == {
        "profiled_step_seconds": pytest.approx(50e-6),
        "gap_share": pytest.approx(0.2),  # nothing runs from 60 to 80 of 100
        "launches_per_step": 2,
    }
    kinds = {row["kind_of_kernel"]: row["seconds"] for row in rows[1:4]}
    assert kinds == pytest.approx({"matrix products": 30e-6, "attention": 20e-6, "copies and fills of memory": 2.5e-6})
    assert (rows[4]["kernel"], rows[4]["calls_per_step"]) == ("nvjet_a", 1.0)
    assert "gaps 20.0% of it, 2 launches a step" in gpu_profile.as_text(rows, "title")


# ── the benchmark ──
