"""Sentence splitting keeps all text and takes linear time."""

import itertools

import pytest
import sentencex
from hypothesis import given
from hypothesis import strategies as st

from bert_pretrain.text import sentences
from bert_pretrain.text.sentences import SentenceSplitter, segment


def split(text: str, splitter: str = "sentencex", language: str = "en") -> list[str]:
    return SentenceSplitter(splitter, language).split(text)


def squeezed(text: str) -> str:
    return "".join(text.split())


COMMON = [*"aB. !?\n\t…。？\"”'’)中文é\u200b\u3000\xa0", "Dr. ", "e.g. ", "\n\n"]
TEXTS = st.lists(st.sampled_from(COMMON), max_size=300).map("".join)


@given(
    text=st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=200), TEXTS),
    cuts=st.lists(st.integers(0, 300), max_size=4),
    window=st.sampled_from([1, 7, 40, 1 << 20]),
)
@pytest.mark.parametrize(("splitter", "language"), [("sentencex", "en"), ("sentencex", "zh"), ("lines", "en")])
def test_all_text_is_kept_across_windows_and_blocks(text: str, cuts, window, splitter: str, language: str) -> None:
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    passages = [text[begin:end] for begin, end in itertools.pairwise(bounds)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentences, "WINDOW_CHARACTERS", window)
        one = SentenceSplitter(splitter, language)
        for _ in range(2):  # nothing of one document is left for the next
            found = [sentence for passage in passages for sentence in one.split(passage, ends_document=False)]
            found += one.split("", ends_document=True)
            assert squeezed("".join(found)) == squeezed(text)
            assert all(sentence and "\n" not in sentence and sentence == sentence.strip() for sentence in found)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_windows_give_the_sentences_of_the_complete_text(
    english_documents, chinese_documents, language, monkeypatch
) -> None:
    documents = english_documents[:40] if language == "en" else chinese_documents
    # An odd quotation mark makes one sentence of all that follows, up to the window's end.
    plain = [sentence for document in documents for sentence in document if not set(sentence) & set("\"'`()[]")]
    text = (" " if language == "en" else "").join(plain)[:60_000]
    whole = split(text, language=language)
    monkeypatch.setattr(sentences, "WINDOW_CHARACTERS", 4096)
    assert split(text, language=language) == whole
    assert len(whole) > 100


def test_unmatched_quotation_mark_affects_one_window() -> None:
    assert len(split('He said: "Stop. ' + "Then came another sentence. " * 3000)) > 2800


def test_english_and_chinese_rules() -> None:
    english = "Dr. Smith met J. K. Rowling\non Jan. 5th. She smiled! Did he?"
    assert split(english) == ["Dr. Smith met J. K. Rowling on Jan. 5th.", "She smiled!", "Did he?"]
    assert split("今天天气很好。我们去公园!你呢？", language="zh") == ["今天天气很好。", "我们去公园!", "你呢？"]


LONG = {"no blank": "x" * 3_000_000, "sentences": "A sentence here. " * 180_000, "blanks": " " * 3_000_000}


@pytest.mark.parametrize("kind", LONG)
def test_time_is_linear_in_the_length_of_a_line(kind: str, monkeypatch) -> None:
    text = LONG[kind]
    lengths = []

    def counted(language: str, part: str, segment=sentencex.segment) -> list[str]:
        lengths.append(len(part))
        return list(segment(language, part))

    monkeypatch.setattr(sentencex, "segment", counted)
    found = split(text)
    assert max(lengths) <= 2 * sentences.WINDOW_CHARACTERS
    assert sum(lengths) < 3 * len(text)
    assert squeezed("".join(found)) == squeezed(text)


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("km", "នេះជាប្រយោគ។ នេះជាប្រយោគទីពីរ។"),
        ("bo", "འདི་གཅིག །  འདི་གཉིས །"),
        ("am", "ሰላም ነው፡፡ እንዴት፡ነህ።"),
        ("ti", "ሰላም፡ነው፡፡እንዴት ነህ፡፡"),
        ("am", "ሰላም ነው:: እንዴት ነህ ::"),
        ("bn", "আজ আকাশ ভালো ৷ আমরা বাইরে গেলাম৷"),
        ("hi", "आज मौसम अच्छा है | हम बाहर गए|"),
    ],
)
def test_languages_without_sentencex_rules_are_split(language: str, text: str) -> None:
    for name in (language, "auto", "mul"):  # the marks belong to a script
        assert len(split(text, language=name)) == 2


def test_lines_of_blanks_end_a_paragraph_and_words_are_not_cut() -> None:
    for blanks in ("", " ", "\t\r", "\u3000"):
        text = f"A heading\n{blanks}\nThe text begins here."
        assert split(text) == ["A heading", "The text begins here."]
    words = [f"word{number}" for number in range(5000)]
    for separator in (" ", "\n", "\t"):
        assert " ".join(split(separator.join(words))).split() == words


@pytest.mark.parametrize("language", ["en", "de", "fr", "zh", "ja", "ru", "ar"])
@pytest.mark.parametrize("blanks", ["\u00a0", " \u202f ", "\u3000"])
def test_blanks_before_a_dot_are_kept_and_do_not_panic(language: str, blanks: str) -> None:
    text = f"Take vitamin C{blanks}. It helps. Plan B{blanks}."
    assert "".join(segment(language, text)) == text
