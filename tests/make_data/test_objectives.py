"""`make-data` under each objective: what examples hold, which corpora do, and what `datasets` makes of the folder."""

import hashlib
import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.examples.examples import Examples
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.make_data.ingest import ensure_store_shard
from bert_pretrain.make_data.run import make_data
from bert_pretrain.make_data.token_store import store_key, store_shard_folder
from bert_pretrain.text import documents
from bert_pretrain.text.sources import resolve
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.run import make_vocab

from .conftest import NUM_RESERVED, Numbered, label_from_shape, originals
from .test_run import CORPORA, SMALL, digests, lengths

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
    "one document": ([lengths(40, 1, (300, 300), (3, 30))[0]], []),
    "one giant sentence": ([[5000]], []),
    "one short document": ([[3, 4]], []),
    "two documents": ([[5, 5, 5]] * 2, []),
}
WITHOUT_PAIRS = {
    "single sentences": ([[length] for length in range(1, 90)], []),
    "words": ([[1]] * 300, []),
    "one word": ([[1]], []),
}


def tables(data: Path, split: str) -> list[Examples]:
    folder = DataFolder.open(data)
    return [read_shard(data, record) for record in folder.shards(split)]


def words_seen(corpus: Numbered, data: Path, split: str) -> Counter[int]:
    """How often each word of the corpus stands in a split."""
    return Counter(
        int(token) - NUM_RESERVED
        for table in tables(data, split)
        for token in originals(table)
        if token >= NUM_RESERVED
    )


def check_examples(data: Path) -> None:
    """What holds of every example, whatever the objective."""
    folder = DataFolder.open(data)
    for split in folder.manifest["splits"]:
        for table in tables(data, split):
            assert table.lengths.max() <= folder.max_seq_length
            assert table.lengths.min() >= 3
            is_masked = folder.config.masking == "static" or split == "validation"
            assert (table.masks is not None) == is_masked
            assert table.masks is None or np.diff(table.masks.offsets).min() >= 1
            assert (table.next_sentence_label is None) == (folder.config.next_sentence == "none")


@pytest.mark.parametrize("name", ODD, ids=lambda name: name.replace(" ", "-"))
def test_sentence_orders_hold_all_text_of_any_corpus(numbered, name: str) -> None:
    documents, settings = ODD[name]
    corpus = numbered(documents)
    data = corpus.make("data.next_sentence=sop", "data.max_seq_length=64", "data.dupe_factor=2", *settings)
    check_examples(data)
    seen: set[int] = set()
    for split in DataFolder.open(data).manifest["splits"]:
        for pair in corpus.pairs(data, split):
            first, second = (pair.a, pair.b) if pair.label == 0 else (pair.b, pair.a)
            words = np.concatenate([first, second])
            assert np.array_equal(words, np.arange(words[0], words[0] + len(words)))
            assert len(set(corpus.document[words])) == 1
            seen.update(words.tolist())
        for table in tables(data, split):
            labels = table.next_sentence_label
            assert abs(2 * int(labels.sum()) - len(labels)) <= 1
    half = (DataFolder.open(data).max_seq_length - 3) // 2
    dropped = [len(document) == 1 and document[0] <= half for document in documents]
    assert seen == set(np.flatnonzero(~np.array(dropped)[corpus.document]).tolist())


@pytest.mark.parametrize("name", ODD | WITHOUT_PAIRS, ids=lambda name: name.replace(" ", "-"))
def test_full_sentences_hold_every_word_of_any_corpus_once_a_copy(numbered, name: str) -> None:
    documents, settings = (ODD | WITHOUT_PAIRS)[name]
    corpus = numbered(documents)
    data = corpus.make("data.next_sentence=none", "data.max_seq_length=64", "data.dupe_factor=2", *settings)
    check_examples(data)
    train, held_out = (words_seen(corpus, data, split) for split in ("train", "validation"))
    assert set(train.values()) == {2}
    assert set(held_out.values()) <= {1}
    assert sorted([*train, *held_out]) == list(range(len(corpus.document)))
    assert bool(held_out) == (len(documents) > 1 and "data.validation_fraction=0" not in settings)
    for table in [*tables(data, "train"), *tables(data, "validation")]:
        assert np.array_equal(table.segment_b_start, table.lengths)


def test_full_sentences_are_packed_over_the_ends_of_documents(numbered) -> None:
    corpus = numbered(lengths(41, 200, (1, 4), (3, 20)))
    data = corpus.make("data.next_sentence=none", "data.max_seq_length=64", "data.dupe_factor=1")
    tokenizer = DataFolder.open(data).tokenizer()
    for table in tables(data, "train"):
        assert table.lengths.mean() > 50
        ids = originals(table)
        for begin, end in itertools.pairwise(table.offsets):
            example = ids[begin:end]
            assert (example[0], example[-1]) == (tokenizer.cls_id, tokenizer.sep_id)
            ends = np.flatnonzero(example == tokenizer.sep_id)
            segments = [part[part >= NUM_RESERVED] - NUM_RESERVED for part in np.split(example, ends)][:-1]
            owners = [set(corpus.document[segment].tolist()) for segment in segments]
            assert all(len(owner) == 1 for owner in owners)
            assert all(left != right for left, right in itertools.pairwise(owners))


SHAPES = {
    "long documents": (lengths(1, 60, (30, 120), (4, 30)), []),
    "documents of 1 to 8 sentences": (lengths(2, 1200, (1, 8), (3, 30)), ["data.dupe_factor=5"]),
    "shorter windows": (lengths(3, 60, (30, 120), (2, 30)), ["data.short_seq_prob=0.5"]),
    "a single document": ([lengths(8, 1, (5000, 5000), (2, 30))[0]], []),
}


@pytest.mark.parametrize("name", SHAPES, ids=lambda name: name.replace(" ", "-"))
def test_lengths_and_boundaries_give_no_hint_of_the_order(numbered, name: str) -> None:
    """As for next sentences; no sentence here is longer than half a window."""
    documents, settings = SHAPES[name]
    corpus = numbered(documents)
    data = corpus.make(
        "data.next_sentence=sop",
        "data.max_seq_length=64",
        "data.validation_fraction=0",
        "data.dupe_factor=6",
        *settings,
    )
    pairs = corpus.pairs(data, "train")[:8000]
    assert len(pairs) > 5000
    assert all(corpus.begins[[pair.a[0], pair.b[0]]].all() for pair in pairs)
    assert all(corpus.ends[[pair.a[-1], pair.b[-1]]].all() for pair in pairs)
    assert label_from_shape(corpus, pairs) < 0.525


def test_a_single_document_is_not_held_out(numbered, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = numbered([[5, 6, 7, 8]])
    for objective in ("sop", "none"):
        data = corpus.make(f"data.next_sentence={objective}", name=objective)
        assert list(DataFolder.open(data).manifest["splits"]) == ["train"]
        assert "nothing is held out" in capsys.readouterr().out


@pytest.fixture(scope="module")
def small(numbered):
    return numbered(lengths(30, 60, (2, 20), (3, 15)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_statistics_are_of_what_the_examples_hold(small, variant: str) -> None:
    data = small.make(*SMALL, *VARIANTS[variant], name=f"statistics {variant}")
    check_examples(data)
    folder = DataFolder.open(data)
    for split in ("train", "validation"):
        statistics = folder.manifest["splits"][split]["statistics"]
        found = tables(data, split)
        shares = {"is_next_share": "nsp", "in_order_share": "sop"}
        for share, objective in shares.items():
            if folder.config.next_sentence != objective:
                assert share not in statistics
                continue
            labels = np.concatenate([table.next_sentence_label for table in found])
            assert statistics[share] == (labels == 0).mean()
        if found[0].masks is None:
            assert not [name for name in statistics if name.startswith("mask")]
        else:
            masked = sum(len(table.masks.positions) for table in found)
            maskable = sum(int((originals(table) >= NUM_RESERVED).sum()) for table in found)
            assert statistics["masked_share"] == masked / maskable


@pytest.mark.parametrize("variant", VARIANTS)
def test_datasets_opens_every_variant_with_all_its_columns(small, variant: str, tmp_path: Path) -> None:
    import datasets

    data = small.make(*SMALL, *VARIANTS[variant], name=f"datasets {variant}")
    loaded = datasets.load_dataset(str(data), cache_dir=str(tmp_path))
    for split in ("train", "validation"):
        table = next(iter(tables(data, split)))
        assert len(loaded[split]) == DataFolder.open(data).rows(split)
        row = loaded[split][0]
        assert row["input_ids"] == table.input_ids[: table.offsets[1]].tolist()
        assert (row.get("masked_lm_positions") is None) == (table.masks is None)
        assert (row.get("next_sentence_label") is None) == (table.next_sentence_label is None)
        if table.masks is not None:
            assert row["masked_lm_ids"] == table.masks.original_ids[: table.masks.offsets[1]].tolist()
    assert (data / "README.md").exists() == ("dynamic" in variant)


def test_bytes_of_no_objective_depend_on_workers(small, tmp_path: Path) -> None:
    for variant in ("sop", "none dynamic"):
        config = small.config(*SMALL, *VARIANTS[variant])
        one, two = (
            make_data(config, [str(small.text)], small.vocab, tmp_path / variant / name, workers=workers)
            for name, workers in (("one", 1), ("two", 2))
        )
        assert digests(one) == digests(two)


def test_the_contents_are_the_stored_ones(numbered) -> None:
    """A change of examples is meant. Then regenerate them, and say why:

    REGENERATE_GOLDEN=1 python -m pytest tests/make_data/test_objectives.py
    """
    import os

    corpus = numbered([*lengths(50, 40, (1, 20), (3, 30)), *lengths(51, 3, (1, 40), (1, 90))])
    found = {
        variant: DataFolder.open(corpus.make(*SMALL, *settings, name=variant)).content_hash
        for variant, settings in {**VARIANTS, "whole words": ("data.whole_word_mask=true",)}.items()
    }
    if os.environ.get("REGENERATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(GOLDEN.read_text())


def test_masks_drawn_later_leave_the_examples_as_they_are(small) -> None:
    """The same pairs in the same order, static or dynamic; only the masks are missing. Validation is the same."""
    static, dynamic = (
        small.make(*SMALL, f"data.masking={masking}", name=f"masking {masking}") for masking in ("static", "dynamic")
    )
    for ours, theirs in zip(tables(static, "train"), tables(dynamic, "train"), strict=True):
        assert np.array_equal(originals(ours), theirs.input_ids)
        assert np.array_equal(ours.next_sentence_label, theirs.next_sentence_label)
    names = [record.path for record in DataFolder.open(static).shards("validation")]
    digest = [hashlib.sha256((folder / names[0]).read_bytes()).hexdigest() for folder in (static, dynamic)]
    assert digest[0] == digest[1]


@pytest.fixture(scope="module")
def segmented(numbered):
    """A corpus whose token store says that words of the corpus are pairs: every odd token continues a word."""
    corpus = numbered(lengths(60, 60, (2, 20), (3, 15)))
    config, tokenizer = corpus.config("data.language=en").data, Tokenizer.load(corpus.vocab)
    (source,) = resolve([str(corpus.text)], config)
    shard = store_shard_folder(corpus.folder / ".token-store" / store_key([source], tokenizer, config), 0)
    (part,) = documents.cut(source, documents.PART_BYTES)
    ensure_store_shard([part], shard, tokenizer, config)
    np.save(shard / "continues_word.npy", np.load(shard / "ids.npy") % 2 == 1)
    return corpus


@pytest.mark.parametrize("variant", VARIANTS)
def test_segmented_words_are_masked_whole_or_told_to_training(segmented, variant: str) -> None:
    data = segmented.make(*SMALL, "data.whole_word_mask=true", *VARIANTS[variant], name=variant)
    whole = divided = 0
    for split in ("train", "validation"):
        for table in tables(data, split):
            ids = originals(table)
            # A word is an even token with the odd one after it; at the beginning of a segment an odd one stands alone.
            before = np.roll(ids, 1)
            starts_word = (ids >= NUM_RESERVED) & ((ids % 2 == 0) | (before < NUM_RESERVED))
            if table.masks is None:
                assert np.array_equal(table.starts_word, starts_word)
                continue
            assert table.starts_word is None
            is_masked = np.zeros(len(ids), dtype=bool)
            is_masked[table.masked_indices] = True
            continues = (ids >= NUM_RESERVED) & ~starts_word
            halves = is_masked[continues].astype(int) + np.roll(is_masked, 1)[continues]
            whole, divided = whole + (halves == 2).sum(), divided + (halves == 1).sum()
    # An example of a few tokens predicts one, where no word of two fits.
    assert divided < 0.1 * whole


def test_words_of_chinese_are_those_of_the_segmenter(
    chinese_text: Path, chinese_documents: list[list[str]], tmp_path: Path
) -> None:
    rjieba = pytest.importorskip("rjieba")
    settings = ["vocab.size=1000", "vocab.min_frequency=1", "data.sentence_splitter=lines"]
    settings += ["data.next_sentence=none", "data.masking=dynamic", "data.dupe_factor=1", "data.validation_fraction=0"]
    config = load_config(settings=[*settings, "data.whole_word_mask=true", "data.word_segmenter=jieba"])
    vocab = make_vocab(config, [str(chinese_text)], tmp_path / "vocab", workers=1)
    data = make_data(config, [str(chinese_text)], vocab, tmp_path / "data", workers=1)
    tokenizer = Tokenizer.load(vocab)
    found: Counter[str] = Counter()
    for table in tables(data, "train"):
        assert table.starts_word is not None
        characters = ["" if token <= tokenizer.mask_id else tokenizer.tokens[token] for token in table.input_ids]
        starts = np.flatnonzero(table.starts_word)
        found.update("".join(characters[begin:end]) for begin, end in itertools.pairwise([*starts, len(characters)]))
    assert found == Counter(word for document in chinese_documents for text in document for word in rjieba.cut(text))
    assert sum(count for word, count in found.items() if len(word) > 1) > 1000
