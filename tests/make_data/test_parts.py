"""Inputs cut in parts: a few large archives are unpacked for all cores, and the cuts stay what they are."""

import gzip
import shutil
from pathlib import Path

import pytest

from bert_pretrain import documents
from bert_pretrain.config import load_config
from bert_pretrain.make_data import parts
from bert_pretrain.make_data.run import make_data
from bert_pretrain.shards import DataFolder


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", 30_000)
    monkeypatch.setattr(parts, "LARGE_ARCHIVE_BYTES", 1000)


def shards(folder: Path) -> list[str]:
    data = DataFolder.open(folder)
    return [record.sha256 for split in ("train", "validation") for record in data.shards(split)]


def build(text: Path, vocab: Path, output: Path) -> Path:
    config = load_config(settings=["data.document_boundary=blank_line", "data.dupe_factor=1"])
    return make_data(config, [str(text)], vocab, output, workers=1)


def test_an_archive_gives_the_shards_of_the_plain_file_from_many_parts(
    tmp_path: Path, english_text: Path, vocab_folder: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "a.txt.gz"
    archive.write_bytes(gzip.compress(english_text.read_bytes()))
    plain = shards(build(english_text, vocab_folder, tmp_path / "plain" / "data"))
    packed = build(archive, vocab_folder, tmp_path / "packed" / "data")
    assert shards(packed) == plain
    (store,) = (tmp_path / "packed" / ".token-store").iterdir()
    pieces = sorted(store.glob("part-*"))
    assert len(pieces) > 3
    assert not list(store.glob("unpacked-*"))
    # A piece that is gone is made anew from the archive alone, cut as before whatever the sizes are now.
    shutil.rmtree(pieces[1])
    shutil.rmtree(packed)
    monkeypatch.setattr(documents, "PART_BYTES", 1 << 25)
    assert shards(build(archive, vocab_folder, packed)) == plain
    assert not list(store.glob("unpacked-*"))


def test_many_archives_are_read_as_they_are(
    tmp_path: Path, english_text: Path, vocab_folder: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "FEW_ARCHIVES", 1)
    content = english_text.read_bytes()
    middle = content.index(b"\n\n", len(content) // 2) + 2
    for name, half in (("a", content[:middle]), ("b", content[middle:])):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{name}.txt.gz").write_bytes(gzip.compress(half))
    assert shards(build(tmp_path / "texts", vocab_folder, tmp_path / "data"))
    (store,) = (tmp_path / ".token-store").iterdir()
    assert len(list(store.glob("part-*"))) == 2
