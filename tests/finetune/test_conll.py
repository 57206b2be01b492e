"""Files of words and tags: which column is the word, which the tag, and which lines are comments."""

from typing import Any

import pytest

from bert_pretrain.finetune.conll import MAX_ONE_WORD, read_conll
from bert_pretrain.finetune.rows import LabelledInput
from bert_pretrain.finetune.settings import Settings

WORDS = [["anna", "sings"], ["in", "berlin", "."]]
TAGS = [["B-PER", "O"], ["O", "B-LOC", "O"]]
LAYOUTS = {  # name: content, and the columns that are printed
    "a counter": (
        "1\tanna\tB-PER\n2\tsings\tO\n\n1\tin\tO\n2\tberlin\tB-LOC\n3\t.\tO\n",
        "words in column 2, tags in column 3 of 3",
    ),
    "a counter from 0": (
        "0 anna NN B-PER\n1 sings NN O\n\n0 in NN O\n1 berlin NN B-LOC\n2 . NN O\n",
        "words in column 2, tags in column 4 of 4",
    ),
    "comments and layers": (
        "#\tn-tv.de\t[2010-01-01]\tB-X\n1\tanna\tB-PER\tO\n2\tsings\tO\tO\n\n"
        "#\tn-tv.de\t[2010-01-01]\tB-X\n1\tin\tO\tO\n2\tberlin\tB-LOC\tO\n3\t.\tO\tO\n",
        "words in column 2, tags in column 3 of 4",
    ),
    "comments and no counter": (
        "#begin document (a); part 1\n# a\nanna B-PER\nsings O\n\n"
        "#begin document (a); part 1\n# a\nin O\nberlin B-LOC\n. O\n",
        "",
    ),
    "phrases and entities": (
        "anna NN I-NP B-PER\nsings NN I-NP O\n\nin NN I-NP O\nberlin NN I-NP B-LOC\n. NN I-NP O\n",
        "",
    ),
    "the start of a document": ("-DOCSTART-\tO\n\nanna\tB-PER\nsings\tO\n\n\nin\tO\nberlin\tB-LOC\n.\tO", ""),
    "the tag first": (
        "B-PER\tanna\nO\tsings\n\nO\tin\nB-LOC\tberlin\nO\t.\n",
        "words in column 2, tags in column 1 of 2",
    ),
}


@pytest.mark.parametrize("flag", ["--train", "INPUT"])
@pytest.mark.parametrize(("content", "note"), LAYOUTS.values(), ids=LAYOUTS)
def test_words_and_tags_are_found_in_every_layout(read, content: str, note: str, flag: str) -> None:
    examples, notes = read("tag", "a.conll", content, flag)
    assert [example.inputs["tokens"] for example in examples] == WORDS
    assert [example.values["tags"] for example in examples] == TAGS
    assert notes.partition(" (")[0] == note


CONLL_U = """# sent_id = 1
# text = it's good in a very fine day
1-2\tit's\t_\t_\t_\t_\t_\t_\t_\t_
1\tit\tit\tPRON\tPRP\t_\t3\tnsubj\t_\t_
2\t's\tbe\tAUX\tVBZ\t_\t3\tcop\t_\tSpaceAfter=No
2.1\tso\tso\tADV\t_\t_\t_\t_\t_\t_
3\tgood\tgood\tADJ\tJJ\t_\t0\troot\t_\t_

# sent_id = 2
1\t#\t#\tSYM\t_\t_\t0\troot\t_\t_
"""
ODDITIES = {  # name: file, content, and the words and tags
    "blanks inside words": (
        "a.conll",
        "10\u00a0000 CD B-A\r\na\u2028b NN O\r\n",
        [["10\u00a0000", "a\u2028b"]],
        ["B-A", "O"],
    ),
    "CoNLL-U": ("a.conllu", CONLL_U, [["it", "'s", "good"], ["#"]], ["PRON", "AUX", "ADJ", "SYM"]),
    "a hash with a tag": (
        "a.conll",
        "# id\n# O\nanna B-PER\n# O\n\n#tag O\nsings O\n",
        [["#", "anna", "#"], ["#tag", "sings"]],
        ["O", "B-PER", "O", "O", "O"],
    ),
    "numbers that do not count": (
        "a.conll",
        "1 X O\n3 X O\n\n1 X B-A\n2 X O\n",
        [["1", "3"], ["1", "2"]],
        ["O", "O", "B-A", "O"],
    ),
}


@pytest.mark.parametrize(("name", "content", "words", "tags"), ODDITIES.values(), ids=ODDITIES)
def test_what_looks_like_a_comment_or_counter_may_be_a_word(read, name: str, content: str, words, tags) -> None:
    examples, notes = read("tag", name, content)
    assert [example.inputs["tokens"] for example in examples] == words
    assert [tag for example in examples for tag in example.label] == tags
    assert not notes or name == "a.conllu"


def test_sentences_of_the_test_rows_may_lack_tags(read) -> None:
    (untagged,), _ = read("tag", "a.conll", "anna\nsings\n", flag="--test")
    assert (untagged.inputs["tokens"], untagged.label) == (["anna", "sings"], None)


def test_a_blank_word_is_kept_and_a_sentence_with_an_untagged_word_is_skipped(read) -> None:
    examples, notes = read("tag", "a.conll", "人 O\n\u3000 O\n\n民 O\nlonely\n\n日 O\n")
    assert [(example.row, example.inputs["tokens"]) for example in examples] == [(0, ["人", "\u3000"]), (2, ["日"])]
    assert [example.where.rpartition(" ")[2] for example in examples] == ["1", "7"]
    assert notes == "1 rows skipped because a word has no tag (first: line 5)\n"


def test_numbers_choose_columns(read) -> None:
    settings: dict[str, Any] = {"tokens_field": "3", "tags_field": "4"}
    (example,), _ = read("tag", "a.conll", "doc 1 anna B-PER O -\ndoc 1 sings O O -\n", settings=settings)
    assert (example.inputs["tokens"], example.label) == (WORDS[0], TAGS[0])
    (words_only,), _ = read("tag", "b.conll", "anna\n", "INPUT", settings=settings)
    assert words_only.inputs["tokens"] == ["anna"]


def test_a_blank_line_after_every_word_gives_a_hint(tmp_path, capsys) -> None:
    (tmp_path / "a.conll").write_text("anna B-PER\n\n" * (MAX_ONE_WORD + 1))
    read_conll(LabelledInput(str(tmp_path / "a.conll"), "--train"), Settings())
    assert "has one word\n  hint: remove the blank lines" in capsys.readouterr().err
