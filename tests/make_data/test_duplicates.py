"""Duplicates are left out, weights repeat inputs, and validation inputs are held out."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import InputError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.make_data import assignment, ingest
from bert_pretrain.make_data.run import make_data

from .conftest import tables

WORDS = ["alpha", "beta", "gamma", "delta", "file", "list", "return", "string", "object", "value", "number", "name"]
NO_VALIDATION = "data.validation_fraction=0"


def write(path: Path, seed: int, number: int, *, of: str = "") -> list[str]:
    """Write documents of random sentences to `path`, and return them."""
    draw = random.Random(seed)
    documents = [
        "\n".join(" ".join([of, *draw.choices(WORDS, k=draw.randint(3, 12))]).strip() + "." for _ in range(6))
        for _ in range(number)
    ]
    path.write_text("\n\n".join(documents) + "\n")
    return documents


def build(tmp_path: Path, vocab: Path, names: list[str], *settings: str, name: str = "data") -> DataFolder:
    always = ("data.max_seq_length=32", "data.dupe_factor=2", "data.document_boundary=blank_line")
    always += ("data.next_sentence=none", "data.short_seq_prob=0")
    config, inputs = load_config(settings=[*always, *settings]), [f"{tmp_path / each}.txt" for each in names]
    return DataFolder.open(make_data(config, inputs, vocab, tmp_path / name, workers=1))


def tokens(data: DataFolder, split: str) -> Counter[int]:
    return Counter(np.concatenate([table.original_ids for table in tables(data.path, split)]).tolist())


@pytest.mark.parametrize("bucket", [1 << 22, 7])
def test_duplicates_are_dropped_and_counted(tmp_path, vocab_folder, monkeypatch, bucket) -> None:
    monkeypatch.setattr(assignment, "BUCKET_DOCUMENTS", bucket)
    documents = write(tmp_path / "once.txt", 1, 40)
    (tmp_path / "more.txt").write_text("\n\n".join([*documents[:15], documents[0].upper(), "One more. And one."]))
    once = build(tmp_path, vocab_folder, ["once"], NO_VALIDATION, name="a")
    more = build(tmp_path, vocab_folder, ["once", "more"], NO_VALIDATION, name="b")
    kept = build(tmp_path, vocab_folder, ["once", "more"], NO_VALIDATION, "data.drop_duplicates=no", name="c")
    left_out = [data.manifest["corpus"]["left_out"] for data in (once, more, kept)]
    assert left_out == [{}, {"duplicate_documents": 16}, {}]
    assert [data.num_documents("train") for data in (once, more, kept)] == [40, 41, 57]
    assert sum((tokens(more, "train") - tokens(once, "train")).values()) < 40  # the one new document, twice
    assert sum(tokens(kept, "train").values()) > 1.3 * sum(tokens(more, "train").values())


@pytest.mark.parametrize("block_characters", [1 << 22, 40])
def test_documents_with_different_unknown_words_are_not_duplicates(
    tmp_path: Path, vocab_folder: Path, monkeypatch: pytest.MonkeyPatch, block_characters: int
) -> None:
    monkeypatch.setattr(ingest, "BLOCK_CHARACTERS", block_characters)
    unknown = ["😍", "😡", "龘", "龗", *("".join(random.Random(seed).choices("ACGT", k=150)) for seed in range(20))]
    documents = [f"alpha {word}.\nThe list beta.\nA {word} gamma." for word in unknown]
    (tmp_path / "unknown.txt").write_text("\n\n".join([*documents, documents[0].upper(), documents[4].lower()]))
    data = build(tmp_path, vocab_folder, ["unknown"], NO_VALIDATION, "data.sentence_splitter=lines")
    assert data.manifest["corpus"]["unk_share"] > 0.1
    assert data.manifest["corpus"]["left_out"] == {"duplicate_documents": 2}


def test_training_documents_in_the_validation_inputs_are_left_out(tmp_path: Path, vocab_folder: Path) -> None:
    training, held_out = write(tmp_path / "train.txt", 1, 40), write(tmp_path / "held-out.txt", 2, 10)
    (tmp_path / "train.txt").write_text("\n\n".join([*held_out[:4], *training, *training[:3]]))
    data = build(tmp_path, vocab_folder, ["train"], f"data.validation=[{tmp_path / 'held-out.txt'}]")
    assert data.manifest["corpus"]["left_out"] == {"documents_also_in_validation": 4, "duplicate_documents": 3}
    alone = build(tmp_path, vocab_folder, ["held-out"], NO_VALIDATION, name="alone")
    of_all, of_one = tokens(alone, "train"), tokens(data, "validation")
    for special in (data.tokenizer().cls_id, data.tokenizer().sep_id):
        del of_all[special], of_one[special]
    assert of_all == {word: 2 * count for word, count in of_one.items()}
    assert [entry["split"] for entry in data.manifest["inputs"]] == ["train", "validation"]


def test_inputs_are_repeated_by_weight(tmp_path: Path, vocab_folder: Path) -> None:
    inputs = {"whole": ("module", 1), "often": ("python", 3), "half": ("function", 0.5), "odd": ("class", 1.25)}
    for seed, (name, (word, _)) in enumerate(inputs.items()):
        write(tmp_path / f"{name}.txt", seed, 100, of=word)
    weights = ",".join(f"{tmp_path / name}.txt: {weight}" for name, (_, weight) in inputs.items() if weight != 1)
    settings = [f"data.input_weights={{{weights}}}", NO_VALIDATION, "data.examples_per_shard=64"]
    data = build(tmp_path, vocab_folder, list(inputs), *settings)
    counts, tokenizer = tokens(data, "train"), data.tokenizer()
    for word, weight in inputs.values():
        (token,) = tokenizer.encode_text(word)
        assert counts[token] / (100 * 6) == pytest.approx(2 * weight, rel=0.01 if weight in (1, 3) else 0.12), word
    rows = [record.rows for record in data.shards("train")]
    assert max(rows) < 2 * np.mean(rows)  # copies with few inputs have fewer shards


def test_the_duplicate_of_the_heaviest_input_is_kept(tmp_path: Path, vocab_folder: Path) -> None:
    for name in ("light", "heavy"):
        write(tmp_path / f"{name}.txt", 1, 30)
    weight = f"data.input_weights={{{tmp_path / 'heavy.txt'}: 3}}"
    data = build(tmp_path, vocab_folder, ["light", "heavy"], weight, NO_VALIDATION)
    assert data.manifest["corpus"]["left_out"] == {"duplicate_documents": 30}
    assert data.manifest["splits"]["train"]["statistics"]["times_text_is_seen"] == pytest.approx(6, rel=0.01)


@pytest.mark.parametrize(
    ("train", "settings", "part"),
    [
        ("same", ["data.next_sentence=nsp"], "at least 4"),
        ("same", ["data.next_sentence=sop"], "at least 2"),
        ("same", ["data.validation=[{}/one.txt]"], "at least 1"),
        ("many", ["data.validation=[{}/one.txt]", "data.next_sentence=nsp"], "at least 2"),
        ("control", [], "no text"),
        ("none", ["data.validation=[{}/many.txt]", "data.next_sentence=nsp"], "no text"),
    ],
)
def test_too_few_documents_without_duplicates_are_an_error(tmp_path, vocab_folder, train, settings, part) -> None:
    (text,) = write(tmp_path / "one.txt", 1, 1)
    write(tmp_path / "many.txt", 2, 9)
    (tmp_path / "same.txt").write_text("\n\n".join([text] * 5) + "\n")
    (tmp_path / "none.txt").write_text("\n\n \n")
    (tmp_path / "control.txt").write_text("\x00\x01\n\n\x02\n\n\x03\n\n\x04\n")
    with pytest.raises(InputError, match=part):
        build(tmp_path, vocab_folder, [train], *(each.format(tmp_path) for each in settings))


@pytest.mark.parametrize("dry_run", [False, True])
def test_repeated_sentences_give_a_warning(tmp_path, vocab_folder, capsys, dry_run) -> None:
    documents = write(tmp_path / "articles.txt", 1, 40)
    pages = "\n\n".join(f"Log in to write a comment.\n{document}\nAll rights reserved." for document in documents)
    (tmp_path / "pages.txt").write_text(pages + "\n")
    config = load_config(settings=("data.max_seq_length=32", "data.dupe_factor=1"))
    for name in ("articles", "pages"):
        make_data(config, [f"{tmp_path / name}.txt"], vocab_folder, tmp_path / name, workers=1, dry_run=dry_run)
        warned = "warning: 25% of the sentences of a sample" in capsys.readouterr().out
        assert warned == (name == "pages")
