"""The ids of `Encoder` equal those of `transformers` for any Unicode text."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_pretrain.text import fast_tokenizer
from bert_pretrain.text.fast_tokenizer import Encoder
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.wordpiece import special_tokens

PIECES = list(
    "abcdefghijklmnopqrstuvwxyzABCDEMSK0123456789.,;:!?'\"()[]{}<>/\\@#$%&*+-=_~`^|äéñßøœćşıİΣσςжאבتم中文字学国豈𠀀𪛖か한"
)
PIECES += ["##" + piece for piece in PIECES if piece.isalnum()]
PIECES += ["the", "##ing", "mask", "##sk", "un", "word", "\u0301"]
VARIANTS = [
    dict(zip(("lowercase", "strip_accents", "handle_chinese_chars"), values, strict=True))
    for values in itertools.product((True, False), (None, True, False), (True, False))
]
HOSTILE = [
    "",
    " \t\r\n ",
    "control\x00chars\x1f\x7f\x85\x9b here\ufffd",
    "zero\u200bwidth\u200c\u200djoin\ufeff and\u00adsoft\u2060hyphen",
    "emoji 👩🏽‍🚀👨‍👩‍👧‍👦🇩🇪 ☺️ #️⃣",
    "e\u0301 a\u0308\u0323 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A\u0315",
    "right to left שלום (abc) مرحبا\u202e reversed \u202c ١٢٣",
    "astral CJK 𠀀𪛖𫝀𫠠 and 𰀀 compat 豈更 丽 radicals ⺀⼀ kana かな カナ hangul 한글 각",
    "中\u0301文 国,学.字!a中b ，。、「」",
    "\u9fa5\u9fa6\u9fd5\u9fef\u9ff0\u9ffc\u9fff\u4dff\u4e00\ua000",
    "x" * 99 + " " + "x" * 100 + " " + "x" * 101 + " " + "é" * 101 + " " + "中" * 150 + " " + "a-" * 120,
    "[CLS] [MASK] [SEP] [PAD] [UNK] [unused5] [MASK][MASK]x[MASK] ##ing [ MASK ] [mask]",
    "İstanbul ıI ß ẞ ﬁ ŉ ǰ Σίσυφος ΣΑΣ ﷺ K Å",
    "dots… dashes–—― quotes“”‘’ spaces\u00a0\u1680\u2003\u2028\u2029\u202f\u205f\u3000end \x0b\x0c\x1c",
    "math $x_1^2+√2≠π$ €£¥ ° § © ½ ² ℵ ∑",
    "private \ue000\uf8ff\U000f0000\U0010ffff unassigned \u0378\U000e0080 nonchars \ufdd0\ufffe\uffff",
    "http://a.b/c?d=e&f#g user@host.org C++ a_b-c/d\\e 3.14 1,000",
]


def build(**variant: Any) -> Tokenizer:
    return Tokenizer([*special_tokens(9), *PIECES], **variant)


def encode(encoder: Encoder, sentences: list[str]) -> list[list[int]]:
    """Encode sentences together and return one list of ids per sentence."""
    encoded = [sentence.encode() for sentence in sentences]
    starts = np.cumsum([0, *(len(sentence) for sentence in encoded[:-1])])
    ids, offsets, *_ = encoder.encode(np.frombuffer(b"".join(encoded), dtype=np.uint8), starts)
    return [ids[first:last].tolist() for first, last in itertools.pairwise(offsets)]


class Both:
    """Our encoder, and the tokenizer of `transformers` on the same folder."""

    def __init__(self, variant: dict[str, Any], folder: Path) -> None:
        from transformers import AutoTokenizer

        self.ours = build(**variant)
        self.ours.save(folder)
        self.theirs = AutoTokenizer.from_pretrained(folder, split_special_tokens=True)
        self.encoder = Encoder(self.ours)

    def check(self, text: str) -> None:
        expected = self.theirs(text, add_special_tokens=False)["input_ids"]
        assert self.ours.encode_text(text) == expected
        assert encode(self.encoder, [text]) == [expected]


@pytest.fixture(
    scope="module",
    params=[VARIANTS[index] for index in (0, 5, 7, 8)],
    ids=lambda variant: "-".join(map(str, variant.values())),
)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(request.param, tmp_path_factory.mktemp("tokenizer"))


OPTIONS = {"lowercase": True, "strip_accents": None, "handle_chinese_chars": True}


COMMON = [*"abcMASK[]#.,-_' \t\n中文字é\u0301\u200d", "[MASK]", "##"]
PLAIN = st.lists(st.sampled_from(COMMON), max_size=60).map("".join)
ANYTHING = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
MIXED = st.lists(st.one_of(ANYTHING, PLAIN, st.sampled_from(HOSTILE)), max_size=6).map("".join)


@given(text=st.one_of(ANYTHING, PLAIN, MIXED))
def test_ids_equal_transformers_for_random_text(both: Both, text: str) -> None:
    both.check(text)


def test_ids_equal_transformers_for_hostile_texts_and_all_characters(both: Both) -> None:
    """Each code point alone, between letters and next to CJK."""
    for text in HOSTILE:
        both.check(text)
    points = [chr(point) for point in [*range(0x3000), *range(0x4DF0, 0x4E10), *range(0x9F00, 0xA010)]]
    points += [chr(point) for point in [*range(0xF800, 0xFB10), *range(0xFE00, 0x10000), *range(0x2A6D0, 0x2A710)]]
    points.append("\U000111c9")  # punctuation in the tables of `tokenizers`, but not in those of Python
    texts = [f"a{point}b 中{point}文 .{point}\u0301" for point in points]
    assert encode(both.encoder, texts) == both.ours.encode_texts(texts)


OURS = build(**OPTIONS)


@settings(max_examples=80)
@given(data=st.data())
def test_sentences_encoded_together_equal_sentences_encoded_alone(data: st.DataObject) -> None:
    """Also if the cache of words overflows."""
    words = st.sampled_from(["the", "words", "中", "a-b", "MASK", "é", "x.y", "é" * 20])
    sentence = st.one_of(ANYTHING, PLAIN, st.lists(words, max_size=9).map(" ".join))
    batches = data.draw(st.lists(st.lists(sentence, min_size=1, max_size=8), min_size=1, max_size=6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_tokenizer, "MAX_CACHED_BYTES", data.draw(st.one_of(st.integers(0, 200), st.just(1 << 20))))
        encoder = Encoder(OURS)
        found = [encode(encoder, batch) for batch in batches]
    assert found == [OURS.encode_texts(batch) for batch in batches]


def test_ids_above_65536_need_four_bytes() -> None:
    small = Tokenizer([*special_tokens(0), *(f"w{number}" for number in range(65531))], **OPTIONS)
    large = Tokenizer([*small.tokens, "last"], **OPTIONS)
    assert (small.id_dtype, large.id_dtype) == (np.uint16, np.uint32)
    assert encode(Encoder(small), ["w65530"]) == [[65535]]
    assert encode(Encoder(large), ["w1 last"]) == [[6, 65536]]


LETTERS = st.text(st.sampled_from("abcxyzABC019"), min_size=1, max_size=40)


@given(words=st.lists(LETTERS, min_size=1, max_size=20), pieces=st.lists(LETTERS, max_size=20), lowercase=st.booleans())
def test_longest_match_equals_tokenizers(words: list[str], pieces: list[str], lowercase: bool) -> None:
    """Random vocabularies, also without some letters, and words of about 8 and 32 bytes, the sizes of keys."""
    tokens = dict.fromkeys([*special_tokens(0), *"abcx01", *pieces, *(f"##{piece}" for piece in ["a", "b", *pieces])])
    ours = Tokenizer(list(tokens), **OPTIONS | {"lowercase": lowercase})
    assert encode(Encoder(ours), words) == [ours.encode_text(word) for word in words]
