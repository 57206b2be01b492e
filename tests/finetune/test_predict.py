"""`predict` matches `transformers`, and keeps all columns and the order of the input."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers

from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import ConfigError, DataError, InputError
from bert_pretrain.finetune.predict import predict
from bert_pretrain.finetune.run import finetune
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tag import Tag
from bert_pretrain.text.tokenizer import Tokenizer
from tests.finetune.conftest import peer_of, questions, tagged_sentences, write_rows

CPU = TrainConfig(device="cpu", precision="fp32")
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


def run(model: Path, source: Path | str, output: Path, **options: Any) -> list[dict[str, Any]]:
    """Predict the rows of a file and return the written rows."""
    predict(model, str(source), output, config=CPU, **options)
    with output.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file)) if output.suffix == ".csv" else [json.loads(line) for line in file]


@pytest.mark.parametrize(("num_labels", "is_pair"), [(3, False), (3, True), (1, False)])
def test_classes_and_numbers_match_transformers(folder_of, tmp_path, num_labels, is_pair) -> None:
    folder = folder_of("SequenceClassification", num_labels=num_labels)
    rows = [{"number": number, "text": text, "other": text[::-1]} for number, text in enumerate(WORDS)]
    rows += [{"number": 9, "text": "good day", "other": None}, {"number": 10, "text": "bad day", "other": " "}]
    source = write_rows(tmp_path / "a.jsonl", rows)
    changes = {"pair_field": "other" if is_pair else None}
    written = run(folder, source, tmp_path / "o.jsonl", changes=changes, batch_tokens=40)
    model, tokenizer = peer_of(folder, "SequenceClassification")
    for row, line in zip(rows, written, strict=True):
        second = (row["other"] or "").strip() or None if is_pair else None
        encoded = tokenizer(row["text"], second, truncation=True, max_length=32)
        with torch.no_grad():
            logits = model(**encoded.convert_to_tensors("pt", prepend_batch_axis=True)).logits[0]
        if num_labels == 1:
            assert line == row | {"label": pytest.approx(logits.item(), abs=1e-5)}
            continue
        score = pytest.approx(logits.softmax(dim=-1).max().item(), abs=2e-6)
        assert line == row | {"label": f"LABEL_{logits.argmax()}", "score": score}
    assert len({line["label" if num_labels == 1 else "score"] for line in written}) == len(rows)


@pytest.fixture(scope="module")
def binary(folder_of) -> Path:
    return folder_of("SequenceClassification", num_labels=2)


@pytest.fixture(scope="module")
def tagger(folder_of) -> Path:
    return folder_of("TokenClassification", id2label=TAGS, label2id={name: n for n, name in TAGS.items()})


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
    tagged = "\n\n".join("\n".join(f"{word}\tO" for word in words) for words in split)
    words_alone = "\n\n".join("\n".join(words) for words in split)
    rows = [{"tokens": words, "tags": ["O"] * len(words)} for words in split]
    for name, content, format_, column in (
        ("a.jsonl", "\n".join(map(json.dumps, rows)), None, "predicted_tags"),
        ("b.conll", tagged, None, "predicted_tags"),
        ("c.dev", tagged, "conll", "predicted_tags"),
        ("d.txt", f"-DOCSTART- -X- O O\n\n{tagged}\n", "conll", "predicted_tags"),
        ("e.conll", words_alone, None, "tags"),
        ("f.txt", texts, "txt", "tags"),
        ("g.tsv", f"text\n{texts}", "tsv", "tags"),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
        written = run(tagger, tmp_path / name, tmp_path / "o.jsonl", format=format_)
        assert [line["tokens"] for line in written] == split
        assert [line[column] for line in written] == expected
        assert format_ not in ("txt", "tsv") or [line["text"] for line in written] == texts.splitlines()


def test_the_format_of_words_or_texts_is_asked_for(tagger, tmp_path) -> None:
    for name in ("a.txt", "a.tsv", "a.dev"):
        (tmp_path / name).write_text("anna was\n")
        with pytest.raises(InputError, match="a line may be a word or a text"):
            run(tagger, tmp_path / name, tmp_path / "o.jsonl")
    (tmp_path / "a.tsv").write_text("id\tbody\nx1\tgood film\n")
    with pytest.raises(InputError, match="there is no column 'text'"):
        run(tagger, tmp_path / "a.tsv", tmp_path / "o.jsonl", format="tsv")
    source = write_rows(tmp_path / "a.jsonl", [{"tokens": ["anna"], "body": "good film"}])
    for path, format_ in ((tmp_path / "a.tsv", "tsv"), (source, None)):
        (line,) = run(tagger, path, tmp_path / "o.jsonl", changes={"text_field": "body"}, format=format_)
        assert line["tokens"] == ["good", "film"]


def test_the_detected_encoding_is_printed_once(tagger: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_text("这个电影很好。我们都喜欢它。\n" * 5, encoding="gb18030")
    run(tagger, tmp_path / "a.txt", tmp_path / "o.jsonl", encoding="auto", format="txt")
    assert capsys.readouterr().out.count("encoding gb18030") == 1


def test_answers_match_transformers(folder_of, tmp_path: Path) -> None:
    folder = folder_of("QuestionAnswering")
    contexts = ["the film was good .", "anna is in Berlin , the book", "bad day " * 4]
    rows = [{"question": "who ?", "context": context, "year": 1900} for context in contexts]
    written = run(folder, write_rows(tmp_path / "a.jsonl", rows), tmp_path / "o.jsonl")
    model, tokenizer = peer_of(folder, "QuestionAnswering")
    for row, line in zip(rows, written, strict=True):
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
    (line,) = run(folder, tmp_path / "b.json", tmp_path / "p.jsonl")
    assert (line["id"], line["answer"]) == ("q", written[0]["answer"])


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
        run(binary, tmp_path / f"a.{kind}", tmp_path / f"{kind}.{ending}")
        for kind in ("jsonl", "csv", "parquet", "txt")
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
    scores = [row["score"] for row in run(binary, tmp_path / "a.jsonl", tmp_path / "scores.jsonl")]
    assert [float(row["score"]) for row in lines] == scores


def test_infinity_and_nan_are_null(binary, tmp_path) -> None:
    table = pa.table({"text": ["good", "bad"], "x": [float("nan"), 1.5], "y": [[float("inf")], [2.0]]})
    pq.write_table(table, tmp_path / "a.parquet")
    lines = run(binary, tmp_path / "a.parquet", tmp_path / "o.jsonl")
    assert [(line["x"], line["y"]) for line in lines] == [(None, [None]), (1.5, [2.0])]


def test_settings_without_effect_are_errors(folder_of, binary, tagger, tmp_path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": "good"}])
    for model, name in (
        (binary, "tokens_field"),
        (tagger, "pair_field"),
        (folder_of("QuestionAnswering"), "text_field"),
    ):
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} has no effect"):
            run(model, source, tmp_path / "o.jsonl", changes={name: "text"})


def test_models_with_a_head_for_another_task_are_fine_tuned(folder_of, tmp_path) -> None:
    settings = Settings(batch_size=16, epochs=1)
    for task, rows, num_labels in (("answer", questions(20, 1), 3), ("tag", tagged_sentences(20, 1), 1)):
        model = folder_of("SequenceClassification", num_labels=num_labels, output_hidden_states=True)
        source = write_rows(tmp_path / "a.jsonl", rows)
        folder = finetune(task, model, train=source, output=tmp_path / task, device="cpu", settings=settings)
        assert len(run(folder, source, tmp_path / "o.jsonl")) == 20


def test_words_of_a_whole_word_vocabulary_are_split_at_white_space() -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "10.0.0.1", "GET"]
    task = Tag(
        Settings(), Tokenizer(tokens, lowercase=False, strip_accents=None, handle_chinese_chars=True, whole_words=True)
    )
    assert task._split_words("10.0.0.1 GET\t/a.html") == ["10.0.0.1", "GET", "/a.html"]


def test_truncated_and_skipped_rows_are_counted_once(binary, tmp_path, capsys) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": "very " * 40}, {"text": " "}, {"text": "good"}])
    written = run(binary, source, tmp_path / "o.jsonl", skip_empty=True)
    assert [line["text"][:5] for line in written] == ["very ", "good"]
    shown = capsys.readouterr().out
    assert f"INPUT {source}: 1 rows skipped because 'text' is empty (first: line 2)\n" in shown
    assert "input: 1 of 2 rows are longer than 32 tokens (truncated)\n" in shown


def test_tags_and_answers_are_written_in_the_format_of_their_task(folder_of, tagger, tmp_path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"tokens": ["anna", "is"]}, {"tokens": ["天"]}])
    tags = [line["tags"] for line in run(tagger, source, tmp_path / "o.jsonl")]
    predict(tagger, str(source), tmp_path / "o.conll", config=CPU)
    expected = f"anna\t{tags[0][0]}\nis\t{tags[0][1]}\n\n天\t{tags[1][0]}\n"
    assert (tmp_path / "o.conll").read_text(encoding="utf-8") == expected
    with pytest.raises(ConfigError, match="for the task 'answer'"):
        predict(tagger, str(source), tmp_path / "o.json", config=CPU)
    reader = folder_of("QuestionAnswering")
    source = write_rows(tmp_path / "q.jsonl", [{"id": "q1", "question": "who ?", "context": "anna is good"}])
    (line,) = run(reader, source, tmp_path / "q.out.jsonl")
    predict(reader, str(source), tmp_path / "o.json", config=CPU)
    assert json.loads((tmp_path / "o.json").read_text(encoding="utf-8")) == {"q1": line["answer"]}


def test_rows_that_the_output_cannot_hold_are_errors_before_computing(folder_of, tagger, tmp_path, monkeypatch) -> None:
    reader = folder_of("QuestionAnswering")
    asked = {"question": "who ?", "context": "anna is good"}
    source = write_rows(tmp_path / "a.jsonl", [asked, asked | {"context": ""}, asked])
    predict(reader, source, tmp_path / "o.json", config=CPU, skip_empty=True)
    assert list(json.loads((tmp_path / "o.json").read_text())) == ["0", "2"]
    monkeypatch.setattr("bert_pretrain.finetune.predict.FinetunedBert.logits", None)
    source = write_rows(tmp_path / "a.jsonl", [asked | {"id": "q"}] * 2)
    with pytest.raises(InputError, match="the id 'q' occurs twice"):
        predict(reader, source, tmp_path / "o.json", config=CPU)
    for word in ("", " ", "a\tb", "c\nd", "-DOCSTART-"):
        source = write_rows(tmp_path / "a.jsonl", [{"tokens": ["anna", word]}])
        with pytest.raises(InputError, match="cannot be written to") as caught:
            predict(tagger, source, tmp_path / "o.conll", config=CPU)
        assert ".jsonl" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "options", "what", "where"),
    [
        ('{"txt": "a"}\n', {}, "no column 'text'", ": line 1"),
        ('{"text": "a"}\n{"text": ""}\n', {}, "'text' is empty", ": line 2"),
        ('{"text": "\u200b"}\n', {}, "'text' is empty", ": line 1"),
        ('{"text": ""}\n', {"skip_empty": True}, "the input has no rows", ""),
    ],
)
def test_an_invalid_row_is_an_error_with_its_line(binary: Path, tmp_path, text, options, what, where) -> None:
    source = tmp_path / "x.jsonl"
    source.write_text(text)
    with pytest.raises(InputError) as caught:
        run(binary, source, tmp_path / "o.jsonl", **options)
    assert what in caught.value.what
    assert caught.value.where.endswith(f"{source}{where}")
    assert list(tmp_path.iterdir()) == [source]


def test_folders_without_a_usable_head_are_errors(folder_of, toy_model, tmp_path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": "good"}])

    def attempt(folder: Path, what: str) -> None:
        with pytest.raises(DataError, match=what):
            run(folder, source, tmp_path / "o.jsonl")

    attempt(toy_model, "is a BertForPreTraining, which has no head for a task")
    attempt(tmp_path / "nosuch", "there is no folder")
    folder = folder_of("SequenceClassification", num_labels=3)
    settings = json.loads((folder / "config.json").read_text())

    def change(**values: Any) -> None:
        (folder / "config.json").write_text(json.dumps({**settings, **values}))

    for names in ({"0": "a"}, {"0": "a", "1": "b", "2": 7}, 7):
        change(id2label=names)
        attempt(folder, "does not name the 3 outputs")
    change(architectures=["BertForQuestionAnswering"])
    attempt(folder, "no layer 'qa_outputs'")
    change()
    manifest = {"kind": "finetune", "identity": {"settings": {"max_length": "x"}}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    attempt(folder, "max_length")
    manifest = {"kind": "finetune", "identity": {"settings": {"max_length": 16, "learning_rate": []}}}
    (folder / "manifest.json").write_text(json.dumps(manifest))  # of an earlier version
    assert run(folder, source, tmp_path / "o.jsonl")
