"""Tests of the soak test: it detects leaks, and samples a real training."""

import json
import sys
from collections.abc import Callable

import pytest

from scripts import soak

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def training(
    memory: Callable[[int], float] = lambda step: 500.0, descriptors: Callable[[int], int] = lambda step: 9
) -> list[soak.Sample]:
    """Ten minutes at ten steps per second, without the last ten seconds, in which the model is exported."""
    samples = []
    for second in range(0, 610, 5):
        step = min(second * 10, 5800)
        size = round(memory(step) * soak.MB)
        samples.append(soak.Sample(float(second), step, size, size // 2, descriptors(step), 1000.0))
    return soak.until_last_step(samples)


@pytest.mark.parametrize(
    ("memory", "descriptors", "from_step", "passes"),
    [
        (lambda step: 900.0 if step % 400 == 0 else 500.0, lambda step: 9 + (step % 400 == 0), 500, True),
        (lambda step: 500.0 if step >= 500 else 100.0, lambda step: 9, 500, True),
        (lambda step: 500.0 if step >= 500 else 100.0, lambda step: 9, 100, False),
        (lambda step: 500.0 + step / 100, lambda step: 9, 500, False),  # 9 %
        (lambda step: 500.0 + step / 300, lambda step: 9, 500, True),  # 3 %
        (lambda step: 500.0, lambda step: 9 + step // 1000, 500, False),
    ],
)
def test_memory_and_descriptor_leaks_fail(memory, descriptors, from_step, passes) -> None:
    assert soak.judge(training(memory, descriptors), from_step)[1] is passes


def test_short_run_gets_no_verdict() -> None:
    for samples, from_step in ((training(), 9000), (training(), 5400), ([], 1)):
        with pytest.raises(soak.TooShort):
            soak.judge(samples, from_step)


@LINUX
@pytest.mark.slow
def test_real_training_is_sampled(data_folder, tmp_path, monkeypatch, capfd) -> None:
    output = tmp_path / "soak"
    settings = ("train.device=cpu", "train.global_batch_size=16", "train.save_every=20", "train.log_every=2")
    words = [word for setting in settings for word in ("--set", setting)]
    command = f"soak.py {data_folder} --minutes 0.3 --size 1x32 --every 0.1 --from-step 10 --output {output}"
    monkeypatch.setattr(sys, "argv", [*command.split(), *words])
    status = soak.main()
    out = capfd.readouterr().out
    assert status in (0, 1), (output / "train.log").read_text()
    assert out.rstrip().endswith("FAILED" if status else "passed")
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert samples[-1]["step"] > 20
    assert all(sample["rss_bytes"] > sample["anonymous_bytes"] > 10**7 for sample in samples)
    assert min(sample["descriptors"] for sample in samples) >= 3
    assert len(list((output / "run" / "checkpoints").glob("step-*"))) == 2


@LINUX
def test_failed_training_gets_no_verdict(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(sys, "argv", ["soak.py", str(tmp_path / "no-data"), "--output", str(tmp_path / "soak")])
    assert soak.main() == 2
    assert "exit status 2" in capfd.readouterr().err
    assert "no-data" in (tmp_path / "soak" / "train.log").read_text()
    with pytest.raises(SystemExit):
        soak.main()  # the folder is in use
