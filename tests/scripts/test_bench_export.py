"""The exported model predicts what `transformers` predicts, and the table measures it."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import bench_export


@pytest.mark.slow  # tracing the network takes a quarter of a minute
def test_onnx_has_the_accuracy_and_loss_of_transformers_and_8_bits_are_smaller(
    make_bert: Callable[..., Path],
    sentences: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(sentences) + "\n", encoding="utf-8")
    model = make_bert(hidden_size=128, intermediate_size=512, num_hidden_layers=1)  # large enough for sizes to tell
    words = [model, tmp_path / "texts.txt", "--output", tmp_path / "o", "--sentences", 8, "--rounds", 2]
    monkeypatch.setattr(sys, "argv", ["bench_export.py", *map(str, words)])
    bench_export.main()
    shown = capsys.readouterr().out
    rows = dict(re.findall(r"^\| ([\w ]+, \w+|[\w ]+, PyTorch int8) \| (.*) \|$", shown, flags=re.MULTILINE))
    cells = {name: [cell.strip() for cell in row.split("|")] for name, row in rows.items()}
    assert set(cells) == {
        "transformers, fp32",
        "transformers, PyTorch int8",
        "ONNX Runtime, fp32",
        "ONNX Runtime, int8",
    }
    truth, exported, small = (
        cells[name] for name in ("transformers, fp32", "ONNX Runtime, fp32", "ONNX Runtime, int8")
    )
    assert exported[1] == truth[1]
    assert float(exported[2]) == pytest.approx(float(truth[2]), abs=2e-4)
    assert float(small[2]) == pytest.approx(float(truth[2]), rel=0.1)
    assert float(small[0]) < 0.5 * float(exported[0])
    assert all(float(row[3].split()[0]) > 0 for row in cells.values())
