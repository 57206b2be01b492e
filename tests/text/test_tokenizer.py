"""Tokenizers of word pieces and whole words open in `transformers` and load back the same."""

from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from bert_pretrain.text.fast_tokenizer import Encoder
from bert_pretrain.text.tokenizer import Tokenizer, old_pieces, word_piece
from bert_pretrain.text.tokenizer_folder import SPECIAL_TOKENS, WHOLE_WORDS
from bert_pretrain.vocab.wordpiece import special_tokens

from .test_fast_tokenizer import ANYTHING, VARIANTS, encode

PIECES = list("abcxyzABC019.,中文é")
WORDS = ["ACGT", "acgt", "a", "a.b", "ไทย", "ភាសា", "##x", "x", "中文", "中", "é", "E4-17\u200b", "[mask]"]
WORDS += ["longer-than-8", "w" * 90]
OF_WORDS = Tokenizer([*special_tokens(9), *WORDS], **asdict(WHOLE_WORDS))


@pytest.fixture(scope="module")
def of_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    OF_WORDS.save(folder)
    return folder


def test_whole_word_tokenizer_opens_in_transformers(of_words: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = OF_WORDS, AutoTokenizer.from_pretrained(of_words)
    assert theirs.convert_ids_to_tokens(range(ours.vocab_size)) == ours.tokens
    for name in ("mask", "unk", "pad"):
        assert getattr(theirs, f"{name}_token_id") == getattr(ours, f"{name}_id")
    pair = theirs("ACGT acgt", "a.b [MASK]")
    ids = [ours.tokens.index(word) for word in ("[CLS]", "ACGT", "acgt", "[SEP]", "a.b", "[MASK]", "[SEP]")]
    assert (pair["input_ids"], pair["token_type_ids"]) == (ids, [0, 0, 0, 0, 1, 1, 1])
    assert theirs.decode(ids[1:3]) == ours.decode(ids[1:3]) == "ACGT acgt"


@pytest.mark.parametrize(
    "ours", [OF_WORDS, *(Tokenizer([*special_tokens(9), *PIECES], **variant) for variant in VARIANTS[::5])]
)
def test_a_saved_tokenizer_loads_back_the_same(tmp_path: Path, ours: Tokenizer) -> None:
    ours.save(tmp_path / "first")
    loaded = Tokenizer.load(tmp_path / "first")
    assert (loaded.tokens, loaded.settings, loaded.hash) == (ours.tokens, ours.settings, ours.hash)
    assert loaded.whole_words == (ours is OF_WORDS)
    loaded.save(tmp_path / "deep" / "copy")
    for path in (tmp_path / "first").iterdir():
        assert (tmp_path / "deep" / "copy" / path.name).read_bytes() == path.read_bytes()
    if ours is not OF_WORDS:
        vocab = tmp_path / "first" / "vocab.txt"
        vocab.write_bytes(vocab.read_bytes().replace(b"\n", b"\r\n"))  # line ends of Windows
        assert Tokenizer.load(tmp_path / "first").tokens == ours.tokens


def test_hash_depends_on_vocabulary_and_settings() -> None:
    tokens = [*special_tokens(9), *PIECES]
    hashes = [Tokenizer(tokens, **variant).hash for variant in VARIANTS]
    hashes.append(Tokenizer([*special_tokens(9), *reversed(PIECES)], **VARIANTS[0]).hash)
    hashes.append(Tokenizer(tokens, **asdict(WHOLE_WORDS)).hash)
    assert len(set(hashes)) == len(hashes)


PARTS = [*WORDS, *SPECIAL_TOKENS, "[unused3]", "unknown", "\0", "a\0", "ACGT\0\0", ".", "w" * 91]
BLANKS = ["  ", "\r\n", *" \n\t\x0b\x0c\x1c\x85\u00a0\u1680\u2003\u2028\u200b\u3000"]
TEXT = st.lists(st.sampled_from(PARTS).flatmap(lambda part: st.sampled_from(BLANKS).map(part.__add__)), max_size=12)


ENCODER = Encoder(OF_WORDS)


@given(text=st.one_of(TEXT.map("".join), ANYTHING))
def test_ids_of_whole_words_equal_tokenizers(text: str, of_words: Path) -> None:
    theirs = Backend.from_file(str(of_words / "tokenizer.json"))
    theirs.encode_special_tokens = True
    # A word that is spelled like a special token is unknown.
    known, found = set(OF_WORDS.word_piece_ids.tolist()), theirs.encode(text, add_special_tokens=False).ids
    expected = [index if index in known else OF_WORDS.unk_id for index in found]
    assert OF_WORDS.encode_text(text) == expected
    assert encode(ENCODER, [text]) == [expected]
    assert not OF_WORDS.is_subword.any()


OLD = ["[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##fold", "##s", "a", "##a", "b"]
IDS = {token: index for index, token in enumerate(OLD)}
MODEL = word_piece(IDS)


@pytest.mark.parametrize("word", ["unfolds", "aas", "as", "una", "bx", "x", "a" * 100, "a" * 101, "ba", "unfoldx"])
def test_old_pieces_equal_wordpiece(word: str) -> None:
    tokenizer = Tokenizer(OLD, lowercase=True, strip_accents=None, handle_chinese_chars=True)
    assert old_pieces(word, MODEL) == tokenizer.encode_text(word)
    assert old_pieces("##x", MODEL) == [IDS["[UNK]"]]
    assert old_pieces("##as", MODEL) == [IDS["##a"], IDS["##s"]]


def test_the_hint_on_long_words_names_them_only_where_they_are_the_cause() -> None:
    tokenizer = Tokenizer([*special_tokens(9), *PIECES], **VARIANTS[0])
    long_word = "ab" * 51
    assert "more than 100 characters" in tokenizer.long_word_hint([long_word, "a b"])
    assert tokenizer.long_word_hint(["中文" * 51, "a, " * 99, "ζ" * 99]) == ""  # other characters, and no long word
    assert tokenizer.long_word_hint([f"ζ η {long_word}"]) == ""
    assert tokenizer.long_word_hint([]) == OF_WORDS.long_word_hint([long_word]) == ""
