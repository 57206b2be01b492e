"""`classify`: encoding of texts and pairs, the order of classes, lists of labels, and rows that are held out."""

import random
from pathlib import Path

import datasets
import pytest
import transformers
from sklearn import metrics
from tokenizers import Tokenizer as Backend

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.classify import Classify
from bert_pretrain.finetune.run import hold_out
from bert_pretrain.finetune.settings import Settings
from tests.finetune.conftest import FILLERS, predicted, results


@pytest.mark.parametrize("pair_field", [None, "pair"])
def test_texts_and_pairs_are_encoded_as_by_tokenizers(read, tokenizer, pair_field) -> None:
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.encode_special_tokens = True
    backend.enable_truncation(16, strategy="longest_first")
    texts = ["good film", "bad [MASK] book", "very " * 40, "天气 is fine"]
    settings = {"max_length": 16, "pair_field": pair_field}
    rows = [{"text": text, "pair": f"{text} ?", "label": number} for number, text in enumerate(texts)]
    examples, _ = read("classify", "a.jsonl", rows, settings=settings)
    task = Classify(Settings(**settings), tokenizer)
    task.set_labels(examples, [])
    windows = task.windows_of(examples, "train")
    peers = backend.encode_batch([(text, f"{text} ?") if pair_field else text for text in texts])
    assert [window.input_ids for window in windows] == [peer.ids for peer in peers]
    assert [window.token_type_ids for window in windows] == [peer.type_ids for peer in peers]
    assert [window.labels["labels"] for window in windows] == [0, 1, 2, 3]
    assert [example.exceeds_window for example in examples] == [False, False, True, False]


def test_classes_are_in_the_order_of_the_dataset_or_sorted_by_number(read, tokenizer, tmp_path: Path) -> None:
    names = datasets.ClassLabel(names=["b", "c", "a"])
    data = datasets.Dataset.from_dict({"text": ["film"] * 3, "label": [2, 0, 1]}).cast_column("label", names)
    data.save_to_disk(tmp_path / "saved")
    for source, content, classes in (
        ("saved", None, ["b", "c", "a"]),
        ("a.csv", "text,label\nfilm,10\nbook,9\nday,x\n", ["9", "10", "x"]),
        ("b.csv", "text,label\nfilm,1_1\nbook,10_2\n", ["10_2", "1_1"]),  # words, not numbers
    ):
        task = Classify(Settings(), tokenizer)
        task.set_labels(read(task, source, content)[0], [])
        assert task.labels == classes


def test_a_dash_of_the_validation_rows_is_no_class_if_the_training_rows_have_two_others(read, tokenizer) -> None:
    task = Classify(Settings(), tokenizer)
    for flag, labels in (("--train", [0, 1]), ("--validation", [0, 1, "-"])):
        examples, _ = read(task, "a.jsonl", [{"text": "good", "label": label} for label in labels], flag)
        assert [example.label for example in examples] == ["0", "1"]


CUES = {"joy": "good", "anger": "bad", "place": "berlin"}


def emotions(count: int, seed: int) -> list[dict[str, object]]:
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        labels = [name for name in CUES if draw.random() < 0.4]
        words = [*draw.choices(FILLERS, k=draw.randint(1, 6)), *(CUES[name] for name in labels)]
        rows.append({"text": " ".join(draw.sample(words, len(words))), "label": labels})
    return rows


def test_lists_of_labels_are_learned_and_opened_by_transformers(tune, tmp_path: Path, capsys) -> None:
    test = emotions(60, 2)
    output = tune("classify", emotions(300, 1), test=test, dropout=0.0, epochs=6)
    assert "words alone" in capsys.readouterr().out
    report, _ = results(output)
    assert report["main_metric"] == "micro_f1"
    assert report["test"]["micro_f1"] > 0.9
    lines = predicted(output, tmp_path / "test.jsonl")
    classify = transformers.pipeline("text-classification", model=str(output), top_k=None, device="cpu")
    assert classify.model.config.problem_type == "multi_label_classification"
    for line, theirs in zip(lines, classify([row["text"] for row in test]), strict=True):
        assert line["scores"] == pytest.approx({each["label"]: each["score"] for each in theirs}, abs=1e-4)
        assert line["predicted_label"] == [name for name, score in line["scores"].items() if score > 0.5]
    truth = [[name in line["label"] for name in CUES] for line in lines]
    chosen = [[name in line["predicted_label"] for name in CUES] for line in lines]
    for average in ("micro", "macro"):
        assert report["test"][f"{average}_f1"] == pytest.approx(metrics.f1_score(truth, chosen, average=average))


def test_lists_and_single_labels_do_not_mix(tune) -> None:
    joy, fear = ({"text": "good", "label": name} for name in ("joy", "fear"))
    with pytest.raises(InputError, match="'joy' is not a list"):
        tune("classify", [*emotions(20, 1), joy])
    with pytest.raises(InputError, match=r"\['joy'\] is a list"):
        tune("classify", [joy, fear], validation=[joy | {"label": ["joy"]}])


@pytest.mark.parametrize(
    ("classes", "num_held_out", "expected"),
    [
        ([{"a"}, {"a"}, {"b"}, {"b"}, {"c"}], 1, {0, 2}),  # class c has only one row
        ([{"a"}, {"a"}, {"a"}, {"a"}, {"a"}], 1, {0}),
        ([set(), {"a", "b"}, {"a"}, {"b"}, {"a"}], 1, {1}),
        ([{"a"}, {"a", "b"}, {"c"}, {"c"}, {"b"}], 1, {0, 2, 4}),
        ([{"a"}, {"a"}, {"b"}, {"b"}], 2, {0, 2}),
    ],
)
def test_hold_out_keeps_each_class_in_both_parts_where_possible(classes, num_held_out, expected) -> None:
    assert hold_out(range(len(classes)), dict(enumerate(classes)), num_held_out) == expected


def test_hold_out_is_fast_for_2000_classes_with_ten_rows_each() -> None:
    classes = {group: {str(group * 7 % 2000)} for group in range(20_000)}
    held_out = hold_out(range(20_000), classes, 2000)
    assert len(held_out) == 2000
    for part in (held_out, classes.keys() - held_out):
        assert len(set().union(*map(classes.__getitem__, part))) == 2000
