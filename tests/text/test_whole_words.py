"""Tokenizers of whole words: ids are those of the library's WordLevel, and `transformers` opens the folder."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from bert_pretrain.errors import DataError
from bert_pretrain.text.fast_tokenizer import Encoder
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.text.tokenizer_folder import SPECIAL_TOKENS
from bert_pretrain.vocab.wordpiece import special_tokens

WORDS = ["ACGT", "acgt", "a", "a.b", "ไทย", "ភាសា", "##x", "x", "中文", "中", "é", "E4-17\u200b", "[mask]"]
WORDS += ["longer-than-8", "w" * 90]
PIECES = [*WORDS, *SPECIAL_TOKENS, "[unused3]", "unknown", "\0", "a\0", "ACGT\0\0", ".", "w" * 91]
BLANKS = ["  ", "\r\n", *" \n\t\x0b\x0c\x1c\x85\u00a0\u1680\u2003\u2028\u200b\u3000"]
TEXT = st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from(BLANKS)), max_size=12).map(
    lambda pairs: "".join(itertools.chain.from_iterable(pairs))
)
ANYTHING = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.of_words([*special_tokens(9), *WORDS])


@pytest.fixture(scope="module")
def folder(ours: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    ours.save(folder)
    return folder


def expected(text: str, backend: Backend, ours: Tokenizer) -> list[int]:
    """The ids of the library, in which a word that is spelled like a special token is unknown."""
    found = backend.encode(text, add_special_tokens=False).ids
    return [index if index in ours.word_piece_ids else ours.unk_id for index in found]


@given(text=st.one_of(TEXT, ANYTHING))
def test_ids_are_those_of_the_library(text: str, ours: Tokenizer, folder: Path) -> None:
    theirs = Backend.from_file(str(folder / "tokenizer.json"))
    theirs.encode_special_tokens = True
    assert ours.encode_text(text) == expected(text, theirs, ours)
    encoded = np.frombuffer(text.encode(), dtype=np.uint8)
    ids, offsets = Encoder(ours).encode(encoded, np.zeros(1, dtype=np.int64))
    assert ids.tolist() == expected(text, theirs, ours)
    assert offsets.tolist() == [0, len(ids)]


def test_transformers_opens_the_folder(ours: Tokenizer, folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(folder)
    assert theirs.convert_ids_to_tokens(range(ours.vocab_size)) == ours.tokens
    assert (theirs.mask_token_id, theirs.unk_token_id, theirs.pad_token_id) == (ours.mask_id, ours.unk_id, ours.pad_id)
    pair = theirs("ACGT acgt", "a.b [MASK]")
    ids = [ours.tokens.index(word) for word in ("[CLS]", "ACGT", "acgt", "[SEP]", "a.b", "[MASK]", "[SEP]")]
    assert (pair["input_ids"], pair["token_type_ids"]) == (ids, [0, 0, 0, 0, 1, 1, 1])
    assert theirs.decode(ids[1:3]) == ours.decode(ids[1:3]) == "ACGT acgt"


def test_the_folder_is_read_again(ours: Tokenizer, folder: Path) -> None:
    again = Tokenizer.load(folder)
    assert (again.tokens, again.hash, again.whole_words) == (ours.tokens, ours.hash, True)
    assert sorted(path.name for path in folder.iterdir()) == sorted(ours.files)
    pieces = Tokenizer(ours.tokens, lowercase=False, strip_accents=False, handle_chinese_chars=False)
    assert pieces.hash != ours.hash
    assert not again.is_subword.any()


@pytest.mark.parametrize("what", ["normalizer", "pre_tokenizer"])
def test_another_treatment_of_words_is_refused(what: str, folder: Path, tmp_path: Path) -> None:
    found = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps({**found, what: {"type": "Lowercase"}}), encoding="utf-8")
    with pytest.raises(DataError, match="that of whole words"):
        Tokenizer.load(tmp_path)
