"""`make-data` as a whole: examples that say the truth about any corpus, and the same bytes every time."""

import hashlib
import itertools
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError, InputError, OutputError
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.io.pool import run_each
from bert_pretrain.make_data import ingest as ingest_module
from bert_pretrain.make_data.run import make_data

Corpus = Callable[..., "object"]


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file of a data folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def lengths(seed: int, documents: int, sentences: tuple[int, int], words: tuple[int, int]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randint(*words) for _ in range(draw.randint(*sentences))] for _ in range(documents)]


CORPORA = {
    "middling documents": (lengths(1, 60, (2, 40), (3, 30)), []),
    "short documents": (lengths(2, 300, (1, 8), (3, 30)), []),
    "long sentences": (lengths(3, 30, (1, 6), (1, 900)), []),
    "one long document among short ones": ([*lengths(4, 40, (1, 4), (3, 20)), *lengths(5, 1, (900, 900), (3, 30))], []),
    "four documents": (lengths(6, 4, (2, 30), (3, 30)), []),
    "no validation": (lengths(7, 20, (2, 30), (3, 30)), ["data.validation_fraction=0"]),
    "one word a sentence": (lengths(8, 50, (2, 100), (1, 1)), []),
    "mostly single sentences": (lengths(9, 300, (1, 1), (3, 30)) + lengths(10, 9, (2, 9), (3, 30)), []),
    "tiny examples": (lengths(11, 40, (2, 20), (1, 9)), ["data.max_seq_length=8"]),
    "many shards": (lengths(12, 150, (1, 30), (3, 30)), ["data.examples_per_shard=64", "data.short_seq_prob=0.5"]),
}


@pytest.fixture(scope="module", params=CORPORA, ids=lambda name: name.replace(" ", "-"))
def made(request: pytest.FixtureRequest, numbered):
    documents, settings = CORPORA[request.param]
    corpus = numbered(documents)
    return corpus, corpus.make("data.max_seq_length=64", "data.dupe_factor=3", *settings), documents


def test_a_and_b_are_contiguous_text_and_labels_tell_the_truth(made) -> None:
    corpus, data, _ = made
    for split in ("train", "validation"):
        for pair in corpus.pairs(data, split):
            assert len(pair.a)
            assert len(pair.b)
            for segment in (pair.a, pair.b):
                assert (np.diff(segment) == 1).all()
                assert len(set(corpus.document[segment])) == 1
            follows = pair.b[0] == pair.a[-1] + 1 and corpus.document[pair.b[0]] == corpus.document[pair.a[0]]
            if pair.label == 0:
                assert follows
            else:
                assert corpus.document[pair.a[0]] != corpus.document[pair.b[0]]


def test_every_shard_holds_equally_many_labels(made) -> None:
    _, data, _ = made
    folder = DataFolder.open(data)
    for record in (*folder.shards("train"), *folder.shards("validation")):
        labels = read_shard(data, record).next_sentence_label
        assert abs(2 * int(labels.sum()) - len(labels)) <= 1


def test_validation_documents_never_appear_in_training(made) -> None:
    corpus, data, _ = made
    seen = {
        split: {int(corpus.document[word[0]]) for pair in corpus.pairs(data, split) for word in (pair.a, pair.b)}
        for split in ("train", "validation")
    }
    assert not seen["train"] & seen["validation"]
    if "validation" in DataFolder.open(data).manifest["splits"]:
        assert len(seen["validation"]) >= 2
    assert len(seen["train"]) >= 2


def test_every_sentence_of_a_document_of_several_appears(made) -> None:
    """As A, or as a B that an exchange may have shortened; in some copy at least, each sentence begins to appear."""
    corpus, data, documents = made
    shown = np.zeros(len(corpus.document), dtype=bool)
    pairs = corpus.pairs(data, "train")
    for pair in pairs:
        shown[pair.a] = True
        shown[pair.b] = True
    held_out = {int(corpus.document[pair.a[0]]) for pair in corpus.pairs(data, "validation")}
    several = [len(document) > 1 and number not in held_out for number, document in enumerate(documents)]
    # Where one document outweighs the others, some of its Bs find no A of another to stand with.
    least = 0.98 if sum(several) > 20 else 0.9
    is_several = np.array(several)[corpus.document]
    assert shown[is_several & corpus.begins].mean() > least
    assert shown[is_several].mean() > least - 0.03


def test_examples_fit_and_the_manifest_counts_them(made) -> None:
    _, data, documents = made
    folder = DataFolder.open(data)
    longest = folder.max_seq_length
    for split, entry in folder.manifest["splits"].items():
        tables = [read_shard(data, record) for record in folder.shards(split)]
        assert max(int(table.lengths.max()) for table in tables if len(table)) <= longest
        assert entry["rows"] == sum(len(table) for table in tables) == folder.rows(split)
        assert entry["tokens"] == sum(len(table.input_ids) for table in tables)
        assert [record.rows for record in folder.shards(split)] == [len(table) for table in tables]
        masked = sum(len(table.masks.original_ids) for table in tables)
        assert entry["statistics"]["masked_share"] == masked / (entry["tokens"] - 3 * entry["rows"])
    assert folder.manifest["corpus"]["documents"] == len(documents)
    assert folder.manifest["corpus"]["sentences"] == sum(map(len, documents))
    assert folder.manifest["corpus"]["tokens"] == sum(map(sum, documents))


def test_short_targets_are_as_frequent_as_asked(numbered) -> None:
    corpus = numbered(lengths(20, 20, (200, 200), (5, 15)))
    settings = ("data.max_seq_length=64", "data.dupe_factor=2", "data.validation_fraction=0", "data.short_seq_prob=")
    share = {}
    for probability in ("0", "0.5"):
        data = corpus.make(*settings[:-1], settings[-1] + probability, name=f"data{probability}")
        share[probability] = np.mean([len(pair.a) + len(pair.b) < 61 for pair in corpus.pairs(data, "train")])
    # Only where documents end is an example short without being asked to; exchanged Bs add a few.
    assert share["0"] < 0.1
    assert 0.4 < share["0.5"] - share["0"] < 0.6


@pytest.mark.parametrize(
    ("documents", "part"),
    [
        ([[5, 5, 5]], "1 document"),
        ([[5, 5, 5]] * 2, "2 document"),
        ([[5, 5, 5]] * 3, "at least 4"),
        ([[5]] * 40, "no document of two sentences"),
        ([[5]] * 40 + [[5, 5]], "two sentences"),
        ([[5]] * 40 + [[5, 5]] * 3, "two sentences"),
    ],
)
def test_a_corpus_without_honest_pairs_is_refused_and_the_folder_stays_free(numbered, documents, part) -> None:
    corpus = numbered(documents)
    with pytest.raises(InputError) as caught:
        corpus.make()
    assert part in caught.value.what
    assert caught.value.remedy
    (corpus.text).write_text(corpus.text.read_text() * 3)
    more = [[5, 5, 5]] * 8
    other = numbered(more)
    data = make_data(other.config(), [str(other.text)], other.vocab, corpus.folder / "data", workers=1)
    assert DataFolder.open(data).rows("train") > 0


def test_few_documents_and_a_large_share_held_out_are_warned_about(
    numbered, capsys: pytest.CaptureFixture[str]
) -> None:
    numbered(lengths(9, 5, (20, 20), (3, 9))).make()
    printed = capsys.readouterr().out
    assert re.search(
        r"warning: the inputs hold only 5 documents; 2 documents, \d\d% of the text, are held out", printed
    )
    assert ".txt=line, if each line" in printed  # blank lines end documents already
    assert "--set data.validation_fraction=0" in printed
    numbered(lengths(9, 40, (5, 5), (3, 9))).make()
    numbered(lengths(9, 40, (5, 5), (3, 9))).make("data.validation_fraction=0.3")
    assert "warning" not in capsys.readouterr().out


def test_of_few_documents_only_as_many_are_held_out_as_needed(numbered) -> None:
    documents = lengths(9, 12, (20, 20), (3, 9))
    held_out = DataFolder.open(numbered(documents).make("data.next_sentence=sop", "data.dupe_factor=1"))
    assert held_out.manifest["splits"]["validation"]["tokens"] < held_out.manifest["splits"]["train"]["tokens"] / 8


def test_many_single_sentences_are_warned_about(numbered, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("data.examples_per_shard=64", "data.max_seq_length=16", "data.dupe_factor=2")
    numbered(lengths(9, 30, (1, 1), (3, 9)) + lengths(10, 30, (3, 40), (3, 9))).make(*settings)
    assert "warning: many documents are a single sentence" in capsys.readouterr().out
    numbered(lengths(9, 2, (1, 1), (3, 9)) + lengths(10, 58, (3, 20), (3, 9))).make(*settings)
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["\n\n \n", "\x00\x01\n\n\x02\n\n\x03\n\n\x04\n"])
def test_inputs_without_text_are_refused(tmp_path: Path, vocab_folder: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(InputError, match="no text"):
        make_data(load_config(), [str(tmp_path / "a.txt")], vocab_folder, tmp_path / "data", workers=1)


SMALL = ("data.max_seq_length=32", "data.dupe_factor=2", "data.examples_per_shard=64", "data.validation_fraction=0.1")


@pytest.fixture(scope="module")
def small(numbered):
    return numbered(lengths(30, 60, (2, 20), (3, 15)))


def test_a_rerun_is_up_to_date_and_touches_nothing(small, capsys: pytest.CaptureFixture[str]) -> None:
    data = small.make(*SMALL, name="rerun")
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    capsys.readouterr()
    small.make(*SMALL, name="rerun")
    assert "up to date" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before


def test_bytes_do_not_depend_on_workers_place_or_store(small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = small.config(*SMALL)
    one = make_data(config, [str(small.text)], small.vocab, tmp_path / "one", workers=1, store=tmp_path / "a")
    two = make_data(config, [str(small.text)], small.vocab, tmp_path / "two", workers=2, store=tmp_path / "b")
    monkeypatch.chdir(small.folder)
    here = make_data(config, ["text.txt"], Path("vocab"), tmp_path / "here", workers=1)
    for other in (two, here):
        assert {**digests(other), "manifest.json": ""} == {**digests(one), "manifest.json": ""}
    assert json.loads((one / "manifest.json").read_text()) == json.loads((two / "manifest.json").read_text())


def test_another_seed_gives_other_examples_of_the_same_text(small) -> None:
    first = small.make(*SMALL, name="seed1")
    second = small.make(*SMALL, "data.seed=7", name="seed2")
    assert DataFolder.open(first).content_hash != DataFolder.open(second).content_hash
    stores = [path for path in (small.folder / ".token-store").iterdir() if path.is_dir()]
    assert len(stores) == 1


def test_copies_differ_in_pairs_and_masks(small) -> None:
    data = small.make(*SMALL, name="copies")
    folder = DataFolder.open(data)
    records = folder.shards("train")
    copies = [records[: len(records) // 2], records[len(records) // 2 :]]
    found = [
        {
            tuple(read_shard(data, record).take(np.array([row])).input_ids)
            for record in copy
            for row in range(record.rows)
        }
        for copy in copies
    ]
    assert len(found[0] & found[1]) < 0.05 * len(found[0])


def test_a_changed_configuration_or_input_is_refused(small, tmp_path: Path) -> None:
    data = small.make(*SMALL, name="changed")
    before = digests(data)
    with pytest.raises(OutputError) as caught:
        small.make(*SMALL, "data.seed=99", name="changed")
    assert "data.seed: 12345 -> 99" in caught.value.what
    other = tmp_path / "other.txt"
    other.write_bytes(small.text.read_bytes())
    with pytest.raises(OutputError, match="inputs"):
        make_data(small.config(*SMALL), [str(other)], small.vocab, data, workers=1)
    assert digests(data) == before
    overwritten = make_data(
        small.config(*SMALL, "data.seed=99"), [str(small.text)], small.vocab, data, workers=1, overwrite=True
    )
    (aside,) = small.folder.glob("changed.old-*")
    assert digests(aside) == before
    assert DataFolder.open(overwritten).manifest["seed"] == 99


def test_an_input_that_changes_meanwhile_is_refused(numbered, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = numbered([[5, 5, 5]] * 8)
    changes = iter([lambda: os.utime(corpus.text, ns=(5, 5)), corpus.text.unlink])

    def run_and_change(*args, **kwargs):
        yield from run_each(*args, **kwargs)
        next(changes)()

    with monkeypatch.context() as patch:
        patch.setattr(ingest_module, "run_each", run_and_change)
        for _ in range(2):
            with pytest.raises(InputError, match="changed while it was read"):
                corpus.make()
    assert not [path for path in (corpus.folder / ".token-store").iterdir() if path.is_dir()]


def test_a_vocabulary_that_replaces_another_is_noticed(tmp_path: Path, numbered) -> None:
    """Tables cached in the process must not survive the folder they came from."""
    corpus = numbered(lengths(31, 12, (3, 9), (3, 9)))
    first = corpus.make("data.validation_fraction=0", name="first")
    vocabulary = (corpus.vocab / "vocab.txt").read_text().replace("w0\n", "w0x\n")
    (corpus.vocab / "vocab.txt").write_text(vocabulary)
    (corpus.vocab / "tokenizer.json").unlink()  # which holds the vocabulary too
    second = corpus.make("data.validation_fraction=0", name="second")
    manifests = [DataFolder.open(data).manifest for data in (first, second)]
    assert manifests[0]["tokenizer"]["hash"] != manifests[1]["tokenizer"]["hash"]
    assert manifests[1]["corpus"]["unk_share"] > 0


def test_real_english_reads_as_text_after_unmasking(data_folder: Path, english_documents: list[list[str]]) -> None:
    """[CLS] A [SEP] B [SEP] decoded is found in the corpus: A and B each in one document, together when label 0."""
    from bert_pretrain.text.tokenizer import Tokenizer

    from .conftest import originals

    tokenizer = Tokenizer.load(data_folder / "tokenizer")
    encoded = [
        "," + ",".join(str(token) for sentence in document for token in tokenizer.encode_text(sentence)) + ","
        for document in english_documents
    ]
    folder = DataFolder.open(data_folder)
    table = read_shard(data_folder, folder.shards("validation")[0])
    ids = originals(table)
    seen: Counter[int] = Counter()
    for row, (begin, end) in enumerate(itertools.pairwise(table.offsets)):
        example = ids[begin:end].tolist()
        split = int(table.segment_b_start[row])
        assert (example[0], example[split - 1], example[-1]) == (tokenizer.cls_id, tokenizer.sep_id, tokenizer.sep_id)
        a, b = example[1 : split - 1], example[split:-1]
        label = int(table.next_sentence_label[row])
        for segment in [a + b] if label == 0 else [a, b]:
            assert any(f",{','.join(map(str, segment))}," in document for document in encoded)
        seen[label] += 1
    assert min(seen[0], seen[1]) > 50


def test_a_segmenter_that_is_not_installed_is_told_before_any_work(numbered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rjieba", None)  # as if it were not there
    corpus = numbered([[5, 5, 5]] * 9)
    with pytest.raises(ConfigError, match="not installed") as caught:
        corpus.make("data.whole_word_mask=true", "data.word_segmenter=jieba")
    assert "[chinese]" in caught.value.remedy
    stores = corpus.folder / ".token-store"
    assert not stores.exists() or not list(stores.iterdir())


@pytest.mark.parametrize("rows", [64, 1024])
def test_the_entropy_of_tokens_is_that_of_all_shards_together(numbered, rows: int) -> None:
    data = numbered([[9, 7, 5, 3, 8, 6]] * 60).make(f"data.examples_per_shard={rows}")
    folder, counts = DataFolder.open(data), {}
    tokenizer = folder.tokenizer()
    for split in ("train", "validation"):
        shards = [read_shard(data, record).original_ids for record in folder.shards(split)]
        counts[split] = np.bincount(np.concatenate(shards), minlength=tokenizer.vocab_size)
        counts[split][[tokenizer.cls_id, tokenizer.sep_id]] = 0
    frequencies = (counts["train"] + 0.1) / (counts["train"] + 0.1).sum()
    for split, own in counts.items():
        measured = folder.manifest["splits"][split]["statistics"]["unigram_entropy"]
        assert measured == pytest.approx(-(own * np.log(frequencies)).sum() / own.sum(), abs=1e-5)
