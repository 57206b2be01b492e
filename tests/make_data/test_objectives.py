"""`make-data` with each objective: the examples, odd corpora, statistics, and loading with `datasets`."""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.make_data.ingest import ensure_store_shard
from bert_pretrain.make_data.token_store import store_key, store_shard_folder
from bert_pretrain.text import documents
from bert_pretrain.text.sources import resolve
from bert_pretrain.text.tokenizer import Tokenizer

from .conftest import NUM_RESERVED, SMALL, Numbered, tables
from .test_pairs import documents_of
from .test_run import CORPORA

GOLDEN = Path(__file__).parents[1] / "golden" / "content_hashes.json"
VARIANTS = {
    "nsp": (),
    "sop": ("data.next_sentence=sop",),
    "none": ("data.next_sentence=none",),
    "nsp dynamic": ("data.masking=dynamic",),
    "none dynamic": ("data.next_sentence=none", "data.masking=dynamic"),
}
ODD = {
    **CORPORA,
    "one document": (documents_of(40, 1, (300, 300), (3, 30)), []),
    "one giant sentence": ([[5000]], []),
    "one short document": ([[3, 4]], []),
}
WITHOUT_PAIRS = {"single sentences": ([[length] for length in range(1, 90)], []), "one word": ([[1]], [])}


def words_seen(corpus: Numbered, data: Path, split: str) -> Counter[int]:
    """Count each word of the corpus in a split."""
    ids = np.concatenate([[0], *(table.original_ids for table in tables(data, split))]).astype(int)
    return Counter((ids[ids >= NUM_RESERVED] - NUM_RESERVED).tolist())


def check_examples(data: Path) -> None:
    """Check the properties that all objectives share."""
    folder = DataFolder.open(data)
    for split in folder.manifest["splits"]:
        for table in tables(data, split):
            assert table.lengths.max() <= folder.max_seq_length
            assert table.lengths.min() >= 3
            is_masked = folder.config.masking == "static" or split == "validation"
            assert (table.masks is not None) == is_masked
            assert table.masks is None or np.diff(table.masks.offsets).min() >= 1
            assert (table.next_sentence_label is None) == (folder.config.next_sentence == "none")


@pytest.mark.parametrize("name", ODD)
def test_sentence_order_examples_cover_all_text(numbered, name: str) -> None:
    documents, settings = ODD[name]
    corpus = numbered(documents)
    data = corpus.make("data.next_sentence=sop", "data.max_seq_length=64", "data.dupe_factor=2", *settings)
    check_examples(data)
    seen: set[int] = set()
    splits = list(DataFolder.open(data).manifest["splits"])
    assert ("validation" in splits) == (len(documents) > 1 and "data.validation_fraction=0" not in settings)
    for split in splits:
        for pair in corpus.pairs(data, split):
            words = np.concatenate([pair.a, pair.b] if pair.label == 0 else [pair.b, pair.a])
            assert np.array_equal(words, np.arange(words[0], words[0] + len(words)))
            assert len(set(corpus.document[words])) == 1
            seen.update(words.tolist())
        for table in tables(data, split):
            assert abs(2 * int(table.next_sentence_label.sum()) - len(table)) <= 1
    half = (DataFolder.open(data).max_seq_length - 3) // 2
    dropped = [len(document) == 1 and document[0] <= half for document in documents]
    assert seen == set(np.flatnonzero(~np.array(dropped)[corpus.document]).tolist())


@pytest.mark.parametrize("name", ODD | WITHOUT_PAIRS)
def test_full_sentences_have_every_word_once_per_copy(numbered, name: str) -> None:
    documents, settings = (ODD | WITHOUT_PAIRS)[name]
    corpus = numbered(documents)
    data = corpus.make("data.next_sentence=none", "data.max_seq_length=64", "data.dupe_factor=2", *settings)
    check_examples(data)
    train, held_out = (words_seen(corpus, data, split) for split in ("train", "validation"))
    assert set(train.values()) == {2}
    assert set(held_out.values()) <= {1}
    assert sorted([*train, *held_out]) == list(range(len(corpus.document)))
    assert bool(held_out) == (len(documents) > 1 and "data.validation_fraction=0" not in settings)


@pytest.mark.parametrize("variant", VARIANTS)
def test_statistics_and_datasets_match_the_examples(small, variant: str, tmp_path: Path) -> None:
    import datasets

    data = small.make(*SMALL, *VARIANTS[variant], name=variant)
    check_examples(data)
    folder, loaded = DataFolder.open(data), datasets.load_dataset(str(data), cache_dir=str(tmp_path))
    assert (data / "README.md").exists() == ("dynamic" in variant)
    for split in ("train", "validation"):
        statistics, found = folder.manifest["splits"][split]["statistics"], tables(data, split)
        row = loaded[split][0]
        assert len(loaded[split]) == folder.rows(split)
        assert row["input_ids"] == found[0].input_ids[: found[0].offsets[1]].tolist()
        assert (row.get("next_sentence_label") is None) == (found[0].next_sentence_label is None)
        for share, objective in (("is_next_share", "nsp"), ("in_order_share", "sop")):
            assert (share in statistics) == (folder.config.next_sentence == objective)
            if share in statistics:
                labels = np.concatenate([table.next_sentence_label for table in found])
                assert statistics[share] == (labels == 0).mean()
        if found[0].masks is None:
            assert not [name for name in statistics if name.startswith("mask")]
            assert row.get("masked_lm_positions") is None
        else:
            masks = found[0].masks
            assert row["masked_lm_positions"] == masks.positions[: masks.offsets[1]].tolist()
            assert row["masked_lm_ids"] == masks.original_ids[: masks.offsets[1]].tolist()
            masked = sum(len(table.masks.positions) for table in found)
            maskable = sum(int((table.original_ids >= NUM_RESERVED).sum()) for table in found)
            assert statistics["masked_share"] == masked / maskable


def test_content_hashes_match_the_golden_file(numbered) -> None:
    """If examples change on purpose, run `REGENERATE_GOLDEN=1 pytest tests/make_data/test_objectives.py`."""
    corpus = numbered([*documents_of(50, 40, (1, 20), (3, 30)), *documents_of(51, 3, (1, 40), (1, 90))])
    found = {
        variant: DataFolder.open(corpus.make(*SMALL, *settings, name=variant)).content_hash
        for variant, settings in {**VARIANTS, "whole words": ("data.whole_word_mask=true",)}.items()
    }
    if os.environ.get("REGENERATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(GOLDEN.read_text())


def test_dynamic_masking_keeps_the_examples(small) -> None:
    static, dynamic = (small.make(*SMALL, *VARIANTS[name], name=name) for name in ("nsp", "nsp dynamic"))
    for ours, theirs in zip(tables(static, "train"), tables(dynamic, "train"), strict=True):
        assert np.array_equal(ours.original_ids, theirs.input_ids)
        assert np.array_equal(ours.next_sentence_label, theirs.next_sentence_label)
    held_out = [[record.sha256 for record in DataFolder.open(data).shards("validation")] for data in (static, dynamic)]
    assert held_out[0] == held_out[1]


@pytest.fixture(scope="module")
def segmented(numbered):
    """A corpus whose token store has words of two tokens: every odd token continues a word."""
    corpus = numbered(documents_of(60, 60, (2, 20), (3, 15)))
    config, tokenizer = corpus.config("data.language=en").data, Tokenizer.load(corpus.vocab)
    (source,) = resolve([str(corpus.text)], config)
    shard = store_shard_folder(corpus.folder / ".token-store" / store_key([source], tokenizer, config), 0)
    (part,) = documents.cut(source, documents.PART_BYTES)
    ensure_store_shard(tokenizer, config, ([part], shard))
    np.save(shard / "continues_word.npy", np.load(shard / "ids.npy") % 2 == 1)
    return corpus


@pytest.mark.parametrize("variant", ["nsp", "none dynamic"])
def test_segmented_words_are_masked_together_or_stored_in_starts_word(segmented, variant: str) -> None:
    data = segmented.make(*SMALL, "data.whole_word_mask=true", *VARIANTS[variant], name=variant)
    for table in tables(data, "train"):
        ids, before = table.original_ids, np.roll(table.original_ids, 1)
        # A word is an even token and the odd one after it. At the start of a segment, an odd token is a word.
        starts_word = (ids >= NUM_RESERVED) & ((ids % 2 == 0) | (before < NUM_RESERVED))
        if table.masks is None:
            assert np.array_equal(table.starts_word, starts_word)
            continue
        assert table.starts_word is None
        is_masked = np.zeros(len(ids), dtype=bool)
        is_masked[table.masked_indices] = True
        continues = (ids >= NUM_RESERVED) & ~starts_word
        halves = is_masked[continues].astype(int) + np.roll(is_masked, 1)[continues]
        # A short example predicts one token, so no word of two tokens fits.
        assert (halves == 1).sum() < 0.1 * (halves == 2).sum()
