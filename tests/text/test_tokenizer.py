"""A tokenizer folder opens in `transformers`, loads back the same, and is named when it is broken."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from bert_pretrain.text.tokenizer import Tokenizer, find_extension, old_pieces
from bert_pretrain.text.tokenizer_folder import FILES
from bert_pretrain.vocab.wordpiece import special_tokens

PIECES = list("abcxyzABC019.,中文é")
VARIANTS = [
    dict(zip(("lowercase", "strip_accents", "handle_chinese_chars"), values, strict=True))
    for values in itertools.product((True, False), (None, True, False), (True, False))
]


def build(**variant: Any) -> Tokenizer:
    return Tokenizer([*special_tokens(9), *PIECES], **variant)


def test_transformers_opens_the_folder_with_segments_and_special_tokens(vocab_folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(vocab_folder)
    pair = theirs("the first one", "the second")
    first, second = (len(theirs(text)["input_ids"]) for text in ("the first one", "the second"))
    assert pair["token_type_ids"] == [0] * first + [1] * (second - 1)
    assert (theirs.pad_token_id, theirs.unk_token_id, theirs.cls_token_id) == (0, 100, 101)
    assert (theirs.sep_token_id, theirs.mask_token_id, theirs.model_max_length) == (102, 103, 512)
    assert theirs("[MASK]")["input_ids"] == [101, 103, 102]
    assert theirs.decode(theirs("Functions, loops.")["input_ids"], skip_special_tokens=True) == "functions, loops."


@pytest.mark.parametrize("variant", VARIANTS[::5])
def test_a_saved_tokenizer_loads_back_the_same(tmp_path: Path, variant: dict[str, Any]) -> None:
    ours = build(**variant)
    ours.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.tokens, loaded.settings, loaded.hash) == (ours.tokens, ours.settings, ours.hash)
    loaded.save(tmp_path / "deep" / "copy")
    for name in FILES:
        assert (tmp_path / "deep" / "copy" / name).read_bytes() == (tmp_path / name).read_bytes()
    content = (tmp_path / "vocab.txt").read_bytes()
    (tmp_path / "vocab.txt").write_bytes(content.replace(b"\n", b"\r\n"))  # line ends of Windows
    assert Tokenizer.load(tmp_path).tokens == ours.tokens


def test_all_that_decides_ids_is_in_the_hash() -> None:
    hashes = [build(**variant).hash for variant in VARIANTS]
    hashes += [Tokenizer([*special_tokens(9), *reversed(PIECES)], **VARIANTS[0]).hash]
    assert len(set(hashes)) == len(hashes)


OLD = ["[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##fold", "##s", "a", "##a", "b"]
IDS = {token: index for index, token in enumerate(OLD)}


def test_new_tokens_come_from_the_slots_and_the_end_with_their_old_pieces() -> None:
    new = [*OLD, "bs", "##as"]
    new[2] = "unfolds"
    extension = find_extension(OLD, new)
    assert extension is not None
    assert extension.pieces == {2: [7, 8, 9], 13: [12, 9], 14: [11, 9]}
    assert (extension.num_old_tokens, extension.num_tokens, extension.num_in_slots) == (13, 15, 1)
    same = find_extension(OLD, OLD)
    assert same is not None
    assert same.pieces == {}


@pytest.mark.parametrize("new", [OLD[:-1], [*OLD[:-1], "c"], [OLD[1], OLD[0], *OLD[2:]], ["[PAD]", *OLD[2:], "c"]])
def test_any_other_change_is_no_extension(new: list[str]) -> None:
    assert find_extension(OLD, new) is None


@pytest.mark.parametrize("word", ["unfolds", "aas", "as", "una", "bx", "x", "a" * 100, "a" * 101, "ba", "unfoldx"])
def test_pieces_are_those_of_wordpiece(word: str) -> None:
    tokenizer = Tokenizer(OLD, lowercase=True, strip_accents=None, handle_chinese_chars=True)
    assert old_pieces(word, IDS) == tokenizer.encode_text(word)
    assert old_pieces("##x", IDS) == [IDS["[UNK]"]]
    assert old_pieces("##as", IDS) == [IDS["##a"], IDS["##s"]]
