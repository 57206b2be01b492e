"""The soak tells a process that grows from one that does not, and watches a real training."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import soak

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def samples(
    memory: Callable[[int], float] = lambda step: 500.0,
    descriptors: Callable[[int], int] = lambda step: 9,
    speed: Callable[[int], float] = lambda step: 1000.0,
) -> list[soak.Sample]:
    """Ten minutes of ten steps a second, after a start of 20 seconds and before an end of 10."""
    found = []
    for second in range(0, 630, 5):
        step = min(max(0, second - 20) * 10, 5800)
        rate = speed(step) if step else None
        size = round(memory(step) * soak.MB)
        found.append(soak.Sample(float(second), step, size, size // 2, descriptors(step), 4, 100, rate))
    return found


def test_a_process_that_stays_as_it_is_passes_with_what_it_holds_for_a_moment() -> None:
    verdict = soak.judge(
        samples(lambda step: 900.0 if step % 400 == 0 else 500.0, lambda step: 9 + (step % 400 == 0)), 500
    )
    assert verdict.is_passed
    assert (verdict.memory_ratio, verdict.descriptors, verdict.speed_ratio) == (1.0, (9, 9), 1.0)
    grows_at_first = samples(lambda step: 500.0 if step >= 500 else 100.0)
    assert soak.judge(grows_at_first, 500).is_passed
    assert not soak.judge(grows_at_first, 100).is_passed


def test_a_leak_of_memory_or_descriptors_fails_and_a_training_that_slows_down_is_seen() -> None:
    leak = soak.judge(samples(memory=lambda step: 500.0 + step / 100), 500)
    assert leak.memory_ratio == pytest.approx(555 / 508, abs=0.002)  # medians of the two tenths
    assert not leak.is_passed
    assert soak.judge(samples(memory=lambda step: 500.0 + step / 300), 500).is_passed  # 3.5 %
    descriptors = soak.judge(samples(descriptors=lambda step: 9 + step // 1000), 500)
    assert not descriptors.is_passed
    assert descriptors.memory_ratio == 1.0
    assert soak.judge(samples(speed=lambda step: 1000.0 - step / 10), 500).speed_ratio == pytest.approx(0.46, abs=0.01)


def test_a_run_too_short_for_a_verdict_gets_none() -> None:
    with pytest.raises(soak.TooShort, match="ended at step 5800, before step 9000"):
        soak.judge(samples(), 9000)
    with pytest.raises(soak.TooShort, match="last two tenths"):
        soak.judge(samples(), 5000)


def test_the_table_has_a_row_for_each_tenth_of_the_training() -> None:
    rows = soak.table(samples(memory=lambda step: 500.0 + step / 100))[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == [str(number) for number in range(1, 11)]
    assert cells[-1][1:] == ["5,800", "555", "278", "9", "4", "100", "1,000"]
    assert cells[0][1] == "600"


@LINUX
@pytest.mark.slow
def test_a_real_training_is_watched(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "soak"
    command = (
        f"soak.py {data_folder} --minutes 0.08 --size 1x32 --batch 16 --every 0.1 --from-step 10 --output {output}"
    )
    monkeypatch.setattr(sys, "argv", [*command.split(), "--save-every", "20", "--set", "train.device=cpu"])
    status = soak.main()
    out = capfd.readouterr().out
    assert status in (soak.PASSED, soak.FAILED), (output / "train.log").read_text()
    assert out.rstrip().endswith("passed" if status == soak.PASSED else "FAILED")
    found = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    steps = [sample["step"] for sample in found]
    assert steps == sorted(steps)
    assert steps[-1] > 20
    assert max(sample["rss_bytes"] for sample in found) > max(sample["anonymous_bytes"] for sample in found) > 10**7
    assert min(sample["descriptors"] for sample in found[-10:]) >= 3
    assert len(list((output / "run" / "checkpoints").glob("step-*"))) == 2
    assert soak.main() == soak.NO_VERDICT  # the folder is in use


@LINUX
def test_a_training_that_fails_gets_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["soak.py", str(tmp_path / "no-data"), "--output", str(tmp_path / "soak")])
    assert soak.main() == soak.NO_VERDICT
    assert "exit status 2" in capfd.readouterr().err
    assert "no-data" in (tmp_path / "soak" / "train.log").read_text()
