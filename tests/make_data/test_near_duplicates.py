"""`data.near_duplicates`: planted copies are found by their true similarity, and nothing else."""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError, OutputError
from bert_pretrain.examples import ragged
from bert_pretrain.make_data import near_duplicates
from bert_pretrain.make_data.near_duplicates import NUM_HASHES, find_near_duplicates, rows_per_band, shingles
from bert_pretrain.make_data.run import make_data
from bert_pretrain.make_data.token_store import TokenStore
from bert_pretrain.storage.locking import exclusive
from bert_pretrain.storage.manifest import read_manifest
from bert_pretrain.text import documents


def ones(numbers: np.ndarray) -> np.ndarray:
    return np.ones(len(numbers))


NONE = np.zeros(0, dtype=np.int64)


def test_equal_shingles_have_equal_hashes_and_others_do_not() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 4, length).astype(np.uint16) for length in (1, 4, 5, 6, 300, 2, 300)]
    hashes, offsets = shingles(np.concatenate(texts), ragged.offsets_of(np.array([len(text) for text in texts])))
    expected = [tuple(text[begin : begin + 5]) for text in texts for begin in range(max(1, len(text) - 4))]
    assert len(hashes) == offsets[-1] == len(expected)
    assert len(set(zip(hashes.tolist(), expected, strict=True))) == len(set(hashes.tolist())) == len(set(expected))


@pytest.mark.parametrize("threshold", [0.5, 0.65, 0.8, 0.9, 0.99, 1.0])
def test_the_bands_miss_one_in_a_thousand_at_most(threshold: float) -> None:
    rows = rows_per_band(threshold)
    assert (1 - threshold**rows) ** (NUM_HASHES // rows) <= 1e-3
    assert (1 - threshold ** (rows + 1)) ** (NUM_HASHES // (rows + 1)) > 1e-3 or threshold == 1.0


def store_of(signatures: np.ndarray, folder: Path, cuts: list[int]) -> Any:
    """Signatures alone, in several store shards."""
    bounds = [0, *cuts, len(signatures)]
    store = SimpleNamespace(folder=folder, first_documents=np.array(bounds), num_documents=len(signatures))
    for index, (first, last) in enumerate(itertools.pairwise(bounds)):
        one: Any = store
        place = near_duplicates.signature_folder(one, index)
        place.mkdir()
        np.save(place / "signatures.npy", signatures[first:last])
    return store


@pytest.mark.parametrize("seed", range(4))
def test_every_document_left_out_has_an_earlier_similar_one_and_no_two_that_stay_are_similar(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_duplicates, "_DOCUMENTS_AT_ONCE", 37)
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 2**32, (30, NUM_HASHES), dtype=np.uint32)
    copies = first[rng.integers(0, 30, 200)]
    is_changed = rng.random(copies.shape) < rng.choice([0.02, 0.1, 0.15, 0.25, 0.5], (200, 1))
    copies[is_changed] = rng.integers(0, 2**32, is_changed.sum(), dtype=np.uint32)
    signatures = rng.permutation(np.concatenate([first, copies]))
    gone, counts = find_near_duplicates(store_of(signatures, tmp_path, [50, 50, 120]), 0.8, NONE, ones)
    similar = (signatures[:, None] == signatures).mean(axis=2) >= 0.8
    np.fill_diagonal(similar, False)
    stay = np.setdiff1d(np.arange(230), gone)
    assert not similar[np.ix_(stay, stay)].any()
    assert all(similar[number, :number].any() for number in gone)
    assert 50 < counts["near_duplicate_documents"] == len(gone)
    assert not counts["documents_similar_to_validation"]


def test_the_document_of_highest_priority_is_kept(tmp_path: Path) -> None:
    signature = np.arange(NUM_HASHES, dtype=np.uint32)
    store = store_of(np.stack([signature] * 5 + [signature + 1000]), tmp_path, [])
    weights = np.array([1.0, 2.0, np.inf, 2.0, np.inf, 1.0])
    gone, counts = find_near_duplicates(store, 0.8, np.array([4]), lambda numbers: weights[numbers])
    assert gone.tolist() == [0, 1, 3]
    assert counts == {"documents_similar_to_validation": 3}


def test_documents_that_are_alike_but_no_near_duplicates_take_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_duplicates, "MAX_LEADERS", 3)
    signatures = np.random.default_rng(0).integers(0, 2**32, (60, NUM_HASHES), dtype=np.uint32)
    signatures[40] = signatures[2]
    signatures[50] = signatures[3]
    pairs = list(near_duplicates._similar_pairs(np.arange(60), np.zeros(60, dtype=np.int64), signatures, 0.8))
    assert [(leaders.tolist(), followers.tolist()) for leaders, followers in pairs] == [([], []), ([], []), ([2], [40])]


@pytest.mark.parametrize("lengths", [[3, 4, 3, 2], [10, 1, 1, 25, 2], [5, 5, 5]])
def test_runs_are_read_whole_unless_they_are_too_long(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_duplicates, "_DOCUMENTS_AT_ONCE", 10)
    runs = np.repeat(np.arange(len(lengths)), lengths)
    found = [runs[some].tolist() for some in near_duplicates._whole_runs(runs)]
    assert list(itertools.chain.from_iterable(found)) == runs.tolist()
    assert all(len(each) <= 10 for each in found)
    for number, length in enumerate(lengths):
        assert sum(number in each for each in found) <= max(1, -(-length // 10) + 1 if length > 10 else 1)


@pytest.fixture
def copied(tmp_path: Path, english_documents: list[list[str]]) -> tuple[Path, int, int]:
    """Real text, copies without two sentences (near duplicates), and others half of which is another document.

    No sentence is in two originals: documents of the standard library are alike in some versions of Python.
    """
    sentences = [each for each in dict.fromkeys(itertools.chain(*english_documents)) if 50 < len(each) < 250]
    originals = [sentences[begin : begin + 30] for begin in range(0, 40 * 30, 30)]
    near = [document[1:-1] for document in originals[:25]]
    far = [one[::2] + other[1::2] for one, other in itertools.pairwise(originals[:26])]
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join("\n".join(document) for document in [*originals, *near, *far]) + "\n")
    return path, len(originals), len(near)


def make(text: Path, vocab: Path, output: Path, *settings: str, workers: int = 1) -> dict[str, Any]:
    fixed = ["data.document_boundary=blank_line", "data.sentence_splitter=lines", "data.dupe_factor=1"]
    config = load_config(settings=[*fixed, "data.max_seq_length=64", "data.near_duplicates=0.7", *settings])
    return read_manifest(make_data(config, [str(text)], vocab, output, workers=workers), "data", "")


def contents(manifest: dict[str, Any]) -> list[str]:
    return [shard["content_hash"] for split in manifest["splits"].values() for shard in split["shards"]]


def test_planted_copies_are_left_out_whatever_the_workers_and_the_damage(
    copied: tuple[Path, int, int], vocab_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, _, num_copies = copied
    monkeypatch.setattr(documents, "PART_BYTES", 50_000)
    one = make(text, vocab_folder, tmp_path / "one" / "data")
    assert one["corpus"]["left_out"] == {"near_duplicate_documents": num_copies}
    two = make(text, vocab_folder, tmp_path / "two" / "data", workers=2)
    assert contents(one) == contents(two)
    found = sorted((tmp_path / "one").glob(".token-store/*/minhash-*/signatures.npy"))
    assert len(found) > 2
    whole = found[0].read_bytes()
    found[0].write_bytes(whole[:-1] + b"\0")
    again = make(text, vocab_folder, tmp_path / "one" / "again")
    assert contents(again) == contents(one)
    assert found[0].read_bytes() == whole


def test_another_command_waits_for_the_signatures_that_it_would_share(
    copied: tuple[Path, int, int], vocab_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def locked(store: TokenStore, *arguments: Any) -> None:
        with pytest.raises(OutputError, match="is writing this folder"), exclusive(store.folder):
            pass
        written.append(store.folder)
        write_signatures(store, *arguments)

    write_signatures = near_duplicates.write_signatures
    monkeypatch.setattr(near_duplicates, "write_signatures", locked)
    make(copied[0], vocab_folder, tmp_path / "data")
    with exclusive(written[0]):  # and it is free again
        pass


def test_other_thresholds_share_a_store(copied: tuple[Path, int, int], vocab_folder: Path, tmp_path: Path) -> None:
    text, *_ = copied
    found = [
        make(text, vocab_folder, tmp_path / name, f"data.near_duplicates={name}")["corpus"]["left_out"]
        for name in ("0.5", "1.0")
    ]
    assert found[0]["near_duplicate_documents"] >= 25
    assert found[1] == {}
    assert len(list((tmp_path / ".token-store").iterdir())) == 1


def test_training_documents_like_those_held_out_are_left_out(
    copied: tuple[Path, int, int], vocab_folder: Path, tmp_path: Path
) -> None:
    text, number, num_copies = copied
    pieces = text.read_text().split("\n\n")
    text.write_text("\n\n".join(pieces[:number]) + "\n")
    (tmp_path / "held.txt").write_text("\n\n".join(pieces[number : number + num_copies]) + "\n")
    manifest = make(text, vocab_folder, tmp_path / "data", f"data.validation=[{tmp_path / 'held.txt'}]")
    assert manifest["corpus"]["left_out"] == {"documents_similar_to_validation": num_copies}


def test_a_library_that_is_not_installed_is_told_before_any_work(
    copied: tuple[Path, int, int], vocab_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        make(copied[0], vocab_folder, tmp_path / "data")
    assert "[near-duplicates]" in caught.value.remedy
