"""`vocab --tokens words`: every word a token, from the text to a trained model."""

import random
import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from bert_pretrain.cli import app
from bert_pretrain.config import VocabConfig
from bert_pretrain.io.manifest import read_manifest
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.wordpiece import choose_words


def call(command: str) -> Result:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def kmers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sequences of DNA as overlapping 3-mers, a line each, blank lines between them."""
    draw = random.Random(5)
    path = tmp_path_factory.mktemp("kmers") / "dna.txt"
    sequences = ["".join(draw.choices("ACGT", weights=(4, 1, 1, 4), k=200)) for _ in range(60)]
    lines = [" ".join(sequence[begin : begin + 3] for begin in range(198)) for sequence in sequences]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(kmers: Path) -> Path:
    call(f"vocab {kmers} --output {kmers.parent}/vocab --tokens words --workers 1")
    return kmers.parent / "vocab"


def test_every_word_is_a_token(kmers: Path, folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert sorted(tokenizer.tokens[104:]) == sorted(set(kmers.read_text().split()))
    assert len(tokenizer.tokens[104:]) == 64
    assert tokenizer.tokens[104] in ("AAA", "TTT")  # the most frequent
    figures = read_manifest(folder, "vocab", "")["figures"]
    assert figures["whole_words"] == {"distinct": 64, "coverage": 1.0}
    assert figures["pieces_per_word"] == 1.0
    assert "up to date" in call(f"vocab {kmers} --output {folder} --tokens words").output


def test_the_most_frequent_words_are_kept_and_none_that_cannot_be_a_token() -> None:
    words = {"b": 5, "a": 5, "A": 9, "once": 1, "[MASK]": 9, "[unused1]": 9, "x\x01": 9, "l" * 1001: 9, "c": 4}
    config = VocabConfig(tokens="words", size=8, unused_tokens=0, min_frequency=2)
    assert choose_words(words, config)[5:] == ["A", "a", "b"]


def test_a_model_is_trained_on_words(kmers: Path, folder: Path, tmp_path: Path) -> None:
    settings = "--set data.next_sentence=none --set data.whole_word_mask=true --set data.max_seq_length=32"
    call(f"make-data {kmers} --vocab {folder} --output {tmp_path}/data {settings} --workers 1")
    corpus = read_manifest(tmp_path / "data", "data", "")["corpus"]
    assert (corpus["documents"], corpus["sentences"]) == (60, 60)
    assert (corpus["tokens"], corpus["unk_share"]) == (60 * 198, 0.0)
    call(f"inspect {tmp_path}/data --stats")
    small = "--set model.hidden_size=16 --set model.num_hidden_layers=1 --set model.num_attention_heads=1"
    small += " --set model.intermediate_size=32 --set train.global_batch_size=8"
    call(f"train --data {tmp_path}/data --output {tmp_path}/run {small} --steps 2")
    answer = call(f"fill-mask {tmp_path}/run/model 'AAA AAT [MASK] TTT' --json").output
    assert '"filled": "AAA AAT ' in answer
    (tmp_path / "new.txt").write_text("AAA AAT ATC\nCCC\n", encoding="utf-8")
    call(f"embed {tmp_path}/run/model {tmp_path}/new.txt --output {tmp_path}/vectors.npy")
    assert np.load(tmp_path / "vectors.npy").shape == (2, 16)
