"""Tokenizer folders of any BERT give the ids of `transformers`; others are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import DataError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.make_data.run import make_data
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.wordpiece import special_tokens
from tests.conftest import one_sentence_a_line

from .test_fast_tokenizer import VARIANTS

WORDS = ["the", "The", "cafe", "café", "Café", "un", "##fold", "##s", "中", "国", "中国", "##国", ".", "-", "a", "##é"]
TOKENS = [*special_tokens(3), *WORDS]
TEXTS = ("The café unfolds - a 中国.", "Café THE the\u0301 国中国 [MASK] unfoldé", "")
NAMES = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
SETTINGS = [dict(zip(NAMES, variant.values(), strict=True)) for variant in VARIANTS[::3]]


def write_vocabulary(folder: Path, tokens: list[str] = TOKENS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return folder


def set_json(path: Path, **values: Any) -> None:
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, **values}))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_ids_equal_transformers_for_all_settings(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Folders of BERT's own, of `transformers`, of its backend alone, and with a tokenizer.json of other settings."""
    from transformers import AutoTokenizer

    Tokenizer(TOKENS, **VARIANTS[0]).save(tmp_path / "contradicted")
    for name in ("hub", "contradicted"):
        folder = write_vocabulary(tmp_path / name)
        set_json(folder / "tokenizer_config.json", model_max_length=512, **settings)
        set_json(folder / "config.json", model_type="bert")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hub")
    theirs.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "vocab.txt").exists()
    shutil.copytree(tmp_path / "saved", tmp_path / "backend alone")
    (tmp_path / "backend alone" / "tokenizer_config.json").unlink()
    contradicted = AutoTokenizer.from_pretrained(tmp_path / "contradicted")
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert contradicted(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == expected
        for name in ("hub", "contradicted", "saved", "backend alone"):
            ours = Tokenizer.load(tmp_path / name)
            assert ours.tokens == TOKENS
            assert ours.encode_text(text) == expected


def test_unknown_casing_is_refused_without_the_flag(tmp_path: Path) -> None:
    folder = write_vocabulary(tmp_path / "bare")
    with pytest.raises(DataError, match="do not say whether"):
        Tokenizer.load(folder)
    for lowercase, token in ((True, "the"), (False, "The")):
        assert Tokenizer.load(folder, lowercase=lowercase).encode_text("The") == [TOKENS.index(token)]
    set_json(folder / "tokenizer_config.json", do_lower_case=False)
    assert Tokenizer.load(folder, lowercase=False).encode_text("The") == [TOKENS.index("The")]


VOCABULARY = {token: index for index, token in enumerate(TOKENS)}
MODEL = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": VOCABULARY}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer_config.json", '{"tokenizer_class": "BertJapaneseTokenizer"}', "BertJapaneseTokenizer"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"24": {"content": "[E1]"}}}', r"\[E1\]"),
        ("tokenizer_config.json", '{"do_basic_tokenize": false}', "do_basic_tokenize"),
        ("tokenizer_config.json", "[]", "tokenizer_config"),
        ("added_tokens.json", '{"[E2]": 24}', r"\[E2\]"),
        ("added_tokens.json", "[1]", "added_tokens"),
        ("tokenizer.json", '{"pre_tokenizer": {"type": "Whitespace"}}', "Whitespace"),
        ("tokenizer.json", '{"added_tokens": [{"content": "[PAD]", "id": 7}]}', "0, 1, 2"),
        ("tokenizer.json", json.dumps({"model": {**MODEL, "vocab": {**VOCABULARY, "more": len(TOKENS)}}}), "different"),
        ("tokenizer.json", json.dumps({"model": {**MODEL, "type": "WordLevel"}}), "whole words"),
        ("tokenizer.json", '{"normalizer": null}', "its normalizer is None"),
        ("manifest.partial.json", "{}", "unfinished"),
    ],
)
def test_unsupported_tokenizer_is_refused(tmp_path: Path, name: str, content: str, said: str) -> None:
    Tokenizer(TOKENS, **VARIANTS[0]).save(tmp_path)
    Tokenizer.load(tmp_path)
    values = json.loads(content)
    if isinstance(values, dict):
        set_json(tmp_path / name, **values)
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=said):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("token", ["", "a\0b", "x" * (9 << 20)], ids=["empty", "NUL", "long"])
def test_invalid_token_is_refused_with_its_line(tmp_path: Path, token: str) -> None:
    write_vocabulary(tmp_path, [*TOKENS, "\u2028", token, "more"])  # of Google's Chinese BERT: it ends no line
    with pytest.raises(DataError) as caught:
        Tokenizer.load(tmp_path, lowercase=True)
    assert caught.value.where == f"{tmp_path}/vocab.txt: line {len(TOKENS) + 2}"
    assert len(str(caught.value)) < 500


def test_data_is_made_from_a_bare_vocabulary_with_a_flag(tmp_path, vocab_folder, english_documents) -> None:
    stated = Tokenizer.load(vocab_folder)
    bare, text = write_vocabulary(tmp_path / "bare", stated.tokens), tmp_path / "a.txt"
    text.write_text(one_sentence_a_line(english_documents[:20]))
    config = load_config(settings=["data.max_seq_length=32", "data.dupe_factor=1"])
    make_data(config, [str(text)], bare, tmp_path / "data", workers=2, lowercase=True)  # the workers are told, too
    assert DataFolder.open(tmp_path / "data").tokenizer().hash == stated.hash


def test_a_vocabulary_without_pad_is_refused_by_name(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, ["<pad>", *TOKENS[1:]])
    with pytest.raises(DataError, match=r"(?s)lacks \[PAD\].*rename tokens such as <pad>"):
        Tokenizer.load(tmp_path, lowercase=True)
