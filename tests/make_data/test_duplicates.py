"""Who takes part: duplicates once, weighted inputs as often as asked, an own validation split held out whole."""

import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import InputError
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.make_data import duplicates
from bert_pretrain.make_data.run import make_data

from .conftest import originals

WORDS = ["alpha", "beta", "gamma", "delta", "file", "list", "return", "string", "object", "value", "number", "name"]


def write(path: Path, seed: int, number: int, *, of: str = "") -> list[str]:
    """Write documents of random sentences to `path`; returns them."""
    draw = random.Random(seed)
    documents = [
        "\n".join(" ".join([of, *draw.choices(WORDS, k=draw.randint(3, 12))]).strip() + "." for _ in range(6))
        for _ in range(number)
    ]
    path.write_text("\n\n".join(documents) + "\n")
    return documents


def build(tmp_path: Path, vocab: Path, inputs: list[Path], *settings: str, name: str = "data") -> DataFolder:
    always = ("data.max_seq_length=32", "data.dupe_factor=2", "data.document_boundary=blank_line")
    always += ("data.next_sentence=none", "data.short_seq_prob=0")
    config = load_config(settings=[*always, *settings])
    return DataFolder.open(make_data(config, [str(path) for path in inputs], vocab, tmp_path / name, workers=1))


def tokens(data: DataFolder, split: str) -> Counter[int]:
    tables = [read_shard(data.path, record) for record in data.shards(split)]
    return Counter(np.concatenate([originals(table) for table in tables]).tolist())


@pytest.mark.parametrize("bucket", [1 << 22, 7])
def test_equal_documents_are_seen_once_and_counted(
    tmp_path: Path, vocab_folder: Path, monkeypatch: pytest.MonkeyPatch, bucket: int
) -> None:
    monkeypatch.setattr(duplicates, "BUCKET_DOCUMENTS", bucket)
    documents = write(tmp_path / "once.txt", 1, 40)
    (tmp_path / "more.txt").write_text("\n\n".join([*documents[:15], documents[0].upper(), "One more. And one."]))
    once = build(tmp_path, vocab_folder, [tmp_path / "once.txt"], "data.validation_fraction=0", name="a")
    both = [tmp_path / "once.txt", tmp_path / "more.txt"]
    more = build(tmp_path, vocab_folder, both, "data.validation_fraction=0", name="b")
    assert more.manifest["corpus"]["left_out"] == {"duplicate_documents": 16}
    assert once.manifest["corpus"]["left_out"] == {}
    added = tokens(more, "train") - tokens(once, "train")
    assert sum(added.values()) < 40  # the one new document, twice
    kept = build(tmp_path, vocab_folder, both, "data.validation_fraction=0", "data.drop_duplicates=no", name="c")
    assert kept.manifest["corpus"]["left_out"] == {}
    assert sum(tokens(kept, "train").values()) > 1.3 * sum(tokens(more, "train").values())


def test_no_training_document_is_in_a_validation_split_of_ones_own(tmp_path: Path, vocab_folder: Path) -> None:
    training = write(tmp_path / "train.txt", 1, 40)
    held_out = write(tmp_path / "held-out.txt", 2, 10)
    (tmp_path / "train.txt").write_text("\n\n".join([*held_out[:4], *training, *training[:3]]))
    data = build(tmp_path, vocab_folder, [tmp_path / "train.txt"], f"data.validation=[{tmp_path / 'held-out.txt'}]")
    assert data.manifest["corpus"]["left_out"] == {"documents_also_in_validation": 4, "duplicate_documents": 3}
    alone = build(tmp_path, vocab_folder, [tmp_path / "held-out.txt"], "data.validation_fraction=0", name="alone")
    of_all, of_one = tokens(alone, "train"), tokens(data, "validation")
    special = {data.tokenizer().cls_id, data.tokenizer().sep_id}
    assert {word: 2 * count for word, count in of_one.items() if word not in special} == {
        word: count for word, count in of_all.items() if word not in special
    }
    assert [entry["split"] for entry in data.manifest["inputs"]] == ["train", "validation"]


def test_an_input_is_seen_as_often_as_its_weight_says(tmp_path: Path, vocab_folder: Path) -> None:
    names = {"whole": 1.0, "often": 3.0, "half": 0.5, "odd": 1.25}
    tokenizer_words = dict(zip(names, ["module", "python", "function", "class"], strict=True))
    for seed, (name, word) in enumerate(tokenizer_words.items()):
        write(tmp_path / f"{name}.txt", seed, 200, of=word)
    weights = ",".join(f"{tmp_path / name}.txt: {weight}" for name, weight in names.items() if weight != 1)
    inputs = [tmp_path / f"{name}.txt" for name in names]
    settings = [f"data.input_weights={{{weights}}}", "data.validation_fraction=0", "data.examples_per_shard=64"]
    data = build(tmp_path, vocab_folder, inputs, *settings)
    found, tokenizer = tokens(data, "train"), data.tokenizer()
    for name, word in tokenizer_words.items():
        (token,) = tokenizer.encode_text(word)
        share = found[token] / (200 * 6)
        assert share == pytest.approx(2 * names[name], rel=0.12 if name in ("odd", "half") else 0.01), name
    rows = [record.rows for record in data.shards("train")]
    assert max(rows) < 2 * np.mean(rows)  # copies in which few inputs take part have fewer shards


@pytest.mark.parametrize(
    ("settings", "names", "needed"),
    [
        (["data.next_sentence=nsp"], "train and validation", 4),
        (["data.next_sentence=sop"], "train and validation", 2),
        (["data.validation=[{other}]"], "train", 1),
    ],
)
def test_a_corpus_that_duplicates_leave_too_small_is_refused_as_such(
    tmp_path: Path, vocab_folder: Path, settings: list[str], names: str, needed: int
) -> None:
    (text,) = write(tmp_path / "other.txt", 1, 1)
    (tmp_path / "a.txt").write_text("\n\n".join([text] * 5) + "\n")
    settings = [each.format(other=tmp_path / "other.txt") for each in settings]
    with pytest.raises(InputError) as caught:
        build(tmp_path, vocab_folder, [tmp_path / "a.txt"], *settings)
    assert re.match(f"without duplicates [01] of 5 documents .* {names}, .* at least {needed}$", caught.value.what)
    assert re.search("4 duplicate documents|5 documents also in validation", caught.value.where)
    if names != "train":
        build(tmp_path, vocab_folder, [tmp_path / "a.txt"], *settings, "data.drop_duplicates=no")


@pytest.mark.parametrize("order", [("light", "heavy"), ("heavy", "light")])
def test_of_equal_documents_the_heaviest_stays(tmp_path: Path, vocab_folder: Path, order: tuple[str, str]) -> None:
    for name in order:
        write(tmp_path / f"{name}.txt", 1, 30)
    inputs = [tmp_path / f"{name}.txt" for name in order]
    weight = f"data.input_weights={{{tmp_path / 'heavy.txt'}: 3}}"
    data = build(tmp_path, vocab_folder, inputs, weight, "data.validation_fraction=0")
    alone = build(tmp_path, vocab_folder, inputs[:1], "data.validation_fraction=0", name="alone")
    assert data.manifest["corpus"]["left_out"] == {"duplicate_documents": 30}
    assert sum(tokens(data, "train").values()) == pytest.approx(3 * sum(tokens(alone, "train").values()), rel=0.01)


def test_a_validation_set_of_one_document_is_too_few_for_random_pairs(tmp_path: Path, vocab_folder: Path) -> None:
    write(tmp_path / "train.txt", 1, 9)
    write(tmp_path / "held-out.txt", 2, 1)
    settings = [f"data.validation=[{tmp_path / 'held-out.txt'}]", "data.next_sentence=nsp"]
    with pytest.raises(InputError, match=r"held out for validation hold 1 document\(s\).* at least 2"):
        build(tmp_path, vocab_folder, [tmp_path / "train.txt"], *settings)


@pytest.mark.parametrize("objective", ["nsp", "sop", "none"])
def test_inputs_without_text_are_refused_though_other_text_is_held_out(
    tmp_path: Path, vocab_folder: Path, objective: str
) -> None:
    (tmp_path / "train.txt").write_text("\n\n\n")
    write(tmp_path / "held-out.txt", 2, 9)
    settings = [f"data.validation=[{tmp_path / 'held-out.txt'}]", f"data.next_sentence={objective}"]
    with pytest.raises(InputError, match="the inputs hold no text to train on"):
        build(tmp_path, vocab_folder, [tmp_path / "train.txt"], *settings)


def test_an_input_that_the_vocabulary_does_not_fit_is_named(
    tmp_path: Path, vocab_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a.txt", 1, 9)
    (tmp_path / "b.txt").write_text("ἐν ἀρχῇ ἦν.\nὁ λόγος ἦν.\n\nκαὶ θεὸς.\nἦν ὁ λόγος.\n")
    build(tmp_path, vocab_folder, [tmp_path / "a.txt", tmp_path / "b.txt"])
    (warning,) = (line for line in capsys.readouterr().out.split("\n") if "warning" in line and "[UNK]" in line)
    assert str(tmp_path / "b.txt") in warning
