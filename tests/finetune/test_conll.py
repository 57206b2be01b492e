"""Layouts of files with a word per line: which column is the word, which the tag, and which lines are comments."""

import pytest

from bert_pretrain.finetune.conll import MAX_ONE_WORD, read_conll
from bert_pretrain.finetune.rows import LabelledInput
from bert_pretrain.finetune.settings import Settings

WORDS, TAGS = [["anna", "sings"], ["in", "berlin", "."]], [["B-PER", "O"], ["O", "B-LOC", "O"]]


def lines(form: str, before: str = "", first: int = 1) -> str:
    """Write the sentences, each word in the form `{n} {word} {tag}`."""
    return "".join(
        before
        + "".join(form.format(n=n, word=w, tag=t) + "\n" for n, (w, t) in enumerate(zip(*pair, strict=True), first))
        + "\n"
        for pair in zip(WORDS, TAGS, strict=True)
    )


LAYOUTS = {  # name: content, and the columns that are printed
    "a counter": (lines("{n}\t{word}\t{tag}"), "words in column 2, tags in column 3 of 3"),
    "a counter from 0": (lines("{n} {word} NN {tag}", first=0), "words in column 2, tags in column 4 of 4"),
    "comments and layers": (
        lines("{n}\t{word}\t{tag}\tO", "#\tn-tv.de\t[2010-01-01]\tB-X\n"),
        "words in column 2, tags in column 3 of 4",
    ),
    "comments and no counter": (lines("{word} {tag}", "#begin document (a); part 1\n# a\n"), ""),
    "phrases and entities": (lines("{word} NN I-NP {tag}"), ""),
    "the tag first": (lines("{tag}\t{word}"), "words in column 2, tags in column 1 of 2"),
}


@pytest.mark.parametrize("flag", ["--train", "INPUT"])
@pytest.mark.parametrize(("content", "note"), LAYOUTS.values(), ids=LAYOUTS)
def test_words_and_tags_are_found_in_every_layout(read, content: str, note: str, flag: str) -> None:
    examples, notes = read("tag", "a.conll", content, flag)
    assert [example.inputs["tokens"] for example in examples] == WORDS
    assert [example.values["tags"] for example in examples] == TAGS
    assert notes.partition(" (")[0] == note


def test_numbers_choose_columns(read) -> None:
    settings = {"tokens_field": "3", "tags_field": "4"}
    examples, _ = read("tag", "a.conll", lines("doc 1 {word} {tag} O -"), settings=settings)
    assert [example.label for example in examples] == TAGS
    (words_only,) = read("tag", "b.conll", "anna\n", "INPUT", settings=settings)[0]
    assert words_only.inputs["tokens"] == ["anna"]


def test_a_hash_with_a_tag_is_a_word(read) -> None:
    (first, second), _ = read("tag", "a.conll", "# id\n# O\nanna B-PER\n# O\n\n#tag O\nsings O\n")
    assert (first.inputs["tokens"], second.inputs["tokens"]) == (["#", "anna", "#"], ["#tag", "sings"])


def test_numbers_that_do_not_count_are_words(read) -> None:
    (example, _), notes = read("tag", "a.conll", "1 X O\n3 X O\n\n1 X B-A\n2 X O\n")
    assert (example.inputs["tokens"], notes) == (["1", "3"], "")


def test_a_blank_line_after_every_word_gives_a_hint(tmp_path, capsys) -> None:
    (tmp_path / "a.conll").write_text("anna B-PER\n\n" * (MAX_ONE_WORD + 1))
    read_conll(LabelledInput(str(tmp_path / "a.conll"), "--train"), Settings())
    assert "has one word\n  hint: remove the blank lines" in capsys.readouterr().err
