"""`data.drop_repeated_lines`: every line that recurs is left out but for the first, exactly as plain Python does it."""

import random
from collections import Counter
from pathlib import Path

import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.make_data import repeated_lines
from bert_pretrain.make_data.run import make_data
from bert_pretrain.storage.manifest import read_manifest
from bert_pretrain.text import documents

NAVIGATION = [f"Home | Products | Contact | Page of kind {number}" for number in range(12)]


@pytest.fixture
def pages(english_documents: list[list[str]]) -> list[list[str]]:
    """Documents with lines that recur, 3 to 40 times each, and short ones that recur more often."""
    draw = random.Random(3)
    pages = [[*document, "Yes, sir."] for document in english_documents]
    for number, line in enumerate(NAVIGATION):
        for page in draw.sample(pages, 3 + 3 * number):
            page.insert(draw.randrange(len(page)), f"  {line} ")
    return pages


def write(pages: list[list[str]], path: Path) -> Path:
    path.write_text("\n\n".join("\n".join(page) for page in pages) + "\n", encoding="utf-8")
    return path


def without_repeats(pages: list[list[str]], least: int) -> tuple[list[list[str]], int]:
    counts = Counter(line.strip() for page in pages for line in page if len(line.strip().encode()) >= 20)
    kept: list[list[str]] = []
    seen: set[str] = set()
    for page in pages:
        kept.append([])
        for line in page:
            if counts[line.strip()] < least or line.strip() not in seen:
                kept[-1].append(line)
            seen.add(line.strip())
    return kept, sum(map(len, pages)) - sum(map(len, kept))


def make(text: Path, vocab: Path, output: Path, *settings: str, workers: int = 1) -> Path:
    fixed = ["data.document_boundary=blank_line", "data.sentence_splitter=lines", "data.dupe_factor=1"]
    config = load_config(settings=[*fixed, "data.max_seq_length=64", *settings])
    return make_data(config, [str(text)], vocab, output, workers=workers)


def contents(data: Path) -> list[str]:
    splits = read_manifest(data, "data", "")["splits"].values()
    return [shard["content_hash"] for split in splits for shard in split["shards"]]


@pytest.mark.parametrize("least", [2, 10])
def test_examples_are_those_of_the_text_without_repeated_lines(
    least: int, pages: list[list[str]], vocab_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, num_left_out = without_repeats(pages, least)
    assert num_left_out > 50
    monkeypatch.setattr(documents, "PART_BYTES", 30_000)  # so that lines recur in other groups than their first
    monkeypatch.setattr(repeated_lines, "LINES_AT_ONCE", 500)  # several files a group, several ranges of hashes
    clean = make(write(kept, tmp_path / "clean.txt"), vocab_folder, tmp_path / "clean")
    option = f"data.drop_repeated_lines={least}"
    dirty = make(write(pages, tmp_path / "dirty.txt"), vocab_folder, tmp_path / "dirty", option)
    store = next(folder for folder in (tmp_path / ".token-store").iterdir() if (folder / "repeated-lines").exists())
    assert len(list(store.glob("part-*"))) > 3
    assert not list(store.glob("lines-*"))
    assert contents(dirty) == contents(clean)
    corpus = read_manifest(dirty, "data", "")["corpus"]
    assert corpus["repairs_and_drops"] == {"repeated_lines_left_out": num_left_out}


def test_workers_change_nothing_and_damage_is_found(
    pages: list[list[str]], vocab_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", 100_000)
    text = write(pages, tmp_path / "a.txt")
    one = make(text, vocab_folder, tmp_path / "one" / "data", "data.drop_repeated_lines=5")
    two = make(text, vocab_folder, tmp_path / "two" / "data", "data.drop_repeated_lines=5", workers=2)
    assert contents(one) == contents(two)
    (hashes,) = (tmp_path / "one").glob(".token-store/*/repeated-lines/hashes.npy")
    whole = hashes.read_bytes()
    hashes.write_bytes(whole[:-1] + b"\0")
    make(text, vocab_folder, tmp_path / "one" / "again", "data.drop_repeated_lines=5")
    assert hashes.read_bytes() == whole


def test_inputs_held_out_stay_as_they_are(pages: list[list[str]], vocab_folder: Path, tmp_path: Path) -> None:
    text, held_out = write(pages, tmp_path / "a.txt"), write(pages[:40], tmp_path / "b.txt")
    option = f"data.validation=[{held_out}]"
    plain = make(text, vocab_folder, tmp_path / "plain", option, "data.drop_duplicates=false")
    settings = (option, "data.drop_duplicates=false", "data.drop_repeated_lines=3")
    found = [read_manifest(make(text, vocab_folder, tmp_path / "left", *settings), "data", "")]
    found.append(read_manifest(plain, "data", ""))
    one, other = (manifest["splits"]["validation"]["shards"][0]["content_hash"] for manifest in found)
    assert one == other
    assert found[0]["corpus"]["tokens"] < found[1]["corpus"]["tokens"]
