"""Tests of the benchmark of the data stages."""

import lzma
import subprocess
import sys
from pathlib import Path

import bench_data as bench
import pytest

from bert_pretrain.text.tokenizer import Tokenizer


def test_different_ids_are_detected(english_text: Path, vocab_folder: Path, tmp_path: Path) -> None:
    assert bench.ids_equal(str(vocab_folder), str(english_text), "0.1")
    tokens = Tokenizer.load(vocab_folder).tokens
    cased = Tokenizer(tokens, lowercase=False, strip_accents=None, handle_chinese_chars=True)
    cased.save(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((vocab_folder / "tokenizer.json").read_bytes())
    assert not bench.ids_equal(str(tmp_path), str(english_text), "0.1")


def test_row_shows_medians_and_ranges() -> None:
    row = bench.Row("a job", "the peer", ours=[30.0, 33.0, 36.0], peer=[10.0, 10.0, 9.0])
    assert str(row) == "| a job | 33 MB/s (30–36) | 10 MB/s (9–10): the peer | 3.3 × (3–4) |"
    once = bench.Row("a job", "the peer", ours=[1.5], peer=[3.0])
    assert str(once) == "| a job | 1.5 MB/s | 3 MB/s: the peer | 0.5 × |"


@pytest.mark.slow
def test_command_prints_all_rows_and_the_scaling_table(english_text, chinese_text, tmp_path) -> None:
    packed = tmp_path / "chinese.txt.xz"
    packed.write_bytes(lzma.compress(chinese_text.read_bytes()))
    words = ["--english", english_text, "--chinese", packed, "--work", tmp_path / "work", "--repeats", 1]
    words += ["--slice-mb", 0.2, "--vocab-size", 1500, "--shape-mb", 1]
    command = [sys.executable, bench.__file__, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "commit:" in done.stdout
    table, scaling = done.stdout.split("| from 0.5 and 1 MB |")
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 7
    for name, ours, peer, *_ in rows:
        assert all(float(cell.split()[0]) > 0 for cell in (ours, peer)), name
    assert sum(line.startswith("| ") for line in scaling.splitlines()) == 10
