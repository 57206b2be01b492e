"""`vocab`: reproducibility, sizes and metrics."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError, InputError, OutputError
from bert_pretrain.io.manifest import read_manifest
from bert_pretrain.text import documents
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab import run, wordpiece
from bert_pretrain.vocab.run import make_vocab
from bert_pretrain.vocab.wordpiece import special_tokens
from tests.conftest import digests, one_sentence_a_line


def make(text: Path, output: Path, *settings: str, workers: int = 1) -> Tokenizer:
    return Tokenizer.load(make_vocab(load_config(settings=settings), [str(text)], output, workers=workers))


@pytest.fixture(scope="module")
def small_text(tmp_path_factory: pytest.TempPathFactory, english_documents: list[list[str]]) -> Path:
    path = tmp_path_factory.mktemp("small") / "small.txt"
    path.write_text(one_sentence_a_line(english_documents[:25]), encoding="utf-8")
    return path


def test_vocabulary_is_independent_of_the_hash_seed(english_text: Path, tmp_path: Path) -> None:
    make(english_text, tmp_path / "1", "vocab.size=2000")
    command = [sys.executable, "-m", "bert_pretrain", "vocab", english_text, "--vocab-size", "2000"]
    command += ["--output", tmp_path / "2", "--workers", "2"]
    subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "2"}, check=True, capture_output=True)
    assert digests(tmp_path / "1") == digests(tmp_path / "2")


def test_vocabulary_is_independent_of_parts_and_workers(english_text, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", 20_000)
    monkeypatch.setattr(run, "MAX_TASKS", 1)
    make(english_text, tmp_path / "one", "vocab.size=800")
    monkeypatch.setattr(run, "MAX_TASKS", 11)
    make(english_text, tmp_path / "merged", "vocab.size=800", workers=2)
    assert digests(tmp_path / "merged") == digests(tmp_path / "one")


@pytest.mark.parametrize("lowercase", [True, False])
def test_vocabulary_equals_training_by_tokenizers(english_text, tmp_path, lowercase, monkeypatch) -> None:
    monkeypatch.setattr("bert_pretrain.vocab.counting.HELD_OUT_SHARE", 0.0)
    ours = make(english_text, tmp_path / "vocab", "vocab.size=2500", f"vocab.lowercase={lowercase}")
    ends = next(index for index, token in enumerate(ours.tokens) if len(token.removeprefix("##")) > 1 and index > 103)
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=2500, min_frequency=2, special_tokens=ours.tokens[:ends], limit_alphabet=ends, show_progress=False
    )
    # Words that hold a character outside the alphabet are [UNK] to both.
    alphabet, known = {token for token in ours.tokens[104:ends] if len(token) == 1}, []
    for line in english_text.read_text(encoding="utf-8").splitlines():
        words = backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(line))
        known.append(" ".join(word for word, _ in words if alphabet.issuperset(word) and len(word) <= 100))
    backend.train_from_iterator(known, trainer)
    theirs = backend.get_vocab()
    assert ours.tokens == sorted(theirs, key=theirs.__getitem__)
    assert len(ours.tokens) == 2500


@pytest.mark.parametrize("unused", [0, 994])
def test_number_of_unused_tokens(small_text: Path, tmp_path: Path, unused: int) -> None:
    tokenizer = make(small_text, tmp_path / "v", f"vocab.unused_tokens={unused}", f"vocab.size={unused + 600}")
    assert tokenizer.tokens[: unused + 5] == special_tokens(unused)
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.mask_id) == (0, unused + 1, unused + 4)
    assert tokenizer.vocab_size == unused + 600
    assert not set(tokenizer.word_piece_ids) & set(range(unused + 5))


def test_rare_characters_are_left_out_and_reported(tmp_path: Path, capsys) -> None:
    rare = "".join(chr(point) for point in range(0x4E00, 0x4E00 + 40))
    (tmp_path / "a.txt").write_text("common words here\n" * 2000 + rare + "@\n", encoding="utf-8")
    tokenizer = make(tmp_path / "a.txt", tmp_path / "v", "vocab.size=140")
    alphabet = metrics_of(tmp_path / "v")["alphabet"]
    assert 0.99 < alphabet["coverage"] < 1
    assert alphabet["left_out"] > 0
    assert tokenizer.vocab_size <= 140
    assert "left out" in capsys.readouterr().out
    assert set("comnwrdshe") <= set(tokenizer.tokens)


def test_text_of_removed_characters_or_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "private.txt").write_text("\ue000\ue001 \ue000\n", encoding="utf-8")
    with pytest.raises(InputError, match="contain no text"):
        make(tmp_path / "private.txt", tmp_path / "v")
    text = "some ordinary words\n" * 15000 + "größere Häuser über Köln\n" * 5000
    (tmp_path / "late.txt").write_bytes(text.encode("cp1252"))
    with pytest.raises(InputError, match="25,000 characters could not be decoded"):
        make(tmp_path / "late.txt", tmp_path / "v")
    assert not (tmp_path / "v" / "vocab.txt").exists()


def test_min_frequency_counts_the_complete_text(english_text, tmp_path, monkeypatch) -> None:
    settings = ("vocab.size=30000", "vocab.min_frequency=20")
    num_tokens = make(english_text, tmp_path / "all", *settings).vocab_size
    monkeypatch.setattr(wordpiece, "MAX_REPLAYED_WORDS", metrics_of(tmp_path / "all")["words"] // 45)
    assert make(english_text, tmp_path / "scaled", *settings).vocab_size > 0.6 * num_tokens
    assert metrics_of(tmp_path / "scaled")["min_word_count"] in (23, 24)


@pytest.mark.parametrize("apart", [True, False])
def test_chinese_characters_are_separate_or_part_of_words(chinese_text, tmp_path, apart) -> None:
    tokenizer = make(chinese_text, tmp_path / "v", "vocab.size=2000", f"vocab.handle_chinese_chars={apart}")
    longer = re.findall(r"\S+[\u4e00-\u9fff]|[\u4e00-\u9fff]\S", " ".join(tokenizer.tokens))
    assert bool(longer) is not apart
    assert metrics_of(tmp_path / "v")["measured_on"] == "held-out documents"
    assert not apart or metrics_of(tmp_path / "v")["unk_share_of_words"] == 0


@pytest.mark.parametrize("setting", ["vocab.size=150", "vocab.limit_alphabet=20"])
def test_alphabet_with_low_coverage_is_refused(chinese_text: Path, tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(chinese_text, tmp_path / "v", setting)
    assert caught.value.where == setting.partition("=")[0]


def test_small_corpus_gives_a_small_vocabulary_and_a_warning(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_text("three small words. three small words.\n")
    assert 104 < make(tmp_path / "a.txt", tmp_path / "v").vocab_size < 200
    assert "too small for vocab.size" in capsys.readouterr().out


def test_text_of_held_out_documents_only_is_trained_on(
    small_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bert_pretrain.vocab.counting.HELD_OUT_SHARE", 1.0)
    assert make(small_text, tmp_path / "v").vocab_size > 104
    metrics = read_manifest(tmp_path / "v", "vocab", "")["metrics"]
    assert metrics["measured_on"].startswith("the training text")


def test_second_run_is_up_to_date_or_repairs_damage(
    small_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(small_text, tmp_path / "v", "vocab.size=800")
    before = digests(tmp_path / "v")
    make(small_text, tmp_path / "v", "vocab.size=800")
    assert "up to date" in capsys.readouterr().out
    with pytest.raises(OutputError, match="size: 800 -> 900"):
        make(small_text, tmp_path / "v", "vocab.size=900")
    (tmp_path / "v" / "manifest.json").rename(tmp_path / "v" / "manifest.partial.json")
    make(small_text, tmp_path / "v", "vocab.size=800")
    path = tmp_path / "v" / "vocab.txt"
    config = path.with_name("tokenizer_config.json")
    for damage in (
        path.unlink,
        lambda: path.write_bytes(path.read_bytes().replace(b"the", b"teh")),
        lambda: config.write_text(config.read_text().replace("512", "5")),
    ):
        damage()
        make(small_text, tmp_path / "v", "vocab.size=800")
        assert "damaged" in capsys.readouterr().out
        assert digests(tmp_path / "v") == before


def metrics_of(folder: Path) -> dict:
    return read_manifest(folder, "vocab", "")["metrics"]
