"""Inputs in byte ranges: a few large archives are unpacked for all cores, and the cuts stay what they are."""

import gzip
import shutil
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import InputError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.make_data import parts
from bert_pretrain.make_data.run import make_data
from bert_pretrain.text import documents
from bert_pretrain.text.sources import resolve
from bert_pretrain.vocab.run import make_vocab


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
    store_shards = sorted(store.glob("part-*"))
    assert len(store_shards) > 3
    assert not list(store.glob("unpacked-*"))
    # A store shard that is gone is rebuilt from the archive alone, cut as before whatever the sizes are now.
    shutil.rmtree(store_shards[1])
    shutil.rmtree(packed)
    monkeypatch.setattr(documents, "PART_BYTES", 1 << 25)
    assert shards(build(archive, vocab_folder, packed)) == plain
    assert not list(store.glob("unpacked-*"))


def test_an_archive_that_is_refused_leaves_nothing_unpacked(
    tmp_path: Path, vocab_folder: Path, small_parts: None
) -> None:
    archive = tmp_path / "bomb.jsonl.gz"
    archive.write_bytes(gzip.compress(b'{"text": "' + b"0" * (6 << 20) + b'"}\n'))
    config = load_config(settings=["data.max_record_bytes=5M"])
    with pytest.raises(InputError, match="the record has more than"):
        make_data(config, [str(archive)], vocab_folder, tmp_path / "data", workers=1)
    assert not list((tmp_path / ".token-store").glob("*/unpacked-*"))


@pytest.mark.parametrize(("encoding", "ending"), [("utf-16", ".txt"), ("utf-16-le", ".txt.gz")])
def test_a_file_in_another_encoding_gives_the_shards_of_utf8_from_many_parts(
    tmp_path: Path, english_text: Path, vocab_folder: Path, small_parts: None, encoding: str, ending: str
) -> None:
    other = tmp_path / f"a{ending}"
    content = english_text.read_text(encoding="utf-8").encode(encoding)
    other.write_bytes(gzip.compress(content) if ending.endswith(".gz") else content)
    plain = shards(build(english_text, vocab_folder, tmp_path / "plain" / "data"))
    settings = ["data.document_boundary=blank_line", "data.dupe_factor=1", "data.encoding=auto"]
    data = make_data(load_config(settings=settings), [str(other)], vocab_folder, tmp_path / "other" / "data", workers=1)
    assert shards(data) == plain
    assert len(list((tmp_path / "other" / ".token-store").glob("*/part-*"))) > 3


@pytest.mark.parametrize("kind", ["row groups", "one row group", "saved", "folder of datasets"])
def test_one_table_is_many_tasks_and_gives_the_shards_of_one(
    tmp_path: Path, english_text: Path, vocab_folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    table = pa.table({"text": english_text.read_text(encoding="utf-8").split("\n\n")})
    source = f"{tmp_path}/a.parquet"
    if kind.endswith("group"):
        pq.write_table(table, source)
    elif kind == "row groups":
        pq.write_table(table, source, row_group_size=7)
    elif kind == "saved":
        source = f"{tmp_path}/saved"
        datasets.Dataset(table).save_to_disk(source)
    else:
        source = f"dataset:{tmp_path}/set"
        (tmp_path / "set").mkdir()
        pq.write_table(table, tmp_path / "set" / "train.parquet")
    config = load_config(settings=["data.dupe_factor=1"])
    whole = shards(make_data(config, [source], vocab_folder, tmp_path / "whole" / "data", workers=1))
    monkeypatch.setattr(documents, "PART_BYTES", 20_000)
    assert shards(make_data(config, [source], vocab_folder, tmp_path / "parts" / "data", workers=1)) == whole
    numbers = [len(list((tmp_path / name).glob(".token-store/*/part-*"))) for name in ("whole", "parts")]
    assert numbers[0] == 1
    assert numbers[1] > 3


def test_a_large_file_that_only_one_core_can_read_is_named_before(
    tmp_path: Path, english_text: Path, vocab_folder: Path, small_parts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "a.txt.gz"
    archive.write_bytes(gzip.compress(english_text.read_bytes(), 0))
    make_vocab(load_config(settings=["vocab.size=3000"]), [str(archive)], tmp_path / "vocab", workers=2)
    said = capsys.readouterr().out
    assert said.index("a.txt.gz: one core") < said.index("3,000 tokens")


def test_many_small_files_are_few_store_shards_and_keep_their_figures(
    tmp_path: Path, vocab_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", 2000)
    (tmp_path / "texts").mkdir()
    for number in range(120):
        sentences = [f"File {number} says sentence {place}." for place in range(number % 5)]
        (tmp_path / "texts" / f"{number:03}.txt").write_text(" ".join(sentences) + "\n")
    config = load_config(settings=["data.document_boundary=file", "data.dupe_factor=1", "data.next_sentence=none"])
    data = make_data(config, [str(tmp_path / "texts")], vocab_folder, tmp_path / "data", workers=1)
    (store,) = (tmp_path / ".token-store").iterdir()
    store_shards = sorted(store.glob("part-*"))
    assert 3 < len(store_shards) < 12
    corpus = DataFolder.open(data).manifest["corpus"]
    assert [figures["documents"] for figures in corpus["inputs"]] == [int(number % 5 > 0) for number in range(120)]
    assert [figures["sentences"] for figures in corpus["inputs"]] == [number % 5 for number in range(120)]
    assert corpus["tokens"] == sum(figures["tokens"] for figures in corpus["inputs"])
    assert corpus["repairs_and_drops"] == {"empty_documents": 24}


def test_a_fraction_of_a_large_file_and_of_its_archive_is_read(
    tmp_path: Path, english_text: Path, vocab_folder: Path, small_parts: None
) -> None:
    config = load_config(settings=["data.dupe_factor=1", "data.next_sentence=none", "data.fraction=0.25"])
    archive = tmp_path / "text.txt.gz"
    archive.write_bytes(gzip.compress(english_text.read_bytes()))
    whole = build(english_text, vocab_folder, tmp_path / "whole")
    tokens = DataFolder.open(whole).manifest["corpus"]["tokens"]
    for source in (english_text, archive):
        data = make_data(config, [str(source)], vocab_folder, tmp_path / f"some-{source.suffix[1:]}", workers=1)
        assert 0.1 < DataFolder.open(data).manifest["corpus"]["tokens"] / tokens < 0.4


def test_a_fraction_of_many_files_is_that_share_of_the_files(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text("One sentence.\nAnother sentence.\n")
    config = load_config(settings=["data.fraction=0.21"]).data
    chosen = resolve([str(tmp_path)], config)
    assert [Path(source.location).stem for source in chosen] == ["02", "06", "11", "15", "20", "24", "28", "33", "37"]
    assert sum(source.fraction for source in chosen) == pytest.approx(0.21 * 40)
    assert len(resolve([str(tmp_path)], load_config().data)) == 40
