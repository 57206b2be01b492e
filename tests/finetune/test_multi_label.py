"""`classify` with lists of labels: `transformers` opens the result, and F1 matches scikit-learn."""

import json
import random
from pathlib import Path

import pytest
import transformers
from sklearn import metrics as sklearn_metrics

from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import InputError
from bert_pretrain.finetune.predict import predict
from bert_pretrain.finetune.run import finetune, hold_out
from bert_pretrain.finetune.settings import Settings
from tests.finetune.conftest import FILLERS, write_rows

CUES = {"joy": "good", "anger": "bad", "place": "berlin"}


def emotions(count: int, seed: int) -> list[dict[str, object]]:
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        labels = [name for name in CUES if draw.random() < 0.4]
        words = [*draw.choices(FILLERS, k=draw.randint(1, 6)), *(CUES[name] for name in labels)]
        rows.append({"text": " ".join(draw.sample(words, len(words))), "label": labels})
    return rows


def test_lists_of_labels_are_learned_and_opened_by_transformers(toy_model: Path, tmp_path: Path, capsys) -> None:
    test = emotions(60, 2)
    finetune(
        "classify", toy_model, train=write_rows(tmp_path / "a.jsonl", emotions(300, 1)),
        test=write_rows(tmp_path / "b.jsonl", test), output=tmp_path / "out", device="cpu",
        settings=Settings(learning_rate=3e-3, dropout=0.0, batch_size=16, epochs=6),
    )  # fmt: skip
    out = capsys.readouterr().out
    assert "words alone" in out
    report = json.loads((tmp_path / "out/metrics.json").read_text())
    assert report["main_metric"] == "micro_f1"
    assert report["test"]["micro_f1"] > 0.9
    config = TrainConfig(device="cpu", precision="fp32")
    predict(tmp_path / "out", str(tmp_path / "b.jsonl"), tmp_path / "p.jsonl", config=config)
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    classify = transformers.pipeline("text-classification", model=str(tmp_path / "out"), top_k=None, device="cpu")
    assert classify.model.config.problem_type == "multi_label_classification"
    for line, theirs in zip(lines, classify([row["text"] for row in test]), strict=True):
        assert line["scores"] == pytest.approx({each["label"]: each["score"] for each in theirs}, abs=1e-4)
        assert line["predicted_label"] == [name for name, score in line["scores"].items() if score > 0.5]
    lists = [row["label"] for row in test], [line["predicted_label"] for line in lines]
    truth, predicted = ([[name in each for name in sorted(CUES)] for each in rows] for rows in lists)
    for average in ("micro", "macro"):
        expected = sklearn_metrics.f1_score(truth, predicted, average=average)
        assert report["test"][f"{average}_f1"] == pytest.approx(expected)


def test_lists_and_single_labels_do_not_mix(toy_model: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [*emotions(20, 1), {"text": "good", "label": "joy"}])
    with pytest.raises(InputError, match="'joy' is not a list"):
        finetune("classify", toy_model, train=path, output=tmp_path / "out", device="cpu")
    single = write_rows(tmp_path / "b.jsonl", [{"text": "good", "label": name} for name in ("joy", "fear")])
    lists = write_rows(tmp_path / "c.jsonl", [{"text": "good", "label": ["joy"]}])
    with pytest.raises(InputError, match=r"\['joy'\] is a list"):
        finetune("classify", toy_model, train=single, validation=lists, output=tmp_path / "out", device="cpu")


def test_hold_out_keeps_each_class_in_both_parts_where_possible() -> None:
    for classes, expected in (
        ([{"a"}, {"a"}, {"b"}, {"b"}, {"c"}], {0, 2}),  # class c has only one row
        ([{"a"}, {"a"}, {"a"}, {"a"}, {"a"}], {0}),
        ([set(), {"a", "b"}, {"a"}, {"b"}, {"a"}], {1}),
        ([{"a"}, {"a", "b"}, {"c"}, {"c"}, {"b"}], {0, 2, 4}),
    ):
        assert hold_out(range(5), dict(enumerate(classes)), 1) == expected
    assert hold_out(range(4), dict(enumerate([{"a"}, {"a"}, {"b"}, {"b"}])), 2) == {0, 2}


def test_hold_out_is_fast_for_2000_classes_with_ten_rows_each() -> None:
    classes = {group: {str(group * 7 % 2000)} for group in range(20_000)}
    held_out = hold_out(range(20_000), classes, 2000)
    assert len(held_out) == 2000
    for part in (held_out, classes.keys() - held_out):
        assert len(set().union(*map(classes.__getitem__, part))) == 2000
