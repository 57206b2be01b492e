"""Descriptors: a system gives a process 1,024 of them, and the size of the corpus must not decide how many it takes."""

import subprocess
import sys
from pathlib import Path

import pytest

MAKE_DATA_WITH_FEW_DESCRIPTORS = """
import os, resource, sys
from pathlib import Path
from bert_pretrain.text import documents
from bert_pretrain.config_file import load_config
from bert_pretrain.make_data.run import make_data

documents.PART_BYTES = 1024
text, copy, vocab, output, limit = sys.argv[1:]
config = load_config(settings=["data.max_seq_length=64", "data.dupe_factor=2", "data.examples_per_shard=512"])
before = len(os.listdir("/dev/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), int(limit)))
make_data(config, [text, copy], Path(vocab), Path(output), workers=1)
print("left open:", len(os.listdir("/dev/fd")) - before)
"""


@pytest.fixture
def copied_text(english_text: Path, tmp_path: Path) -> Path:
    """Some documents once more, so that there is a list of duplicates to be read."""
    copy = tmp_path / "copy.txt"
    copy.write_text(english_text.read_text(encoding="utf-8")[:20000], encoding="utf-8")
    return copy


def test_make_data_takes_no_more_descriptors_for_more_parts_and_leaves_none_open(
    english_text: Path, copied_text: Path, vocab_folder: Path, tmp_path: Path
) -> None:
    limit = 30
    command = [sys.executable, "-c", MAKE_DATA_WITH_FEW_DESCRIPTORS]
    arguments = map(str, (english_text, copied_text, vocab_folder, tmp_path / "data", limit))
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.glob(".token-store/*/part-*"))) > limit
    assert list(tmp_path.glob(".token-store/*/duplicates-*.npy"))
    assert result.stdout.splitlines()[-1] == "left open: 0"
