"""`classify`: encoding of texts and pairs, and the order of classes."""

from pathlib import Path

import datasets
import pytest
from tokenizers import Tokenizer as Backend

from bert_pretrain.finetune.classify import Classify
from bert_pretrain.finetune.rows import LabelledInput
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.text.tokenizer import Tokenizer
from tests.finetune.conftest import write_rows


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


def test_classes_are_in_the_order_of_the_dataset_or_sorted_by_number(tokenizer: Tokenizer, tmp_path: Path) -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["b", "c", "a"])}
    )
    rows = [{"text": "film", "label": number} for number in (2, 0, 1)]
    datasets.DatasetDict(train=datasets.Dataset.from_list(rows, features=features)).save_to_disk(tmp_path / "saved")
    (tmp_path / "numbers.csv").write_text("text,label\nfilm,10\nbook,9\nday,x\n")
    for source, classes in (("saved", ["b", "c", "a"]), ("numbers.csv", ["9", "10", "x"])):
        task = Classify(Settings(), tokenizer)
        task.set_labels(task.read(LabelledInput(str(tmp_path / source), "--train")), [])
        assert task.labels == classes


def test_a_dash_of_the_validation_rows_is_no_class_if_the_training_rows_have_two_others(tokenizer, tmp_path) -> None:
    task = Classify(Settings(), tokenizer)
    for flag, labels in (("--train", [0, 1]), ("--validation", [0, 1, "-"])):
        path = write_rows(tmp_path / f"{flag}.jsonl", [{"text": "good", "label": label} for label in labels])
        assert [example.label for example in task.read(LabelledInput(path, flag))] == ["0", "1"]


def test_labels_with_underscores_are_words(read, tokenizer: Tokenizer) -> None:
    task = Classify(Settings(), tokenizer)
    rows = [{"text": "good", "label": label} for label in ("1_1", "10_2")]
    task.set_labels(read("classify", "a.jsonl", rows)[0], [])
    assert task.labels == ["10_2", "1_1"]
