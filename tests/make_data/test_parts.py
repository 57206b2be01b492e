"""Inputs cut into byte ranges, unpacked archives, and fractions of inputs."""

import gzip
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import InputError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.make_data import ingest
from bert_pretrain.make_data.run import make_data
from bert_pretrain.text import documents
from bert_pretrain.text.sources import resolve
from tests.text.test_documents import write


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", 30_000)
    monkeypatch.setattr(ingest, "MIN_UNPACKED_BYTES", 1000)


def build(source: object, vocab: Path, folder: Path, *settings: str) -> tuple[list[str], dict, list[Path]]:
    """Make data of one copy, and return the shard hashes, the manifest's corpus entry and the store shards."""
    config = load_config(settings=["data.document_boundary=blank_line", "data.dupe_factor=1", *settings])
    data = DataFolder.open(make_data(config, [str(source)], vocab, folder / "data", workers=1))
    hashes = [record.sha256 for split in ("train", "validation") for record in data.shards(split)]
    assert not list(folder.glob(".token-store/*/unpacked-*"))
    return hashes, data.manifest["corpus"], sorted(folder.glob(".token-store/*/part-*"))


def test_an_archive_in_parts_gives_the_shards_of_the_plain_file(
    tmp_path: Path, english_text: Path, vocab_folder: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = write(tmp_path / "a.txt.gz", gzip.compress(english_text.read_bytes()))
    plain, _, _ = build(english_text, vocab_folder, tmp_path / "plain")
    packed, _, store_shards = build(archive, vocab_folder, tmp_path / "packed")
    assert packed == plain
    assert len(store_shards) > 3
    # A missing store shard is rebuilt from the archive with the saved cuts.
    shutil.rmtree(store_shards[1])
    shutil.rmtree(tmp_path / "packed" / "data")
    with monkeypatch.context() as patch:
        patch.setattr(documents, "PART_BYTES", 1 << 25)
        assert build(archive, vocab_folder, tmp_path / "packed")[0] == plain
    other = write(tmp_path / "b.txt.gz", gzip.compress(english_text.read_text(encoding="utf-8").encode("utf-16-le")))
    hashes, _, store_shards = build(other, vocab_folder, tmp_path / "other", "data.encoding=auto")
    assert (hashes, len(store_shards) > 3) == (plain, True)
    bomb = write(tmp_path / "bomb.jsonl.gz", gzip.compress(b'{"text": "' + b"0" * (6 << 20) + b'"}\n'))
    with pytest.raises(InputError, match="the record has more than"):
        build(bomb, vocab_folder, tmp_path / "bomb", "data.max_record_bytes=5M")
    assert not list(tmp_path.glob("bomb/.token-store/*/unpacked-*"))
    both = tmp_path / "both"
    both.mkdir()
    shutil.copy(archive, both)
    write(both / "cut.txt.gz", archive.read_bytes()[:-100])
    with pytest.raises(InputError, match="cannot read the file"):
        build(both, vocab_folder, tmp_path / "cut")
    assert not list(tmp_path.glob("cut/.token-store/*/unpacked-*"))


@pytest.mark.parametrize("kind", ["row groups", "one row group", "folder of datasets"])
def test_a_table_in_parts_gives_the_shards_of_one_part(tmp_path, english_text, vocab_folder, monkeypatch, kind) -> None:
    table = pa.table({"text": english_text.read_text(encoding="utf-8").split("\n\n")})
    source = f"{tmp_path}/a.parquet"
    if kind != "folder of datasets":
        pq.write_table(table, source, row_group_size=7 if kind == "row groups" else None)
    else:
        source = f"dataset:{tmp_path}/set"
        (tmp_path / "set").mkdir()
        pq.write_table(table, tmp_path / "set" / "train.parquet")
    whole, _, one = build(source, vocab_folder, tmp_path / "whole")
    monkeypatch.setattr(documents, "PART_BYTES", 20_000)
    parts, _, several = build(source, vocab_folder, tmp_path / "parts")
    assert parts == whole
    assert (len(one), len(several) > 3) == (1, True)


def test_small_files_share_store_shards_and_keep_their_counts(tmp_path, vocab_folder, monkeypatch) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", 2000)
    for number in range(120):
        sentences = [f"File {number} says sentence {place}." for place in range(number % 5)]
        write(tmp_path / "texts" / f"{number:03}.txt", " ".join(sentences) + "\n")
    settings = ("data.document_boundary=file", "data.next_sentence=none")
    _, corpus, store_shards = build(tmp_path / "texts", vocab_folder, tmp_path, *settings)
    assert 3 < len(store_shards) < 12
    assert [metrics["documents"] for metrics in corpus["inputs"]] == [int(number % 5 > 0) for number in range(120)]
    assert [metrics["sentences"] for metrics in corpus["inputs"]] == [number % 5 for number in range(120)]
    assert corpus["tokens"] == sum(metrics["tokens"] for metrics in corpus["inputs"])
    assert corpus["repairs_and_drops"] == {"empty_documents": 24}


def test_a_fraction_of_a_large_file_or_archive_is_read(tmp_path, english_text, vocab_folder, small_parts) -> None:
    archive = write(tmp_path / "text.txt.gz", gzip.compress(english_text.read_bytes()))
    _, whole, _ = build(english_text, vocab_folder, tmp_path / "whole")
    for source in (english_text, archive):
        settings = ("data.next_sentence=none", "data.fraction=0.25")
        _, corpus, _ = build(source, vocab_folder, tmp_path / f"some-{source.suffix[1:]}", *settings)
        assert 0.1 < corpus["tokens"] / whole["tokens"] < 0.4


def test_a_fraction_of_many_files_selects_files(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text("One sentence.\nAnother sentence.\n")
    config = load_config(settings=["data.fraction=0.21"]).data
    chosen = resolve([str(tmp_path)], config)
    assert [Path(source.location).stem for source in chosen] == ["02", "06", "11", "15", "20", "24", "28", "33", "37"]
    assert sum(source.fraction for source in chosen) == pytest.approx(0.21 * 40)
    assert len(resolve([str(tmp_path)], load_config().data)) == 40
