"""`predict` matches `transformers`, and keeps all columns and the order of the input."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers

from bert_pretrain.errors import ConfigError, DataError, InputError
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tag import Tag
from bert_pretrain.io.files import read_json, write_json
from bert_pretrain.text.tokenizer import Tokenizer
from tests.finetune.conftest import peer_of, predicted, questions, tagged_sentences, write_rows, written

TAGS = dict(enumerate(["O", "B-PER", "I-PER"]))
WORDS = ["the film was good", "bad book", "anna is in berlin .", "very " * 40 + "good", "天气 is fine"]


@pytest.fixture(scope="module")
def folder_of(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a folder with a random head by `transformers`: `folder_of("TokenClassification", num_labels=3)`."""

    def make(kind: str, **settings: Any) -> Path:
        transformers.set_seed(3)
        folder = tmp_path_factory.mktemp("head")
        network = getattr(transformers, f"BertFor{kind}").from_pretrained(toy_model, **settings)
        for parameter in network.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.5)  # large enough for different outputs
        network.save_pretrained(folder)
        Tokenizer.load(toy_model).save(folder, 32)
        return folder

    return make


@pytest.mark.parametrize(("num_labels", "is_pair"), [(3, False), (3, True), (1, False)])
def test_classes_and_numbers_match_transformers(folder_of, tmp_path, num_labels, is_pair) -> None:
    folder = folder_of("SequenceClassification", num_labels=num_labels)
    rows = [{"number": number, "text": text, "other": text[::-1]} for number, text in enumerate(WORDS)]
    rows += [{"number": 9, "text": "good day", "other": None}, {"number": 10, "text": "bad day", "other": " "}]
    changes = {"pair_field": "other" if is_pair else None}
    lines = predicted(folder, write_rows(tmp_path / "a.jsonl", rows), changes=changes, batch_tokens=40)
    peer_of(folder, "SequenceClassification")
    classify = transformers.pipeline("text-classification", model=str(folder), device="cpu")
    how, tolerance = ("none", 1e-5) if num_labels == 1 else ("softmax", 2e-6)
    found = set()
    for row, line in zip(rows, lines, strict=True):
        texts = {"text": row["text"]}
        if is_pair and (row["other"] or "").strip():
            texts["text_pair"] = row["other"]
        theirs = classify(texts, truncation=True, max_length=32, function_to_apply=how)
        score = pytest.approx(theirs["score"], abs=tolerance)
        assert line == row | ({"label": score} if num_labels == 1 else {"label": theirs["label"], "score": score})
        found.add(theirs["score"])
    assert len(found) == len(rows)


@pytest.fixture(scope="module")
def binary(folder_of) -> Path:
    return folder_of("SequenceClassification", num_labels=2)


@pytest.fixture(scope="module")
def tagger(folder_of) -> Path:
    return folder_of("TokenClassification", id2label=TAGS, label2id={name: n for n, name in TAGS.items()})


@pytest.fixture(scope="module")
def reader(folder_of) -> Path:
    return folder_of("QuestionAnswering")


def test_tags_of_words_and_texts_match_transformers(tagger: Path, tmp_path: Path) -> None:
    split = [["the", "film", "was", "good"], ["anna", "'", "s", "book", "."], ["天", "气", "is", "Fine"]]
    model, tokenizer = peer_of(tagger, "TokenClassification")
    expected = []
    for words in split:
        encoding = tokenizer(words, is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            best = model(**encoding).logits[0].argmax(dim=-1).tolist()
        tags = [TAGS[best[encoding.word_ids().index(word)]] for word in range(len(words))]
        # The first tag of an entity is changed to B-.
        pairs = zip(["O", *tags], tags, strict=False)
        expected.append([tag.replace("I-", "B-") if before == "O" else tag for before, tag in pairs])
    assert len({tag for tags in expected for tag in tags}) > 1
    texts = "the film was good\nanna's book.\n天气 is Fine\n"
    words_alone = "\n\n".join("\n".join(words) for words in split)
    tagged = re.sub("(.)$", r"\1\tO", words_alone, flags=re.MULTILINE)
    rows = "\n".join(json.dumps({"tokens": words, "tags": ["O"] * len(words)}) for words in split)
    for name, content, format_, column in (
        ("a.jsonl", rows, None, "predicted_tags"),
        ("b.conll", tagged, None, "predicted_tags"),
        ("c.dev", tagged, "conll", "predicted_tags"),
        ("d.txt", f"-DOCSTART- -X- O O\n\n{tagged}\n", "conll", "predicted_tags"),
        ("e.conll", words_alone, None, "tags"),
        ("f.txt", texts, "txt", "tags"),
        ("g.tsv", f"text\n{texts}", "tsv", "tags"),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
        lines = predicted(tagger, tmp_path / name, format=format_)
        assert [line["tokens"] for line in lines] == split
        assert [line[column] for line in lines] == expected
        assert format_ not in ("txt", "tsv") or [line["text"] for line in lines] == texts.splitlines()


def test_the_format_of_words_or_texts_is_asked_for(tagger, tmp_path) -> None:
    for name in ("a.txt", "a.tsv", "a.dev"):
        (tmp_path / name).write_text("anna was\n")
        with pytest.raises(InputError, match="a line may be a word or a text"):
            predicted(tagger, tmp_path / name)
    (tmp_path / "a.tsv").write_text("id\tbody\nx1\tgood film\n")
    with pytest.raises(InputError, match="there is no column 'text'"):
        predicted(tagger, tmp_path / "a.tsv", format="tsv")
    write_rows(tmp_path / "a.jsonl", [{"tokens": ["anna"], "body": "good film"}])
    for name, format_ in (("a.tsv", "tsv"), ("a.jsonl", None)):
        (line,) = predicted(tagger, tmp_path / name, changes={"text_field": "body"}, format=format_)
        assert line["tokens"] == ["good", "film"]


def test_the_detected_encoding_is_printed_once(tagger: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_text("这个电影很好。我们都喜欢它。\n" * 5, encoding="gb18030")
    predicted(tagger, tmp_path / "a.txt", encoding="auto", format="txt")
    assert capsys.readouterr().out.count("encoding gb18030") == 1


def test_answers_match_transformers(reader: Path, tmp_path: Path) -> None:
    contexts = ["the film was good .", "anna is in Berlin , the book", "bad day " * 4]
    rows = [{"question": "who ?", "context": context, "year": 1900} for context in contexts]
    lines = predicted(reader, write_rows(tmp_path / "a.jsonl", rows))
    model, tokenizer = peer_of(reader, "QuestionAnswering")
    for row, line in zip(rows, lines, strict=True):
        encoding = tokenizer(row["question"], row["context"], return_tensors="pt", return_offsets_mapping=True)
        offsets = encoding.pop("offset_mapping")[0].tolist()
        with torch.no_grad():
            outputs = model(**encoding)
        scores = outputs.start_logits[0][:, None] + outputs.end_logits[0][None, :]
        first = encoding["token_type_ids"][0].tolist().index(1)
        inside = scores[first:-1, first:-1]
        inside = inside.masked_fill(torch.ones_like(inside).tril(-1).bool(), -torch.inf)
        begin, end = divmod(inside.argmax().item(), len(inside))
        answer = row["context"][offsets[first + begin][0] : offsets[first + end][1]]
        assert line == row | {"answer": answer, "score": pytest.approx(inside.max().item(), abs=1e-3)}
    squad = {"data": [{"paragraphs": [{"context": contexts[0], "qas": [{"id": "q", "question": "who ?"}]}]}]}
    (tmp_path / "b.json").write_text(json.dumps(squad))
    (line,) = predicted(reader, tmp_path / "b.json")
    assert (line["id"], line["answer"]) == ("q", lines[0]["answer"])


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_rows_keep_their_columns_from_every_format_to_every_format(binary, tmp_path, monkeypatch, ending) -> None:
    monkeypatch.setattr("bert_pretrain.finetune.predict.BUFFER_ROWS", 2)
    rows: list[dict[str, Any]] = [
        {"text": text, "label": "x", "kinds": ["a", "b"], "note": f'{number},"\r\n'}
        for number, text in enumerate(WORDS)
    ]
    rows[3]["late"] = 1.5
    write_rows(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.csv").write_text('text,label\nthe film,"a\n""b"\nbad,NA\n')
    pq.write_table(pa.table({"text": ["good", "bad"], "day": pa.array([0, 1], pa.date32())}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("good film\r\nbad\r\n")
    lines, table, parquet, text = (
        predicted(binary, tmp_path / f"a.{kind}", f"{kind}.{ending}") for kind in ("jsonl", "csv", "parquet", "txt")
    )
    for name in ("text", "label", "note"):
        assert [row[name] for row in lines] == [row[name] for row in rows]
    assert [float(row.get("late") or 0) for row in lines] == [0, 0, 0, 1.5, 0]
    kinds = json.dumps(["a", "b"]) if ending == "csv" else ["a", "b"]
    assert [row["kinds"] for row in lines] == [kinds] * len(rows)
    assert {row["predicted_label"] for row in lines} <= {"LABEL_0", "LABEL_1"}
    assert [(row["text"], row["label"]) for row in table] == [("the film", 'a\n"b'), ("bad", "NA")]
    assert [str(row["day"]) for row in parquet] == ["1970-01-01", "1970-01-02"]
    assert [row["text"] for row in text] == ["good film", "bad"]
    has_mark = (tmp_path / f"jsonl.{ending}").read_bytes().startswith(b"\xef\xbb\xbf")
    assert has_mark == (ending == "csv")  # Excel needs it to read non-ASCII text
    scores = [row["score"] for row in predicted(binary, tmp_path / "a.jsonl")]
    assert [float(row["score"]) for row in lines] == scores


def test_infinity_and_nan_are_null(binary, tmp_path) -> None:
    table = pa.table({"text": ["good", "bad"], "x": [float("nan"), 1.5], "y": [[float("inf")], [2.0]]})
    pq.write_table(table, tmp_path / "a.parquet")
    lines = predicted(binary, tmp_path / "a.parquet")
    assert [(line["x"], line["y"]) for line in lines] == [(None, [None]), (1.5, [2.0])]


def test_settings_without_effect_are_errors(binary, tagger, reader, tmp_path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": "good"}])
    for model, name in ((binary, "tokens_field"), (tagger, "pair_field"), (reader, "text_field")):
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} has no effect"):
            predicted(model, source, changes={name: "text"})


def test_models_with_a_head_for_another_task_are_fine_tuned(folder_of, tune, tmp_path) -> None:
    for task, rows, num_labels in (("answer", questions(20, 1), 3), ("tag", tagged_sentences(20, 1), 1)):
        model = folder_of("SequenceClassification", num_labels=num_labels, output_hidden_states=True)
        folder = tune(task, rows, model=model, output=task, epochs=1)
        assert len(predicted(folder, tmp_path / "train.jsonl")) == 20


def test_words_of_a_whole_word_vocabulary_are_split_at_white_space() -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "10.0.0.1", "GET"]
    task = Tag(
        Settings(), Tokenizer(tokens, lowercase=False, strip_accents=None, handle_chinese_chars=True, whole_words=True)
    )
    assert task._split_words("10.0.0.1 GET\t/a.html") == ["10.0.0.1", "GET", "/a.html"]


def test_truncated_and_skipped_rows_are_counted_once(binary, tmp_path, capsys) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": "very " * 40}, {"text": " "}, {"text": "good"}])
    lines = predicted(binary, source, skip_empty=True)
    assert [line["text"][:5] for line in lines] == ["very ", "good"]
    shown = capsys.readouterr().out
    assert f"INPUT {source}: 1 rows skipped because 'text' is empty (first: line 2)\n" in shown
    assert "input: 1 of 2 rows are longer than 32 tokens (truncated)\n" in shown


def test_tags_and_answers_are_written_in_the_format_of_their_task(reader, tagger, tmp_path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"tokens": ["anna", "is"]}, {"tokens": ["天"]}])
    (first, second), (third,) = (line["tags"] for line in predicted(tagger, source))
    assert written(tagger, source, "o.conll") == f"anna\t{first}\nis\t{second}\n\n天\t{third}\n"
    with pytest.raises(ConfigError, match="for the task 'answer'"):
        written(tagger, source, "o.json")
    source = write_rows(tmp_path / "q.jsonl", [{"id": "q1", "question": "who ?", "context": "anna is good"}])
    (line,) = predicted(reader, source)
    assert json.loads(written(reader, source, "o.json")) == {"q1": line["answer"]}


def test_rows_that_the_output_cannot_hold_are_errors_before_computing(reader, tagger, tmp_path, monkeypatch) -> None:
    asked = {"question": "who ?", "context": "anna is good"}
    source = write_rows(tmp_path / "a.jsonl", [asked, asked | {"context": ""}, asked])
    assert list(json.loads(written(reader, source, "o.json", skip_empty=True))) == ["0", "2"]
    monkeypatch.setattr("bert_pretrain.finetune.predict.FinetunedBert.logits", None)
    write_rows(tmp_path / "a.jsonl", [asked | {"id": "q"}] * 2)
    with pytest.raises(InputError, match="the id 'q' occurs twice"):
        written(reader, source, "o.json")
    for word in ("", " ", "a\tb", "c\nd", "-DOCSTART-"):
        write_rows(tmp_path / "a.jsonl", [{"tokens": ["anna", word]}])
        with pytest.raises(InputError, match=r"(?s)cannot be written to.*hint: .*\.jsonl"):
            written(tagger, source, "o.conll")


@pytest.mark.parametrize(
    ("text", "skip_empty", "what", "where"),
    [
        ('{"txt": "a"}\n', False, "no column 'text'", ": line 1"),
        ('{"text": "a"}\n{"text": ""}\n', False, "'text' is empty", ": line 2"),
        ('{"text": "\u200b"}\n', False, "'text' is empty", ": line 1"),
        ('{"text": ""}\n', True, "the input has no rows", ""),
    ],
)
def test_an_invalid_row_is_an_error_with_its_line(binary: Path, tmp_path, text, skip_empty, what, where) -> None:
    source = tmp_path / "x.jsonl"
    source.write_text(text)
    with pytest.raises(InputError, match=what) as caught:
        predicted(binary, source, skip_empty=skip_empty)
    assert caught.value.where.endswith(f"{source}{where}")
    assert list(tmp_path.iterdir()) == [source]


def test_folders_without_a_usable_head_are_errors(folder_of, toy_model, tmp_path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": "good"}])

    def attempt(folder: Path, what: str) -> None:
        with pytest.raises(DataError, match=what):
            predicted(folder, source)

    attempt(toy_model, "is a BertForPreTraining, which has no head for a task")
    attempt(tmp_path / "nosuch", "there is no folder")
    folder = folder_of("SequenceClassification", num_labels=3)
    settings = read_json(folder / "config.json")
    for names in ({"0": "a"}, {"0": "a", "1": "b", "2": 7}, 7):
        write_json(folder / "config.json", {**settings, "id2label": names})
        attempt(folder, "does not name the 3 outputs")
    write_json(folder / "config.json", {**settings, "architectures": ["BertForQuestionAnswering"]})
    attempt(folder, "no layer 'qa_outputs'")
    write_json(folder / "config.json", settings)
    write_json(folder / "manifest.json", {"kind": "finetune", "identity": {"settings": {"max_length": "x"}}})
    attempt(folder, "max_length")
    settings = {"max_length": 16, "learning_rate": []}  # of an earlier version
    write_json(folder / "manifest.json", {"kind": "finetune", "identity": {"settings": settings}})
    assert predicted(folder, source)
