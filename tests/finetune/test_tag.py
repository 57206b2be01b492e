"""`tag`: reading, windows, labels and metrics."""

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.rows import Example, LabelledInput
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tag import Tag, entity_scores
from bert_pretrain.text.tokenizer import Tokenizer
from tests.finetune.conftest import write_rows

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "anna", "sing", "##s", "in", "ber", "##lin", "."]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(16, 40))
def test_every_word_gets_the_tag_of_the_window_where_it_is_farther_from_the_edge(lengths, max_length) -> None:
    tokenizer = Tokenizer(TOKENS, lowercase=True, strip_accents=None, handle_chinese_chars=True)
    task = Tag(Settings(max_length=max_length).resolve("tag", 128), tokenizer)
    task.labels = ["NOUN", "VERB"]
    example = Example(
        0, "", {}, {"tokens": ["sing" + "s" * (length - 1) for length in lengths]}, ["VERB"] * len(lengths)
    )
    windows = task.windows_of([example], "test")
    tokens = [token for length in lengths for token in ("sing", *["##s"] * (length - 1))]
    seen = {}
    logits = [np.zeros((len(window.input_ids), 2)) for window in windows]
    for number, window in enumerate(windows):
        assert len(window.input_ids) <= max_length
        assert [TOKENS[window.input_ids[position]] for _, position in window.positions] == ["sing"] * len(
            window.positions
        )
        for word, position in window.positions:
            distance = min(position, len(window.input_ids) - 1 - position)
            if distance > seen.get(word, (0, 0, 0))[0]:
                seen[word] = (distance, number, position)
    assert sorted(seen) == list(range(len(lengths)))
    for _, number, position in seen.values():
        logits[number][position, 1] = 1
    assert task.decode([example], windows, logits) == [["VERB"] * len(lengths)]
    assert len(tokens) <= sum(len(window.input_ids) - 2 for window in windows)


def test_conll_and_lists_give_the_same_examples(read) -> None:
    files = {
        "a.tsv": "-DOCSTART-\tO\n\nanna\tB-PER\nsings\tO\n\n\nin\tO\nberlin\tB-LOC\n.\tO",
        "a.conll": "anna NNP B-NP B-PER\nsings VB B-VP O\n\nin IN B-PP O\nberlin NN B-NP B-LOC\n. . O O\n",
        "a.jsonl": '{"tokens": ["anna", "sings"], "tags": ["B-PER", "O"]}\n'
        '{"tokens": ["in", "berlin", "."], "tags": ["O", "B-LOC", "O"]}\n',
    }
    examples = {name: read("tag", name, text)[0] for name, text in files.items()}
    tsv, conll, jsonl = ([(example.inputs, example.label) for example in each] for each in examples.values())
    assert tsv == conll == jsonl
    assert [example.where.rpartition(" ")[2] for example in examples["a.tsv"]] == ["3", "7"]
    (example,) = read("tag", "c.conll", "10\u00a0000 CD B-NUM\r\na\u2028b NN O\r\n")[0]
    assert (example.inputs["tokens"], example.label) == (["10\u00a0000", "a\u2028b"], ["B-NUM", "O"])
    with pytest.raises(InputError, match="a word has no tag"):
        read("tag", "b.tsv", "anna\tO\nlonely\n")
    (untagged,) = read("tag", "d.conll", "anna\nsings\n", flag="--test")[0]
    assert (untagged.inputs["tokens"], untagged.label) == (["anna", "sings"], None)
    (art,) = read("tag", "e.jsonl", [{"tokens": ["the", "scream"], "tags": ["B-work of art", "I-work of art"]}])[0]
    assert art.label == ["B-work of art", "I-work of art"]


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


def test_conll_u_gives_forms_and_universal_parts_of_speech(read) -> None:
    examples, _ = read("tag", "en-ud-train.conllu", CONLL_U)
    assert [each.inputs["tokens"] for each in examples] == [["it", "'s", "good"], ["#"]]
    assert [each.label for each in examples] == [["PRON", "AUX", "ADJ"], ["SYM"]]
    # In other files, a line is a comment if it has another number of fields.
    (example,) = read("tag", "a.conll", "# id 1\n# O\nanna B-PER\n")[0]
    assert example.inputs["tokens"] == ["#", "anna"]


@pytest.mark.parametrize(
    ("tags", "is_plain", "expected"),
    [
        (["O", "B", "I"], False, ["O", "B-ENTITY", "I-ENTITY"]),
        (["S", "B", "E"], False, ["B-ENTITY", "B-ENTITY", "I-ENTITY"]),
        (["D", "N", "O"], True, ["D", "N", "O"]),
        (["O", "B-PER", "O"], False, ["O", "B-PER", "O"]),
    ],
)
def test_bare_tags_get_a_kind_and_other_letters_are_classes(tokenizer, tmp_path, tags, is_plain, expected) -> None:
    task, rows = Tag(Settings(), tokenizer), [{"tokens": ["anna", "is", "good"], "tags": tags}]
    (example,) = task.read(LabelledInput(write_rows(tmp_path / "a.jsonl", rows), "--train"))
    assert (task.has_plain_tags, example.label) == (is_plain, expected)


def test_the_first_token_of_a_word_has_its_tag(read) -> None:
    tokenizer = Tokenizer(TOKENS, lowercase=True, strip_accents=None, handle_chinese_chars=True)
    task = Tag(Settings().resolve("tag", 128), tokenizer)
    # The normalizer removes the control character, so the word has no token.
    row = {"tokens": ["sings", "\u0007", "berlin"], "tags": ["O", "O", "B-LOC"]}
    examples, _ = read("tag", "a.jsonl", [row])
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


def test_words_of_texts_keep_the_characters_that_bert_removes(tokenizer, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\u0645\\u06cc\\u200c\\u062e, so\\u00adfa \\u4e2d\\u56fd"}\n')
    (row,) = Tag(Settings().resolve("tag", 128), tokenizer).read(LabelledInput(str(tmp_path / "a.jsonl"), "INPUT"))
    assert row.inputs["tokens"] == ["\u0645\u06cc\u200c\u062e", ",", "so\u00adfa", "\u4e2d", "\u56fd"]


def test_tags_without_prefixes_are_plain_classes(tokenizer, tmp_path) -> None:
    text = '{"tokens": ["anna", "sings"], "tags": ["PROPN", "VERB"]}\n{"tokens": ["berlin"], "tags": ["PROPN"]}\n'
    (tmp_path / "a.jsonl").write_text(text)
    task = Tag(Settings().resolve("tag", 128), tokenizer)
    rows = task.read(LabelledInput(str(tmp_path / "a.jsonl"), "--train"))
    task.set_labels(rows, [])
    assert task.labels == ["PROPN", "VERB"]
    assert task.constant_baseline(rows) == ("PROPN for every word", 2 / 3)
    assert task.score(rows, [["PROPN", "PROPN"], ["PROPN"]])["f1"] == pytest.approx(2 / 3)
    assert task.word_baseline(rows, rows) == [["PROPN", "VERB"], ["PROPN"]]


def test_numbers_are_named_by_the_option_or_the_dataset(read, tokenizer, tmp_path) -> None:
    names = ["O", "B-PER", "I-PER"]
    rows = [{"tokens": ["anna", "sings"], "tags": [1, 0]}]
    settings = {"tag_names": tuple(names)}
    assert read("tag", "a.jsonl", rows, settings=settings)[0][0].label == ["B-PER", "O"]
    for wrong in ({}, {"tag_names": ("O",)}):
        with pytest.raises(InputError, match="is not a list of strings") as caught:
            read("tag", "a.jsonl", rows, settings=wrong)
        assert "--tag-names" in caught.value.remedy
    features = datasets.Features(
        {"tokens": datasets.List(datasets.Value("string")), "tags": datasets.List(datasets.ClassLabel(names=names))}
    )
    data = datasets.Dataset.from_list(rows, features=features)
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "saved")
    for name in ("a.parquet", "saved"):
        (example,) = Tag(Settings(), tokenizer).read(LabelledInput(str(tmp_path / name), "--train"))
        assert example.label == ["B-PER", "O"]


def test_a_rare_tag_without_training_rows_counts_as_wrong(tokenizer, capsys) -> None:
    def example(tags: list[str]) -> Example:
        return Example(0, "rows: line 1", {}, inputs={"tokens": ["anna"] * len(tags)}, label=tags)

    task = Tag(Settings(max_length=256).resolve("tag", 256), tokenizer)
    task.has_plain_tags = True
    other = example(["NOUN"] * 198 + ["VERB", "INTJ"])
    task.set_labels([example(["NOUN", "VERB"])], [other])
    assert task.labels == ["NOUN", "VERB"]
    assert "labels without training rows, counted as wrong: INTJ" in capsys.readouterr().out
    labels = [label for window in task.windows_of([other], "test") for label in window.labels["labels"]]
    assert (labels.count(0), labels.count(1)) == (198, 1)
    assert task.score([other], [["NOUN"] * 198 + ["VERB", "NOUN"]])["f1"] == pytest.approx(0.995)
    with pytest.raises(InputError, match="the label 'INTJ' does not occur in the training rows"):
        task.set_labels([example(["NOUN", "VERB"])], [example(["NOUN", "INTJ"])])
