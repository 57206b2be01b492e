"""Tests of the check for equal bits: its checksum detects a change of a weight or a loss, and ignores times."""

import json
from pathlib import Path

import check_bits
import pytest


@pytest.mark.parametrize(
    ("weights", "loss", "seconds", "is_equal"),
    [
        (b"\x00\x01", 9.491313883, 2.0, True),
        (b"\x00\x03", 9.491313883, 1.0, False),
        (b"\x00\x01", 9.491313985, 1.0, False),
    ],
)
def test_digest(tmp_path: Path, weights: bytes, loss: float, seconds: float, is_equal: bool) -> None:
    def run(name: str, weights: bytes, loss: float, seconds: float) -> Path:
        folder = tmp_path / name
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "model.safetensors").write_bytes(weights)
        lines = [{"step": 41, "loss": loss, "elapsed_seconds": seconds}, {"step": 41, "validation_mlm_loss": 7.1}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    reference = check_bits.digest(run("reference", b"\x00\x01", 9.491313883, 1.0))
    assert (check_bits.digest(run("other", weights, loss, seconds)) == reference) is is_equal
