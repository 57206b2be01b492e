"""`vocab --tokens words`, from the text to a trained model."""

import random
from pathlib import Path

import pytest

from bert_pretrain.config import Config, VocabConfig
from bert_pretrain.errors import InputError
from bert_pretrain.io.manifest import read_manifest
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.run import make_vocab
from bert_pretrain.vocab.wordpiece import choose_words
from tests.conftest import call


def test_most_frequent_storable_words_are_chosen() -> None:
    words = {"b": 5, "a": 5, "A": 9, "once": 1, "[MASK]": 9, "[unused1]": 9, "x\x01": 9, "l" * 1001: 9, "c": 4}
    config = VocabConfig(tokens="words", size=8, unused_tokens=0, min_frequency=2)
    assert choose_words(words, config)[5:] == ["A", "a", "b"]


def test_text_without_a_frequent_word_is_an_error(tmp_path: Path) -> None:
    text = tmp_path / "once.txt"
    text.write_text("every word here occurs once")
    with pytest.raises(InputError, match="no word occurs 2 times"):
        make_vocab(Config.model_validate({"vocab": {"tokens": "words"}}), [str(text)], tmp_path / "vocab", workers=1)


def test_a_model_is_trained_on_words(tmp_path: Path) -> None:
    """Sequences of DNA as overlapping 3-mers, one per line, separated by blank lines."""
    draw, text = random.Random(5), tmp_path / "dna.txt"
    sequences = ["".join(draw.choices("ACGT", weights=(4, 1, 1, 4), k=200)) for _ in range(60)]
    text.write_text("\n\n".join(" ".join(each[begin : begin + 3] for begin in range(198)) for each in sequences) + "\n")
    vocab = ("vocab", text, "--output", tmp_path / "vocab", "--tokens", "words")
    call(*vocab)
    tokens = Tokenizer.load(tmp_path / "vocab").tokens[104:]
    assert sorted(tokens) == sorted(set(text.read_text().split()))
    assert tokens[0] in ("AAA", "TTT")  # the most frequent
    metrics = read_manifest(tmp_path / "vocab", "vocab", "")["metrics"]
    assert metrics["whole_words"] == {"distinct": 64, "coverage": 1.0}
    assert metrics["pieces_per_word"] == 1.0
    assert "up to date" in call(*vocab).output
    settings = "--set data.next_sentence=none --set data.whole_word_mask=true --set data.max_seq_length=32"
    call(*f"make-data {text} --vocab {tmp_path}/vocab --output {tmp_path}/data {settings} --workers 1".split())
    corpus = read_manifest(tmp_path / "data", "data", "")["corpus"]
    assert (corpus["documents"], corpus["sentences"]) == (60, 60)
    assert (corpus["tokens"], corpus["unk_share"]) == (60 * 198, 0.0)
    small = "--set model.hidden_size=16 --set model.num_hidden_layers=1 --set model.num_attention_heads=1"
    small += " --set model.intermediate_size=32 --set train.global_batch_size=8"
    call(*f"train --data {tmp_path}/data --output {tmp_path}/run {small} --steps 2".split())
    answer = call("fill-mask", tmp_path / "run" / "model", "AAA AAT [MASK] TTT", "--json").output
    assert '"filled": "AAA AAT ' in answer
