"""`tag`: reading, windows, labels and metrics."""

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.rows import Example
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tag import Tag, entity_scores
from bert_pretrain.text.tokenizer import Tokenizer

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "anna", "sing", "##s", "in", "ber", "##lin", "."]
PIECES = Tokenizer(TOKENS, lowercase=True, strip_accents=None, handle_chinese_chars=True)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(16, 40))
def test_every_word_gets_the_tag_of_the_window_where_it_is_farther_from_the_edge(lengths, max_length) -> None:
    task = Tag(Settings(max_length=max_length).resolve("tag", 128), PIECES)
    task.labels = ["NOUN", "VERB"]
    words = ["sing" + "s" * (length - 1) for length in lengths]
    tags = ["VERB"] * len(words)
    example = Example(0, "", {}, {"tokens": words}, tags)
    windows = task.windows_of([example], "test")
    logits = [np.zeros((len(window.input_ids), 2)) for window in windows]
    best: dict[int, tuple[int, int, int]] = {}  # of each word: distance to the edge, window and position
    for number, window in enumerate(windows):
        assert len(window.input_ids) <= max_length
        assert {TOKENS[window.input_ids[position]] for _, position in window.positions} <= {"sing"}
        for word, position in window.positions:
            distance = min(position, len(window.input_ids) - 1 - position)
            if word not in best or distance > best[word][0]:
                best[word] = (distance, number, position)
    assert sorted(best) == list(range(len(words)))
    for _, number, position in best.values():
        logits[number][position, 1] = 1
    assert task.decode([example], windows, logits) == [tags]
    assert sum(lengths) <= sum(len(window.input_ids) - 2 for window in windows)


@pytest.mark.parametrize(
    ("tags", "is_plain", "expected"),
    [
        (["O", "B", "I"], False, ["O", "B-ENTITY", "I-ENTITY"]),
        (["S", "B", "E"], False, ["B-ENTITY", "B-ENTITY", "I-ENTITY"]),
        (["D", "N", "O"], True, ["D", "N", "O"]),
        (["O", "B-PER", "O"], False, ["O", "B-PER", "O"]),
        (["O", "B-work of art", "I-work of art"], False, ["O", "B-work of art", "I-work of art"]),
    ],
)
def test_bare_tags_get_a_kind_and_other_letters_are_classes(read, tokenizer, tags, is_plain, expected) -> None:
    task = Tag(Settings(), tokenizer)
    (example,), _ = read(task, "a.jsonl", [{"tokens": ["anna", "is", "good"], "tags": tags}])
    assert (task.has_plain_tags, example.label) == (is_plain, expected)


def test_the_first_token_of_a_word_has_its_tag(read) -> None:
    task = Tag(Settings().resolve("tag", 128), PIECES)
    # The normalizer removes the control character, so the word has no token.
    examples, _ = read(task, "a.jsonl", [{"tokens": ["sings", "\u0007", "berlin"], "tags": ["O", "O", "B-LOC"]}])
    task.set_labels(examples, [])
    (window,) = task.windows_of(examples, "validation")
    assert [TOKENS[token] for token in window.input_ids] == ["[CLS]", "sing", "##s", "ber", "##lin", "[SEP]"]
    assert window.labels["labels"] == [-100, 0, -100, 1, -100, -100]
    assert task.labels == ["O", "B-LOC", "I-LOC"]
    assert window.positions == [(0, 1), (2, 3)]


def test_partly_predicted_entities_do_not_count() -> None:
    truth = [["B-PER", "I-PER", "O", "B-LOC"]]
    scores = entity_scores(truth, [["B-PER", "O", "O", "B-LOC"]])
    assert (scores["precision"], scores["recall"], scores["f1"]) == (0.5, 0.5, 0.5)
    assert (scores["f1_PER"], scores["f1_LOC"]) == (0.0, 1.0)
    assert scores["word_accuracy"] == 0.75
    assert entity_scores(truth, [["O"] * 4])["f1"] == 0.0


def test_words_of_texts_keep_the_characters_that_bert_removes(read) -> None:
    (row,), _ = read("tag", "a.jsonl", [{"text": "\u0645\u06cc\u200c\u062e, so\u00adfa \u4e2d\u56fd"}], "INPUT")
    assert row.inputs["tokens"] == ["\u0645\u06cc\u200c\u062e", ",", "so\u00adfa", "\u4e2d", "\u56fd"]


def test_tags_without_prefixes_are_plain_classes(read, tokenizer) -> None:
    task = Tag(Settings(), tokenizer)
    rows = [{"tokens": ["anna", "sings"], "tags": ["PROPN", "VERB"]}, {"tokens": ["berlin"], "tags": ["PROPN"]}]
    examples, _ = read(task, "a.jsonl", rows)
    task.set_labels(examples, [])
    assert task.labels == ["PROPN", "VERB"]
    assert task.constant_baseline(examples) == ("PROPN for every word", 2 / 3)
    assert task.score(examples, [["PROPN", "PROPN"], ["PROPN"]])["f1"] == pytest.approx(2 / 3)
    assert task.word_baseline(examples, examples) == [["PROPN", "VERB"], ["PROPN"]]


def test_numbers_are_named_by_the_option_or_the_dataset(read, tmp_path) -> None:
    names = ["O", "B-PER", "I-PER"]
    rows = [{"tokens": ["anna", "sings"], "tags": [1, 0]}]
    data = datasets.Dataset.from_list(rows)
    data = data.cast_column("tags", datasets.List(datasets.ClassLabel(names=names)))
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "saved")
    for name, content, tag_names in (("a.jsonl", rows, names), ("a.parquet", None, ()), ("saved", None, ())):
        (example,), _ = read("tag", name, content, settings={"tag_names": tuple(tag_names)})
        assert example.label == ["B-PER", "O"]
    for tag_names in ((), ("O",)):
        with pytest.raises(InputError, match=r"(?s)is not a list of strings.*--tag-names"):
            read("tag", "a.jsonl", rows, settings={"tag_names": tag_names})


def test_a_rare_tag_without_training_rows_counts_as_wrong(tokenizer, capsys) -> None:
    def example(*tags: str) -> Example:
        return Example(0, "rows: line 1", {}, inputs={"tokens": ["anna"] * len(tags)}, label=list(tags))

    task = Tag(Settings(max_length=256).resolve("tag", 256), tokenizer)
    task.has_plain_tags = True
    train = example("NOUN", "VERB")
    other = example(*["NOUN"] * 198, "VERB", "INTJ")
    task.set_labels([train], [other])
    assert task.labels == ["NOUN", "VERB"]
    assert "labels without training rows, counted as wrong: INTJ" in capsys.readouterr().out
    labels = [label for window in task.windows_of([other], "test") for label in window.labels["labels"]]
    assert (labels.count(0), labels.count(1)) == (198, 1)
    assert task.score([other], [["NOUN"] * 198 + ["VERB", "NOUN"]])["f1"] == pytest.approx(0.995)
    with pytest.raises(InputError, match="the label 'INTJ' does not occur in the training rows"):
        task.set_labels([train], [example("NOUN", "INTJ")])
