"""`make-data` from text to data folder: true labels for any corpus, and the same bytes every time."""

import os
import queue
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError, InputError, OutputError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.io import manifest
from bert_pretrain.io.manifest import exclusive
from bert_pretrain.make_data import assignment, build, run
from bert_pretrain.make_data.run import make_data
from bert_pretrain.text import documents
from bert_pretrain.text.corpus import Corpus
from tests.conftest import call, digests

from .conftest import SMALL, tables
from .test_pairs import documents_of

CORPORA = {
    "short documents": (documents_of(2, 300, (1, 8), (3, 30)), []),
    "long sentences": (documents_of(3, 30, (1, 6), (1, 900)), []),
    "one long document among short ones": (
        documents_of(4, 40, (1, 4), (3, 20)) + documents_of(5, 1, (900, 900), (3, 30)), []
    ),
    "four documents": (documents_of(6, 4, (2, 30), (3, 30)), []),
    "one word a sentence": (documents_of(8, 50, (2, 100), (1, 1)), ["data.validation_fraction=0"]),
    "mostly single sentences": (documents_of(9, 300, (1, 1), (3, 30)) + documents_of(10, 9, (2, 9), (3, 30)), []),
    "tiny examples": (documents_of(11, 40, (2, 20), (1, 9)), ["data.max_seq_length=8"]),
    "many shards": (
        documents_of(12, 60, (1, 30), (3, 30)), ["data.examples_per_shard=64", "data.short_seq_prob=0.5"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CORPORA)
def test_next_sentence_labels_are_true(numbered, name: str) -> None:
    documents, settings = CORPORA[name]
    corpus = numbered(documents)
    data = corpus.make("data.max_seq_length=64", "data.dupe_factor=3", *settings)
    folder = DataFolder.open(data)
    seen: dict[str, set[int]] = {"train": set(), "validation": set()}
    shown = np.zeros(len(corpus.document), dtype=bool)
    for split, documents_seen in seen.items():
        for pair in corpus.pairs(data, split):
            a, b = (set(corpus.document[segment].tolist()) for segment in (pair.a, pair.b))
            assert len(a) == len(b) == 1
            assert (np.diff(pair.a) == 1).all()
            assert (np.diff(pair.b) == 1).all()
            assert (a == b) == (pair.label == 0)
            assert pair.label == 1 or pair.b[0] == pair.a[-1] + 1
            documents_seen |= a | b
            shown[pair.a] |= split == "train"
            shown[pair.b] |= split == "train"
    assert not seen["train"] & seen["validation"]
    assert len(seen["train"]) >= 2
    assert len(seen["validation"]) >= (2 if "validation" in folder.manifest["splits"] else 0)
    # Nearly every sentence is in some copy. If one document outweighs the others, some of its Bs have no partner.
    several = np.array([len(each) > 1 and n not in seen["validation"] for n, each in enumerate(documents)])
    minimum, is_several = 0.98 if several.sum() > 20 else 0.9, several[corpus.document]
    assert shown[is_several & corpus.begins].mean() > minimum
    assert shown[is_several].mean() > minimum - 0.03
    check_manifest(data, documents)


def test_random_bs_come_from_the_whole_corpus(numbered) -> None:
    number = 300
    corpus = numbered(documents_of(60, number, (6, 12), (5, 12)))
    data = corpus.make("data.max_seq_length=64", name="far")
    documents = [corpus.document[[pair.a[0], pair.b[0]]] for pair in corpus.pairs(data, "train") if pair.label == 1]
    distances = np.abs(np.diff(documents, axis=1)) / number
    assert np.median(distances) == pytest.approx(1 - 0.5**0.5, abs=0.05)  # as of two uniform draws


def test_records_depend_on_weights_and_validation_inputs_and_other_records_are_removed(
    small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    open_records = assignment._open_records
    monkeypatch.setattr(assignment, "_open_records", lambda records: opened.append(records) or open_records(records))
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join("\n".join(text.split("\n")[::-1]) for text in small.text.read_text().split("\n\n")))
    for number, more in enumerate(([], [f"data.input_weights={{{other}: 3}}"], [f"data.validation=[{other}]"])):
        inputs = [str(small.text)] if number == 2 else [str(small.text), str(other)]
        make_data(small.config(*SMALL, *more), inputs, small.vocab, tmp_path / str(number), workers=1)
    assert len({records.name for records in opened}) == 3
    assert not any(records.exists() for records in opened)
    record = opened[0] / "train-00000.json"
    for records in (opened[0], opened[0].with_name(".records-other")):
        records.mkdir(parents=True, exist_ok=True)
        record.touch()
        open_records(opened[0])
        assert (record.exists(), records.exists()) == (True, records == opened[0])


def check_manifest(data: Path, documents: list[list[int]]) -> None:
    """Check lengths, balanced labels in every shard, and the counts of the manifest."""
    folder = DataFolder.open(data)
    for split, entry in folder.manifest["splits"].items():
        found = tables(data, split)
        labels = [table.next_sentence_label.astype(int) for table in found]
        assert all(abs(2 * each.sum() - len(each)) <= 1 for each in labels)
        assert max(int(table.lengths.max()) for table in found if len(table)) <= folder.max_seq_length
        assert [record.rows for record in folder.shards(split)] == [len(table) for table in found]
        assert entry["rows"] == sum(map(len, found)) == folder.rows(split)
        assert entry["tokens"] == sum(len(table.input_ids) for table in found)
    counts = (len(documents), sum(map(len, documents)), sum(map(sum, documents)))
    assert tuple(folder.manifest["corpus"][name] for name in ("documents", "sentences", "tokens")) == counts


@pytest.mark.parametrize(
    ("documents", "part"),
    [
        ([[5, 5, 5]] * 2, "2 document"),
        ([[5, 5, 5]] * 3, "at least 4"),
        ([[5]] * 40, "no document of two sentences"),
        ([[5]] * 40 + [[5, 5]] * 3, "two sentences"),
    ],
)
def test_a_corpus_without_pairs_is_an_error_and_the_output_stays_free(numbered, documents, part) -> None:
    corpus, other = numbered(documents), numbered([[5, 5, 5]] * 8)
    with pytest.raises(InputError, match=part):
        corpus.make()
    data = make_data(other.config(), [str(other.text)], other.vocab, corpus.folder / "data", workers=1)
    assert DataFolder.open(data).rows("train") > 0


@pytest.mark.parametrize(
    ("documents", "warned"),
    [
        (documents_of(9, 5, (20, 20), (3, 9)), "only 5 documents"),
        (documents_of(9, 30, (1, 1), (3, 9)) + documents_of(10, 30, (3, 40), (3, 9)), "a single sentence"),
        (documents_of(9, 2, (1, 1), (3, 9)) + documents_of(10, 58, (3, 20), (3, 9)), ""),
    ],
)
def test_few_documents_and_many_single_sentences_give_a_warning(numbered, documents, warned: str, capsys) -> None:
    numbered(documents).make("data.examples_per_shard=64", "data.max_seq_length=16", "data.dupe_factor=2")
    printed = capsys.readouterr().out
    assert ("warning" in printed) == bool(warned)
    assert warned in printed


@pytest.mark.parametrize("settings", [(), ("data.next_sentence=none", "data.masking=dynamic")])
def test_bytes_do_not_depend_on_workers_paths_or_store(small, monkeypatch, tmp_path: Path, settings) -> None:
    config = small.config(*SMALL, *settings)
    one = make_data(config, [str(small.text)], small.vocab, tmp_path / "one", workers=1, store=tmp_path / "a")
    two = make_data(config, [str(small.text)], small.vocab, tmp_path / "two", workers=2, store=tmp_path / "b")
    monkeypatch.chdir(small.folder)
    here = make_data(config, ["text.txt"], Path("vocab"), tmp_path / "here", workers=1)
    assert digests(one) == digests(two)
    assert {**digests(here), "manifest.json": ""} == {
        **digests(one),
        "manifest.json": "",
    }  # has the input's path


def test_copies_differ_in_pairs_and_masks(small) -> None:
    data = small.make(*SMALL, name="copies")
    found = tables(data, "train")
    copies = [
        {tuple(table.take(np.array([row])).input_ids) for table in copy for row in range(len(table))}
        for copy in (found[: len(found) // 2], found[len(found) // 2 :])
    ]
    assert len(copies[0] & copies[1]) < 0.05 * len(copies[0])


def test_the_same_command_changes_nothing_and_another_is_an_error(numbered, tmp_path: Path, capsys) -> None:
    small = numbered(documents_of(30, 60, (2, 20), (3, 15)))
    data = small.make(*SMALL)
    before, times = digests(data), {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    capsys.readouterr()
    small.make(*SMALL)
    assert "up to date" in capsys.readouterr().out
    with pytest.raises(OutputError, match=r"data\.seed"):
        small.make(*SMALL, "data.seed=99")
    other = tmp_path / "other.txt"
    other.write_bytes(small.text.read_bytes())
    with pytest.raises(OutputError, match="inputs"):
        make_data(small.config(*SMALL), [str(other)], small.vocab, data, workers=1)
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == times
    make_data(small.config(*SMALL, "data.seed=99"), [str(small.text)], small.vocab, data, workers=1, overwrite=True)
    (aside,) = small.folder.glob("data.old-*")
    assert digests(aside) == before
    assert digests(data / "train") != digests(aside / "train")
    assert len([path for path in (small.folder / ".token-store").iterdir() if path.is_dir()]) == 1


def test_an_input_that_changes_while_it_is_read_is_an_error(numbered, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, read = numbered([[5, 5, 5]] * 8), documents.read
    changes = iter([lambda: os.utime(corpus.text, ns=(5, 5)), corpus.text.unlink])

    def read_and_change(*args):
        yield from read(*args)
        next(changes)()

    monkeypatch.setattr(documents, "read", read_and_change)
    monkeypatch.setattr(Corpus, "texts", ["A sample that was read before."])
    for _ in range(2):
        with pytest.raises(InputError, match="changed while it was read"):
            corpus.make()
    assert not list(corpus.folder.glob(".token-store/*/part-*"))


@pytest.mark.parametrize("removed", ["data", ".token-store"])
def test_a_folder_removed_during_the_run_is_one_error(numbered, monkeypatch, removed: str) -> None:
    corpus, build_shard = numbered(documents_of(30, 60, (2, 20), (3, 15))), build.build_shard
    command = ["make-data", corpus.text, "--vocab", corpus.vocab, "--output", corpus.folder / "data", "--workers", 1]
    command += [f"--set={setting}" for setting in (*SMALL, "data.document_boundary=blank_line")]

    def remove_and_build(*args):
        shutil.rmtree(corpus.folder / removed, ignore_errors=True)
        return build_shard(*args)

    with monkeypatch.context() as patch:
        patch.setattr(run, "build_shard", remove_and_build)
        errors = call(*command, code=2).stderr
    assert errors.count("error: ") == 1
    assert str(corpus.folder / removed) in errors
    shutil.rmtree(corpus.folder / removed, ignore_errors=True)  # written after it was removed
    call(*command)


def test_a_command_waits_for_a_locked_token_store(small, tmp_path: Path, monkeypatch) -> None:
    arguments = (small.config(*SMALL), [str(small.text)], small.vocab)
    make_data(*arguments, tmp_path / "a", workers=1)
    (store,) = (tmp_path / ".token-store").iterdir()
    written = (store / "part-00000" / "ids.npy").stat().st_mtime_ns
    printed: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(manifest, "print", lambda text, **_: printed.put(text), raising=False)
    with exclusive(store):
        other = threading.Thread(target=make_data, args=(*arguments, tmp_path / "b"), kwargs={"workers": 1})
        other.start()
        text = printed.get(timeout=60)
        assert text.startswith("waiting for")
        assert str(store) in text
        assert not (tmp_path / "b" / "train").exists()
    other.join(timeout=60)
    assert (store / "part-00000" / "ids.npy").stat().st_mtime_ns == written
    assert (tmp_path / "b" / "manifest.json").exists()


WHOLE_WORDS = "data.whole_word_mask=true"


@pytest.mark.parametrize(
    ("settings", "language", "segmenter"),
    [
        ([], "zh", None),
        ([WHOLE_WORDS], "zh", "jieba"),
        ([WHOLE_WORDS, "data.word_segmenter=characters", "data.language=ja"], "ja", "characters"),
    ],
)
def test_chinese_is_detected(settings, language, segmenter, chinese_text: Path, vocab_folder: Path, tmp_path) -> None:
    config = load_config(settings=["data.dupe_factor=1", *settings])
    found = DataFolder.open(make_data(config, [str(chinese_text)], vocab_folder, tmp_path / "data", workers=1)).config
    assert (found.language, found.word_segmenter) == (language, segmenter)


@pytest.mark.parametrize("settings", [[WHOLE_WORDS], [WHOLE_WORDS, "data.word_segmenter=jieba"]])
def test_a_missing_segmenter_is_an_early_error(settings, chinese_text, vocab_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "rjieba", None)
    with pytest.raises(ConfigError) as caught:
        make_data(load_config(settings=settings), [str(chinese_text)], vocab_folder, tmp_path / "data", workers=1)
    assert "[chinese]" in caught.value.remedy
    assert not list(tmp_path.glob(".token-store/*"))
