"""Tokenizer folders of any BERT give the ids that `transformers` gives; what is not BERT's, or unknown, is refused."""

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import DataError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.make_data.run import make_data
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.wordpiece import special_tokens

WORDS = ["the", "The", "cafe", "café", "Café", "un", "##fold", "##s", "中", "国", "中国", "##国", ".", "-", "a", "##é"]
TOKENS = [*special_tokens(3), *WORDS]
TEXTS = ("The café unfolds - a 中国.", "Café THE the\u0301 国中国 [MASK] unfoldé", "")
SETTINGS = [
    dict(zip(("do_lower_case", "strip_accents", "tokenize_chinese_chars"), values, strict=True))
    for values in itertools.product((True, False), (None, True, False), (True, False))
]


def write_vocabulary(folder: Path, tokens: list[str] = TOKENS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return folder


def set_json(path: Path, **values: Any) -> None:
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, **values}))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_ids_equal_those_of_transformers_for_every_treatment(tmp_path: Path, settings: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    hub = write_vocabulary(tmp_path / "hub")  # as BERT's own folders are
    set_json(hub / "tokenizer_config.json", model_max_length=512, **settings)
    set_json(hub / "config.json", model_type="bert")
    theirs = AutoTokenizer.from_pretrained(hub)
    theirs.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "vocab.txt").exists()
    shutil.copytree(tmp_path / "saved", tmp_path / "backend alone")
    (tmp_path / "backend alone" / "tokenizer_config.json").unlink()
    for name in ("hub", "saved", "backend alone"):
        ours = Tokenizer.load(tmp_path / name)
        assert ours.tokens == TOKENS
        for text in TEXTS:
            expected = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            assert ours.encode_text(text) == expected


def test_casing_that_no_file_states_is_asked_for_and_never_guessed(tmp_path: Path) -> None:
    folder = write_vocabulary(tmp_path / "bare")
    with pytest.raises(DataError, match="casing of this vocabulary is not stated") as caught:
        Tokenizer.load(folder)
    assert "--no-lowercase" in caught.value.remedy
    assert Tokenizer.load(folder, lowercase=True).encode_text("The") == [TOKENS.index("the")]
    assert Tokenizer.load(folder, lowercase=False).encode_text("The") == [TOKENS.index("The")]
    set_json(folder / "tokenizer_config.json", do_lower_case=False)
    assert Tokenizer.load(folder, lowercase=False).encode_text("The") == [TOKENS.index("The")]
    with pytest.raises(DataError, match="states do_lower_case false") as caught:
        Tokenizer.load(folder, lowercase=True)
    assert caught.value.where == "--lowercase"


def test_the_configuration_outweighs_the_backend_as_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    Tokenizer(TOKENS, lowercase=True, strip_accents=None, handle_chinese_chars=True).save(tmp_path)
    set_json(tmp_path / "tokenizer_config.json", do_lower_case=False)
    set_json(tmp_path / "config.json", model_type="bert")
    expected = AutoTokenizer.from_pretrained(tmp_path)("The café", add_special_tokens=False)["input_ids"]
    assert Tokenizer.load(tmp_path).encode_text("The café") == expected == [TOKENS.index("The"), TOKENS.index("café")]


def other_kinds() -> Iterator[Any]:
    trainer: dict[str, Any] = {"special_tokens": special_tokens(0), "show_progress": False}
    for model, train, said in (
        (models.BPE(unk_token="[UNK]"), trainers.BpeTrainer(**trainer), "BPE"),
        (models.Unigram(), trainers.UnigramTrainer(unk_token="[UNK]", **trainer), "Unigram"),
        (models.WordLevel(unk_token="[UNK]"), trainers.WordLevelTrainer(**trainer), "WhitespaceSplit"),
        (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer(**trainer), "the normalizer is None"),
    ):
        yield pytest.param(model, train, said, id=said)


@pytest.mark.parametrize(("model", "trainer", "said"), other_kinds())
def test_other_kinds_of_tokenizer_are_refused_by_name(tmp_path: Path, model: Any, trainer: Any, said: str) -> None:
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(["some words for training"] * 5, trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=said) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.where == str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "BertJapaneseTokenizer"}, "a BertJapaneseTokenizer"),
        ("tokenizer_config.json", {"do_basic_tokenize": False}, "do_basic_tokenize is false"),
        ("tokenizer_config.json", {"tokenize_chinese_chars": "x"}, "tokenize_chinese_chars is 'x'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"24": {"content": "[E1]"}}}, r"such as '\[E1\]'"),
        ("added_tokens.json", {"[E2]": 24}, r"1 added tokens outside its WordPiece vocabulary, such as '\[E2\]'"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Whitespace"}}, "the pre-tokenizer is 'Whitespace'"),
        ("tokenizer.json", {"pre_tokenizer": "BertPreTokenizer"}, "describes no tokenizer"),
        ("tokenizer.json", {"added_tokens": 7}, "its added tokens are no list"),
        ("tokenizer.json", {"added_tokens": [{"content": "[PAD]", "id": "0"}]}, "are not 0, 1, 2"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"0": "[PAD]"}}, "its added tokens are no list"),
        ("tokenizer_config.json", {"tokenizer_class": {"a": 1}}, "the tokenizer is a {'a': 1}"),
        ("manifest.partial.json", {}, "is unfinished"),
    ],
)
def test_what_would_give_other_ids_is_refused(tmp_path: Path, name: str, values: dict[str, Any], said: str) -> None:
    Tokenizer(TOKENS, lowercase=True, strip_accents=None, handle_chinese_chars=True).save(tmp_path)
    Tokenizer.load(tmp_path)
    set_json(tmp_path / name, **values)
    with pytest.raises(DataError, match=said):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("token", "said"),
    [("", "a token is empty"), ("a\0b", r"control characters: 'a\\x00b'"), ("x" * (10 << 20), "10,485,760 characters")],
    ids=["empty", "NUL", "long"],
)
def test_a_token_that_cannot_be_one_is_named_by_its_line(tmp_path: Path, token: str, said: str) -> None:
    write_vocabulary(tmp_path, [*TOKENS, token, "more"])
    with pytest.raises(DataError, match=said) as caught:
        Tokenizer.load(tmp_path, lowercase=True)
    assert caught.value.where == f"{tmp_path}/vocab.txt: line {len(TOKENS) + 1}"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("with_backend", [False, True])
def test_a_folder_called_vocab_txt_is_no_vocabulary(tmp_path: Path, with_backend: bool) -> None:
    Tokenizer(TOKENS, lowercase=True, strip_accents=None, handle_chinese_chars=True).save(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    (tmp_path / "vocab.txt").mkdir()
    if not with_backend:
        (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"vocab\.txt is broken: .*directory"):
        Tokenizer.load(tmp_path)


def test_the_line_separator_in_the_vocabulary_of_googles_chinese_bert_is_a_token(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, [*TOKENS, "\u2028", "more"])
    loaded = Tokenizer.load(tmp_path, lowercase=True)
    assert loaded.tokens[-2:] == ["\u2028", "more"]
    assert loaded.encode_text("more") == [len(TOKENS) + 1]


def test_added_tokens_of_transformers_are_noticed(tmp_path: Path) -> None:
    from transformers import BertTokenizer

    write_vocabulary(tmp_path / "a")
    theirs = BertTokenizer.from_pretrained(tmp_path / "a", do_lower_case=True)
    theirs.add_tokens(["newword"])
    theirs.save_pretrained(tmp_path / "b")
    with pytest.raises(DataError, match="such as 'newword'"):
        Tokenizer.load(tmp_path / "b")


def test_two_vocabularies_in_one_folder_are_refused(tmp_path: Path) -> None:
    Tokenizer(TOKENS, lowercase=True, strip_accents=None, handle_chinese_chars=True).save(tmp_path)
    write_vocabulary(tmp_path, [*TOKENS[:-1], "other"])
    with pytest.raises(DataError, match="different vocabularies"):
        Tokenizer.load(tmp_path)


def test_data_is_made_with_a_bare_vocabulary_and_a_flag(
    tmp_path: Path, vocab_folder: Path, english_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stated = Tokenizer.load(vocab_folder)
    bare = write_vocabulary(tmp_path / "bare", stated.tokens)
    config = load_config(settings=["data.max_seq_length=64", "data.dupe_factor=1"])
    with pytest.raises(DataError, match="casing"):
        make_data(config, [str(english_text)], bare, tmp_path / "data", workers=1)
    make_data(config, [str(english_text)], bare, tmp_path / "data", workers=2, lowercase=True)
    assert DataFolder.open(tmp_path / "data").tokenizer().hash == stated.hash
    capsys.readouterr()
    make_data(config, [str(english_text)], vocab_folder, tmp_path / "data", workers=1)
    assert "up to date" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ({"the": "105"}, "are not 0, 1, 2"),
        ({"": len(TOKENS)}, "a token is empty"),
        ({"a\nb": len(TOKENS)}, "control characters"),
        ({"\ud800": len(TOKENS)}, "control characters"),
    ],
)
def test_a_backend_with_odd_tokens_is_refused(tmp_path: Path, ids: dict[str, Any], said: str) -> None:
    Tokenizer(TOKENS, lowercase=True, strip_accents=None, handle_chinese_chars=True).save(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    found = json.loads((tmp_path / "tokenizer.json").read_text())
    found["model"]["vocab"].update(ids)
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    with pytest.raises(DataError, match=said):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", "[" * 100_000, "nested deeper than"),
        ("added_tokens.json", "[" * 100_000, "nested deeper than"),
        ("tokenizer_config.json", "{", "cannot read tokenizer_config.json"),
        ("tokenizer_config.json", "[]", "holds no settings"),
    ],
    ids=["backend", "added tokens", "broken", "list"],
)
def test_a_file_that_is_no_object_of_json_is_refused(tmp_path: Path, name: str, content: str, said: str) -> None:
    write_vocabulary(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=said):
        Tokenizer.load(tmp_path, lowercase=True)
