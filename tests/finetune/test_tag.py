"""Every word is labelled in exactly one window, and words are read with their tags from both layouts."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.inputs import LabelledInput
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tag import Tag, entity_scores, spans
from bert_pretrain.text.tokenizer import Tokenizer

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "anna", "sing", "##s", "in", "ber", "##lin", "."]


@pytest.fixture
def task() -> Tag:
    tokenizer = Tokenizer(TOKENS, lowercase=True, strip_accents=None, handle_chinese_chars=True)
    return Tag(Settings().resolve("tag", 128), tokenizer)


@given(st.integers(1, 40).flatmap(lambda room: st.tuples(st.just(room), st.lists(st.integers(1, room), max_size=60))))
def test_windows_fit_and_label_every_word_once(case: tuple[int, list[int]]) -> None:
    room, lengths = case
    found = spans(lengths, room)
    assert [word for span in found for word in range(span.own_begin, span.own_end)] == list(range(len(lengths)))
    for span in found:
        assert span.begin <= span.own_begin <= span.own_end <= span.end
        assert sum(lengths[span.begin : span.end]) <= room


def test_a_word_at_a_border_has_words_around_it() -> None:
    first, second = spans([1] * 50, 30)
    assert (first.own_begin, first.own_end) == (0, 25)
    assert (second.begin, second.end) == (20, 50)


def test_words_a_line_and_lists_are_the_same(task: Tag, tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("-DOCSTART-\tO\n\nanna\tB-PER\nsings\tO\n\n\nin\tO\nberlin\tB-LOC\n.\tO")
    (tmp_path / "a.conll").write_text(
        "anna NNP B-NP B-PER\nsings VB B-VP O\n\nin IN B-PP O\nberlin NN B-NP B-LOC\n. . O O\n"
    )
    (tmp_path / "a.jsonl").write_text(
        '{"tokens": ["anna", "sings"], "tags": ["B-PER", "O"]}\n'
        '{"tokens": ["in", "berlin", "."], "tags": ["O", "B-LOC", "O"]}\n'
    )
    found = {
        name: task.read(LabelledInput(str(tmp_path / name), "--train")) for name in ("a.tsv", "a.conll", "a.jsonl")
    }
    contents = {name: [task.content(example) for example in examples] for name, examples in found.items()}
    assert contents["a.tsv"] == contents["a.conll"] == contents["a.jsonl"]
    assert [example.where.rpartition(" ")[2] for example in found["a.tsv"]] == ["3", "7"]
    (tmp_path / "c.conll").write_text("10\u00a0000 CD B-NUM\r\na\u2028b NN O\r\n", newline="")
    (example,) = task.read(LabelledInput(str(tmp_path / "c.conll"), "--train"))
    assert (example.words, example.tags) == (["10\u00a0000", "a\u2028b"], ["B-NUM", "O"])
    (tmp_path / "b.tsv").write_text("anna\tO\nlonely\n")
    with pytest.raises(InputError, match="a word has no tag"):
        task.read(LabelledInput(str(tmp_path / "b.tsv"), "--train"))


def test_the_first_piece_of_a_word_carries_its_tag(task: Tag, tmp_path: Path) -> None:
    # Of a control character the normaliser leaves nothing; the word keeps a place all the same.
    (tmp_path / "a.jsonl").write_text('{"tokens": ["sings", "\\u0007", "berlin"], "tags": ["O", "O", "B-LOC"]}\n')
    examples = task.read(LabelledInput(str(tmp_path / "a.jsonl"), "--train"))
    task.set_labels(examples, [], [])
    (window,) = task.encode(examples, "train", Counter())
    assert [TOKENS[token] for token in window.input_ids] == ["[CLS]", "sing", "##s", "[UNK]", "ber", "##lin", "[SEP]"]
    assert window.labels["labels"] == [-100, 0, -100, 0, 1, -100, -100]
    assert task.tags == ["O", "B-LOC", "I-LOC"]
    assert window.positions == [(0, 1), (1, 3), (2, 4)]


def test_an_entity_counts_only_whole() -> None:
    truth = [["B-PER", "I-PER", "O", "B-LOC"]]
    scores = entity_scores(truth, [["B-PER", "O", "O", "B-LOC"]])
    assert (scores["precision"], scores["recall"], scores["f1"]) == (0.5, 0.5, 0.5)
    assert (scores["f1_PER"], scores["f1_LOC"]) == (0.0, 1.0)
    assert scores["word_accuracy"] == 0.75
    assert entity_scores(truth, [["O"] * 4])["f1"] == 0.0
